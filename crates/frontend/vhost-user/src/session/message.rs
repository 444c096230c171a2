//! Messages on the socket: received with their files, and replies sent. A connection with half a message, in either
//! direction, is closed after a while.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use forkdisk_uring::{Rt, Stream};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vhost::vhost_user::message::{MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE};
use vm_memory::ByteValued;

use crate::foreign_file::ForeignFile;

const HEADER_BYTES: usize = 12;
/// Version of the protocol, and flags of the header.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    #[error("a message of version {0}, or one that is a reply")]
    Version(u32),
    #[error("a message of {0} bytes, at most {MAX_MSG_SIZE} are allowed")]
    TooLong(u32),
    #[error("a message with more than {MAX_ATTACHED_FD_ENTRIES} files")]
    TooManyFiles,
    #[error("half of a message for {0:?}")]
    Stalled(Duration),
    #[error("the front end does not read its replies")]
    NotReading,
    #[error("{request}: {why}")]
    Refused { request: String, why: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Number of the request.
    pub code: u32,
    /// A reply is requested even if the request has none of its own.
    pub needs_reply: bool,
    pub body: Vec<u8>,
    pub files: Vec<ForeignFile>,
}

impl Message {
    /// Returns the body as a `T`, if it is as long as one.
    pub fn body<T: ByteValued + Default>(&self) -> Result<T, String> {
        let mut value = T::default();
        let (found, wanted) = (self.body.len(), value.as_slice().len());
        if found != wanted {
            return Err(format!("the body has {found} bytes, not {wanted}"));
        }
        value.as_mut_slice().copy_from_slice(&self.body);
        Ok(value)
    }

    /// Takes the only file.
    pub fn file(&mut self) -> Result<ForeignFile, String> {
        match self.files.len() {
            1 => Ok(self.files.remove(0)),
            count => Err(format!("the message has {count} files, not one")),
        }
    }
}

/// Receives the next message, which has begun to arrive; `None` when the peer has closed the connection.
pub async fn receive(rt: &Rt, stream: &Stream, stall: Duration) -> Result<Option<Message>, Closed> {
    let rest = async {
        let (mut header, mut files) = ([0; HEADER_BYTES], Vec::new());
        let mut done = 0;
        while done < HEADER_BYTES {
            match receive_some(stream, &mut header[done..], &mut files).await? {
                0 if done == 0 => return Ok(None),
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => done += count,
            }
        }
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (code, flags, len) = (word(0), word(4), word(8));
        if flags & (VERSION_MASK | REPLY) != VERSION {
            return Err(Closed::Version(flags & VERSION_MASK));
        }
        if len as usize > MAX_MSG_SIZE {
            return Err(Closed::TooLong(len));
        }
        let mut body = vec![0; len as usize];
        let mut done = 0;
        while done < body.len() {
            match receive_some(stream, &mut body[done..], &mut files).await? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => done += count,
            }
        }
        Ok(Some(Message { code, needs_reply: flags & NEED_REPLY != 0, body, files }))
    };
    rt.timeout(stall, rest).await.map_err(|_| Closed::Stalled(stall))?
}

/// Receives some bytes, and the files that come with them; 0 when the peer has closed its side.
async fn receive_some(stream: &Stream, into: &mut [u8], files: &mut Vec<ForeignFile>) -> Result<usize, Closed> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(stream.as_fd(), &mut [IoSliceMut::new(into)], &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN) => {
                stream.readable().await?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => 0,
            Err(error) => return Err(io::Error::from(error).into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received.map(|fd| ForeignFile::from(File::from(fd))));
            }
        }
        if files.len() > MAX_ATTACHED_FD_ENTRIES {
            return Err(Closed::TooManyFiles);
        }
        return Ok(received);
    }
}

/// Encodes a message: `code` is that of the request that it answers, or of a request of our own.
pub fn encode(code: u32, is_reply: bool, body: &[u8]) -> Vec<u8> {
    let flags = VERSION | if is_reply { REPLY } else { 0 };
    [&code.to_ne_bytes()[..], &flags.to_ne_bytes(), &(body.len() as u32).to_ne_bytes(), body].concat()
}

/// Sends a message.
pub async fn send(rt: &Rt, stream: &Stream, bytes: Vec<u8>, stall: Duration) -> Result<(), Closed> {
    match rt.timeout(stall, stream.send_vectored(vec![bytes.into()])).await {
        Ok((sent, _)) => Ok(sent?),
        Err(_) => Err(Closed::NotReading),
    }
}

/// Sends a message with a file. A peer without room for a message does not read.
pub fn send_with(stream: &Stream, bytes: &[u8], file: &OwnedFd) -> Result<(), Closed> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: [BorrowedFd<'_>; 1] = [file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(stream.as_fd(), &[IoSlice::new(bytes)], &mut control, flags) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(Closed::NotReading),
        Err(error) => Err(io::Error::from(error).into()),
    }
}
