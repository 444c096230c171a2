//! Changes of what the extension of a volume or snapshot stores: its lifetime and its labels.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    Bound, CloneProperty, Extension, LABEL_BYTES, Lease, MAX_CREATED_BY_BYTES, MAX_LABEL_KEY_BYTES, MAX_LABELS_BYTES,
    Record, VolumeRecord, VolumeState, Writes, Zeroes,
};
use crate::types::{AccountId, CHECKSUMS, MAX_VOLUME_SIZE, PAGE_SIZE, VolumeId};

use super::CatalogEntry;

/// New values of what is not in the record of a volume or snapshot itself; `None`: unchanged. A clone and a snapshot
/// inherit none of them, unless a field says so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExtensionChanges {
    /// When it expires, in seconds since 1970; 0: never. See [`Pool::delete_expired`](crate::Pool::delete_expired).
    pub expires: Option<u64>,
    /// What it is deleted after; `Some(None)`: nothing.
    pub lease: Option<Option<Lease>>,
    /// What made it: a text of at most 64 bytes.
    pub created_by: Option<String>,
    /// Labels by their keys; a value of `None` removes one. Keys have at most 63 letters, digits and any of `-_./`. All
    /// labels of a volume, with the extended attributes of its file, take at most 320 bytes: those of keys and values,
    /// and 4 for each.
    pub labels: BTreeMap<String, Option<String>>,
    /// What a volume does with written bytes that are there already. A clone has this and the next property of its
    /// source.
    pub writes: Option<Writes>,
    /// What a volume does with written pages of zeroes.
    pub zeroes: Option<Zeroes>,
    /// Most bytes of new pages that a volume, and its snapshots and clones with it, or that all volumes in a folder
    /// together, may hold beyond what they are when this is set, 4 KiB to 1 PiB, of which whole pages count; 0: no
    /// bound. See [`VolumeInfo::diverged`](crate::VolumeInfo::diverged).
    pub diverge: Option<u64>,
    /// Bytes of new pages that a volume can write whatever else takes space of the pool, beyond what the volume is when
    /// this or `diverge` is set first, 4 KiB to 1 PiB, of which whole pages count; 0: none. The pool keeps them free,
    /// and what their tables may take.
    pub reserve: Option<u64>,
    /// Of a folder: properties of clones that are made below it and are not given others; a value of `None` removes
    /// one, so that clones inherit it from the folder above.
    pub inherited: BTreeMap<CloneProperty, Option<u64>>,
}

impl ExtensionChanges {
    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == ExtensionChanges::default()
    }

    /// Refuses values that no volume can have.
    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |why: String| Err(Error::new(ErrorKind::Invalid, why));
        for (key, value) in &self.labels {
            check_label_key(key)?;
            if value.iter().flat_map(|value| value.chars()).any(char::is_control) {
                return invalid(format!("bad value of the label {key:?}: it has a control character"));
            }
        }
        for (property, value) in &self.inherited {
            if value.is_some_and(|value| !property.allows(value)) {
                return invalid(format!("bad clone.{property}: no volume can have it"));
            }
        }
        match &self.created_by {
            Some(by) if by.len() > MAX_CREATED_BY_BYTES => {
                invalid(format!("bad created_by {by:?}: at most {MAX_CREATED_BY_BYTES} bytes"))
            }
            Some(by) if by.chars().any(char::is_control) => {
                invalid(format!("bad created_by {by:?}: it has a control character"))
            }
            _ if self.diverge.is_some_and(|bytes| bytes != 0 && !is_bound(bytes)) => {
                invalid("bad diverge: 4 KiB to 1 PiB, of which whole pages count; or none".to_string())
            }
            _ if self.reserve.is_some_and(|bytes| bytes != 0 && !is_bound(bytes)) => {
                invalid("bad reserve: 4 KiB to 1 PiB, of which whole pages count; or none".to_string())
            }
            _ => self.applied(&Extension::default(), VolumeId(0)).map(drop),
        }
    }

    /// The extension with these changes. A new bound gets the account with this number.
    fn applied(&self, old: &Extension, number: VolumeId) -> Result<Extension> {
        let mut new = old.clone();
        new.expires = self.expires.unwrap_or(new.expires);
        new.lease = self.lease.unwrap_or(new.lease);
        new.created_by = self.created_by.clone().unwrap_or(new.created_by);
        for (key, value) in &self.labels {
            match value {
                Some(value) => new.labels.insert(key.clone(), value.clone()),
                None => new.labels.remove(key),
            };
        }
        for (&property, &value) in &self.inherited {
            match value {
                Some(value) => new.inherited.insert(property, value),
                None => new.inherited.remove(&property),
            };
        }
        new.writes.writes = self.writes.unwrap_or(new.writes.writes);
        new.writes.zeroes = self.zeroes.unwrap_or(new.writes.zeroes);
        let had = |of: fn(&Bound) -> u64| new.bound.as_ref().map_or(0, of);
        let diverge = self.diverge.unwrap_or_else(|| had(|bound| bound.diverge));
        let reserve = self.reserve.unwrap_or_else(|| had(|bound| bound.reserve));
        match (diverge, reserve) {
            (0, 0) => new.bound = None,
            _ => {
                let account = || {
                    let why = "no bound can be set: the pool has made 4 billion volumes and snapshots";
                    let number = u32::try_from(number.0).ok().filter(|&number| AccountId(number) != CHECKSUMS);
                    let number = number.ok_or_else(|| Error::new(ErrorKind::Unsupported, why))?;
                    let folder = VolumeId(0);
                    Result::Ok(Bound { account: AccountId(number), diverge, reserve, charged: 0, folder })
                };
                new.bound = Some(Bound { diverge, reserve, ..new.bound.map_or_else(account, Ok)? });
            }
        }
        if !new.has_room() {
            let bytes = Extension::labels_bytes(&new.labels);
            let beside = match Extension::xattrs_bytes(&new.xattrs) {
                0 => String::new(),
                bytes => format!(", of which its extended attributes take {bytes}"),
            };
            let why = format!(
                "the labels take {bytes} bytes (keys, values, and {LABEL_BYTES} for each), and a volume has room for \
                 {MAX_LABELS_BYTES}{beside}; use fewer or shorter ones"
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        Ok(new)
    }

    /// The record that changes the extension of a volume or snapshot, if there is a difference. `next` is a number that
    /// no volume has.
    pub(crate) fn record(&self, volume: &CatalogEntry, name: &str, next: VolumeId) -> Result<Option<Record>> {
        let is_limited = self.expires.is_some_and(|expires| expires != 0) || self.lease.flatten().is_some();
        if is_limited && volume.record.state == VolumeState::Origin {
            let why = format!("{name:?} is an origin, which nothing deletes; its snapshots can expire");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if is_limited && is_of_remnants(&volume.record) {
            let why = format!("{name:?} has the snapshots of a removed file; let these expire");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if self.has_write_policy() && volume.record.state != VolumeState::Volume {
            let why = format!("{name:?} is no volume; writes and zeroes are properties of volumes");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let is_volume = matches!(volume.record.state, VolumeState::Volume | VolumeState::Orphan | VolumeState::Folder);
        let is_bounded = [self.diverge, self.reserve].iter().flatten().any(|&bytes| bytes != 0);
        if is_bounded && !is_volume {
            let why = format!("{name:?} is no volume; diverge and reserve are properties of volumes");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if !self.inherited.is_empty() && volume.record.state != VolumeState::Folder {
            let why = format!("{name:?} is no folder; clone.PROPERTY is what clones below a folder inherit");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let old = volume.extension().cloned().unwrap_or_default();
        let (id, new) = (volume.record.id, self.applied(&old, next)?);
        Ok((new != old).then(|| Record::SetExtension { id, extension: Box::new(new) }))
    }

    fn has_write_policy(&self) -> bool {
        self.writes.is_some() || self.zeroes.is_some()
    }

    /// The record that gives a new volume or snapshot its extension, if it has one; the changes were checked.
    pub(crate) fn record_of_new(&self, id: VolumeId) -> Option<Record> {
        self.record_of_clone(id, &Extension::default()).expect("checked before")
    }

    /// The same for a clone or snapshot, which inherits this.
    pub(crate) fn record_of_clone(&self, id: VolumeId, inherited: &Extension) -> Result<Option<Record>> {
        let new = self.applied(inherited, id)?;
        Ok((!new.is_empty()).then(|| Record::SetExtension { id, extension: Box::new(new) }))
    }
}

fn is_bound(bytes: u64) -> bool {
    (PAGE_SIZE as u64..=MAX_VOLUME_SIZE).contains(&bytes)
}

fn is_of_remnants(record: &VolumeRecord) -> bool {
    record.state == VolumeState::Volume && record.name.starts_with(".snapshots/")
}

/// Refuses what is no key of a label.
fn check_label_key(key: &str) -> Result<()> {
    let is_marked = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match (1..=MAX_LABEL_KEY_BYTES).contains(&key.len()) && key.chars().all(is_marked) {
        true => Ok(()),
        false => {
            let why = format!("bad key of a label {key:?}: 1 to {MAX_LABEL_KEY_BYTES} letters, digits and any of -_./");
            Err(Error::new(ErrorKind::Invalid, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels<const N: usize>(all: [(&str, Option<&str>); N]) -> ExtensionChanges {
        let labels = all.map(|(key, value)| (key.to_string(), value.map(str::to_string))).into();
        ExtensionChanges { labels, ..ExtensionChanges::default() }
    }

    #[test]
    fn labels_are_set_replaced_and_removed_one_by_one() {
        let first = labels([("a", Some("1")), ("b", Some(""))]).applied(&Extension::default(), VolumeId(1)).unwrap();
        let second = labels([("a", Some("2")), ("b", None), ("c", None)]).applied(&first, VolumeId(1)).unwrap();
        assert_eq!(second.labels, BTreeMap::from([("a".to_string(), "2".to_string())]));
        let renewed =
            ExtensionChanges { expires: Some(9), ..ExtensionChanges::default() }.applied(&second, VolumeId(1)).unwrap();
        assert_eq!((renewed.expires, renewed.labels), (9, second.labels));
    }

    #[test]
    fn labels_fill_their_room_to_the_last_byte() {
        let value = "v".repeat(MAX_LABELS_BYTES - LABEL_BYTES - 1);
        assert!(labels([("k", Some(&value))]).check().is_ok());
        let error = labels([("k", Some(&format!("{value}v")))]).check().unwrap_err();
        assert!(error.to_string().contains("take 321 bytes"), "{error}");
        let old = labels([("k", Some(&value))]).applied(&Extension::default(), VolumeId(1)).unwrap();
        assert!(labels([("l", Some(""))]).applied(&old, VolumeId(1)).is_err(), "with those that are there");
        assert!(labels([("l", Some("")), ("k", None)]).applied(&old, VolumeId(1)).is_ok());
    }

    #[test]
    fn keys_and_texts_follow_their_rules() {
        for good in ["a", "owner", "ci.example/job-1_x", &"k".repeat(63)] {
            assert!(labels([(good, Some("=, \u{e4}"))]).check().is_ok(), "{good}");
        }
        for bad in ["", "a b", "a=b", "\u{e4}", &"k".repeat(64)] {
            assert!(labels([(bad, Some(""))]).check().is_err(), "{bad}");
        }
        assert!(labels([("a", Some("x\n"))]).check().is_err());
        for (by, is_good) in [("cli:uid=0".to_string(), true), ("c".repeat(65), false), ("a\t".to_string(), false)] {
            let changes = ExtensionChanges { created_by: Some(by.clone()), ..ExtensionChanges::default() };
            assert_eq!(changes.check().is_ok(), is_good, "{by}");
        }
    }
}
