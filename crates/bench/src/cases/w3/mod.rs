//! First writes to a thin volume in order (W3): on a plain device and on RAID5.

pub mod peers;
pub mod raid5;
pub mod thin;

use anyhow::Result;
use forkdisk::testing::{Recording, Request, RequestKind};
use forkdisk::{CreateOptions, OpenOptions};
use forkdisk_uring::{Config, block_on};

use crate::load::{Job, sequential};
use crate::model::Label;
use crate::runner::Context;

use super::sparse::Bed;

/// Form in which `dd bs=2M` reaches the volume.
#[derive(Clone, Copy)]
pub struct Arrival {
    pub name: &'static str,
    pub len: usize,
    pub depth: usize,
}

/// Through the page cache: pages, many at a time. Bypassing it: whole requests, one after the other.
pub const ARRIVALS: [Arrival; 2] =
    [Arrival { name: "4k", len: 4096, depth: 32 }, Arrival { name: "2m", len: 2 << 20, depth: 1 }];

/// Returns the bytes to write: whole stripes of the array and whole requests.
fn span(context: &Context<'_>) -> u64 {
    context.scale.pick(384 << 20, 1998 << 20, 1998 << 20)
}

impl Arrival {
    fn job(&self, span: u64) -> Job {
        Job { write: true, len: self.len, depth: self.depth, offsets: sequential(span, self.len) }
    }

    /// Returns the requests themselves, and a flush.
    fn raw(&self, span: u64) -> Recording {
        let request = |&offset: &u64| Request { kind: RequestKind::WriteData, offset, len: self.len as u64 };
        let flush = Request { kind: RequestKind::Flush, offset: 0, len: 0 };
        Recording { requests: self.job(span).offsets.iter().map(request).chain([flush]).collect() }
    }

    /// Records what reaches the device when a new volume with chunks of 512 KiB is written.
    fn record(&self, span: u64) -> Result<Recording> {
        let job = self.job(span);
        block_on(Config::default(), |rt| async move {
            let volume = CreateOptions::new(span, 0).with_chunk(512 << 10);
            let bed = Bed::new(&rt, 8 << 30, volume, OpenOptions::default()).await?;
            bed.record(&job).await
        })?
    }
}

fn label(case: &str) -> Label<'_> {
    Label { workload: "w3", case, target: "forkdisk" }
}
