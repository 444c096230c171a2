//! `man`: writes the manual pages, from the same definitions as the parser.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, line_break, roman};

use super::examples;
use crate::config::{KEYS, Key, Scope};
use crate::dates::utc;
use crate::verbs::examples::examples;

/// Write the manual pages into a directory
#[derive(Args)]
#[command(after_help = examples!["forkdisk man /usr/share/man/man1"])]
pub struct ManArgs {
    /// The directory; created if it is missing
    dir: PathBuf,
}

/// Writes `forkdisk.1` and one page for each verb of `command`.
pub fn run(args: ManArgs, command: Command) -> Result<()> {
    let shown = args.dir.display();
    fs::create_dir_all(&args.dir).with_context(|| format!("{shown}: cannot be made"))?;
    let mut whole = command.disable_help_subcommand(true);
    whole.build();
    let date = date();
    let verbs = whole.get_subcommands().map(|verb| (format!("forkdisk-{}", verb.get_name()), verb));
    for (name, command) in verbs.chain([("forkdisk".to_string(), &whole)]) {
        let path = args.dir.join(format!("{name}.1"));
        let page = page(&name, command.clone(), &date).with_context(|| format!("{name}: the page cannot be made"))?;
        fs::write(&path, page).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

/// Returns the date of the packaged release (`SOURCE_DATE_EPOCH`, as in reproducible builds), else today.
fn date() -> String {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    utc(given.unwrap_or_else(now)).chars().take("2026-11-21".len()).collect()
}

/// Formats one page: name, synopsis and options from the parser, then the sections common to all pages.
fn page(name: &str, command: Command, date: &str) -> std::io::Result<String> {
    let verb = command.get_name().to_string();
    let source = format!("forkdisk {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone().name(name.to_string())).title(name.to_uppercase()).date(date);
    let man = man.source(source).manual("forkdisk");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
        man.render_extra_section(&mut text)?;
    }
    let mut rest = Roff::new();
    let lines = examples::of(&command);
    if !lines.is_empty() {
        rest.control("SH", ["EXAMPLES"]);
        rest.control("nf", []);
        rest.text(lines.join("\n").lines().flat_map(|line| [roman(line), line_break()]).collect::<Vec<_>>());
        rest.control("fi", []);
    }
    for (heading, entries) in [("EXIT STATUS", exit_status(&verb)), ("ENVIRONMENT", environment()), ("FILES", files())]
    {
        rest.control("SH", [heading]);
        for (term, meaning) in entries {
            rest.control("TP", []);
            rest.text([bold(term)]);
            rest.text([roman(meaning)]);
        }
    }
    rest.control("SH", ["SEE ALSO"]);
    let others = if verb == "forkdisk" { "forkdisk-serve" } else { "forkdisk" };
    rest.text([bold(others), roman("(1)")]);
    rest.to_writer(&mut text)?;
    String::from_utf8(text).map_err(std::io::Error::other)
}

fn exit_status(verb: &str) -> Vec<(String, &'static str)> {
    let of_check: &[_] = &[
        ("0", "The pool is clean."),
        ("1", "It could not be checked."),
        ("2", "It is damaged, or the command line was not understood."),
        ("3", "Space leaks, and nothing else is wrong."),
    ];
    let usual: &[_] = &[
        ("0", "It is done. A warning on standard error may say what comes later, such as space on a full file system."),
        ("1", "It failed; standard error says why, as JSON under --json."),
        ("2", "The command line, or a variable, was not understood."),
    ];
    let entries = if verb == "check" { of_check } else { usual };
    entries.iter().map(|&(status, meaning)| (status.to_string(), meaning)).collect()
}

fn environment() -> Vec<(String, &'static str)> {
    let of_key = |key: &'static Key| (key.variable(), key.help);
    let every = KEYS.iter().filter(|key| key.scope == Scope::Every).map(of_key);
    let more = [
        ("FORKDISK_CONFIG", "The configuration file."),
        ("FORKDISK_LOG_FILE, ...", "Every key of the configuration is a variable; `forkdisk config` shows them."),
    ];
    every.chain(more.map(|(name, meaning)| (name.to_string(), meaning))).collect()
}

fn files() -> Vec<(String, &'static str)> {
    let all = [
        ("/etc/forkdisk/config.toml", "The configuration, unless --config names another file."),
        ("/run/forkdisk/UUID/", "Sockets of the daemon of root that serves the pool UUID."),
        ("$XDG_RUNTIME_DIR/forkdisk/UUID/", "Sockets of the daemon of another user."),
    ];
    all.into_iter().map(|(name, meaning)| (name.to_string(), meaning)).collect()
}
