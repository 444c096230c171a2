//! First writes of 4 KiB in random order to an origin with one snapshot, one at a time and 32.

use anyhow::Result;
use forkdisk_uring::{Config, block_on};

use crate::load::{Job, random};
use crate::rows::Row;
use crate::runner::Context;

use super::super::origin::{self, Bed, Setup};
use super::label;

const PAGE: usize = 4096;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, count) = (context.scale.pick(512 << 20, 1 << 30, 4 << 30), context.scale.pick(4096, 16_384, 65_536));
    let mut rows = Vec::new();
    for (name, chunk) in [("4k", 4 << 10), ("64k", 64 << 10)] {
        for depth in [1, 32] {
            let job = Job { write: true, len: PAGE, depth, offsets: random(span, PAGE, count, 12) };
            let setup = Setup { span, chunk, copies: 1, second: false };
            let seen = {
                let job = job.clone();
                block_on(Config::default(), |rt| async move {
                    let bed = Bed::new(&rt, setup).await?;
                    bed.snapshot("s", false).await?;
                    bed.settle().await?;
                    bed.record(&job).await
                })??
            };
            let case = format!("random/chunk-{name}-qd{depth}");
            rows.extend(origin::rows(&label(&case), &job, &setup, &seen));
        }
    }
    Ok(rows)
}
