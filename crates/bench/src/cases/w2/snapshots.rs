//! First writes of 4 KiB in random order on a volume with 1 to 1,000 snapshots: time with one ÷
//! time with more.

use anyhow::Result;
use forkdisk::testing::RequestKind;
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, block_on};

use crate::clock::Stopwatch;
use crate::model::Trace;
use crate::rows::Row;
use crate::runner::Context;

use super::super::sparse::Bed;
use super::{PAGE, label, pages};

const COUNTS: [usize; 4] = [1, 16, 256, 1000];
/// Random writes after each snapshot.
const BETWEEN: u64 = 32;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, count) = (context.scale.pick(256 << 20, 1 << 30, 1 << 30), context.scale.pick(32_768, 65_536, 262_144));
    let mut rows = Vec::new();
    for depth in [1, 32] {
        let (mut first, mut cpu_of_first) = (None, 0.0);
        for snapshots in COUNTS {
            let (seen, cpu) = measure(span, count, depth, snapshots)?;
            let seen = Trace::of(seen, count as usize, depth);
            let case = format!("snapshots/{snapshots}-qd{depth}");
            let label = label(&case);
            if snapshots == 1 {
                cpu_of_first = cpu;
            }
            let one = first.get_or_insert_with(|| seen.clone());
            rows.extend(label.ratios(one, &seen));
            let per_byte = |bytes: u64| bytes as f64 / (count * PAGE as u64) as f64;
            rows.push(label.row("written_bytes_per_byte", "ratio", per_byte(seen.written())));
            rows.push(label.row("read_bytes_per_byte", "ratio", per_byte(seen.recording.bytes(RequestKind::Read))));
            rows.push(label.row("cpu_ratio", "ratio", cpu_of_first / cpu));
        }
    }
    Ok(rows)
}

fn measure(span: u64, count: u64, depth: usize, snapshots: usize) -> Result<(forkdisk::testing::Recording, f64)> {
    block_on(Config::default(), |rt| async move {
        let bed = Bed::new(&rt, 4 * span, CreateOptions::new(span, 0), OpenOptions::default()).await?;
        bed.fill(span).await?;
        bed.pool.device().pause(true);
        for i in 1..snapshots {
            bed.snapshot(&format!("s{i}")).await?;
            bed.run(&pages(span, BETWEEN, depth, i as u64)).await?;
        }
        bed.snapshot("last").await?;
        bed.settle().await?;
        bed.pool.device().pause(false);
        let watch = Stopwatch::start();
        let seen = bed.record(&pages(span, count, depth, 0)).await?;
        Ok((seen, watch.stop().cpu))
    })?
}
