//! Serves disks in memory, to measure the cost of the server alone.
//!
//! `null_server SOCKET [SIZE_MIB [SECONDS]]` serves one export called `disk` (default: 1 GiB, for
//! an hour) and then ends.

use std::path::PathBuf;
use std::time::Duration;

use forkdisk_nbd::memory::MemoryExports;
use forkdisk_nbd::{Server, ServerOptions, nbd_uri};
use forkdisk_uring::{Config, UnixListener, block_on};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let socket = PathBuf::from(args.next().ok_or("usage: null_server SOCKET [SIZE_MIB [SECONDS]]")?);
    let mut number = |default: u64| match args.next() {
        Some(arg) => arg.to_string_lossy().parse(),
        None => Ok(default),
    };
    let (size, seconds) = (number(1024)?, number(3600)?);
    block_on(Config::default(), |rt| async move {
        let listener = UnixListener::bind(&rt, &socket)?;
        let disks = MemoryExports::new().with("disk", (size as usize) << 20, false);
        let server = Server::new(&rt, disks, ServerOptions::default());
        println!("{}", nbd_uri(&socket, "disk"));
        let handle = server.handle();
        let sleep = rt.sleep_for(Duration::from_secs(seconds));
        rt.spawn(async move {
            sleep.await;
            handle.stop();
        });
        server.serve(listener).await;
        Ok(())
    })?
}
