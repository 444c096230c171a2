//! `serve`: every volume and snapshot of a pool as an NBD export, in the foreground, until a signal
//! says that it is enough.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use forkdisk::WhenFull;
use forkdisk_monitor::{MetricsListener, MetricsServer, PoolSource, Source};
use forkdisk_nbd::{Exports, Security, Server, ServerOptions, nbd_uri};
use forkdisk_uring::{JoinHandle, Rt, Signals, TcpListener, UnixListener};
use rustix::process::Signal;
use serde::Serialize;

use crate::cli::Global;
use crate::endpoint::PrivateDir;
use crate::network::{Doors, NetworkArgs};
use crate::output::{print_json_line, print_line};
use crate::progress::Progress;
use crate::session::{Access, Session, with_pool_when_full};

/// How long a write waits for space in a full pool.
const WAIT_FOR_SPACE: Duration = Duration::from_secs(60);
/// How often space that was given up is brought back, to the pool and to the file system under it.
const GIVE_BACK: Duration = Duration::from_secs(5);
/// Exports that are announced to people by name; programs are told all of them.
const ANNOUNCED: usize = 100;

/// Serve every volume and snapshot as an NBD export
///
/// Runs in the foreground. SIGTERM and SIGINT let requests in flight end, flush, and leave the pool
/// clean.
#[derive(Args)]
pub struct ServeArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Where the socket goes [default: /run/forkdisk/UUID/nbd.sock for root, else
    /// $XDG_RUNTIME_DIR/forkdisk/UUID/nbd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    network: NetworkArgs,
}

/// Said once, when clients may connect.
#[derive(Serialize)]
struct Announcement {
    socket: String,
    /// Beginnings of URIs; an export's name follows.
    tcp: Vec<String>,
    metrics: Vec<String>,
    exports: Vec<Export>,
}

#[derive(Serialize)]
struct Export {
    name: String,
    uri: String,
    size: u64,
    read_only: bool,
}

/// Serves until a signal, then closes the pool cleanly.
pub fn run(args: ServeArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let json = global.output.json();
    let security = args.network.security()?;
    with_pool_when_full(&path, Access::Write, WhenFull::Wait(WAIT_FOR_SPACE), |session| {
        serve(session, args, security, json)
    })
}

async fn serve(session: Session, args: ServeArgs, security: Security, json: bool) -> Result<()> {
    let signals = session.runtime.signals(&[Signal::TERM.as_raw(), Signal::INT.as_raw()])?;
    let private = match args.socket {
        Some(_) => None,
        None => Some(PrivateDir::make(&session.pool.info().uuid)?),
    };
    let socket = args.socket.or_else(|| private.as_ref().map(PrivateDir::socket)).context("no place for the socket")?;
    let socket = std::path::absolute(&socket).with_context(|| format!("{}: no such place", socket.display()))?;
    let listener = UnixListener::bind(&session.runtime, &socket)?;
    let doors = args.network.open(&session.runtime, security)?;
    announce(&session, &socket, &doors, json)?;
    let server = Server::new(&session.runtime, session.pool.clone(), ServerOptions::default());
    let handle = server.handle();
    tracing::info!(socket = %socket.display(), "serving");
    let waiting = session.runtime.spawn(async move {
        let ended = until_signal(&signals).await;
        handle.stop();
        // The signals stay taken over while the pool is closed: a second one does not tear it.
        (ended, signals)
    });
    let giving_back = session.runtime.spawn(give_back(session.clone()));
    let source = PoolSource { pool: session.pool.clone(), server: Some(server.handle()) };
    let metrics = serve_metrics(&session.runtime, source, doors.metrics);
    let tcp = serve_tcp(&session.runtime, &server, doors.tcp, &doors.security);
    server.serve(listener).await;
    for door in tcp {
        door.await;
    }
    for door in metrics {
        door.cancel().await;
    }
    giving_back.cancel().await;
    let (ended, _signals) = waiting.await;
    ended?;
    let _progress = Progress::spinner("closing the pool");
    session.pool.flush().await?;
    tracing::info!("stopped");
    Ok(())
}

fn serve_tcp<X: Exports>(
    rt: &Rt,
    server: &Server<X>,
    listeners: Vec<TcpListener>,
    security: &Security,
) -> Vec<JoinHandle<()>> {
    let serve = |listener| {
        let (server, security) = (server.clone(), security.clone());
        rt.spawn(async move { server.serve_as(listener, security).await })
    };
    listeners.into_iter().map(serve).collect()
}

fn serve_metrics(rt: &Rt, source: impl Source, listeners: Vec<MetricsListener>) -> Vec<JoinHandle<()>> {
    let server = MetricsServer::new(rt, source);
    listeners.into_iter().map(|listener| rt.spawn(server.clone().serve(listener))).collect()
}

/// What was trimmed or deleted is free, and a hole in the pool's file, only after a checkpoint. One
/// comes by itself when much has changed; here it comes for little, too.
async fn give_back(session: Session) {
    loop {
        session.runtime.sleep_for(GIVE_BACK).await;
        if session.pool.info().freeing > 0
            && let Err(error) = session.pool.checkpoint().await
        {
            return tracing::error!(%error, "space cannot be given back");
        }
    }
}

async fn until_signal(signals: &Signals) -> Result<()> {
    let signal = signals.recv().await.context("waiting for signals")?;
    let name = if signal == Signal::TERM.as_raw() { "SIGTERM" } else { "SIGINT" };
    tracing::info!("{name}: letting clients finish");
    Ok(())
}

fn announce(session: &Session, socket: &Path, doors: &Doors, json: bool) -> Result<()> {
    let export = |info: &forkdisk::VolumeInfo| Export {
        name: info.name.clone(),
        uri: nbd_uri(socket, &info.name),
        size: info.size,
        read_only: info.snapshot,
    };
    let exports: Vec<Export> = session.pool.list().iter().map(export).collect();
    if json {
        let (socket, tcp, metrics) = (socket.display().to_string(), doors.uris(), doors.metrics_places.clone());
        return print_json_line(&Announcement { socket, tcp, metrics, exports });
    }
    print_line(&format!("socket {}", socket.display()))?;
    doors.uris().iter().try_for_each(|uri| print_line(&format!("tcp {uri}")))?;
    doors.metrics_places.iter().try_for_each(|place| print_line(&format!("metrics {place}")))?;
    for export in exports.iter().take(ANNOUNCED) {
        print_line(&export.uri)?;
    }
    match exports.len().saturating_sub(ANNOUNCED) {
        0 => Ok(()),
        more => print_line(&format!("and {more} more")),
    }
}
