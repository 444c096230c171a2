//! `bench`: runs forkdisk's benchmarks on this machine.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use forkdisk_bench::{Benchmark, Options, Row, Scale, inside, page, table};

use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::size;
use crate::verbs::examples::examples;

/// Measure forkdisk on this machine
#[derive(Args)]
#[command(after_help = examples!["forkdisk bench engine", "forkdisk bench doors --quick --json doors.json"])]
pub struct BenchArgs {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Subcommand)]
enum Workload {
    /// The engine alone: device counts, modelled time, CPU and wall-clock time next to raw I/O
    Engine(RunArgs),
    /// The NBD server: CPU per request, large requests, idle exports; next to qemu-nbd and nbdkit
    Serve(PeerArgs),
    /// Sequential writes to a file on a volume, or an origin, with a snapshot; next to dm-snapshot
    W1(OriginArgs),
    /// Breaking sharing after a snapshot: large blocks, random pages, many snapshots; next to dm-thin
    W2(PeerArgs),
    /// First writes to a thin volume in order, on one device and on RAID5; next to dm-thin
    W3(PeerArgs),
    /// Many snapshots of an origin in place, chained and independent; next to dm-snapshot
    W4(PeerArgs),
    /// Clone, modify, delete, repeat through the files of a mounted pool; next to btrfs and XFS
    W5(RoundArgs),
    /// Every door to a volume: CPU and time per request, speed on a disk; next to QEMU's doors, XFS, btrfs
    Doors(PeerArgs),
    /// Many clones, forks at a rate, resets, deep descents; next to qcow2 overlays and clones of XFS and btrfs
    Fleet(PeerArgs),
    /// A part of a benchmark that runs in a separate process
    #[command(hide = true)]
    Inside(InsideArgs),
}

#[derive(Args)]
struct InsideArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Options of a benchmark that repeats rounds on a file.
#[derive(Args)]
struct RoundArgs {
    #[command(flatten)]
    peers: PeerArgs,

    /// Rounds of each mode [default: 20, with --quick 6]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,

    /// Bytes of the file, from 1M on [default: 100M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
}

/// Options of a benchmark on a volume or an origin.
#[derive(Args)]
struct OriginArgs {
    #[command(flatten)]
    peers: PeerArgs,

    /// On an origin protected in place, with chunks of 8K, 64K and 512K, instead of a volume
    #[arg(long)]
    origin: bool,
}

/// Options of a benchmark with peers.
#[derive(Args)]
struct PeerArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Measure forkdisk only, without its peers
    #[arg(long)]
    no_peers: bool,
}

#[derive(Args)]
#[command(after_help = "Every figure is printed with its goal, if it has one. The exit status is 0 when the run \
                        came to its end, whether goals were met or not. docs/benchmarks.md says what each \
                        figure means.")]
struct RunArgs {
    /// Where --json writes the rows [default: stdout]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Where the files for timed cases are created; they are removed afterwards [default: the
    /// folder for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Also write a page with charts of all ratios, forkdisk's next to its peers', to FILE
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Take a minute or two instead of up to fifteen
    #[arg(long, conflicts_with = "full")]
    quick: bool,

    /// Run more and longer rounds, for a narrower spread
    #[arg(long)]
    full: bool,

    /// Run one case only
    #[arg(long, value_name = "CASE", hide = true)]
    only: Option<String>,
}

/// Runs a benchmark.
pub fn run(args: BenchArgs, global: &Global) -> Result<()> {
    let (mut rounds, mut size) = (None, None);
    let (benchmark, args, peers) = match args.workload {
        Workload::Engine(args) => (Benchmark::ENGINE, args, true),
        Workload::Serve(args) => (Benchmark::SERVE, args.run, !args.no_peers),
        Workload::Doors(args) => (Benchmark::DOORS, args.run, !args.no_peers),
        Workload::Fleet(args) => (Benchmark::FLEET, args.run, !args.no_peers),
        Workload::W1(args) => {
            let benchmark = if args.origin { Benchmark::W1_ORIGIN } else { Benchmark::W1 };
            (benchmark, args.peers.run, !args.peers.no_peers)
        }
        Workload::W2(args) => (Benchmark::W2, args.run, !args.no_peers),
        Workload::W3(args) => (Benchmark::W3, args.run, !args.no_peers),
        Workload::W4(args) => (Benchmark::W4, args.run, !args.no_peers),
        Workload::W5(args) => {
            (rounds, size) = (args.rounds.map(|n| n as usize), args.size);
            ensure!(
                size.is_none_or(|bytes| bytes >= 1 << 20),
                "--size: a file of less than 1M has no room for the rounds"
            );
            (Benchmark::W5, args.peers.run, !args.peers.no_peers)
        }
        Workload::Inside(args) => return inside(&args.arguments),
    };
    let json = global.output.json();
    ensure!(json || args.file.is_none(), "a FILE is for --json: without it the figures are printed as a table");
    let scale = match (args.quick, args.full) {
        (true, _) => Scale::Quick,
        (_, true) => Scale::Full,
        _ => Scale::Default,
    };
    let dir = args.dir.unwrap_or_else(std::env::temp_dir);
    let program = std::env::current_exe().context("finding this program")?;
    let options = Options { dir, scale, only: args.only, peers, rounds, size, program };
    let rows = benchmark.run(&options, &|text| eprintln!("{text}"))?;
    if let Some(path) = &args.report {
        let title = format!("forkdisk bench {}", benchmark.name());
        fs::write(path, page(&title, &rows)).with_context(|| path.display().to_string())?;
    }
    match args.file {
        Some(path) => {
            let text = serde_json::to_string_pretty(&rows)?;
            fs::write(&path, text + "\n").with_context(|| path.display().to_string())?;
            report(&rows)
        }
        None if json => print_json(&rows),
        None => report(&rows),
    }
}

fn report(rows: &[Row]) -> Result<()> {
    print_line(table(rows).trim_end())?;
    let required = rows.iter().filter(|row| row.met.is_some()).count();
    let met = rows.iter().filter(|row| row.met == Some(true)).count();
    print_line(&format!("{met} of {required} goals met"))
}
