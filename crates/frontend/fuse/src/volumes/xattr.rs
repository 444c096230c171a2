//! Extended attributes: `user.NAME`, which a file or folder stores for programs, and a volume's properties, as
//! `user.forkdisk.PROPERTY`, of which only the chunk and policies can be set. No other attributes are stored.

use std::collections::BTreeMap;
use std::str::FromStr;

use forkdisk::{
    Attributes, Changes, Child, Device, ExtensionChanges, FileKind, GatherPolicy, VolumeId, VolumeInfo, Writes, Zeroes,
};

use super::attributes::{fresh, unless_full};
use super::nodes::Node;
use super::{Failed, Outcome, Volumes, now};
use crate::codec::Reply;

const PREFIX: &str = "user.forkdisk.";
/// Properties of a folder; the last two can only be read.
const FOLDER_PROPERTIES: [&str; 4] = ["diverge", "quota", "diverged", "referenced"];
const STORED: &str = "user.";
/// The only property that is listed: programs that copy files try to set all listed ones, and a copy has this one.
const CHUNK: &str = "user.forkdisk.chunk";

/// The name of a stored attribute without its prefix; `None` if attributes of this name are not stored.
fn stored(name: &str) -> Option<&str> {
    // Replaced bytes that are no text.
    let is_text = !name.contains(char::REPLACEMENT_CHARACTER);
    name.strip_prefix(STORED).filter(|_| is_text && !name.starts_with(PREFIX))
}

impl<D: Device> Volumes<D> {
    fn property(&self, number: u64, name: &str) -> Outcome<Option<String>> {
        let Some(name) = name.strip_prefix(PREFIX) else { return Ok(None) };
        match self.node(number)? {
            Node::Volume(id) => Ok(value_of(&self.pool.volume_by_id(id)?.info(), name)),
            // One without a bound has no properties.
            Node::Folder(path) if FOLDER_PROPERTIES.contains(&name) => {
                Ok(self.pool.find_folder(&path).ok().and_then(|info| value_of(&info, name)))
            }
            _ => Ok(None),
        }
    }

    /// The stored attributes of a file, snapshot or folder.
    fn xattrs(&self, number: u64) -> Outcome<BTreeMap<String, Vec<u8>>> {
        Ok(match self.node(number)? {
            Node::Volume(id) => self.pool.xattrs(id),
            Node::Folder(path) => self.pool.number_of(&path).map(|id| self.pool.xattrs(id)).unwrap_or_default(),
            _ => BTreeMap::new(),
        })
    }

    pub(super) fn get_xattr(&self, number: u64, name: &str, size: u32) -> Outcome {
        let value = match stored(name) {
            Some(name) => self.xattrs(number)?.remove(name),
            None => self.property(number, name)?.map(String::into_bytes),
        };
        sized(value.ok_or(Failed(libc::ENODATA))?, size)
    }

    pub(super) fn list_xattr(&self, number: u64, size: u32) -> Outcome {
        let mut names: String = self.xattrs(number)?.keys().map(|name| format!("{STORED}{name}\0")).collect();
        if let Node::Volume(id) = self.node(number)?
            && self.pool.volume_by_id(id)?.info().attributes.is_none_or(|a| a.kind() == FileKind::File)
        {
            names += CHUNK;
            names.push('\0');
        }
        sized(names.into_bytes(), size)
    }

    pub(super) async fn set_xattr(&self, number: u64, name: &str, value: &[u8], flags: u32) -> Outcome {
        if let Some(name) = stored(name) {
            let is_there = self.xattrs(number)?.contains_key(name);
            match flags as i32 {
                libc::XATTR_CREATE if is_there => return Err(Failed(libc::EEXIST)),
                libc::XATTR_REPLACE if !is_there => return Err(Failed(libc::ENODATA)),
                _ => return self.store_xattr(number, name, Some(value)),
            }
        }
        let of_folder = name.strip_prefix(PREFIX).is_some_and(|name| FOLDER_PROPERTIES.contains(&name));
        let object = match self.node(number)? {
            Node::Volume(id) => self.pool.volume_by_id(id)?.name(),
            Node::Folder(path) if of_folder && !path.is_empty() => path,
            _ => return Err(Failed(libc::EOPNOTSUPP)),
        };
        let Some(changes) = changes(name, value)? else {
            let errno = if self.property(number, name)?.is_some() { libc::EPERM } else { libc::EOPNOTSUPP };
            return Err(Failed(errno));
        };
        let is_limit = [changes.quota, changes.extension.diverge].iter().flatten().any(|&bytes| bytes > 0);
        if is_limit && self.caches_writes && self.is_written(number)? {
            // What the kernel holds of it would be refused later than it was written.
            return Err(Failed(libc::EBUSY));
        }
        self.pool.set(&object, &changes).await?;
        Ok(Reply::Done)
    }

    /// Whether a program has a file open for writing, or any file if this is a folder.
    fn is_written(&self, number: u64) -> Outcome<bool> {
        let opens = self.opens.borrow();
        Ok(match self.node(number)? {
            Node::Volume(id) => opens.has_writer(id),
            _ => opens.has_writers(),
        })
    }

    pub(super) fn remove_xattr(&self, number: u64, name: &str) -> Outcome {
        match stored(name) {
            Some(name) if self.xattrs(number)?.contains_key(name) => self.store_xattr(number, name, None),
            None if self.property(number, name)?.is_some() => Err(Failed(libc::EPERM)),
            _ => Err(Failed(libc::ENODATA)),
        }
    }

    /// Whether a stored attribute has this value, or is not there.
    pub(super) fn has_xattr(&self, number: u64, name: &str, value: Option<&[u8]>) -> Outcome<bool> {
        let Some(name) = stored(name) else { return Ok(false) };
        Ok(self.xattrs(number)?.get(name).map(Vec::as_slice) == value)
    }

    /// Sets or removes a stored attribute, and the time of the last change of the file or folder.
    fn store_xattr(&self, number: u64, name: &str, value: Option<&[u8]>) -> Outcome {
        let (id, attributes) = match self.node(number)? {
            Node::Volume(id) => {
                let info = self.pool.volume_by_id(id)?.info();
                let known = self.known_or_default(info.attributes, 0o644, info.created);
                if !matches!(known.kind(), FileKind::File) {
                    return Err(Failed(libc::EPERM));
                }
                (id, known)
            }
            Node::Folder(path) => self.recorded_folder(&path)?,
            Node::Snapshots(_) | Node::Kept(..) => return Err(Failed(libc::EROFS)),
            Node::Phantom | Node::Removed => return Err(Failed(libc::ENOENT)),
        };
        self.pool.set_xattr(id, name, value)?;
        unless_full(self.pool.set_attributes(id, Attributes { changed: now().as_nanos(), ..attributes }))?;
        Ok(Reply::Done)
    }

    /// The number and the attributes of a folder, which gets a record if it has none.
    fn recorded_folder(&self, path: &str) -> Outcome<(VolumeId, Attributes)> {
        let Child::Folder(known, created) = self.pool.child(path)? else { return Err(Failed(libc::ESTALE)) };
        let attributes = match known {
            Some(_) => self.known_or_default(known, 0o755, created),
            None => {
                let new = fresh(0o755, self.options.uid, self.options.gid);
                self.pool.set_folder_attributes(path, new, now().seconds as u64)?;
                new
            }
        };
        Ok((self.pool.number_of(path)?, attributes))
    }
}

fn value_of(info: &VolumeInfo, property: &str) -> Option<String> {
    Some(match property {
        "id" => info.id.0.to_string(),
        "name" => info.name.clone(),
        "size" => info.size.to_string(),
        "referenced" => info.referenced.to_string(),
        "chunk" => info.chunk.to_string(),
        "scattered" => info.scattered.to_string(),
        "gather" => info.gather.to_string(),
        "writes" => info.writes.to_string(),
        "zeroes" => info.zeroes.to_string(),
        "quota" if info.quota > 0 => info.quota.to_string(),
        "quota" => "none".to_string(),
        "diverge" if info.diverge > 0 => info.diverge.to_string(),
        "diverge" => "none".to_string(),
        "reserve" if info.reserve > 0 => info.reserve.to_string(),
        "reserve" => "none".to_string(),
        "diverged" => info.diverged.to_string(),
        "created" => info.created.to_string(),
        "origin" if !info.origin.is_empty() => info.origin.clone(),
        _ => return None,
    })
}

/// Returns the value if it fits, or its length if `size` is 0.
fn sized(value: Vec<u8>, size: u32) -> Outcome {
    match size as usize {
        0 => Ok(Reply::Length(value.len() as u32)),
        room if value.len() <= room => Ok(Reply::Bytes(value)),
        _ => Err(Failed(libc::ERANGE)),
    }
}

/// What setting this attribute changes; `None` if it cannot be set.
fn changes(name: &str, value: &[u8]) -> Outcome<Option<Changes>> {
    let invalid = Failed(libc::EINVAL);
    let of_extension = |changes| Changes::default().with_extension(changes);
    Ok(Some(match name.strip_prefix(PREFIX) {
        Some("chunk") => Changes::default().with_chunk(parse_size(value).ok_or(invalid)?),
        Some("gather") => Changes::default().with_gather(parsed::<GatherPolicy>(value).ok_or(invalid)?),
        Some("writes") => {
            of_extension(ExtensionChanges::default().with_writes(parsed::<Writes>(value).ok_or(invalid)?))
        }
        Some("zeroes") => {
            of_extension(ExtensionChanges::default().with_zeroes(parsed::<Zeroes>(value).ok_or(invalid)?))
        }
        Some("quota") => Changes::default().with_quota(parse_bound(value).ok_or(invalid)?),
        Some("diverge") => of_extension(ExtensionChanges::default().with_diverge(parse_bound(value).ok_or(invalid)?)),
        Some("reserve") => of_extension(ExtensionChanges::default().with_reserve(parse_bound(value).ok_or(invalid)?)),
        _ => return Ok(None),
    }))
}

/// Parses the name of a policy.
fn parsed<T: FromStr>(value: &[u8]) -> Option<T> {
    std::str::from_utf8(value).ok()?.trim_end_matches('\0').trim().parse().ok()
}

/// Parses a bound: bytes, or `none`, which is 0.
fn parse_bound(text: &[u8]) -> Option<u64> {
    match std::str::from_utf8(text).ok()?.trim_end_matches('\0').trim() {
        "none" => Some(0),
        _ => parse_size(text).filter(|&bytes| bytes > 0),
    }
}

/// Parses bytes, or a number with `K`, `M` or `G`.
fn parse_size(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.trim_end_matches('\0').trim();
    let units = [(['K', 'k'], 10), (['M', 'm'], 20), (['G', 'g'], 30)];
    let unit = units.into_iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_name_is_stored_and_nothing_else() {
        for (name, is_stored) in
            [("user.a", Some("a")), ("user.a.b", Some("a.b")), ("user.forkdisk", Some("forkdisk")), ("user.", Some(""))]
        {
            assert_eq!(stored(name), is_stored);
        }
        for name in ["user.forkdisk.chunk", "user.forkdisk.x", "security.a", "trusted.a", "system.a", "user.\u{fffd}"] {
            assert_eq!(stored(name), None, "{name}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, size) in [("4096", 4096), ("64K", 65536), ("1M\0", 1 << 20)] {
            assert_eq!(parse_size(text.as_bytes()), Some(size));
        }
        for bad in ["", "x", "-1", "1T", "99999999999999999999"] {
            assert_eq!(parse_size(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn policies_have_names() {
        assert_eq!(parsed(b"20%"), Some(GatherPolicy::Above(20)));
        assert_eq!(parsed(b"idle\0"), Some(GatherPolicy::Idle));
        assert_eq!(parsed(b"compare"), Some(Writes::Compare));
        for bad in ["0%", "100%", "20", "on", ""] {
            assert_eq!(parsed::<GatherPolicy>(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn a_value_is_given_its_length_told_or_refused() {
        assert!(matches!(sized(vec![1; 5], 0), Ok(Reply::Length(5))));
        assert!(matches!(sized(vec![1; 5], 5), Ok(Reply::Bytes(_))));
        assert_eq!(sized(vec![1; 5], 4).unwrap_err(), Failed(libc::ERANGE));
    }
}
