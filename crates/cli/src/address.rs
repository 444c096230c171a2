//! Parsing of addresses: `POOL/volume@snapshot`, split where the pool's path ends.
//!
//! POOL is the shortest leading part of the path that exists and is not a directory. With `--pool` or
//! `FORKDISK_POOL` an address is only `volume@snapshot`, unless it begins with `/`, `./`, `../` or the path of a pool.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forkdisk::{NAME_MARKS, has_sound_escapes, is_name_character};
use forkdisk_control::runtime_dir;

/// Longest name of a volume or a snapshot, in bytes.
pub const MAX_NAME_BYTES: usize = 255;

/// A pool, or an object in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Path of the pool.
    pub pool: PathBuf,
    /// `volume`, `volume@snapshot`, `@snapshot`, or empty for the pool itself.
    pub name: String,
}

impl Address {
    /// Returns the volume's name, without a snapshot's.
    pub fn volume(&self) -> &str {
        self.name.split_once('@').map_or(&self.name, |(volume, _)| volume)
    }

    /// Returns the snapshot's own name, if there is one.
    pub fn snapshot(&self) -> Option<&str> {
        self.name.split_once('@').map(|(_, snapshot)| snapshot)
    }

    /// Returns the address as a user would write it.
    pub fn show(&self) -> String {
        match self.name.as_str() {
            "" => self.pool.display().to_string(),
            name => format!("{}/{name}", self.pool.display()),
        }
    }
}

/// Splits `text` into pool and name; `default` is the configured pool.
pub fn parse(text: &str, default: Option<&Path>) -> Result<Address> {
    let address = parse_unchecked(text, default)?;
    check_name(&address)?;
    Ok(address)
}

fn parse_unchecked(text: &str, default: Option<&Path>) -> Result<Address> {
    let is_path = ["/", "./", "../"].iter().any(|start| text.starts_with(start));
    if let Some(pool) = default.filter(|_| !is_path && !begins_with_a_pool(text)) {
        return Ok(Address { pool: pool.to_path_buf(), name: text.to_string() });
    }
    split(text)
}

/// Returns whether a leading part of `text` is the path of a pool; other files do not count.
fn begins_with_a_pool(text: &str) -> bool {
    let path = within_a_file(text).map_or(text, |(path, _)| path);
    Path::new(path).is_file() && runtime_dir::pool_identity(Path::new(path)).is_some()
}

/// Returns the leading part of `text` that is a file or block device, and the rest.
pub fn within_a_file(text: &str) -> Option<(&str, &str)> {
    let parts = text.match_indices('/').map(|(at, _)| (&text[..at], text[at..].trim_start_matches('/')));
    let is_end = |found: Metadata| found.is_file() || found.file_type().is_block_device();
    parts.into_iter().find(|(path, name)| !name.is_empty() && std::fs::metadata(path).is_ok_and(is_end))
}

/// Parses the address of a volume or a snapshot; refuses a pool alone.
pub fn parse_object(text: &str, default: Option<&Path>) -> Result<Address> {
    let address = parse(text, default)?;
    if address.name.is_empty() {
        let pool = text.trim_end_matches('/');
        bail!("{text} is a pool: name a volume in it, as in {pool}/volume or {pool}/volume@snapshot");
    }
    Ok(address)
}

/// Parses the address of a volume; refuses a pool alone and a snapshot.
pub fn parse_volume(text: &str, default: Option<&Path>) -> Result<Address> {
    let address = parse_object(text, default)?;
    if address.snapshot().is_some() {
        bail!("{text} is a snapshot: name a volume");
    }
    Ok(address)
}

/// Parses the address of a snapshot; `@snapshot` alone stands for those of all volumes of the pool.
pub fn parse_snapshot(text: &str, default: Option<&Path>) -> Result<Address> {
    let unchecked = parse_unchecked(text, default)?;
    if let Some(name) = unchecked.name.strip_prefix('@') {
        check_part(name, name)?;
        return Ok(unchecked);
    }
    let address = parse_object(text, default)?;
    if address.snapshot().is_none() {
        bail!("{text} is a volume: name a snapshot, as in {text}@name");
    }
    Ok(address)
}

/// Returns the pool of all `addresses`; fails if they are in several.
pub fn same_pool(addresses: &[Address]) -> Result<PathBuf> {
    let first = &addresses.first().context("no address was given")?.pool;
    for other in addresses {
        if !same_file(first, &other.pool) {
            bail!("{} and {} are two pools: one command works on one pool", first.display(), other.pool.display());
        }
    }
    Ok(first.clone())
}

/// Returns the names within the pool.
pub fn names(addresses: Vec<Address>) -> Vec<String> {
    addresses.into_iter().map(|address| address.name).collect()
}

fn same_file(a: &Path, b: &Path) -> bool {
    if a == b {
        return true;
    }
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

fn split(text: &str) -> Result<Address> {
    if text.is_empty() {
        bail!("an empty address: write POOL/volume@snapshot");
    }
    let ends = text.match_indices('/').map(|(at, _)| at).filter(|&at| at > 0).chain([text.len()]);
    for end in ends {
        let path = Path::new(&text[..end]);
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => {}
            Ok(found) => return at_file(text, end, &found),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => break,
            Err(e) => return Err(e).with_context(|| format!("{}: cannot be looked at", path.display())),
        }
    }
    match std::fs::metadata(text) {
        Ok(_) => bail!("{text} is a directory, not a pool: name the pool's file or block device"),
        Err(_) => bail!(
            "{text}: there is no pool along this path: make one with `forkdisk init FILE --size SIZE`, \
             or name it with --pool or FORKDISK_POOL"
        ),
    }
}

fn at_file(text: &str, end: usize, found: &Metadata) -> Result<Address> {
    let kind = found.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{} is neither a file nor a block device", &text[..end]);
    }
    let name = text[end..].trim_start_matches('/').to_string();
    Ok(Address { pool: PathBuf::from(&text[..end]), name })
}

fn check_name(address: &Address) -> Result<()> {
    if address.name.is_empty() {
        return Ok(());
    }
    check_volume_name(address.volume())?;
    match address.snapshot() {
        Some(snapshot) => check_part(snapshot, snapshot),
        None => Ok(()),
    }
}

fn check_volume_name(name: &str) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        bail!("the name {name} is {} bytes long: at most {MAX_NAME_BYTES} are allowed", name.len());
    }
    // What a mount keeps of removed files.
    let name = name.strip_prefix(".snapshots/").unwrap_or(name);
    name.split('/').try_for_each(|part| check_part(name, part))
}

fn check_part(name: &str, part: &str) -> Result<()> {
    if part.len() > MAX_NAME_BYTES {
        bail!("the name {name} is {} bytes long: at most {MAX_NAME_BYTES} are allowed", name.len());
    }
    let is_odd = part.starts_with(' ') || part.ends_with(' ') || !part.chars().all(is_name_character);
    if part.is_empty() || part == "." || part == ".." || part == ".snapshots" || is_odd {
        bail!(
            "the name '{}' is not allowed: letters, digits, spaces inside, and {NAME_MARKS}, parts joined by '/', \
             no part empty, '.', '..' or '.snapshots'",
            name.escape_debug()
        );
    }
    if !has_sound_escapes(part) {
        bail!("the name '{name}' is not allowed: '%' stands only before the number of a byte that needs it: '%40'");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_in(dir: &Path) -> String {
        let path = dir.join("pool.img");
        std::fs::write(&path, b"x").unwrap();
        path.to_str().unwrap().to_string()
    }

    #[test]
    fn the_pool_is_the_shortest_part_that_is_not_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let pool = pool_in(dir.path());
        let address = parse(&format!("{pool}/vm/root@clean"), None).unwrap();
        assert_eq!(address.pool, Path::new(&pool));
        assert_eq!((address.volume(), address.snapshot()), ("vm/root", Some("clean")));
        assert_eq!(parse(&pool, None).unwrap().name, "");
        assert_eq!(parse(&format!("{pool}/"), None).unwrap().name, "");
    }

    #[test]
    fn with_a_default_pool_an_address_is_a_name() {
        let address = parse("a/b@x", Some(Path::new("/p"))).unwrap();
        assert_eq!((address.pool.as_path(), address.name.as_str()), (Path::new("/p"), "a/b@x"));
        let dir = tempfile::tempdir().unwrap();
        let pool = pool_in(dir.path());
        let other = parse(&format!("{pool}/v"), Some(Path::new("/p"))).unwrap();
        assert_eq!(other.pool, Path::new(&pool), "a path stays a path");
    }

    #[test]
    fn bad_names_are_refused() {
        let long = "n".repeat(256);
        for name in
            ["a//b", "a/../b", ".", "a@", "@x", "a@x@y", "a b ", "a%", "a/.snapshots/x", "a%41", "a\n", "a/", &long]
        {
            assert!(parse(name, Some(Path::new("/p"))).is_err(), "{name}");
        }
        let all = parse_snapshot("@x", Some(Path::new("/p"))).unwrap();
        assert_eq!((all.volume(), all.snapshot()), ("", Some("x")));
        assert!(parse_snapshot("@x y ", Some(Path::new("/p"))).is_err());
    }

    #[test]
    fn what_kind_of_object_is_meant_is_checked() {
        let pool = Some(Path::new("/p"));
        assert!(parse_object("", pool).is_err());
        assert!(parse_volume("a@x", pool).is_err());
        assert!(parse_snapshot("a", pool).is_err());
    }

    #[test]
    fn a_path_without_a_pool_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("none/v");
        let message = parse(text.to_str().unwrap(), None).unwrap_err().to_string();
        assert!(message.contains("there is no pool"), "{message}");
        let message = parse(dir.path().to_str().unwrap(), None).unwrap_err().to_string();
        assert!(message.contains("is a directory"), "{message}");
    }
}
