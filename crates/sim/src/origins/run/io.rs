//! Reads, writes, discards and flushes.

use super::controls::FLATTEN;
use super::{Inflight, Run};
use crate::driver::{Class, Start, Violation};
use crate::model::{Key, What};
use crate::origins::{Kind, ORIGIN, Op};
use crate::pattern::SECTOR;
use crate::rng::{Rng, mix};

impl Run {
    /// Returns a place in whole sectors, mostly near the beginning.
    pub(in crate::origins) fn place(draws: [u64; 2], size: u64, ragged: bool) -> (u64, u64) {
        let mut rng = Rng::new(mix(&draws));
        let reach = (size / 4096).min(*rng.pick(&[4, 32, 1 << 20])).max(1);
        let page = rng.below(reach) * 4096;
        let (offset, len) = match rng.below(8) {
            _ if ragged => (page + rng.below(4096), *rng.pick(&[1, 100, 511, 700, 5000])),
            0..=3 => (page, 4096),
            4 => (page, 4096 * (1 + rng.below(8))),
            5 => (page, 4096 * (1 + rng.below(80))),
            _ => (page + rng.below(8) * SECTOR as u64, SECTOR as u64 * (1 + rng.below(12))),
        };
        let offset = offset.min(size - SECTOR as u64);
        (offset, len.min(size - offset))
    }

    pub(in crate::origins) fn read(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.any(op.draws[0], |_, _| true) else { return Ok(()) };
        self.look_at(op, key, op.draws[3].is_multiple_of(8))
    }

    /// Reads a snapshot and at once overwrites its backing in the origin, so that one may overtake the other.
    pub(in crate::origins) fn chase(&mut self, op: &Op) -> Result<(), Violation> {
        let origin = self.known.origin;
        let Some(key) = self.any(op.draws[0], |_, v| v.of == Some(origin)) else { return Ok(()) };
        for _ in 0..1 + op.draws[3] % 3 {
            self.look_at(op, key, false)?;
        }
        self.write(&Op { draws: [1, op.draws[1], op.draws[2], op.draws[3]], ..*op })
    }

    pub(in crate::origins) fn look_at(&mut self, op: &Op, key: Key, ragged: bool) -> Result<(), Violation> {
        if !self.is_there(key)? {
            return Ok(());
        }
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let (offset, len) = Run::place([op.draws[1], op.draws[2]], size, ragged);
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        self.submit_read(volume, key, (offset, len), false);
        Ok(())
    }

    /// Returns the target: mostly the origin; else a volume or clone, half the time one that is being
    /// flattened if there is one.
    pub(in crate::origins) fn target(&mut self, op: &Op) -> Result<Option<Key>, Violation> {
        let origin = self.known.origin;
        let flattened = self.inflight.values().find(|o| o.class.is(FLATTEN)).map(|o| o.keys[0]);
        let key = match flattened {
            _ if op.kind == Kind::Append => Some(origin),
            Some(key) if op.draws[0].is_multiple_of(2) => Some(key),
            _ if !op.draws[0].is_multiple_of(4) => Some(origin),
            _ => {
                let known = &self.known;
                let writable = |key| known.writable.contains(&known.model.name(key));
                self.any(op.draws[0] / 4, |key, v| key != origin && (v.of.is_none() || writable(key)))
            }
        };
        let Some(key) = key else { return Ok(None) };
        // A snapshot that is being rolled back to must not be written.
        if self.rolling().is_some_and(|name| name == self.known.model.name(key)) {
            return Ok(None);
        }
        Ok(self.is_there(key)?.then_some(key))
    }

    pub(in crate::origins) fn write(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.target(op)? else { return Ok(()) };
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let ragged = op.kind == Kind::Ragged;
        let (mut offset, mut len) = Run::place([op.draws[1], op.draws[2]], size, ragged);
        if op.kind == Kind::Append {
            let cursor = self.world.cursor.next_multiple_of(SECTOR as u64);
            offset = if cursor < size { cursor } else { 0 };
            len = (4096 * (1 + op.draws[1] % 8)).min(size - offset);
        }
        // The model tracks parts of sectors only while nothing else changes the volume.
        let quiet = move |o: &Inflight| matches!(o.class, Class::Change | Class::Control(_)) && o.keys.contains(&key);
        if ragged {
            self.wait(quiet)?;
        }
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let fua = op.draws[3].is_multiple_of(8);
        let name = self.known.model.name(key);
        let text = format!("{:?} op {} {name} {offset}+{len}{}", op.kind, op.number, if fua { " fua" } else { "" });
        let zero = op.kind == Kind::Zero;
        let what = if zero { What::Zero } else { What::Mark(op.number) };
        let mut buf = self.session.pool.buffer(len as usize);
        self.known.model.bytes(key, offset, op.number, &mut buf);
        let rec = self.known.model.write(key, offset, len, what);
        // Announces a client's next request, which may never arrive.
        let coming = (op.draws[3] / 8).is_multiple_of(4).then(|| volume.announce_write(offset + len, len)).flatten();
        self.submit_change((rec, fua), vec![key], text, async move {
            let _coming = coming;
            match zero {
                true => volume.write_zeroes(offset, len, fua).await.into(),
                false => volume.write(offset, buf, fua).await.0.into(),
            }
        });
        if key == self.known.origin {
            self.world.cursor = offset + len;
        }
        if ragged { self.wait(quiet) } else { Ok(()) }
    }

    /// Writes many chunks of a range: their exceptions fill leaves of the map.
    pub(in crate::origins) fn sweep(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[1]);
        let chunks = self.setup.origin / self.setup.chunk;
        let count = (chunks / *rng.pick(&[1, 1, 2, 4])).max(1);
        let (first, stride) = (rng.below(chunks - count + 1), *rng.pick(&[1, 1, 1, 2, 3]));
        self.touch(op.number, (first..first + count).step_by(stride).collect())
    }

    /// Writes a page of each of these chunks of the origin concurrently; the executor draws their order.
    pub(in crate::origins) fn touch(&mut self, number: u32, chunks: Vec<u64>) -> Result<(), Violation> {
        let key = self.known.origin;
        if !self.is_there(key)? {
            return Ok(());
        }
        for chunk in chunks {
            self.put(number, chunk, false)?;
        }
        self.wait(move |o| o.keys.contains(&key))
    }

    /// Writes a page of a chunk of the origin.
    pub(in crate::origins) fn put(&mut self, number: u32, chunk: u64, fua: bool) -> Result<(), Violation> {
        let (key, offset) = (self.known.origin, chunk * self.setup.chunk);
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let len = 4096.min(self.setup.origin - offset);
        let mut buf = self.session.pool.buffer(len as usize);
        self.known.model.bytes(key, offset, number, &mut buf);
        let rec = self.known.model.write(key, offset, len, What::Mark(number));
        let text = format!("write op {number} {ORIGIN} {offset}+{len}{}", if fua { " fua" } else { "" });
        self.submit_change((rec, fua), vec![key], text, async move { volume.write(offset, buf, fua).await.0.into() });
        Ok(())
    }

    /// Discards a range of the origin or of a clone with a backing, which must change nothing.
    pub(in crate::origins) fn discard(&mut self, op: &Op) -> Result<(), Violation> {
        let (rests, flattening) = (self.known.rests.clone(), self.known.flattening.clone());
        let origin = self.known.origin;
        let rests = |key| rests.contains_key(&key) && !flattening.contains(&key);
        let wanted = |key, v: &crate::model::Volume| key == origin || v.of.is_none() && rests(key);
        let Some(key) = self.any(op.draws[0], wanted) else { return Ok(()) };
        if !self.is_there(key)? {
            return Ok(());
        }
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let (offset, len) = Run::place([op.draws[1], op.draws[2]], size, false);
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let text = format!("discard {} {offset}+{len}", self.known.model.name(key));
        self.submit_upkeep("discard", vec![key], text, async move { volume.discard(offset, len).await.into() });
        Ok(())
    }

    pub(in crate::origins) fn flush(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.target(op)? else { return Ok(()) };
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let text = format!("flush {}", self.known.model.name(key));
        let start = Start::new(Class::Flush, self.known.model.tick(), vec![key], text);
        // One of the pool covers all but the origin.
        self.submit(start, async move { volume.flush().await.into() }, move |run, ended| {
            let origin = run.known.origin;
            let all = run.known.model.volumes().map(|(k, _)| k);
            let keys: Vec<Key> = all.filter(|&k| (k == origin) == (key == origin)).collect();
            for key in keys.into_iter().filter(|_| ended.is_ok()) {
                run.known.model.flushed(Some(key), ended.op.start);
            }
            Ok(())
        });
        Ok(())
    }
}
