//! Messages with descriptors between two processes, over a pair of sockets.
//!
//! A message is the length of its JSON text and the number of its descriptors, each in 4 bytes, then the text, then a
//! byte for each group of descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// Descriptors of one group; the kernel takes 253.
const GROUP_COUNT: usize = 128;
/// Longest text of a message.
const MAX_TEXT_BYTES: usize = 1 << 30;

/// One end.
pub struct Channel(UnixStream);

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Channel {
    pub fn new(socket: UnixStream) -> Channel {
        Channel(socket)
    }

    /// Limits the time of each further call; `None`: no limit.
    pub fn set_patience(&self, limit: Option<Duration>) -> Result<()> {
        self.0.set_read_timeout(limit).and_then(|()| self.0.set_write_timeout(limit)).context("a socket")
    }

    pub fn send<M: Serialize, F: AsFd>(&mut self, message: &M, files: &[F]) -> Result<()> {
        let text = text_of(message)?;
        let head = [(text.len() as u32).to_ne_bytes(), (files.len() as u32).to_ne_bytes()].concat();
        self.0.write_all(&head).and_then(|()| self.0.write_all(&text)).context("sending")?;
        for group in files.chunks(GROUP_COUNT) {
            let group: Vec<BorrowedFd<'_>> = group.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GROUP_COUNT))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            ensure!(control.push(SendAncillaryMessage::ScmRights(&group)), "a group of descriptors is too large");
            let sent = || sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
            retry(sent).context("sending descriptors")?;
        }
        Ok(())
    }

    /// Receives a message; `None` if the other process has ended.
    pub fn receive<M: DeserializeOwned>(&mut self) -> Result<Option<(M, Vec<OwnedFd>)>> {
        let mut head = [0; 8];
        match self.0.read_exact(&mut head) {
            Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                return Ok(None);
            }
            read => read.context("receiving")?,
        }
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (len, count) = (word(0), word(4));
        ensure!(len <= MAX_TEXT_BYTES, "a message of {len} bytes");
        let mut text = Zeroizing::new(vec![0; len]);
        self.0.read_exact(&mut text).context("receiving")?;
        let mut files = Vec::with_capacity(count.min(1 << 20));
        while files.len() < count {
            let before = files.len();
            let mut byte = [0];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GROUP_COUNT))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut byte)];
            let received = || recvmsg(&self.0, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC);
            retry(received).context("receiving descriptors")?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    files.extend(received);
                }
            }
            if files.len() == before {
                bail!("{before} of {count} descriptors have arrived: the limit of open files is too low (LimitNOFILE)");
            }
        }
        let message = serde_json::from_slice(&text).context("a message of another version")?;
        Ok(Some((message, files)))
    }
}

/// Returns the text of a message, which can have keys of TLS sessions: allocated once, and zeroed when it is dropped.
fn text_of(message: &impl Serialize) -> Result<Zeroizing<Vec<u8>>> {
    let mut length = Length(0);
    serde_json::to_writer(&mut length, message)?;
    let mut text = Zeroizing::new(Vec::with_capacity(length.0));
    serde_json::to_writer(&mut *text, message)?;
    Ok(text)
}

/// Counts bytes.
struct Length(usize);

impl Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return Ok(outcome?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn many_descriptors_arrive_in_their_order() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let make = |n: usize| File::create(dir.path().join(n.to_string())).unwrap();
        let files: Vec<File> = (0..GROUP_COUNT * 2 + 3).map(make).collect();
        let inodes: Vec<u64> = files.iter().map(|file| file.metadata().unwrap().ino()).collect();
        let files: Vec<OwnedFd> = files.into_iter().map(OwnedFd::from).collect();
        let sender = std::thread::spawn(move || Channel::new(ours).send(&"all", &files).unwrap());
        let mut channel = Channel::new(theirs);
        let (message, received) = channel.receive::<String>().unwrap().unwrap();
        sender.join().unwrap();
        assert_eq!(message, "all");
        let found: Vec<u64> = received.into_iter().map(|fd| File::from(fd).metadata().unwrap().ino()).collect();
        assert_eq!(found, inodes);
        assert!(channel.receive::<String>().unwrap().is_none(), "the sender has ended");
    }
}
