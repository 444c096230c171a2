//! Fuzzing of the NBD server: bytes are made into what a client does, a client in memory does it to
//! the real server, and a model of its own says what may come back.
//!
//! The model shares only the numbers of the protocol with the server. It holds that every request
//! is answered exactly once, that no reply is foreign, that what is refused is refused with a code
//! that fits, that reads return what is written, and that the connection is gone afterwards.
//!
//! libFuzzer's targets and a test of the crate `forkdisk-nbd` both call [`Fuzzer::run`].

mod contents;
mod disk;
mod negotiation;
mod play;
mod script;
mod session;
mod wire;

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use forkdisk_uring::{Config, block_on};

/// An answer that takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(120);

/// What bytes are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A setup byte, then all that a client sends.
    Handshake,
    /// A script of options, each of them well formed or nearly so.
    Options,
    /// A script of batches of requests.
    Transmission,
}

/// One lasting executor on a thread of its own, to which inputs are handed.
pub struct Fuzzer {
    inputs: Option<SyncSender<(Target, Vec<u8>)>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Default for Fuzzer {
    fn default() -> Fuzzer {
        Fuzzer::new()
    }
}

impl Fuzzer {
    /// Starts the executor.
    pub fn new() -> Fuzzer {
        let (inputs, jobs) = sync_channel::<(Target, Vec<u8>)>(1);
        let (finished, done) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            let main = |rt: forkdisk_uring::Rt| async move {
                let work = rt.clone();
                let all = async move {
                    // Nothing else is to be done on this thread while the next input is waited for.
                    while let Ok((target, input)) = jobs.recv() {
                        let played = work.timeout(PATIENCE, play::play(&work, target, &input)).await;
                        assert!(played.is_ok(), "an answer does not come");
                        finished.send(()).expect("somebody waits");
                    }
                };
                rt.spawn(all).await;
            };
            block_on(Config::default(), main).expect("a ring");
        });
        Fuzzer { inputs: Some(inputs), done, thread: Some(thread) }
    }

    /// Plays one input.
    ///
    /// # Panics
    /// When the server does what the model does not allow.
    pub fn run(&self, target: Target, input: &[u8]) {
        let sent = self.inputs.as_ref().is_some_and(|inputs| inputs.send((target, input.to_vec())).is_ok());
        assert!(sent && self.done.recv().is_ok(), "{target:?} with the input {input:02x?} failed, see above");
    }
}

impl Drop for Fuzzer {
    fn drop(&mut self) {
        self.inputs = None;
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the server's thread has panicked");
        }
    }
}
