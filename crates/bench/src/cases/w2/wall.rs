//! The published table in wall-clock time: a pool in a file, all of a volume written again while it
//! is shared, and again while it is not, alternating.

use std::path::Path;
use std::rc::Rc;

use anyhow::Result;
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool, Volume};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice, block_on};

use crate::clock::{Stopwatch, Took};
use crate::load::{self, Job, sequential};
use crate::rows::Row;
use crate::runner::Context;

use super::super::file;
use super::{CELLS, Cell, PAGE, label};

const PIECE: usize = 1 << 20;
const VOLUME: &str = "v";

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(64 << 20, 1 << 30, 1 << 30), context.scale.pick(3, 7, 15));
    let mut rows = Vec::new();
    let path = context.disk("pool");
    // Written once, so that no first write waits for allocation by the file system under the pool.
    let size = 4 * span + (256 << 20);
    file::plain(&path, size)?;
    for cell in &CELLS {
        let span = if cell.len == PAGE { span / 16 } else { span };
        let rounds = measure(cell, &path, span, size, times)?;
        let case = format!("wall/{}", cell.name);
        let label = label(&case);
        let ratio = rounds.iter().map(|(shared, alone)| alone.wall / shared.wall).collect();
        let rate = |took: &Took| span as f64 / took.wall / 1e6;
        let cpu = rounds.iter().map(|(shared, alone)| shared.cpu / alone.cpu).collect();
        let rows_of_cell = [
            label.rows("wall_ratio", "ratio", &ratio),
            label.rows("shared_throughput", "MB/s", &rounds.iter().map(|(shared, _)| rate(shared)).collect()),
            label.rows("alone_throughput", "MB/s", &rounds.iter().map(|(_, alone)| rate(alone)).collect()),
            label.rows("cpu_to_alone", "ratio", &cpu),
        ];
        rows.extend(rows_of_cell);
    }
    Ok(rows)
}

/// Times of a round with everything shared, and with nothing shared.
type Round = (Took, Took);

fn measure(cell: &Cell, path: &Path, span: u64, size: u64, times: usize) -> Result<Vec<Round>> {
    let (cell, path) = (*cell, path.to_path_buf());
    block_on(Config::default(), |rt| async move {
        let device = UringDevice::open(&rt, &path, &DeviceOptions::default())?;
        Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-4", 0)).await?;
        // No discards, since holes would have to be allocated again.
        let options = OpenOptions::default().with_discard(false);
        let pool = Pool::open(device, Rc::new(rt.clone()), options).await?;
        pool.create(VOLUME, &CreateOptions::new(span, 0).with_chunk(cell.chunk)).await?;
        let volume = pool.volume(VOLUME)?;
        let fill = Job { write: true, len: PIECE, depth: 8, offsets: sequential(span, PIECE) };
        load::run(&rt, &pool, &volume, &fill).await?;
        let mut rounds = Vec::new();
        for round in 0..=times {
            pool.snapshot(&[(VOLUME, "s")], 0).await?;
            pool.checkpoint().await?;
            let shared = timed(&rt, &pool, &volume, &cell.dd(span)).await?;
            pool.delete(&["v@s"]).await?;
            pool.wait_freed().await?;
            let alone = timed(&rt, &pool, &volume, &cell.dd(span)).await?;
            if round > 0 {
                rounds.push((shared, alone));
            }
        }
        drop(volume);
        pool.close().await?;
        Ok(rounds)
    })?
}

/// Measures the time until all of it is durable.
async fn timed(rt: &Rt, pool: &Pool<UringDevice>, volume: &Volume<UringDevice>, job: &Job) -> Result<Took> {
    let watch = Stopwatch::start();
    load::run(rt, pool, volume, job).await?;
    pool.flush().await?;
    Ok(watch.stop())
}
