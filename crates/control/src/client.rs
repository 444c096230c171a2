//! Client of the control protocol, for programs that block until an answer arrives.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Deserialize;
use serde_json::{Value, json};

use forkdisk::ErrorKind;

use crate::failure::{Failure, FailureKind};
use crate::message::PROGRESS;
use crate::method::{Method, Request};
use crate::observer::Step;

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Most descriptors that come with one piece of an answer (SCM_MAX_FD of the kernel).
const MAX_FILES_PER_PIECE: usize = 253;

/// A connection to a daemon's control socket. One request at a time.
pub struct Client {
    stream: UnixStream,
    received: Vec<u8>,
    files: Vec<OwnedFd>,
    last_id: u64,
}

impl Client {
    /// Connects to the control socket at `path`.
    ///
    /// # Errors
    /// The socket cannot be reached: nothing listens there, or this user has no access.
    pub fn connect(path: &Path) -> io::Result<Client> {
        Ok(Client { stream: UnixStream::connect(path)?, received: Vec::new(), files: Vec::new(), last_id: 0 })
    }

    /// Calls `method` and waits for the answer. `file` is passed along for verbs that read or write
    /// a file; `reached` is called with each progress notification.
    ///
    /// # Errors
    /// The daemon refuses or fails the request, as [`perform`](crate::perform) does; [`FailureKind::Ending`]
    /// if the connection ends, [`FailureKind::Protocol`] for an answer that is not understood.
    pub fn call<M: Method>(
        &mut self,
        method: M,
        file: Option<BorrowedFd<'_>>,
        mut reached: impl FnMut(Step),
    ) -> Result<M::Reply, Failure> {
        let request: Request = method.into();
        self.last_id += 1;
        let id = self.last_id;
        let params = request.params().map_err(|e| Failure::new(ErrorKind::Invalid, e.to_string()))?;
        let message = json!({"jsonrpc": "2.0", "id": id, "method": request.method(), "params": params});
        let sent = self.send(format!("{message}\n").as_bytes(), file);
        // A daemon that refuses a connection sends an error and closes it: read that error before
        // reporting a failed send.
        let answer = loop {
            let message = match self.receive() {
                Ok(message) => message,
                Err(lost) => return Err(sent.err().map_or(lost, broken)),
            };
            match message.get("method").and_then(Value::as_str) {
                Some(PROGRESS) => Step::deserialize(&message["params"]).into_iter().for_each(&mut reached),
                Some(_) => {}
                None => break message,
            }
        };
        if let Some(error) = answer.get("error") {
            return Err(failure(error));
        }
        let result = answer.get("result").cloned().unwrap_or_default();
        serde_json::from_value(result)
            .map_err(|e| Failure::new(FailureKind::Protocol, format!("the daemon's answer is not understood: {e}")))
    }

    /// Returns the descriptors that came with answers, in their order.
    pub fn take_files(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.files)
    }

    /// Waits until the daemon closes the connection.
    pub fn wait_for_end(&mut self) {
        while self.receive().is_ok() {}
    }

    fn send(&mut self, mut bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if let Some(file) = file {
            let files = [file];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            let sent = sendmsg(self.stream.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
            bytes = &bytes[sent..];
        }
        self.stream.write_all(bytes)
    }

    /// Receives some bytes, and keeps the descriptors that come with them.
    fn receive_some(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES_PER_PIECE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(piece)];
        let received = recvmsg(self.stream.as_fd(), into, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        Ok(received)
    }

    fn receive(&mut self) -> Result<Value, Failure> {
        let mut seen = 0;
        loop {
            if let Some(end) = self.received[seen..].iter().position(|&byte| byte == b'\n') {
                let rest = self.received.split_off(seen + end + 1);
                let line = std::mem::replace(&mut self.received, rest);
                let text = |e| Failure::new(FailureKind::Protocol, format!("the daemon does not speak JSON-RPC: {e}"));
                return serde_json::from_slice(&line).map_err(text);
            }
            seen = self.received.len();
            let mut piece = [0; 64 << 10];
            match self.receive_some(&mut piece) {
                Ok(0) => {
                    let text = "the daemon closed the connection before it answered";
                    return Err(Failure::new(FailureKind::Ending, text));
                }
                Ok(n) => self.received.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(e)),
            }
        }
    }
}

fn broken(error: io::Error) -> Failure {
    Failure::new(FailureKind::Ending, format!("the connection to the daemon broke: {error}"))
}

fn failure(error: &Value) -> Failure {
    let code = error.get("code").and_then(Value::as_i64).unwrap_or_default();
    let message = error.get("message").and_then(Value::as_str).unwrap_or("the daemon gave no reason");
    Failure::new(FailureKind::from_code(code), message)
}
