//! Operations on how volumes are copied: chunks, break policies, throttles, the copier's settings,
//! and writes that meet in one chunk.

use forkdisk::{BreakPolicy, CopierSettings, CreateOptions, Throttle};

use super::Violation;
use super::op::{Op, Profile};
use super::place::Place;
use super::run::{AllowedFailure, Inflight, Run};
use crate::model::Key;
use crate::rng::{Rng, mix};

const PAGE: u64 = 4096;
const SECTOR: u64 = 512;

/// Returns a chunk size: any valid one, the default most often.
fn chunk(draw: u64) -> u64 {
    let mut rng = Rng::new(draw);
    if rng.one_in(2) { 64 << 10 } else { 4096 << rng.below(15) }
}

/// Returns a chunk size that suits copies of a small volume: 16 KiB to 2 MiB.
fn copied_chunk(draw: u64) -> u64 {
    16 << 10 << Rng::new(draw).below(8)
}

/// Returns the options of a new volume. `copies`: most break sharing by copying.
pub(super) fn options(size: u64, name: &str, copies: bool) -> CreateOptions {
    let draw = size ^ name.len() as u64;
    let plain = CreateOptions::new(size, 1).with_chunk(chunk(draw));
    if !copies || mix(&[draw]).is_multiple_of(4) {
        return plain;
    }
    plain.with_chunk(copied_chunk(draw)).with_break_policy(BreakPolicy::Copy)
}

/// Returns a throttle, none most often; slow ones let a sub-job pass every few virtual seconds.
fn throttle(rng: &mut Rng) -> Throttle {
    match rng.below(4) {
        0 => Throttle { percent: *rng.pick(&[1, 20, 50, 99]), bytes_per_second: 0 },
        1 => Throttle { percent: *rng.pick(&[10, 100]), bytes_per_second: 1024 << rng.below(16) },
        _ => Throttle::NONE,
    }
}

impl Run {
    pub(super) fn set_chunk(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let copies = self.setup.profile == Profile::Copies;
        let chunk = if copies { copied_chunk(op.draws[1]) } else { chunk(op.draws[1]) };
        let text = format!("set the chunk of {name} to {chunk} bytes");
        self.submit_upkeep("set chunk", vec![key], text, async move { pool.set_chunk(&name, chunk).await.into() });
        Ok(())
    }

    /// Sets the policy or the throttle of one volume.
    pub(super) fn set_copying(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let mut rng = Rng::new(op.draws[1]);
        if rng.one_in(2) {
            let policy = *rng.pick(&[BreakPolicy::Copy, BreakPolicy::Copy, BreakPolicy::Split]);
            let text = format!("set the break policy of {name} to {policy:?}");
            self.submit_upkeep("set break", vec![key], text, async move {
                pool.set_break_policy(&name, policy).await.into()
            });
        } else {
            let throttle = throttle(&mut rng);
            let text = format!("set the throttle of {name} to {throttle:?}");
            self.submit_upkeep("set throttle", vec![key], text, async move {
                pool.set_throttle(&name, throttle).await.into()
            });
        }
        Ok(())
    }

    /// Sets the copier's settings: few buffers more often than many.
    pub(super) fn set_copier(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[1]);
        let subjob_size = (64 << 10) * (1 + rng.below(4) as u32);
        let least = 5 * u64::from(subjob_size);
        let settings = CopierSettings::default()
            .with_subjob_size(subjob_size)
            .with_split_count(1 + rng.below(8) as u32)
            .with_buffers(if rng.one_in(3) { 8 << 20 } else { least + rng.below(2) * (64 << 10) })
            .with_throttle(throttle(&mut rng))
            .with_offload(rng.one_in(2));
        let pool = self.session.pool.clone();
        let text = format!("set the copier to {settings:?}");
        self.submit_upkeep("set copier", Vec::new(), text, async move { pool.set_copier(settings).await.into() });
        Ok(())
    }

    /// Makes up to six concurrent writes, contiguous or overlapping, all near one place: later ones find the
    /// chunk being copied for the first.
    pub(super) fn burst(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[1]);
        let size = self.size(key);
        let first = rng.below(size.div_ceil(PAGE).max(1)) * PAGE;
        let unit = *rng.pick(&[SECTOR, PAGE, PAGE, 4 * PAGE]);
        let spread = *rng.pick(&[1, 4, 16]);
        for i in 0..2 + rng.below(5) {
            let at = if rng.one_in(2) { i } else { rng.below(spread) };
            let place = Place { offset: first + at * unit, len: unit * (1 + rng.below(3)) }.within(size);
            // Which of two writes to one place came last must be known.
            let Some(place) = place else { continue };
            let over = |run: &Self, id: &u64, o: &Inflight| {
                o.keys.first() == Some(&key)
                    && run
                        .world
                        .places
                        .get(id)
                        .is_some_and(|p| p.offset < place.offset + place.len && place.offset < p.offset + p.len)
            };
            let busy = self.inflight.iter().any(|(id, o)| over(self, id, o));
            if busy && op.draws[2].is_multiple_of(2) {
                continue;
            }
            let one = op.write_of(i);
            self.write(&one, key, Some(place), AllowedFailure::Nothing)?;
        }
        Ok(())
    }
}
