//! Messages to the service manager (sd_notify), sent as datagrams to `NOTIFY_SOCKET`.

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Connection to the service manager, if there is one.
pub struct Notifier {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Connects as the environment specifies. If the manager cannot be reached, that is logged and
    /// messages are dropped.
    pub fn from_environment() -> Notifier {
        let var = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let socket = var("NOTIFY_SOCKET").and_then(|place| {
            let connected = connect(&place);
            connected.inspect_err(|error| tracing::warn!(%error, "the service manager cannot be reached")).ok()
        });
        let number = |name| var(name)?.to_str()?.parse::<u64>().ok();
        let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|&time| is_ours && time > 0).map(Duration::from_micros);
        Notifier { socket, watchdog }
    }

    /// Returns the interval of watchdog messages: half the time that the manager waits.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog.map(|time| time / 2)
    }

    /// Reports that clients can connect.
    pub fn ready(&self, status: &str) {
        self.say(&format!("READY=1\nMAINPID={}\nSTATUS={status}", std::process::id()));
    }

    /// Reports that another process serves from now on.
    pub fn passed_to(&self, pid: u32) {
        self.say(&format!("MAINPID={pid}"));
    }

    /// Reports to the watchdog.
    pub fn alive(&self) {
        self.say("WATCHDOG=1");
    }

    /// Reports that the daemon is ending.
    pub fn stopping(&self, status: &str) {
        self.say(&format!("STOPPING=1\nSTATUS={status}"));
    }

    /// Returns whether there is a service manager.
    pub fn has_manager(&self) -> bool {
        self.socket.is_some()
    }

    /// Sends a message with a descriptor.
    pub fn send(&self, text: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Err(io::ErrorKind::NotConnected.into()) };
        let (fds, mut space) = ([fd], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends a message.
    pub fn say(&self, text: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(text.as_bytes())
        {
            tracing::warn!(%error, "the service manager could not be notified");
        }
    }
}

/// Connects to a path, or to a name in the abstract namespace after `@`.
fn connect(place: &OsStr) -> io::Result<UnixDatagram> {
    let address = match place.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(place)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // A manager that does not read must not block the daemon.
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buf = [0; 1000];
        let n = socket.recv(&mut buf).unwrap();
        String::from_utf8(buf[..n].to_vec()).unwrap()
    }

    #[test]
    fn a_path_and_an_abstract_name_are_both_reached() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("forkdisk-notify-{}", std::process::id());
        let by_path = UnixDatagram::bind(&path).unwrap();
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (place, socket) in [(path.into_os_string(), by_path), (format!("@{name}").into(), by_name)] {
            let notifier = Notifier { socket: Some(connect(&place).unwrap()), watchdog: None };
            notifier.ready("serving");
            assert!(heard(&socket).starts_with("READY=1\n"));
            notifier.stopping("closing");
            assert_eq!(heard(&socket), "STOPPING=1\nSTATUS=closing");
        }
    }
}
