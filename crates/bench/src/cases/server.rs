//! NBD servers, forkdisk's and others', each in its own process, with fio as the client of all of them.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use forkdisk::CreateOptions;
use forkdisk_uring::{Config, block_on};

use crate::process::Process;
use crate::runner::Context;

use super::file;
use super::fio::{self, At, Done, Load};

/// Peers: programs and labels of their rows.
pub const QEMU_NBD: &str = "qemu-nbd";
const NBDKIT: &str = "nbdkit";

/// Creates a pool at `path` with one volume of `span` bytes, completely written, and `others` empty
/// volumes, `idle0`, `idle1`, …
pub fn served_pool(path: &Path, span: u64, others: usize) -> Result<()> {
    block_on(Config::default(), |rt| {
        let path = path.to_owned();
        async move {
            let (pool, volume) = file::filled(&rt, &path, span).await?;
            drop(volume);
            for i in 0..others {
                pool.create(&format!("idle{i}"), &CreateOptions::new(1 << 30, 0)).await?;
            }
            anyhow::Ok(pool.close().await?)
        }
    })?
}

/// A running server, stopped when dropped.
pub struct Server {
    process: Process,
    uri: String,
}

impl Server {
    /// Starts `forkdisk serve` on a pool of [`served_pool`].
    pub fn forkdisk(context: &Context<'_>, pool: &Path, socket: &Path, flags: &[&str]) -> Result<Server> {
        let mut command = Command::new(&context.options.program);
        command.arg("serve").arg(pool).arg("--socket").arg(socket).args(["--log", "error"]).args(flags);
        // Explicit, so that it lies in the case's own folder.
        command.arg("--control").arg(socket.with_extension("control"));
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts `qemu-nbd` on a plain file, bypassing the page cache.
    pub fn qemu_nbd(plain: &Path, socket: &Path) -> Result<Server> {
        Server::qemu_nbd_on(plain, &["-f", "raw"], socket)
    }

    /// Starts `qemu-nbd` on its null driver: reads are undefined, writes are lost.
    pub fn qemu_nbd_null(span: u64, socket: &Path) -> Result<Server> {
        let mut command = Command::new(QEMU_NBD);
        command.args(["-t", "-e", "32", "-x", file::VOLUME, "-k"]).arg(socket);
        command.arg(format!(r#"json:{{"driver":"null-co","size":{span},"read-zeroes":false}}"#));
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts `nbdkit` with a plugin and its arguments.
    pub fn nbdkit(arguments: &[&OsStr], socket: &Path) -> Result<Server> {
        let mut command = Command::new(NBDKIT);
        command.args(["-f", "-U"]).arg(socket).args(arguments);
        Server::start(command, socket, "")
    }

    /// Starts `qemu-nbd` on an image with arguments that describe it.
    pub fn qemu_nbd_on(image: &Path, arguments: &[&str], socket: &Path) -> Result<Server> {
        let mut command = Command::new(QEMU_NBD);
        command.args(["-t", "-e", "32", "-x", file::VOLUME, "--cache=none", "--aio=io_uring"]).args(arguments);
        command.arg("-k").arg(socket).arg(image);
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts a server, which creates `socket` and serves `export`.
    pub fn start(command: Command, socket: &Path, export: &str) -> Result<Server> {
        let process = Process::start(command, || Ok(socket.exists()))?;
        Ok(Server { process, uri: format!("nbd+unix:///{export}?socket={}", socket.display()) })
    }

    /// Returns the process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the microseconds of CPU per request, of server and client: 4 KiB each, 32 in flight.
    pub fn cost(&self, mode: &str, span: u64, count: usize) -> Result<f64> {
        let flags = fio::counted(count);
        let before = self.process.cpu()?;
        let done = self.load(&Load { mode, len: 4096, depth: 32, connections: 1, span, flags: &flags })?;
        ensure!(done.requests == count as u64, "fio made {} requests instead of {count}", done.requests);
        Ok((done.cpu + self.process.cpu()? - before) * 1e6 / count as f64)
    }

    /// Runs fio on the export.
    pub fn load(&self, load: &Load<'_>) -> Result<Done> {
        fio::run(&At::Nbd(&self.uri), load)
    }

    /// Runs fio on another export of the server.
    pub fn load_export(&self, export: &str, load: &Load<'_>) -> Result<Done> {
        let socket = self.uri.split_once('?').map_or("", |(_, socket)| socket);
        fio::run(&At::Nbd(&format!("nbd+unix:///{export}?{socket}")), load)
    }

    /// Ends the server by SIGTERM.
    pub fn stop(self) -> Result<()> {
        self.process.stop()
    }
}
