//! Effect of a transaction: everything that its parts name is looked up before the first of them is applied, so that
//! no part can fail after another was applied.

use std::collections::BTreeSet;

use crate::format::Record;
use crate::types::VolumeId;

use super::{Catalog, Failure};

/// What a part needs.
enum Needs {
    Nothing,
    Volume(VolumeId),
    Origin(VolumeId),
}

/// Applies the parts of a transaction from part `done` on.
pub fn apply(catalog: &mut Catalog, parts: &[Record], done: &mut u64) -> Result<(), Failure> {
    if *done == 0 {
        check(catalog, parts)?;
    }
    for part in &parts[*done as usize..] {
        catalog.apply(part, &mut 0)?;
        *done += 1;
    }
    Ok(())
}

fn check(catalog: &Catalog, parts: &[Record]) -> Result<(), Failure> {
    let (mut made, mut protected) = (BTreeSet::new(), BTreeSet::new());
    for part in parts {
        let (needs, new) = match part {
            Record::Create { id, .. } | Record::Protect { id, .. } | Record::MakeFolder { id, .. } => {
                (Needs::Nothing, Some(*id))
            }
            Record::Rollback { volume, snapshot, dead } => {
                catalog.refuse_unknown(*volume)?;
                (Needs::Volume(*snapshot), Some(*dead))
            }
            Record::Clone { source, id, .. } => (Needs::Volume(*source), Some(*id)),
            Record::SetOrigin { id, .. } | Record::Identify { id, .. } | Record::Stamp { id, .. } => {
                (Needs::Origin(*id), None)
            }
            Record::MakeHardLink { id, file, .. } => (Needs::Volume(*file), Some(*id)),
            Record::TakeName { file, link } => {
                catalog.refuse_no_link(*file, *link)?;
                (Needs::Volume(*file), None)
            }
            Record::Resize { id, .. }
            | Record::Rename { id, .. }
            | Record::SetChunk { id, .. }
            | Record::SetCopying { id, .. }
            | Record::SetQuota { id, .. }
            | Record::SetAttributes { id, .. }
            | Record::SetGather { id, .. }
            | Record::SetExtension { id, .. }
            | Record::Unlink { id } => (Needs::Volume(*id), None),
            Record::Delete { ids } => {
                ids.iter().try_for_each(|&id| catalog.refuse_unknown(id))?;
                (Needs::Nothing, None)
            }
            Record::Snapshot { of, .. } => {
                for (source, id, _) in of {
                    catalog.refuse_unknown(*source)?;
                    refuse_existing(catalog, &mut made, *id)?;
                }
                (Needs::Nothing, None)
            }
            other => return Err(Failure::Nonsense(format!("a transaction has {other:?}"))),
        };
        let is_origin = |id| catalog.directory.get(id).is_some_and(|v| v.record.origin_record.is_some());
        match needs {
            Needs::Volume(id) if !made.contains(&id) => catalog.refuse_unknown(id)?,
            Needs::Origin(id) if !protected.contains(&id) && !is_origin(id) => {
                return Err(Failure::Nonsense(Catalog::unknown(id)));
            }
            _ => {}
        }
        new.map_or(Ok(()), |id| refuse_existing(catalog, &mut made, id))?;
        if matches!(part, Record::Protect { .. }) {
            protected.extend(new);
        }
    }
    Ok(())
}

fn refuse_existing(catalog: &Catalog, made: &mut BTreeSet<VolumeId>, id: VolumeId) -> Result<(), Failure> {
    if catalog.directory.get(id).is_some() || !made.insert(id) {
        return Err(Failure::Nonsense(format!("a journal record makes volume {} a second time", id.0)));
    }
    Ok(())
}
