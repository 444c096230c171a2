//! A client of a block device in a guest: writes of 4 KiB at random places, bypassing the page
//! cache, with a given number in flight, and a flush.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::bare::Bare;
use crate::load::{Job, scattered};

const PAGE: usize = 4096;

/// `DEVICE SPAN COUNT DEPTH SEED`: COUNT different pages of the first SPAN bytes.
pub fn run(arguments: &[OsString]) -> Result<()> {
    let [device, numbers @ ..] = arguments else { bail!("a device is needed") };
    let parse = |text: &OsString| text.to_str().and_then(|t| t.parse::<u64>().ok()).context("a number is needed");
    let numbers: Vec<u64> = numbers.iter().map(parse).collect::<Result<_>>()?;
    let [span, count, depth, seed] = numbers[..] else { bail!("four numbers are needed") };
    let job =
        Job { write: true, len: PAGE, depth: depth as usize, offsets: scattered(span, PAGE, count as usize, seed) };
    Bare::open(Path::new(device), job.depth, job.len)?.run(&job)?;
    File::open(device)?.sync_all().context("flushing the device")
}
