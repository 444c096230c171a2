//! The options common to all verbs, with the addresses and pools that depend on them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use crate::address::{self, Address};
use crate::config::{Given, Settings, key};
use crate::output::{OutputArgs, print_json};

/// Options of every verb.
#[derive(Args, Clone)]
pub struct Global {
    /// Format of results.
    #[command(flatten)]
    pub output: OutputArgs,

    /// The configuration file [default: /etc/forkdisk/config.toml, if there is one]
    #[arg(long, global = true, env = "FORKDISK_CONFIG", hide_env = true, value_name = "PATH")]
    pub config: Option<PathBuf>,

    #[command(flatten)]
    pub given: Given<false>,

    /// The effective configuration.
    #[arg(skip)]
    pub settings: Settings,

    /// Name of the verb.
    #[arg(skip)]
    pub verb: String,
}

impl Global {
    fn default_pool(&self) -> Option<PathBuf> {
        self.settings.path(&key::POOL)
    }

    /// Describes the default pool if `path` is it. Added to errors about missing objects: another
    /// pool may have been meant.
    pub fn about_default_pool(&self, path: &Path) -> Option<String> {
        self.default_pool().filter(|pool| pool == path)?;
        Some(format!("in the pool {} ({})", path.display(), self.settings.source(&key::POOL)))
    }

    /// Returns the configured path of the daemon's control socket.
    pub fn control(&self) -> Option<PathBuf> {
        self.settings.path(&key::CONTROL)
    }

    /// Parses any address: a pool or an object in it.
    pub fn address(&self, text: &str) -> Result<Address> {
        address::parse(text, self.default_pool().as_deref())
    }

    /// Parses the address of a volume or snapshot.
    pub fn object(&self, text: &str) -> Result<Address> {
        address::parse_object(text, self.default_pool().as_deref())
    }

    /// Parses the address of a volume.
    pub fn volume(&self, text: &str) -> Result<Address> {
        address::parse_volume(text, self.default_pool().as_deref())
    }

    /// Parses the address of a snapshot.
    pub fn snapshot(&self, text: &str) -> Result<Address> {
        address::parse_snapshot(text, self.default_pool().as_deref())
    }

    /// Returns the path of an existing pool: `named`, or the default pool.
    pub fn pool(&self, named: Option<&Path>) -> Result<PathBuf> {
        let path = self.new_pool(named)?;
        let source = || match named {
            Some(_) => String::new(),
            None => format!(" ({})", self.settings.source(&key::POOL)),
        };
        let found = std::fs::metadata(&path)
            .with_context(|| format!("{}{}: there is no pool here that can be opened", path.display(), source()))?;
        if found.is_dir() {
            anyhow::bail!("{} is a directory, not a pool: name the pool's file or block device", path.display());
        }
        Ok(path)
    }

    /// As [`pool`](Self::pool), for a pool that need not exist.
    pub fn new_pool(&self, named: Option<&Path>) -> Result<PathBuf> {
        let path = named.map(Path::to_path_buf).or_else(|| self.default_pool());
        let path = path.context("no pool: name its path, or set FORKDISK_POOL")?;
        if let Some((pool, name)) = path.to_str().and_then(address::within_a_file) {
            anyhow::bail!("{} takes a pool: {} names {name} in {pool}", self.verb, path.display());
        }
        Ok(path)
    }

    /// Returns the addresses that a listing verb works on: those given, or the whole default pool.
    pub fn addresses(&self, given: &[String]) -> Result<Vec<Address>> {
        if given.is_empty() {
            return Ok(vec![Address { pool: self.pool(None)?, name: String::new() }]);
        }
        given.iter().map(|text| self.address(text)).collect()
    }

    /// Writes `value` as JSON if the user wants JSON; else writes nothing.
    pub fn print_if_json(&self, value: &impl Serialize) -> Result<()> {
        if self.output.json() { print_json(value) } else { Ok(()) }
    }
}
