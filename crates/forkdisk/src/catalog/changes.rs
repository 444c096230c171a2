//! Changes of the properties of a volume or origin, as many at a time as wanted: all or none, with one commit.

use crate::error::{Error, ErrorKind, Result};
use crate::format::inherited;
use crate::format::{
    BreakPolicy, CloneProperty, Extension, GatherPolicy, Inherited, NO_VOLUME, OriginFull, Record, Throttle,
    VolumeRecord, VolumeState,
};
use crate::types::{MAX_COPY_AHEAD_BYTES, VolumeId};

use super::limits::{check_chunk, check_gather, check_quota, writable_volume};
use super::{Catalog, ExtensionChanges, is_folder};

/// New values of properties; `None`: unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// Space that a first write reserves, in bytes, a power of two from 4 KiB to 64 MiB.
    pub chunk: Option<u64>,
    /// What a first write to a shared chunk does. A clone inherits it.
    pub break_policy: Option<BreakPolicy>,
    /// Limit of copies for the volume, including those under way.
    pub throttle: Option<Throttle>,
    /// Most bytes that it may have mapped, at most 1 PiB, in whole pages; 0: no limit.
    pub quota: Option<u64>,
    /// When its scattered pages are gathered by policy. A clone has the policy of its source.
    pub gather: Option<GatherPolicy>,
    /// Of an origin: most bytes copied ahead of a sequential writer.
    pub copy_ahead: Option<u64>,
    /// Of an origin: what happens to a write if there is no space for the old contents.
    pub when_full: Option<OriginFull>,
    /// Lifetime and labels, also of a snapshot.
    pub extension: ExtensionChanges,
}

impl Changes {
    /// Refuses values out of range.
    pub(crate) fn check(&self) -> Result<()> {
        self.chunk.map_or(Ok(()), check_chunk)?;
        self.quota.map_or(Ok(()), check_quota)?;
        self.gather.map_or(Ok(()), check_gather)?;
        self.extension.check()?;
        if self.throttle.is_some_and(|throttle| !throttle.is_valid()) {
            let why = "bad throttle: 1% to 100%, and whole KiB per second up to 4 TiB";
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if self.copy_ahead.is_some_and(|bytes| bytes > MAX_COPY_AHEAD_BYTES) {
            return Err(Error::new(ErrorKind::Invalid, "bad copy_ahead: at most 1 GiB"));
        }
        Ok(())
    }

    /// Refuses properties that only an origin has.
    pub(crate) fn check_of_clone(&self) -> Result<()> {
        if self.copy_ahead.is_some() || self.when_full.is_some() {
            return Err(Error::new(ErrorKind::Invalid, "copy_ahead and when_full are properties of origins"));
        }
        self.check()
    }

    /// These changes, and where they have none what a clone inherits that is made at the time `now`.
    pub(crate) fn or_inherited(&self, inherited: &Inherited, now: u64) -> Changes {
        let of = |property: CloneProperty| inherited.get(&property).copied();
        let (mut changes, own) = (self.clone(), &self.extension);
        changes.chunk = self.chunk.or(of(CloneProperty::Chunk));
        changes.break_policy = self.break_policy.or(of(CloneProperty::Break).map(inherited::break_policy));
        changes.quota = self.quota.or(of(CloneProperty::Quota));
        changes.gather = self.gather.or(of(CloneProperty::Gather).and_then(inherited::gather_policy));
        changes.extension.diverge = own.diverge.or(of(CloneProperty::Diverge));
        changes.extension.reserve = own.reserve.or(of(CloneProperty::Reserve));
        changes.extension.writes = own.writes.or(of(CloneProperty::Writes).map(inherited::writes));
        changes.extension.zeroes = own.zeroes.or(of(CloneProperty::Zeroes).map(inherited::zeroes));
        let expires = of(CloneProperty::Expires).filter(|&after| after != 0).map(|after| now + after);
        changes.extension.expires = own.expires.or(expires);
        changes
    }

    /// The records that give these properties to a new clone, which has those of its source.
    pub(crate) fn records_of_clone(
        &self,
        id: VolumeId,
        source: &VolumeRecord,
        inherited: &Extension,
    ) -> Result<impl Iterator<Item = Record> + use<>> {
        let copying = (self.break_policy.is_some() || self.throttle.is_some()).then(|| Record::SetCopying {
            id,
            break_policy: self.break_policy.unwrap_or(source.break_policy),
            throttle: self.throttle.unwrap_or(source.throttle),
        });
        let chunk = self.chunk.map(|chunk| Record::SetChunk { id, chunk });
        let quota = self.quota.map(|quota| Record::SetQuota { id, quota });
        let gather = self.gather.map(|gather| Record::SetGather { id, gather });
        Ok([copying, chunk, quota, gather, self.extension.record_of_clone(id, inherited)?].into_iter().flatten())
    }

    /// The number of the volume or folder, and the records that change it. A name with a slash at its end is that of a
    /// folder, which is made if it does not exist.
    pub(crate) fn records(&self, meta: &Catalog, name: &str) -> Result<(VolumeId, Vec<Record>)> {
        let ending = name.strip_suffix('/');
        if ending.is_some() || is_folder(meta, name) {
            return self.records_of_folder(meta, ending.unwrap_or(name));
        }
        let volume = meta.directory.find(name).map_err(|missing| match missing.kind() {
            ErrorKind::NotFound if !name.contains('@') => {
                Error::new(ErrorKind::NotFound, format!("{missing}; a slash at the end, {name}/, makes a folder"))
            }
            _ => missing,
        })?;
        let id = volume.record.id;
        let mut records = Vec::new();
        if self.copy_ahead.is_some() || self.when_full.is_some() {
            let protects = volume.record.origin_record.as_ref().filter(|_| volume.record.state == VolumeState::Origin);
            let not_one = || Error::new(ErrorKind::Invalid, format!("{name:?} is not an origin"));
            let protects = protects.ok_or_else(not_one)?;
            let copy_ahead = self.copy_ahead.unwrap_or(protects.copy_ahead);
            records.push(Record::SetOrigin { id, copy_ahead, when_full: self.when_full.unwrap_or(protects.when_full) });
        }
        if self.break_policy.is_some() || self.throttle.is_some() {
            if volume.record.state != VolumeState::Origin {
                writable_volume(volume, name)?;
            }
            let break_policy = self.break_policy.unwrap_or(volume.record.break_policy);
            records.push(Record::SetCopying {
                id,
                break_policy,
                throttle: self.throttle.unwrap_or(volume.record.throttle),
            });
        }
        if self.chunk.is_some() || self.quota.is_some() || self.gather.is_some() {
            writable_volume(volume, name)?;
        }
        records.extend(self.chunk.map(|chunk| Record::SetChunk { id, chunk }));
        records.extend(self.quota.map(|quota| Record::SetQuota { id, quota }));
        records.extend(self.gather.map(|gather| Record::SetGather { id, gather }));
        records.extend(self.extension.record(volume, name, VolumeId(meta.next_id))?);
        Ok((id, records))
    }

    /// The same for a folder, which gets a record if it has none.
    fn records_of_folder(&self, meta: &Catalog, name: &str) -> Result<(VolumeId, Vec<Record>)> {
        let ExtensionChanges { diverge, reserve, .. } = self.extension;
        let inherited = self.extension.inherited.clone();
        let bound = ExtensionChanges { diverge, inherited, ..ExtensionChanges::default() };
        if reserve.is_some_and(|bytes| bytes != 0) {
            let why = format!("{name:?} is a folder, and only volumes have a reserve; set it for volumes in {name:?}");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let extension = ExtensionChanges { reserve, ..bound.clone() };
        if *self != (Changes { quota: self.quota, extension, ..Changes::default() }) {
            let why = format!("{name:?} is a folder, which has the properties diverge, quota and clone.PROPERTY only");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        if !is_folder(meta, name) {
            if meta.directory.find(name).is_ok() {
                let why = format!("{name:?} is a volume, not a folder: name it without the slash");
                return Err(Error::new(ErrorKind::Exists, why));
            }
            meta.directory.check_new(NO_VOLUME, name)?;
        }
        let (known, new) = (meta.directory.folder(name), VolumeId(meta.next_id));
        let make = || Record::MakeFolder { id: new, name: name.to_string(), attributes: None, now: 0 };
        let id = known.map_or(new, |record| record.id);
        let bound = match known.and_then(|record| meta.directory.get(record.id)) {
            Some(entry) => bound.record(entry, name, new)?,
            None => bound.record_of_new(id),
        };
        let quota = self.quota.map(|quota| Record::SetQuota { id, quota });
        let made = known.is_none().then(make);
        Ok((id, [made, quota, bound].into_iter().flatten().collect()))
    }
}
