//! Requests per second on a disk: a volume in place and a clone, through every door, beside raw I/O, another server,
//! file systems with clones and images with snapshots. All in turns; raw I/O three times a round.

mod ours;
mod peers;

use std::rc::Rc;

use anyhow::Result;

use crate::cases::file;
use crate::cases::fio::{self, At, Load};
use crate::load::{random, sequential};
use crate::rows::{Row, Samples};
use crate::runner::{Context, Scale};

use super::row;
use super::subjects::OURS;
use crate::cases::pools::Place;

/// Name of the volume or file that nothing else shares, of the one that is cloned, and of the clone.
pub const ALONE: &str = "v";
pub const BASE: &str = "base";
pub const CLONE: &str = "c";
const XFS: &str = "xfs";
const QEMU_NBD: &str = "qemu-nbd";

/// One of the six kinds of work.
pub struct Work {
    pub name: &'static str,
    pub write: bool,
    pub len: u64,
    pub depth: u64,
    /// Clients; each has its own part of the disk.
    pub jobs: u64,
    /// Whether a flush follows each write.
    pub flush: bool,
    /// Requests of each client, each at another place.
    pub count: usize,
    pub span: u64,
}

impl Work {
    /// Returns the requests per second that fio makes with `run`.
    fn fio(&self, run: impl FnOnce(&Load<'_>) -> Result<fio::Done>) -> Result<f64> {
        let mode = match (self.write, self.is_sequential()) {
            (false, _) => "randread",
            (true, false) => "randwrite",
            (true, true) => "write",
        };
        let mut flags = vec![format!("--number_ios={}", self.count)];
        flags.extend(self.flush.then(|| "--fsync=1".to_string()));
        let (len, depth, connections, span) = (self.len, self.depth, self.jobs, self.span);
        Ok(run(&Load { mode, len, depth, connections, span, flags: &flags })?.rate / self.len as f64)
    }

    fn is_sequential(&self) -> bool {
        self.len > 4096
    }

    /// Returns the places of each client's requests.
    fn offsets(&self) -> Vec<Rc<[u64]>> {
        let (part, len) = (self.span / self.jobs, self.len as usize);
        let of = |job: u64| {
            let within = match self.is_sequential() {
                true => sequential(part, len),
                false => random(part, len, self.count, 5 + job),
            };
            within.iter().take(self.count).map(|offset| job * part + offset).collect()
        };
        (0..self.jobs).map(of).collect()
    }
}

/// Returns the six kinds of work.
fn works(scale: Scale, span: u64) -> Vec<Work> {
    let synced = scale.pick(300, 2_000, 5_000);
    let single = scale.pick(1_000, 8_000, 20_000);
    let deep = scale.pick(8_000, 64_000, 128_000);
    let whole = (span >> 20) as usize;
    let work = |name, write, len, depth, jobs, flush, count| Work { name, write, len, depth, jobs, flush, count, span };
    vec![
        work("fsync-4k", true, 4096, 1, 1, true, synced),
        work("fsync-4k-4-jobs", true, 4096, 1, 4, true, synced),
        work("first-4k-qd1", true, 4096, 1, 1, false, single),
        work("first-4k-qd32", true, 4096, 32, 1, false, deep),
        work("read-4k-qd32", false, 4096, 32, 1, false, deep),
        work("first-1m-qd8", true, 1 << 20, 8, 1, false, whole),
    ]
}

/// Something with files or disks, one of which shares nothing; a clone is made for each measurement of one.
pub trait Target {
    /// Whether it has something that shares nothing, and something shared.
    fn has(&self) -> (bool, bool) {
        (true, true)
    }

    /// Returns the requests per second of `work` on a new clone, or on what shares nothing.
    fn measure(&mut self, work: &Work, shared: bool) -> Result<f64>;
}

/// A target with its names in the rows of what shares nothing, and of a clone.
pub struct Named {
    pub alone: String,
    pub shared: String,
    /// Door and place of forkdisk's; `None` for a peer.
    pub ours: Option<String>,
    pub target: Box<dyn Target>,
}

/// Requests per second of every round, and of raw I/O in it.
#[derive(Default)]
struct Rates {
    raw: Samples,
    /// Per round.
    raw_medians: Vec<f64>,
    /// Of each target, per round: what shares nothing, and a clone.
    targets: Vec<(Vec<f64>, Vec<f64>)>,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(128 << 20, 512 << 20, 1 << 30), context.scale.pick(3, 5, 9));
    let raw = context.disk("raw");
    file::plain(&raw, span)?;
    let mut targets = Vec::new();
    for place in Place::ALL.into_iter().filter(|place| context.scale > Scale::Quick || *place != Place::Preallocated) {
        context.say(&format!("  pools: {}", place.name()));
        targets.extend(ours::open(context, place, span));
    }
    if context.options.peers {
        context.say("  peers");
        targets.extend(peers::open(context, span));
    }
    let works = works(context.scale, span);
    let mut rates: Vec<Rates> = works.iter().map(|_| Rates::default()).collect();
    for rate in &mut rates {
        rate.targets.resize_with(targets.len(), Default::default);
    }
    for round in 0..times {
        for (work, rates) in works.iter().zip(&mut rates) {
            context.say(&format!("  round {} of {times}: {}", round + 1, work.name));
            let timed = || work.fio(|load| fio::run(&At::File(&raw), load));
            let mut of_round = vec![timed()?];
            for (index, named) in targets.iter_mut().enumerate() {
                if index == rates.targets.len() / 2 {
                    of_round.push(timed()?);
                }
                measure(context, named, work, &mut rates.targets[index]);
            }
            of_round.push(timed()?);
            of_round.iter().for_each(|&rate| rates.raw.push(rate));
            rates.raw_medians.extend(of_round.into_iter().collect::<Samples>().median());
        }
    }
    Ok(works.iter().zip(&rates).flat_map(|(work, rates)| rows_of(work, &targets, rates, times)).collect())
}

fn measure(context: &Context<'_>, named: &mut Named, work: &Work, rates: &mut (Vec<f64>, Vec<f64>)) {
    let (has_alone, has_shared) = named.target.has();
    for (shared, name) in [(false, &named.alone), (true, &named.shared)] {
        if !(if shared { has_shared } else { has_alone }) {
            continue;
        }
        match named.target.measure(work, shared) {
            Ok(rate) if shared => rates.1.push(rate),
            Ok(rate) => rates.0.push(rate),
            Err(error) => context.say(&format!("    {name}: {error:#}")),
        }
    }
}

fn rows_of(work: &Work, targets: &[Named], rates: &Rates, times: usize) -> Vec<Row> {
    let case = format!("clock/{}", work.name);
    let unit = if work.len == 1 << 20 { "MiB/s" } else { "1/s" };
    let samples = |values: &[f64]| values.iter().copied().collect::<Samples>();
    let ratios = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a / b).collect::<Samples>();
    let peer = |name: &str, shared: bool| -> Option<&[f64]> {
        let is_it = |named: &Named| named.ours.is_none() && named.alone == name;
        let (alone, clone) = &rates.targets[targets.iter().position(is_it)?];
        let values: &[f64] = if shared { clone } else { alone };
        (values.len() == times).then_some(values)
    };
    let mut rows = vec![row(&case, "raw", "rate", unit, &rates.raw)];
    for (named, (alone, shared)) in targets.iter().zip(&rates.targets) {
        let raw = &rates.raw_medians;
        let Some(door) = &named.ours else {
            for (name, values) in [(&named.alone, alone), (&named.shared, shared)] {
                if values.len() == times {
                    rows.push(row(&case, name, "rate", unit, &samples(values)));
                    rows.push(row(&case, name, "ratio_to_raw", "ratio", &ratios(values, raw)));
                }
            }
            continue;
        };
        // A round that failed leaves no pairs.
        if alone.len() != times || shared.len() != times {
            continue;
        }
        let case = format!("{case}/{door}");
        let mut add = |metric: &str, unit: &str, samples: Samples| {
            rows.push(row(&case, OURS, metric, unit, &samples));
        };
        add("in_place_rate", unit, samples(alone));
        add("shared_rate", unit, samples(shared));
        add("in_place_ratio_to_raw", "ratio", ratios(alone, raw));
        add("shared_ratio_to_raw", "ratio", ratios(shared, raw));
        add("shared_ratio_to_in_place", "ratio", ratios(shared, alone));
        if let Some(theirs) = peer(XFS, true) {
            add("shared_ratio_to_xfs_clone", "ratio", ratios(shared, theirs));
        }
        if let (true, Some(theirs)) = (door.starts_with(ours::NBD), peer(QEMU_NBD, false)) {
            add("in_place_ratio_to_qemu_nbd", "ratio", ratios(alone, theirs));
            add("shared_ratio_to_qemu_nbd", "ratio", ratios(shared, theirs));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_have_parts_of_their_own_and_no_place_is_used_twice() {
        for work in works(Scale::Quick, 128 << 20) {
            let all: Vec<u64> = work.offsets().iter().flat_map(|offsets| offsets.to_vec()).collect();
            assert_eq!(all.len(), work.count * work.jobs as usize, "{}", work.name);
            let mut distinct = all.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), all.len(), "{}", work.name);
            assert!(all.iter().all(|offset| offset + work.len <= work.span));
        }
    }
}
