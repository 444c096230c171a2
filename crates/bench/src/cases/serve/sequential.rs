//! Sequential requests of 1 MiB, from 1, 4 and 16 connections, next to nbdkit's file plugin on a
//! plain file on the same disk.

use std::fs::File;
use std::path::Path;

use anyhow::Result;

use crate::cases::file;
use crate::cases::fio::Load;
use crate::cases::server::{Server, served_pool};
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::row;

/// Number of connections, and requests in flight on each.
const CONNECTIONS: [(u64, u64); 3] = [(1, 16), (4, 8), (16, 4)];
const LEN: u64 = 1 << 20;
/// Writes between two flushes.
const FLUSH_EVERY: u64 = 64;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(512 << 20, 1 << 30, 4 << 30), context.scale.pick(3, 7, 15));
    let (pool, plain) = (context.disk("pool"), context.disk("plain"));
    served_pool(&pool, span, 0)?;
    let ours = Server::forkdisk(context, &pool, &context.ram("ours.sock"), &[])?;
    let mut peer = None;
    if context.options.peers {
        file::plain(&plain, span)?;
        peer = Some(Server::nbdkit(&["file".as_ref(), plain.as_os_str()], &context.ram("nbdkit.sock"))?);
    }
    let mut rows = Vec::new();
    for (word, mode) in [("read", "read"), ("write", "write")] {
        for (connections, depth) in CONNECTIONS {
            let case = format!("sequential/{word}-1m-{connections}-connections");
            let each = FLUSH_EVERY / connections;
            let flags: Vec<String> = if mode == "write" { vec![format!("--fsync={each}")] } else { Vec::new() };
            let load = Load { mode, len: LEN, depth, connections, span, flags: &flags };
            let (mut mine, mut theirs, mut ratio) = (Samples::default(), Samples::default(), Samples::default());
            for round in 0..=times {
                let other = match &peer {
                    Some(peer) => {
                        uncache(&plain)?;
                        Some(peer.load(&load)?.rate)
                    }
                    None => None,
                };
                let rate = ours.load(&load)?.rate;
                if round > 0 {
                    mine.push(rate / LEN as f64);
                    if let Some(other) = other {
                        theirs.push(other / LEN as f64);
                        ratio.push(rate / other);
                    }
                }
            }
            rows.push(row(&case, "forkdisk", "throughput", "MiB/s", &mine));
            if peer.is_some() {
                rows.push(row(&case, "forkdisk", "throughput_ratio_to_nbdkit", "ratio", &ratio));
                rows.push(row(&case, "nbdkit-file", "throughput", "MiB/s", &theirs));
            }
        }
    }
    ours.stop()?;
    Ok(rows)
}

/// Drops a plain file from the page cache, so that its data comes from the disk, as the pool's does.
fn uncache(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}
