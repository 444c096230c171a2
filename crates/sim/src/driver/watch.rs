//! Every crash at every step, for short histories.

use super::world::{Instant, Knowledge, Life, Moment, World};
use super::{CrashPoint, Run, Violation};
use crate::disk::{Crash, SimDisk};
use crate::rng::mix;

/// Tries crashes at every step of an operation.
pub struct Watch {
    aim: Option<CrashPoint>,
    /// Most masks tried at one step; if there are more, they are spread over all.
    masks: u64,
    /// Only acknowledgements count as changes.
    acks_only: bool,
    seen: (u64, u64),
}

impl Watch {
    pub fn new(aim: Option<CrashPoint>, masks: u64, acks_only: bool) -> Watch {
        Watch { aim, masks, acks_only, seen: (0, 0) }
    }
}

impl<W: World> Run<W> {
    /// Tries crashes at this step if something has changed since the last one.
    pub(super) fn watch_step(&mut self) -> Result<(), Violation> {
        let Some(watch) = &mut self.watch else { return Ok(()) };
        let version: u64 = self.session.disks().iter().map(SimDisk::version).sum();
        let acks = self.known.model().acks();
        let now = if watch.acks_only { (0, acks) } else { (version, acks) };
        match watch.aim {
            Some(aim) if aim.step != self.step => return Ok(()),
            None if watch.seen == now => return Ok(()),
            _ => {}
        }
        watch.seen = now;
        let (aimed, most) = (watch.aim.and_then(|aim| aim.mask), watch.masks);
        let instant = self.session.freeze(Crash::Power);
        let known = self.in_doubt();
        self.stats.cuts += 1;
        let all = instant.masks();
        let spread = (0..most).map(|i| (u128::from(i) * u128::from(all) / u128::from(most)) as u64);
        let drawn = (0..W::WATCHED_DRAWN_MASKS).map(|i| mix(&[i, self.step]));
        let masks: Vec<u64> = match aimed {
            Some(mask) => vec![mask],
            None if all <= most => (0..all).collect(),
            None => spread.chain(drawn).collect(),
        };
        for mask in masks {
            self.stats.crash_states += 1;
            let nth = instant.nth(mask);
            let is_new = self.seen.insert(mix(&[instant.fingerprint(nth), acks]));
            if !is_new && aimed.is_none() {
                continue;
            }
            self.stats.distinct += 1;
            self.say(|| format!("crash (mask {mask}): {}", instant.describe(nth)));
            let entrance = W::entrance(self, Moment::Watched, mask);
            let left = (instant.crash(nth), None);
            W::recover(&self.setup, left, &known, entrance, &mut self.stats).map_err(|v| v.at(self.step, mask))?;
        }
        Ok(())
    }
}
