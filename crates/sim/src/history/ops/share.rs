//! Range clones.

use forkdisk::{Error, ErrorKind};

use super::target::{family, handle, is_unsure, size_of, with};
use super::write::change;
use crate::driver::{Class, Op, Operation, Outcome, Violation};
use crate::history::op::Profile;
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::place::{PAGE, Place};
use crate::history::run::{AllowedFailure, Inflight, Run, Volumes};
use crate::model::Key;
use crate::pattern::SECTOR;
use crate::rng::Rng;

pub static CLONE_RANGE: Operation<Volumes> = Operation {
    name: "clone-range",
    weight: |profile| match profile {
        Journal => 40,
        Ranges => 26,
        Forks | Faults => 10,
        Large => 8,
        Races | Copies => 6,
        Blocks | Files | Quotas | Bounds => 5,
        Mixed | Calm | Gathering | Hosts => 4,
        Full | Cuts | Crowd => 3,
        Names => 2,
        Heirs => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| clone_range(run, op, key)),
};

/// A range clone onto itself, which must be refused.
pub static OVERLAP: Operation<Volumes> = Operation {
    name: "overlap",
    weight: |profile| match profile {
        Mixed | Large => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| overlap(run, op, key)),
};

fn clone_range(run: &mut Run, op: &Op, target: Key) -> Result<(), Violation> {
    let mut keys = place::volumes(&run.known.model);
    keys.extend(place::snapshots(&run.known.model, None));
    let Some(source) = place::choose(&keys, op.draws[4]) else {
        return Ok(());
    };
    let family = family(run, source);
    let busy = |o: &Inflight| match &o.class {
        Class::Control(_) => o.keys.contains(&family) || o.keys.contains(&target),
        // Chains of copies in flight are more than the model tracks.
        Class::Change => o.text.starts_with("share") && (o.keys.contains(&source) || o.keys.contains(&target)),
        _ => false,
    };
    run.wait(busy)?;
    if run.known.model.get(source).is_none() || run.known.model.get(target).is_none() || is_unsure(run, family) {
        return Ok(());
    }
    let tables = match run.setup.profile {
        Profile::Ranges => place::tables(op.draws[3], size_of(run, source), size_of(run, target)),
        _ => None,
    };
    if let Some((Place { offset, len }, to)) = tables.filter(|_| !op.draws[1].is_multiple_of(4)) {
        let apart = source != target || to + len <= offset || offset + len <= to;
        return if apart { share(run, (source, offset), (target, to), len) } else { Ok(()) };
    }
    let Some(from) = place::range(op, size_of(run, source)) else {
        return Ok(());
    };
    let mut rng = Rng::new(op.draws[3]);
    let unit = if rng.one_in(3) { SECTOR as u64 } else { PAGE };
    let to = rng.below(size_of(run, target) / unit + 1) * unit + from.offset % unit;
    let len = from.len.min(size_of(run, target).saturating_sub(to));
    let apart = source != target || to + len <= from.offset || from.offset + len <= to;
    if len == 0 || !apart {
        return Ok(());
    }
    share(run, (source, from.offset), (target, to), len)
}

/// Shares a range.
pub fn share(run: &mut Run, source: (Key, u64), target: (Key, u64), len: u64) -> Result<(), Violation> {
    let (s, t) = (handle(run, source.0)?, handle(run, target.0)?);
    let (from, to) = (source.1, target.1);
    let text =
        format!("share {} {from}+{len} into {} {to}", run.known.model.name(source.0), run.known.model.name(target.0));
    let rec = run.known.model.clone_range(source, target, len);
    change(run, (rec, false, AllowedFailure::Nothing), vec![target.0, source.0], text, async move {
        t.clone_range(&s, from, to, len).await.into()
    });
    Ok(())
}

/// A range clone of overlapping ranges of one volume is refused and changes nothing.
fn overlap(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let Some(Place { offset, len }) = place::range(op, size_of(run, key)).filter(|p| p.len > 1) else {
        return Ok(());
    };
    let volume = handle(run, key)?;
    let to = offset + op.draws[3] % len;
    let len = len.min(size_of(run, key) - to);
    if to >= offset + len {
        return Ok(());
    }
    let text = format!("share {offset}+{len} of {} into itself at {to}", run.known.model.name(key));
    run.submit_upkeep("overlap", vec![key], text, async move {
        match volume.clone_range(&volume, offset, to, len).await {
            Err(e) if e.kind() == ErrorKind::Invalid => Outcome::default(),
            Err(e) => Err(e).into(),
            Ok(()) => Err(Error::new(ErrorKind::Unsupported, "it was not refused")).into(),
        }
    });
    Ok(())
}
