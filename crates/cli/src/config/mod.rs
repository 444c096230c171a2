//! The configuration. Flags take precedence over environment variables, those over the file, the file over defaults.

mod file;
pub mod keys;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use forkdisk::LowWater;

pub use keys::{KEYS, Key, Scope};

pub mod key {
    //! The keys by name.
    pub use super::keys::*;
}

/// The default configuration file.
const USUAL_FILE: &str = "/etc/forkdisk/config.toml";

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// An environment variable.
    Environment,
    /// A line of the file.
    File(PathBuf, usize),
    /// The built-in default.
    Default,
}

/// Values from the command line and the environment, for the keys of `serve` or for those of every verb.
#[derive(Clone, Debug, Default)]
pub struct Given<const SERVE: bool> {
    values: Vec<(&'static str, String, Origin)>,
}

impl<const SERVE: bool> Given<SERVE> {
    fn keys() -> impl Iterator<Item = &'static Key> {
        let wanted = if SERVE { Scope::Serve } else { Scope::Every };
        KEYS.iter().filter(move |key| key.scope == wanted)
    }
}

impl<const SERVE: bool> Args for Given<SERVE> {
    fn augment_args(command: Command) -> Command {
        Given::<SERVE>::keys().fold(command, |command, key| command.arg(key.arg()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Given::<SERVE>::augment_args(command)
    }
}

impl<const SERVE: bool> FromArgMatches for Given<SERVE> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Given<SERVE>, clap::Error> {
        let given = |key: &'static Key| {
            let words: Vec<&str> = matches.get_many::<String>(key.id)?.map(String::as_str).collect();
            let text = Some(words.join(",")).filter(|text| !text.is_empty())?;
            Some((key.name, text, Origin::Flag))
        };
        let mut values = Vec::new();
        for key in Given::<SERVE>::keys() {
            match given(key) {
                Some(flag) => values.push(flag),
                None => values.extend(in_environment(key, std::env::var_os(key.variable()))?),
            }
        }
        Ok(Given { values })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Given::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the value of `key` from its environment variable, which contains `value`. The argument
/// parser does not read the variable: its error for an invalid value would name the flag.
fn in_environment(key: &Key, value: Option<OsString>) -> Result<Option<(&'static str, String, Origin)>, clap::Error> {
    let refused = |why: String| clap::Error::raw(ErrorKind::InvalidValue, format!("{}: {why}\n", key.variable()));
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let text = value.into_string().map_err(|value| refused(format!("{value:?} is not UTF-8")))?;
    key.check(&text).map_err(|why| refused(why.to_string()))?;
    Ok(Some((key.name, text, Origin::Environment)))
}

/// The effective configuration.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Values that were set, highest precedence first.
    said: Vec<(&'static str, String, Origin)>,
}

impl Settings {
    /// Merges the values of the command line, the environment and the file (`file`, or the default
    /// file if it exists).
    pub fn load(every: Given<false>, serve: Given<true>, file: Option<&Path>) -> Result<Settings> {
        let usual = Path::new(USUAL_FILE);
        let path = file.or_else(|| usual.exists().then_some(usual));
        let mut said = every.values;
        said.extend(serve.values);
        for given in path.map(file::read).transpose().context("the configuration")?.into_iter().flatten() {
            let line = Origin::File(path.unwrap_or(usual).to_path_buf(), given.line);
            said.push((given.name, given.text, line));
        }
        Ok(Settings { said })
    }

    /// Returns the value of `key`, empty if it has none, and its source.
    pub fn get(&self, key: &Key) -> (&str, Origin) {
        let found = self.said.iter().find(|(name, _, _)| *name == key.name);
        found.map_or((key.default, Origin::Default), |(_, text, origin)| (text, origin.clone()))
    }

    /// Describes the source of the value of `key`.
    pub fn source(&self, key: &Key) -> String {
        match self.get(key).1 {
            Origin::Flag => format!("flag --{}", key.flag()),
            Origin::Environment => format!("environment {}", key.variable()),
            Origin::File(path, line) => format!("{}:{line}", path.display()),
            Origin::Default => "default".to_string(),
        }
    }

    fn text(&self, key: &Key) -> Option<&str> {
        Some(self.get(key).0).filter(|text| !text.is_empty())
    }

    /// Returns a value as text.
    pub fn word(&self, key: &Key) -> Option<&str> {
        self.text(key)
    }

    /// Returns a path.
    pub fn path(&self, key: &Key) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    /// Returns bytes. Every key of this kind has a default.
    pub fn size(&self, key: &Key) -> Result<usize> {
        let bytes = crate::size::parse(self.get(key).0).with_context(|| key.name)?;
        usize::try_from(bytes).with_context(|| format!("{}: too large for this machine", key.name))
    }

    /// Returns bytes or percent. Every key of this kind has a default.
    pub fn share(&self, key: &Key) -> Result<LowWater> {
        keys::share(self.get(key).0).with_context(|| key.name)
    }

    /// Returns a whole number. Every key of this kind has a default.
    pub fn count(&self, key: &Key) -> Result<usize> {
        keys::count(self.get(key).0).with_context(|| key.name)
    }

    /// Returns a duration. Every key of this kind has a default.
    pub fn time(&self, key: &Key) -> Result<Duration> {
        keys::time(self.get(key).0).with_context(|| key.name)
    }

    /// Returns permissions of a file.
    pub fn mode(&self, key: &Key) -> Result<Option<u32>> {
        self.text(key).map(crate::volume_sockets::mode).transpose().with_context(|| key.name)
    }

    /// Returns a switch. Every key of this kind has a default.
    pub fn switch(&self, key: &Key) -> Result<bool> {
        keys::switch(self.get(key).0).with_context(|| key.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_value(key: &Key) -> &'static str {
        match key.kind {
            keys::Kind::Path => "/some/where",
            keys::Kind::Size => "12M",
            keys::Kind::Share => "7%",
            keys::Kind::Count => "17",
            keys::Kind::Time => "33s",
            keys::Kind::Switch | keys::Kind::SwitchOr(_) => "no",
            keys::Kind::Mode => "0640",
            keys::Kind::Group => "disk",
            keys::Kind::Sockets => "vm1=0660:disk,*=0600",
            keys::Kind::Addresses => "127.0.0.1:7,[::1]:8",
            keys::Kind::Places => "127.0.0.1:7,unix:/some/where",
            keys::Kind::Patterns => "db,vm-*",
            keys::Kind::Choice(words) => words[words.len() - 1],
        }
    }

    fn in_toml(key: &Key) -> String {
        match key.kind {
            keys::Kind::Count => format!("{} = {}\n", key.name, a_value(key)),
            keys::Kind::Switch | keys::Kind::SwitchOr(_) => format!("{} = false\n", key.name),
            _ => format!("{} = {:?}\n", key.name, a_value(key)),
        }
    }

    fn parsed(args: &[String]) -> (Given<false>, Given<true>) {
        let command = Given::<true>::augment_args(Given::<false>::augment_args(Command::new("forkdisk")));
        let matches = command.try_get_matches_from(args).unwrap();
        (Given::from_arg_matches(&matches).unwrap(), Given::from_arg_matches(&matches).unwrap())
    }

    #[test]
    fn every_key_is_a_flag_a_variable_and_a_line_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for key in KEYS {
            let flag = vec!["forkdisk".to_string(), format!("--{}={}", key.flag(), a_value(key))];
            let (every, serve) = parsed(&flag);
            let settings = Settings::load(every, serve, None).unwrap();
            assert_eq!(settings.get(key), (a_value(key), Origin::Flag));
            let variable = in_environment(key, Some(a_value(key).into())).unwrap();
            assert_eq!(variable, Some((key.name, a_value(key).to_string(), Origin::Environment)));
            let path = dir.path().join(key.name);
            std::fs::write(&path, in_toml(key)).unwrap();
            let settings = Settings::load(Given::default(), Given::default(), Some(&path)).unwrap();
            assert_eq!(settings.get(key), (a_value(key), Origin::File(path, 1)));
        }
    }

    #[test]
    fn the_nearer_word_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "socket = \"file\"\npid_file = \"file\"\n").unwrap();
        let said = |name, text: &str, origin| (name, text.to_string(), origin);
        let serve = Given { values: vec![said("socket", "flag", Origin::Flag)] };
        let settings = Settings::load(Given::default(), serve, Some(&path)).unwrap();
        assert_eq!(settings.get(&key::SOCKET), ("flag", Origin::Flag));
        assert_eq!(settings.get(&key::PID_FILE), ("file", Origin::File(path, 2)));
        assert_eq!(settings.get(&key::CACHE), ("32M", Origin::Default));
        assert_eq!(settings.path(&key::LOG_FILE), None);
    }
}
