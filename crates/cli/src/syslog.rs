//! Writer for the system's log, used by a daemon without a log file.
//!
//! journald and syslogd take one datagram per line from the same socket, in the traditional form
//! `<PRIORITY>TAG[PID]: TEXT`. A line that cannot be sent at once is lost: logging never blocks.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// The syslog facility for daemons.
const FACILITY_ID: u8 = 3;

static LOG: OnceLock<UnixDatagram> = OnceLock::new();

/// Redirects log lines from stderr to the socket at `path`.
pub fn begin(path: &Path) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(path)?;
    socket.set_nonblocking(true)?;
    // A second call has no effect: both sockets are equivalent.
    let _ = LOG.set(socket);
    Ok(())
}

/// Writes log lines to their current target: stderr, or the system's log.
pub struct Lines;

/// Writer for one line.
pub struct Line(Level);

impl MakeWriter<'_> for Lines {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line(Level::INFO)
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> Line {
        Line(*metadata.level())
    }
}

impl Line {
    /// Creates the writer for a line of this level.
    pub fn of(level: Level) -> Line {
        Line(level)
    }
}

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match LOG.get() {
            None => io::stderr().write_all(line)?,
            Some(log) => _ = log.send(&datagram(self.0, std::process::id(), line)),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn datagram(level: Level, pid: u32, line: &[u8]) -> Vec<u8> {
    let severity = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    };
    let mut datagram = format!("<{}>forkdisk[{pid}]: ", FACILITY_ID * 8 + severity).into_bytes();
    datagram.extend(line.trim_ascii_end());
    datagram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_carries_its_severity_and_who_says_it() {
        assert_eq!(datagram(Level::WARN, 7, b"  two words\n"), b"<28>forkdisk[7]:   two words");
        assert_eq!(datagram(Level::ERROR, 7, b"x"), b"<27>forkdisk[7]: x");
        assert_eq!(datagram(Level::TRACE, 7, b""), b"<31>forkdisk[7]: ");
    }
}
