//! Extended attributes: a volume's properties, as `user.forkdisk.PROPERTY`. Only the chunk and
//! policies can be set. No other attributes are stored.

use std::str::FromStr;

use forkdisk::{Changes, Device, ExtensionChanges, GatherPolicy, VolumeInfo, Writes, Zeroes};

use super::nodes::Node;
use super::{Failed, Outcome, Volumes};
use crate::codec::Reply;

const PREFIX: &str = "user.forkdisk.";
/// Properties of a folder; the last two can only be read.
const FOLDER_PROPERTIES: [&str; 4] = ["diverge", "quota", "diverged", "referenced"];
/// The only attribute that is listed: programs that copy files try to set all listed ones, and a copy has this one.
const CHUNK: &str = "user.forkdisk.chunk";

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

    pub(super) fn get_xattr(&self, number: u64, name: &str, size: u32) -> Outcome {
        let value = self.property(number, name)?.ok_or(Failed(libc::ENODATA))?;
        sized(value.into_bytes(), size)
    }

    pub(super) fn list_xattr(&self, number: u64, size: u32) -> Outcome {
        let names = if matches!(self.node(number)?, Node::Volume(_)) { format!("{CHUNK}\0") } else { String::new() };
        sized(names.into_bytes(), size)
    }

    pub(super) async fn set_xattr(&self, number: u64, name: &str, value: &[u8]) -> Outcome {
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
        let errno = if self.property(number, name)?.is_some() { libc::EPERM } else { libc::ENODATA };
        Err(Failed(errno))
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
