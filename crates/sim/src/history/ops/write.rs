//! Writes of a range.

use std::cell::Cell;

use forkdisk::device::{BUF_ALIGN_BYTES, Buf, BufMemory};

use super::target::{handle, is_unsure, size_of, with};
use crate::driver::{Class, Op, Operation, Outcome, Start, Violation};
use crate::history::op::Profile;
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::place::{PAGE, Place};
use crate::history::run::{AllowedFailure, Inflight, Run, Volumes};
use crate::model::{Key, RecId, What};
use crate::pattern::{OTHER_CONTENTS_FLAG, SECTOR};

pub static WRITE: Operation<Volumes> = Operation {
    name: "write",
    weight: |profile| match profile {
        Journal => 480,
        Races => 50,
        Gathering => 44,
        Mixed | Full | Calm | Ranges | Large | Hosts | Quotas | Bounds => 40,
        Faults => 36,
        Forks | Files | Copies => 30,
        Cuts => 24,
        Crowd => 20,
        Blocks | Names | Transactions | Folders | Lifetimes | Comparing => 16,
        Heirs => 6,
        _ => 0,
    },
    launch: |run, op| {
        with(run, op, |run, key| {
            let place = place::range(op, size_of(run, key));
            write(run, op, key, place, AllowedFailure::Nothing)
        })
    },
};

pub static APPEND: Operation<Volumes> = Operation {
    name: "append",
    weight: |profile| match profile {
        Blocks => 40,
        Quotas | Bounds => 12,
        Mixed | Full | Large => 10,
        Calm | Files | Copies | Hosts => 8,
        Faults | Ranges => 6,
        Forks | Races => 4,
        Cuts | Gathering => 3,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| append(run, op, key)),
};

/// A write that starts or ends within a sector.
pub static RAGGED: Operation<Volumes> = Operation {
    name: "ragged",
    weight: |profile| match profile {
        Calm | Copies => 4,
        Mixed | Large | Quotas | Bounds => 3,
        Forks | Faults | Files => 2,
        Cuts | Gathering => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| ragged(run, op, key)),
};

/// Overwrites a page that nothing shares: works on a full pool, too.
pub static IN_PLACE: Operation<Volumes> = Operation {
    name: "in-place",
    weight: |profile| match profile {
        Journal => 20,
        Full => 12,
        Quotas | Bounds => 6,
        Mixed | Gathering | Hosts => 4,
        Calm | Copies => 2,
        _ => 0,
    },
    launch: in_place,
};

/// Writes until the pool is full.
pub static FILL: Operation<Volumes> = Operation {
    name: "fill",
    weight: |profile| match profile {
        Full => 4,
        Blocks => 3,
        Bounds => 6,
        Gathering => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| fill(run, op, key)),
};

/// Starts a change of contents.
pub fn change(
    run: &mut Run,
    (rec, fua, spare): (RecId, bool, AllowedFailure),
    keys: Vec<Key>,
    text: String,
    future: impl Future<Output = Outcome> + 'static,
) -> u64 {
    let start = Start::new(Class::Change, run.known.model.now(), keys, text);
    run.submit(start.with_need(spare == AllowedFailure::Nothing), future, move |run, ended| {
        let skipped = spare == AllowedFailure::Discard && run.world.failure.full;
        run.known.model.end(rec, ended.is_ok() && !skipped, fua);
        Ok(())
    })
}

pub fn write(run: &mut Run, op: &Op, key: Key, place: Option<Place>, spare: AllowedFailure) -> Result<(), Violation> {
    let Some(Place { offset, len }) = place else {
        return Ok(());
    };
    let fua = op.draws[3].is_multiple_of(6) != (run.setup.profile == Profile::Journal);
    let volume = handle(run, key)?;
    let is_whole = (offset % SECTOR as u64, len % BUF_ALIGN_BYTES as u64) == (0, 0);
    let is_shared = is_whole && op.draws[3] % 5 == 1;
    let (buf, what) = if is_shared { changing(run, op, key, offset, len) } else { steady(run, op, key, offset, len) };
    let text = format!(
        "write op {} {} {offset}+{len}{}{} (sectors {}..{})",
        op.number,
        run.known.model.name(key),
        if fua { " fua" } else { "" },
        if is_shared { " from shared memory" } else { "" },
        offset / SECTOR as u64,
        (offset + len).div_ceil(SECTOR as u64)
    );
    let rec = run.known.model.write(key, offset, len, what);
    run.known.model.spread();
    if matches!(what, What::Mark(_)) {
        super::rewrite::note(run, key, op.number, Place { offset, len });
    }
    let (disk, op) = (run.session.disk.clone(), op.number);
    // What is compared first may be passed by later writes.
    let is_ordered = run.setup.profile != Profile::Comparing;
    let id = change(run, (rec, fua, spare), vec![key], text, async move {
        if is_ordered {
            disk.order().accept(op, key, offset, len);
        }
        let (result, _) = volume.write(offset, buf, fua).await;
        disk.order().end(op);
        result.into()
    });
    run.world.places.insert(id, Place { offset, len });
    run.world.cursors.insert(key, offset + len);
    Ok(())
}

/// Returns a buffer with the data of a write.
fn steady(run: &Run, op: &Op, key: Key, offset: u64, len: u64) -> (Buf, What) {
    let mut buf = run.session.pool.buffer(len as usize);
    run.known.model.bytes(key, offset, op.number, &mut buf);
    (buf, What::Mark(op.number))
}

/// Returns a buffer with the data of a write in memory that another process changes all the time.
fn changing(run: &Run, op: &Op, key: Key, offset: u64, len: u64) -> (Buf, What) {
    let other = op.number | OTHER_CONTENTS_FLAG;
    let contents = [op.number, other].map(|number| {
        let mut bytes = Buf::zeroed(len as usize);
        run.known.model.bytes(key, offset, number, &mut bytes);
        bytes
    });
    let memory = Changing { contents, draws: Cell::new(op.draws[3]) };
    (Buf::shared(Box::new(memory)), What::Either(op.number, other))
}

/// Memory that has one of two contents, by chance at each access.
struct Changing {
    contents: [Buf; 2],
    draws: Cell<u64>,
}

impl AsRef<[u8]> for Changing {
    fn as_ref(&self) -> &[u8] {
        let draws = self.draws.get();
        self.draws.set(draws.rotate_right(1));
        &self.contents[(draws >> 3 & 1) as usize]
    }
}

impl AsMut<[u8]> for Changing {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.contents[0]
    }
}

impl BufMemory for Changing {}

fn append(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let from = run.world.cursors.get(&key).copied().unwrap_or(0);
    let place = place::stretch(op, from, size_of(run, key));
    write(run, op, key, place, AllowedFailure::Nothing)
}

/// The model tracks parts of sectors only while nothing else changes the volume.
pub fn ragged(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let quiet = |o: &Inflight| !matches!(o.class, Class::Read { .. } | Class::Flush) && o.keys.contains(&key);
    run.wait(quiet)?;
    let place = place::ragged(op, size_of(run, key));
    write(run, op, key, place, AllowedFailure::Nothing)?;
    run.wait(quiet)
}

/// Overwrites a page that nothing shares, which needs no space.
fn in_place(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let fits = |run: &Run, key: Key| {
        let pages = size_of(run, key) / PAGE;
        let from = op.draws[1] % pages.max(1);
        let owned = |page: &u64| run.known.model.is_mapped(key, page * PAGE / SECTOR as u64);
        (from..pages).chain(0..from).take(64).find(owned).map(|page| (key, page * PAGE))
    };
    let keys: Vec<Key> =
        run.known.model.volumes().filter(|(_, v)| v.of.is_none() && !v.shared).map(|(k, _)| k).collect();
    let Some((key, offset)) = keys.into_iter().find_map(|key| fits(run, key)) else {
        return Ok(());
    };
    if is_unsure(run, key) || run.inflight.values().any(|o| o.keys.contains(&key)) {
        return Ok(());
    }
    write(run, op, key, Some(Place { offset, len: PAGE }), AllowedFailure::Space)
}

pub fn fill(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let len = (1 << 20).min(size_of(run, key));
    for i in 0..8.max(size_of(run, key) >> 20).min(16) {
        let offset = (i << 20) % size_of(run, key).max(1);
        let len = len.min(size_of(run, key) - offset);
        write(run, op, key, Some(Place { offset, len }), AllowedFailure::Nothing)?;
        run.wait(|o| o.keys.contains(&key))?;
        if run.known.model.get(key).is_none() || is_unsure(run, key) {
            break;
        }
    }
    Ok(())
}
