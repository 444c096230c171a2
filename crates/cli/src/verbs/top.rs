//! `top`: shows the current activity of a served pool.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use forkdisk_control::{Client, params};
use forkdisk_monitor::Statistics;

use crate::global::Global;
use crate::output::print_line;
use crate::session::daemon;
use crate::top::rates::View;
use crate::top::{screen, table};
use crate::verbs::examples::examples;

/// Watch a served pool: volumes, throughput, latency, space, journal
///
/// Ends with q. If the output is not a terminal, one table is printed.
#[derive(Args)]
#[command(after_help = examples!["forkdisk top /srv/pool.img"])]
pub struct TopArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,

    /// Print one table, of one interval, and end
    #[arg(long)]
    once: bool,
}

fn parse_interval(text: &str) -> Result<Duration> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => bail!("not a number of seconds from 0.01 to 3600"),
    }
}

/// Connection and the counters of the last update.
struct Watch {
    client: Client,
    last: Box<Statistics>,
    at: Instant,
}

impl Watch {
    fn begin(mut client: Client) -> Result<Watch> {
        let last = client.call(params::Statistics {}, None, |_| {})?;
        Ok(Watch { client, last, at: Instant::now() })
    }

    /// Returns the activity since the last update.
    fn look(&mut self) -> Result<View> {
        let new = self.client.call(params::Statistics {}, None, |_| {})?;
        let now = Instant::now();
        let seconds = now.duration_since(self.at).as_secs_f64().max(1e-3);
        let view = View::between(&self.last, &new, seconds);
        (self.last, self.at) = (new, now);
        Ok(view)
    }
}

/// Shows the activity until a key ends it, or once.
pub fn run(args: TopArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let Some(client) = daemon(global, &path)? else {
        bail!(
            "{0} is not being served, so nothing happens in it: `forkdisk stats {0}` shows its state",
            path.display()
        );
    };
    if global.output.json() {
        bail!("top shows tables only: `forkdisk stats {} --json` has all counters", path.display());
    }
    let mut watch = Watch::begin(client)?;
    if args.once || !std::io::stdout().is_terminal() {
        thread::sleep(args.interval);
        return table::lines(&watch.look()?).iter().try_for_each(|line| print_line(line));
    }
    screen::run(args.interval, || watch.look())
}
