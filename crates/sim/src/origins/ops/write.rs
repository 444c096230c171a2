//! Writes.

use super::clone::FLATTENING;
use super::target::{any_of, handle, is_there, place, rolling};
use crate::driver::{Class, Op, Operation, Violation};
use crate::model::{Key, What};
use crate::origins::ORIGIN;
use crate::origins::op::Focus::*;
use crate::origins::run::{Inflight, Origins, Run};
use crate::pattern::SECTOR;

pub static WRITE: Operation<Origins> = Operation {
    name: "write",
    weight: |focus| match focus {
        Plain => 60,
        Strikes => 30,
        Sweeps => 24,
    },
    launch: |run, op| write(run, op, Style::Plain),
};

/// Writes the next range after the last write of the origin.
pub static APPEND: Operation<Origins> = Operation {
    name: "append",
    weight: |focus| match focus {
        Plain => 16,
        Strikes => 4,
        _ => 0,
    },
    launch: |run, op| write(run, op, Style::Append),
};

/// A write that starts or ends within a sector.
pub static RAGGED: Operation<Origins> = Operation {
    name: "ragged",
    weight: |focus| match focus {
        Plain => 3,
        _ => 0,
    },
    launch: |run, op| write(run, op, Style::Ragged),
};

pub static ZERO: Operation<Origins> = Operation {
    name: "zero",
    weight: |focus| match focus {
        Plain => 2,
        Strikes | Sweeps => 1,
    },
    launch: |run, op| write(run, op, Style::Zero),
};

/// How a range is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Append,
    Ragged,
    Zero,
}

/// Returns the target: mostly the origin; else a volume or clone, half the time one that is being
/// flattened if there is one.
pub fn target(run: &mut Run, op: &Op, is_append: bool) -> Result<Option<Key>, Violation> {
    let origin = run.known.origin;
    let flattened = run.inflight.values().find(|o| o.class.is(FLATTENING)).map(|o| o.keys[0]);
    let key = match flattened {
        _ if is_append => Some(origin),
        Some(key) if op.draws[0].is_multiple_of(2) => Some(key),
        _ if !op.draws[0].is_multiple_of(4) => Some(origin),
        _ => {
            let known = &run.known;
            let writable = |key| known.writable.contains(&known.model.name(key));
            any_of(run, op.draws[0] / 4, |key, v| key != origin && (v.of.is_none() || writable(key)))
        }
    };
    let Some(key) = key else { return Ok(None) };
    // A snapshot that is being rolled back to must not be written.
    if rolling(run).is_some_and(|name| name == run.known.model.name(key)) {
        return Ok(None);
    }
    Ok(is_there(run, key)?.then_some(key))
}

pub fn write(run: &mut Run, op: &Op, style: Style) -> Result<(), Violation> {
    let Some(key) = target(run, op, style == Style::Append)? else { return Ok(()) };
    let size = run.known.model.get(key).map_or(0, |v| v.size);
    let ragged = style == Style::Ragged;
    let (mut offset, mut len) = place([op.draws[1], op.draws[2]], size, ragged);
    if style == Style::Append {
        let cursor = run.world.cursor.next_multiple_of(SECTOR as u64);
        offset = if cursor < size { cursor } else { 0 };
        len = (4096 * (1 + op.draws[1] % 8)).min(size - offset);
    }
    // The model tracks parts of sectors only while nothing else changes the volume.
    let quiet = move |o: &Inflight| matches!(o.class, Class::Change | Class::Control(_)) && o.keys.contains(&key);
    if ragged {
        run.wait(quiet)?;
    }
    let Some(volume) = handle(run, key)? else { return Ok(()) };
    let fua = op.draws[3].is_multiple_of(8);
    let name = run.known.model.name(key);
    let text = format!("write op {} ({style:?}) {name} {offset}+{len}{}", op.number, if fua { " fua" } else { "" });
    let zero = style == Style::Zero;
    let what = if zero { What::Zero } else { What::Mark(op.number) };
    let mut buf = run.session.pool.buffer(len as usize);
    run.known.model.bytes(key, offset, op.number, &mut buf);
    let rec = run.known.model.write(key, offset, len, what);
    // Announces a client's next request, which may never arrive.
    let coming = (op.draws[3] / 8).is_multiple_of(4).then(|| volume.announce_write(offset + len, len)).flatten();
    run.submit_change((rec, fua), vec![key], text, async move {
        let _coming = coming;
        match zero {
            true => volume.write_zeroes(offset, len, fua).await.into(),
            false => volume.write(offset, buf, fua).await.0.into(),
        }
    });
    if key == run.known.origin {
        run.world.cursor = offset + len;
    }
    if ragged { run.wait(quiet) } else { Ok(()) }
}

/// Writes a page of a chunk of the origin.
pub fn put(run: &mut Run, number: u32, chunk: u64, fua: bool) -> Result<(), Violation> {
    let (key, offset) = (run.known.origin, chunk * run.setup.chunk);
    let Some(volume) = handle(run, key)? else { return Ok(()) };
    let len = 4096.min(run.setup.origin - offset);
    let mut buf = run.session.pool.buffer(len as usize);
    run.known.model.bytes(key, offset, number, &mut buf);
    let rec = run.known.model.write(key, offset, len, What::Mark(number));
    let text = format!("write op {number} {ORIGIN} {offset}+{len}{}", if fua { " fua" } else { "" });
    run.submit_change((rec, fua), vec![key], text, async move { volume.write(offset, buf, fua).await.0.into() });
    Ok(())
}
