//! The same rounds on btrfs and XFS, whose `cp` makes clones as well, on loop devices over the same disk.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use forkdisk::testing::{Recording, Request, RequestKind};

use super::figures::{self, CONSTANT};
use super::label;
use super::rounds::{Counts, Place, Plan, Round, run_reading};
use crate::limits::output_of;
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::Context;

const BLOCK: u64 = 4096;
const PIECE: u64 = 1 << 20;

/// A file system with clones.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    pub mkfs: &'static [&'static str],
}

pub const KINDS: [Kind; 2] = [
    Kind { name: "btrfs", mkfs: &["mkfs.btrfs", "-q", "-f"] },
    Kind { name: "xfs", mkfs: &["mkfs.xfs", "-q", "-f", "-m", "reflink=1"] },
];

/// A piece of a file: offset in the file, offset on the device, and length, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    file: u64,
    device: u64,
    blocks: u64,
}

/// Parses the extents printed by `filefrag -v -b4096`.
fn extents(printed: &str) -> Vec<Extent> {
    let extent = |line: &str| {
        let mut fields = line.split(':');
        let first = |range: &str| range.split("..").next()?.trim().parse().ok();
        fields.next()?.trim().parse::<u64>().ok()?;
        let (file, device) = (first(fields.next()?)?, first(fields.next()?)?);
        Some(Extent { file, device, blocks: fields.next()?.trim().parse().ok()? })
    };
    printed.lines().filter_map(extent).collect()
}

/// Returns the reads of 1 MiB of the first `len` bytes of a file, split at its extents.
fn reads(extents: &[Extent], len: u64) -> Vec<Request> {
    let mut requests: Vec<Request> = Vec::new();
    for extent in extents {
        let (mut at, end) = (extent.file * BLOCK, ((extent.file + extent.blocks) * BLOCK).min(len));
        while at < end {
            let stop = (at / PIECE + 1) * PIECE;
            let (offset, len) = (extent.device * BLOCK + (at - extent.file * BLOCK), stop.min(end) - at);
            match requests.last_mut() {
                Some(last) if at % PIECE != 0 && last.offset + last.len == offset => last.len += len,
                _ => requests.push(Request { kind: RequestKind::Read, offset, len }),
            }
            at += len;
        }
    }
    requests
}

impl Place for Mounted {
    fn dir(&self) -> &Path {
        self.dir()
    }

    /// Syncs twice: space freed by the first is reported to the device by the second.
    fn settle(&self) -> Result<()> {
        for _ in 0..2 {
            rustix::fs::syncfs(File::open(self.dir())?)?;
        }
        Ok(())
    }

    fn has_log(&self) -> bool {
        self.kind() == "xfs"
    }

    /// Freezes the file system: XFS then writes from its log what btrfs has written to its place already.
    fn empty_log(&self) -> Result<()> {
        // Ignores signals that end the benchmark, so that they do not leave it frozen.
        let script = r#"trap "" INT TERM HUP; fsfreeze -f "$0" && fsfreeze -u "$0""#;
        output_of(Command::new("sh").args(["-c", script]).arg(self.dir())).map(drop)
    }

    /// Counts requests and bytes; pages of metadata cannot be distinguished.
    fn counts(&self) -> Result<Counts> {
        let counts = Mounted::counts(self)?;
        let requests = counts.reads + counts.writes + counts.discards + counts.flushes;
        let bytes = counts.read_bytes + counts.written_bytes;
        Ok(Counts { requests, bytes, map_pages: 0 })
    }

    /// Returns reads of the contents only, each piece once: the places are known, but not the reads
    /// of metadata.
    fn read(&self, name: &str, len: u64) -> Result<Recording> {
        let printed = output_of(Command::new("filefrag").args(["-v", "-b4096", "-s"]).arg(self.dir().join(name)))?;
        Ok(Recording { requests: reads(&extents(&printed), len) })
    }

    fn used(&self) -> Result<Option<(u64, u64)>> {
        Ok(None)
    }
}

/// Measures all rounds of `plan`, and reading before and after them.
pub fn measure(context: &Context<'_>, kind: Kind, plan: &Plan) -> Result<(Vec<Round>, Vec<Recording>)> {
    let backing = File::options().read(true).write(true).create(true).truncate(true).open(context.disk(kind.name))?;
    backing.set_len(plan.pool_size().max(2 << 30))?;
    let place = Mounted::new(&backing, context.disk(&format!("{}-mnt", kind.name)), kind.mkfs, &[])?;
    run_reading(&place, plan)
}

/// Returns the peer's rows, and forkdisk's lead in clone and remove: the peer's figure ÷ forkdisk's, less 1.
pub fn beside(name: &str, kind: Kind, theirs: &[Round], ours: &[Row]) -> Vec<Row> {
    let mut rows: Vec<Row> = figures::rows(name, "", kind.name, theirs);
    rows.retain(|row| !row.metric.starts_with("map_pages"));
    for (part, step) in CONSTANT {
        let case = format!("{name}/{part}");
        let label = label(&case);
        let median = |values: Vec<f64>| values.into_iter().collect::<Samples>().median().unwrap_or(0.0);
        let our = |metric: &str| {
            let row = ours.iter().find(|row| row.case == case && row.metric == metric && row.target == "forkdisk");
            row.and_then(|row| row.median).unwrap_or(f64::INFINITY)
        };
        let cpu = median(theirs.iter().map(|r| step(r).cpu).collect());
        let settled = median(theirs.iter().map(|r| step(r).settled).collect());
        let bytes = median(theirs.iter().map(|r| step(r).counts.bytes as f64).collect());
        rows.push(label.row(&format!("cpu_ahead_of_{}", kind.name), "ratio", cpu / our("cpu") - 1.0));
        let all_cpu: Samples = theirs.iter().filter_map(|r| step(r).all_cpu).collect();
        if let Some(all_cpu) = all_cpu.median() {
            rows.push(label.row(&format!("all_cpu_ahead_of_{}", kind.name), "ratio", all_cpu / our("all_cpu") - 1.0));
        }
        rows.push(label.row(
            &format!("seconds_ahead_of_{}", kind.name),
            "ratio",
            settled / our("seconds_settled") - 1.0,
        ));
        rows.push(label.row(&format!("bytes_ahead_of_{}", kind.name), "ratio", bytes / our("bytes") - 1.0));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_what_filefrag_prints() {
        let printed = "Filesystem type is: 58465342\nFile size of mnt/a is 1048576 (256 blocks of 4096 bytes)\n \
            ext:     logical_offset:        physical_offset: length:   expected: flags:\n   \
            0:        0..      63:        340..       403:     64:             shared\n   \
            1:       64..     255:       1000..      1191:    192:        404: last,eof\nmnt/a: 2 extents found\n";
        let two = [Extent { file: 0, device: 340, blocks: 64 }, Extent { file: 64, device: 1000, blocks: 192 }];
        assert_eq!(extents(printed), two);
    }

    #[test]
    fn reads_are_cut_by_extents_and_by_their_length() {
        let at = |file, device, blocks| Extent { file, device, blocks };
        let places = |extents: &[Extent], len| -> Vec<(u64, u64)> {
            reads(extents, len).iter().map(|r| (r.offset / BLOCK, r.len / BLOCK)).collect()
        };
        assert_eq!(places(&[at(0, 1000, 600)], 2 << 20), [(1000, 256), (1256, 256)]);
        assert_eq!(places(&[at(0, 50, 10), at(10, 60, 246)], 1 << 20), [(50, 256)], "one behind the other");
        assert_eq!(places(&[at(0, 50, 10), at(12, 70, 244)], 1 << 20), [(50, 10), (70, 244)]);
    }
}
