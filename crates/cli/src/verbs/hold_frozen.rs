//! `hold-frozen`: freezes file systems for its parent process, and thaws them when that process ends.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::freeze;

/// Freeze file systems until the parent process releases them or ends
#[derive(Args)]
pub struct HoldFrozenArgs {
    /// Most milliseconds to hold them
    limit: u64,

    /// Numbers of inherited descriptors, one in each file system
    #[arg(required = true)]
    descriptors: Vec<u32>,
}

/// Returns when everything is thawed.
pub fn run(args: HoldFrozenArgs) -> Result<()> {
    let open = |number: &u32| {
        let path = format!("/proc/self/fd/{number}");
        File::open(&path).context(path)
    };
    let files = args.descriptors.iter().map(open).collect::<Result<Vec<_>>>()?;
    freeze::hold(files, Duration::from_millis(args.limit))
}
