//! The configuration file: TOML with top-level keys only; unknown keys are refused.

use std::path::Path;

use anyhow::{Context, Result, bail};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{KEYS, Key, Kind, nearest};

/// A value from the file, and the number of its line.
#[derive(Debug, PartialEq, Eq)]
pub struct Given {
    pub name: &'static str,
    pub text: String,
    pub line: usize,
}

/// Reads the file at `path`.
pub fn read(path: &Path) -> Result<Vec<Given>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    parse(&text, &path.display().to_string())
}

fn parse(text: &str, shown: &str) -> Result<Vec<Given>> {
    let table = match DeTable::parse(text) {
        Ok(table) => table,
        Err(error) => {
            let line = line_of(text, error.span().map_or(0, |span| span.start));
            bail!("{shown}:{line}: this is not TOML: {}", error.message());
        }
    };
    let mut all = Vec::new();
    for (name, value) in table.get_ref() {
        let line = line_of(text, name.span().start);
        let name = name.get_ref();
        let Some(key) = KEYS.iter().find(|key| key.name == *name) else {
            let hint = nearest(name).map_or(String::new(), |key| format!(": did you mean {}?", key.name));
            bail!("{shown}:{line}: there is no key '{name}'{hint}");
        };
        let given = value_of(key, value).with_context(|| format!("{shown}:{line}: {name}"))?;
        all.push(Given { name: key.name, text: given, line });
    }
    Ok(all)
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
}

fn value_of(key: &Key, value: &Spanned<DeValue<'_>>) -> Result<String> {
    let text = match (key.kind, value.get_ref()) {
        (Kind::Switch | Kind::SwitchOr(_), DeValue::Boolean(true)) => "yes".to_string(),
        (Kind::Switch | Kind::SwitchOr(_), DeValue::Boolean(false)) => "no".to_string(),
        (Kind::Path | Kind::Choice(_) | Kind::SwitchOr(_), DeValue::String(text)) => text.to_string(),
        (Kind::Size | Kind::Share | Kind::Time | Kind::Mode | Kind::Group, DeValue::String(text)) => text.to_string(),
        (Kind::Count | Kind::Size | Kind::Share | Kind::Time | Kind::Group, DeValue::Integer(number)) => {
            number.to_string()
        }
        (Kind::Addresses | Kind::Places | Kind::Sockets | Kind::Patterns, DeValue::String(text)) => text.to_string(),
        (kind @ (Kind::Addresses | Kind::Places | Kind::Sockets | Kind::Patterns), DeValue::Array(list)) => {
            let words =
                list.iter().map(|word| word.get_ref().as_str().with_context(|| format!("this takes {}", wanted(kind))));
            words.collect::<Result<Vec<_>>>()?.join(",")
        }
        (kind, _) => bail!("this takes {}", wanted(kind)),
    };
    key.check(&text)?;
    Ok(text)
}

fn wanted(kind: Kind) -> &'static str {
    match kind {
        Kind::Path => "a path, in quotes",
        Kind::Size => "a size, such as \"64M\" or a number of bytes",
        Kind::Share => "a size or a percentage, such as \"10G\" or \"5%\"",
        Kind::Count => "a whole number above 0",
        Kind::Time => "a time, such as \"10s\" or a number of seconds",
        Kind::Switch => "true or false",
        Kind::SwitchOr(_) => "true, false or a word in quotes",
        Kind::Addresses | Kind::Places => "an address in quotes, or several in brackets",
        Kind::Sockets => "VOLUME=MODE:GROUP in quotes, or several in brackets",
        Kind::Patterns => "a name or pattern in quotes, or several in brackets",
        Kind::Mode => "a mode, in quotes",
        Kind::Group => "a group, in quotes",
        Kind::Choice(_) => "a word, in quotes",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_kind_are_read_with_their_lines() {
        let text = "# ours\npool = \"/srv/p\"\n\ncache = 4096\ndirty = \"1G\"\nmax_connections = 7\ndiscard = false\n\
                    drain_timeout = \"3s\"\nstall_timeout = 4\nwhen_full = \"error\"\n";
        let given = parse(text, "f").unwrap();
        let found: Vec<(&str, &str, usize)> = given.iter().map(|g| (g.name, g.text.as_str(), g.line)).collect();
        for expected in [
            ("pool", "/srv/p", 2),
            ("cache", "4096", 4),
            ("dirty", "1G", 5),
            ("max_connections", "7", 6),
            ("discard", "no", 7),
            ("drain_timeout", "3s", 8),
            ("stall_timeout", "4", 9),
            ("when_full", "error", 10),
        ] {
            assert!(found.contains(&expected), "{expected:?} in {found:?}");
        }
    }

    #[test]
    fn mistakes_name_the_file_the_line_and_the_nearest_key() {
        for (text, message) in [
            ("pool = \"p\"\nsoket = \"s\"\n", "f:2: there is no key 'soket': did you mean socket?"),
            ("\n[serve]\nsocket = \"s\"\n", "f:2: there is no key 'serve'"),
            ("cache = true\n", "f:1: cache: this takes a size"),
            ("\nmax_requests = 0\n", "f:2: max_requests: '0' is not"),
            ("when_full = \"explode\"\n", "f:1: when_full: 'explode' is none of wait, error"),
            ("pool = \"p\"\npool = \"q\"\n", "f:2: this is not TOML: duplicate key"),
            ("pool = \n", "f:1: this is not TOML"),
        ] {
            let error = format!("{:#}", parse(text, "f").unwrap_err());
            assert!(error.starts_with(message), "{error}");
        }
    }
}
