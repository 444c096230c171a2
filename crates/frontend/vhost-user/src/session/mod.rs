//! One front end, from its connection to the answer of its last request: the messages of the vhost-user protocol.
//!
//! Messages are processed one after the other. A message that is refused ends the session, unless it requests
//! a reply: then the refusal is the reply.

mod message;
mod vring;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use forkdisk_uring::{Changes, EventFd, Rt, Stream};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use vhost::vhost_user::message::{
    BackendReq, FrontendReq, VHOST_USER_CONFIG_SIZE, VhostUserConfig, VhostUserInflight, VhostUserMemory,
    VhostUserMemoryRegion, VhostUserMsgValidator, VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVringAddr,
    VhostUserVringState,
};
use vm_memory::ByteValued;

pub use message::Closed;

use crate::config::{self, CONFIG_WCE_FLAG, FLUSH_FLAG, PROTOCOL_FEATURES, WRITEBACK_OFFSET};
use crate::disk::{Disk, Disks};
use crate::foreign_file::ForeignFile;
use crate::memory::{MAX_REGIONS, Memory};
use crate::options::ServerOptions;
use crate::passed::{PassedInflight, PassedRegion, PassedSession};
use crate::queue::{Device, Inflight};
use message::{Message, encode, receive, send, send_with};
use vring::{Addresses, MAX_QUEUE_SIZE, Vring};

/// Bit of the number of a queue: no file comes with the message.
const WITHOUT_FILE_FLAG: u64 = 1 << 8;

/// A session, as the server sees it.
pub struct Control {
    /// The connection to the front end.
    pub stream: Stream,
    /// Path of the socket by which the front end came.
    place: String,
    is_closing: Cell<bool>,
    is_leaving: Cell<bool>,
    changes: Changes,
    /// The channel on which the front end takes requests.
    channel: RefCell<Option<Stream>>,
}

impl Control {
    pub fn new(stream: Stream, place: &str) -> Rc<Control> {
        let (is_closing, is_leaving, changes, channel) = Default::default();
        Rc::new(Control { stream, place: place.to_string(), is_closing, is_leaving, changes, channel })
    }

    /// Ends the session after its requests in flight.
    pub fn close(&self) {
        self.is_closing.set(true);
        self.changes.wake();
    }

    /// Ends the session between two messages, after its requests in flight, to be passed on.
    pub fn leave(&self) {
        self.is_leaving.set(true);
        self.changes.wake();
    }

    /// Whether it ends, or has lost its front end.
    pub fn is_closing(&self) -> bool {
        self.is_closing.get()
    }

    /// Whether the front end can be told of changes of the configuration space.
    pub fn learns_of_changes(&self) -> bool {
        self.channel.borrow().is_some()
    }

    /// Tells the front end that the configuration space has changed.
    pub fn announce_change(&self, rt: &Rt, options: &ServerOptions) {
        let Some(channel) = self.channel.borrow().clone() else { return };
        let (rt, stall) = (rt.clone(), options.stall_timeout);
        let bytes = encode(BackendReq::CONFIG_CHANGE_MSG.into(), false, &[]);
        rt.clone().spawn(async move {
            if let Err(error) = send(&rt, &channel, bytes, stall).await {
                tracing::warn!("a front end did not learn of the new size of its disk: {error}");
            }
        });
    }
}

/// What a request of the front end gets.
enum Answer {
    /// Nothing, or that it was carried out.
    Done,
    Body(Vec<u8>),
    WithFile(Vec<u8>, OwnedFd),
}

type Handled = Result<Answer, String>;

/// The protocol with one front end.
pub struct Session<X: Disks> {
    device: Rc<Device<X>>,
    control: Rc<Control>,
    features: u64,
    protocol: Protocol,
    is_writeback: bool,
    status: u64,
    vrings: Vec<Vring<X>>,
    inflight: Option<Inflight>,
}

impl<X: Disks> Session<X> {
    pub fn new(rt: &Rt, disks: X, disk: Rc<X::Disk>, options: &ServerOptions, control: Rc<Control>) -> Session<X> {
        let (memory, writethrough, buffered, changes) = Default::default();
        let (rt, options, stream) = (rt.clone(), options.clone(), control.stream.clone());
        let vrings = (0..usize::from(options.max_queues)).map(Vring::new).collect();
        let device = Rc::new(Device { rt, disks, disk, options, stream, memory, writethrough, buffered, changes });
        let protocol = Protocol::empty();
        let session =
            Session { device, control, features: 0, protocol, is_writeback: true, status: 0, vrings, inflight: None };
        session.choose_cache();
        session
    }

    /// Serves the front end until it has gone or the session is closed. All requests have ended when this returns. If
    /// the session leaves, returns what another process needs to continue it.
    pub async fn run(mut self) -> Result<Option<PassedSession>, Closed> {
        let outcome = self.converse().await;
        self.control.is_closing.set(true);
        for vring in &mut self.vrings {
            vring.pause().await;
        }
        if outcome.is_ok() && self.control.is_leaving.get() {
            match self.passed() {
                Ok(passed) => return Ok(Some(passed)),
                Err(error) => tracing::warn!("a session cannot be passed on: {error}"),
            }
        }
        if let Some(channel) = self.control.channel.take() {
            let _ = channel.shutdown(Shutdown::Both);
        }
        // Others hold the connection, too. Fails if the front end has closed it already.
        let _ = self.control.stream.shutdown(Shutdown::Both);
        outcome.map(|()| None)
    }

    fn passed(&self) -> io::Result<PassedSession> {
        let device = &self.device;
        let channel = self.control.channel.borrow().as_ref().map(Stream::pass_on).transpose()?;
        let inflight = self.inflight.as_ref().map(Inflight::passed).transpose()?;
        let memory = device.memory.borrow().passed()?;
        let queues = self.vrings.iter().map(Vring::passed).collect::<io::Result<_>>()?;
        Ok(PassedSession {
            disk: device.disk.info().name,
            place: self.control.place.clone(),
            socket: self.control.stream.pass_on()?,
            block_size: device.options.block_size,
            features: self.features,
            protocol: self.protocol.bits(),
            is_writeback: self.is_writeback,
            status: self.status,
            channel,
            inflight,
            memory,
            queues,
        })
    }

    /// Continues a session of another process, with its queues.
    pub fn resume(&mut self, passed: PassedSession<OwnedFd>) -> Result<(), String> {
        let PassedSession { features, protocol, is_writeback, status, channel, inflight, memory, queues, .. } = passed;
        (self.features, self.is_writeback, self.status) = (features, is_writeback, status);
        self.protocol = Protocol::from_bits_truncate(protocol);
        self.choose_cache();
        let channel = channel.map(|channel| Stream::from_fd(&self.device.rt, channel));
        *self.control.channel.borrow_mut() = channel;
        self.inflight = inflight
            .map(|PassedInflight { file, offset, len, queues, queue_size }| {
                Inflight::of(File::from(file).into(), offset, len, queues, queue_size)
            })
            .transpose()?;
        let mut all = Memory::default();
        for PassedRegion { file, offset, len, guest, user } in memory {
            all = all.with(&VhostUserMemoryRegion::new(guest, len, user, offset), File::from(file).into())?;
        }
        *self.device.memory.borrow_mut() = Rc::new(all);
        for (vring, queue) in self.vrings.iter_mut().zip(queues) {
            vring.resume(&self.device.rt, queue).map_err(|error| error.to_string())?;
        }
        (0..self.vrings.len()).try_for_each(|index| self.start(index as u32))
    }

    async fn converse(&mut self) -> Result<(), Closed> {
        loop {
            let (device, control) = (self.device.clone(), self.control.clone());
            let stall = device.options.stall_timeout;
            let mut arrives = pin!(control.stream.readable());
            let arrived = poll_fn(|cx| {
                if control.is_closing.get() || control.is_leaving.get() {
                    return Poll::Ready(Ok(false));
                }
                control.changes.register(cx);
                arrives.as_mut().poll(cx).map_ok(|()| true)
            });
            if !arrived.await? {
                return Ok(());
            }
            let Some(message) = receive(&device.rt, &control.stream, stall).await? else { return Ok(()) };
            let (code, needs_reply) = (message.code, message.needs_reply);
            let handled = self.handle(message).await;
            let has_acks = self.protocol.contains(Protocol::REPLY_ACK) && needs_reply;
            match handled {
                Ok(Answer::Body(body)) => send(&device.rt, &control.stream, encode(code, true, &body), stall).await?,
                Ok(Answer::WithFile(body, file)) => send_with(&control.stream, &encode(code, true, &body), &file)?,
                Ok(Answer::Done) if has_acks => self.acknowledge(code, 0).await?,
                Ok(Answer::Done) => {}
                Err(why) => {
                    let request = FrontendReq::try_from(code).map_or(format!("request {code}"), |r| format!("{r:?}"));
                    if !has_acks || has_reply(code) {
                        return Err(Closed::Refused { request, why });
                    }
                    tracing::warn!("refused {request} of a front end of {:?}: {why}", device.disk.info().name);
                    self.acknowledge(code, 1).await?;
                }
            }
        }
    }

    async fn acknowledge(&self, code: u32, value: u64) -> Result<(), Closed> {
        let bytes = encode(code, true, VhostUserU64::new(value).as_slice());
        send(&self.device.rt, &self.control.stream, bytes, self.device.options.stall_timeout).await
    }

    async fn handle(&mut self, mut message: Message) -> Handled {
        let code = FrontendReq::try_from(message.code).map_err(|_| "there is no such request".to_string())?;
        match code {
            FrontendReq::GET_FEATURES => value(config::features(&self.device.disk.info())),
            FrontendReq::SET_FEATURES => self.set_features(message.body::<VhostUserU64>()?.value),
            FrontendReq::GET_PROTOCOL_FEATURES => value(offered_protocol().bits()),
            FrontendReq::SET_PROTOCOL_FEATURES => self.set_protocol(message.body::<VhostUserU64>()?.value),
            FrontendReq::SET_OWNER | FrontendReq::RESET_OWNER => Ok(Answer::Done),
            FrontendReq::GET_QUEUE_NUM => value(self.vrings.len() as u64),
            FrontendReq::GET_CONFIG => self.get_config(&message),
            FrontendReq::SET_CONFIG => self.set_config(&message),
            FrontendReq::SET_MEM_TABLE => self.set_memory(message),
            FrontendReq::GET_MAX_MEM_SLOTS => value(MAX_REGIONS as u64),
            FrontendReq::ADD_MEM_REG => {
                let region = *message.body::<VhostUserSingleMemoryRegion>()?;
                let file = message.file()?;
                let memory = self.device.memory.borrow().with(&region, file)?;
                self.use_memory(memory)
            }
            FrontendReq::REM_MEM_REG => {
                let region = *message.body::<VhostUserSingleMemoryRegion>()?;
                let memory = self.device.memory.borrow().without(&region)?;
                self.use_memory(memory)
            }
            FrontendReq::SET_BACKEND_REQ_FD => self.set_channel(message.file()?),
            FrontendReq::GET_INFLIGHT_FD => self.get_inflight(message.body()?),
            FrontendReq::SET_INFLIGHT_FD => {
                let file = message.file()?;
                self.set_inflight(message.body()?, file)
            }
            FrontendReq::SET_STATUS => self.set_status(message.body::<VhostUserU64>()?.value).await,
            FrontendReq::GET_STATUS => value(self.status),
            FrontendReq::RESET_DEVICE => {
                for vring in &mut self.vrings {
                    vring.reset().await;
                }
                Ok(Answer::Done)
            }
            _ => self.handle_vring(code, message).await,
        }
    }

    async fn handle_vring(&mut self, code: FrontendReq, mut message: Message) -> Handled {
        let device = self.device.clone();
        match code {
            FrontendReq::SET_VRING_NUM => {
                let VhostUserVringState { index, num } = message.body()?;
                self.vring(index)?.set_size(num)?;
            }
            FrontendReq::SET_VRING_BASE => {
                let VhostUserVringState { index, num } = message.body()?;
                self.vring(index)?.set_base(num)?;
            }
            FrontendReq::SET_VRING_ADDR => {
                let body: VhostUserVringAddr = message.body()?;
                if !body.is_valid() || body.flags != 0 {
                    return Err("addresses that are not aligned, or flags that were not offered".to_string());
                }
                let addresses = Addresses { descriptors: body.descriptor, available: body.available, used: body.used };
                let memory = device.memory.borrow().clone();
                self.vring(body.index)?.set_addresses(addresses, &memory)?;
            }
            FrontendReq::GET_VRING_BASE => {
                let VhostUserVringState { index, .. } = message.body()?;
                let base = self.vring(index)?.stop().await;
                return Ok(Answer::Body(VhostUserVringState::new(index, base.into()).as_slice().to_vec()));
            }
            FrontendReq::SET_VRING_ENABLE => {
                let VhostUserVringState { index, num } = message.body()?;
                match num {
                    0 => self.vring(index)?.disable().await,
                    1 => {
                        self.vring(index)?.enable();
                        self.start(index)?;
                    }
                    _ => return Err(format!("{num} is neither on nor off")),
                }
            }
            FrontendReq::SET_VRING_KICK => {
                let (index, kick) = self.descriptor(&mut message)?;
                let kick = kick.ok_or("a queue without a descriptor for its notifications is not supported")?;
                self.vring(index)?.set_kick(kick)?;
                if self.features & PROTOCOL_FEATURES == 0 {
                    self.vring(index)?.enable();
                }
                self.start(index)?;
            }
            FrontendReq::SET_VRING_CALL => {
                let (index, call) = self.descriptor(&mut message)?;
                self.vring(index)?.set_call(call);
            }
            FrontendReq::SET_VRING_ERR => {
                let (index, fault) = self.descriptor(&mut message)?;
                self.vring(index)?.set_fault(fault);
            }
            _ => return Err("it was not offered".to_string()),
        }
        Ok(Answer::Done)
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring<X>, String> {
        let count = self.vrings.len();
        self.vrings.get_mut(index as usize).ok_or_else(|| format!("there is no queue {index} of {count}"))
    }

    fn start(&mut self, index: u32) -> Result<(), String> {
        let (device, features, inflight) = (self.device.clone(), self.features, self.inflight.clone());
        self.vring(index)?.start_if_ready(&device, features, inflight.as_ref())
    }

    /// Returns the queue of a message and the event descriptor that came with it.
    fn descriptor(&self, message: &mut Message) -> Result<(u32, Option<EventFd>), String> {
        let value = message.body::<VhostUserU64>()?.value;
        let index = (value & 0xff) as u32;
        if value & WITHOUT_FILE_FLAG != 0 {
            return Ok((index, None));
        }
        let file = message.file()?;
        if !EventFd::is_one(file.as_fd()).is_ok_and(|is_one| is_one) {
            return Err("the file is no eventfd".to_string());
        }
        let event = EventFd::from_fd(&self.device.rt, file.into_known().into()).map_err(|error| error.to_string())?;
        Ok((index, Some(event)))
    }

    fn set_features(&mut self, features: u64) -> Handled {
        let offered = config::features(&self.device.disk.info());
        if features & !offered != 0 {
            return Err(format!("features {:#x} were not offered", features & !offered));
        }
        self.features = features;
        self.choose_cache();
        Ok(Answer::Done)
    }

    /// Without flushes, or if the guest says so, a write is durable when it is answered.
    fn choose_cache(&self) {
        let chosen = self.features & CONFIG_WCE_FLAG != 0 && !self.is_writeback;
        self.device.writethrough.set(chosen || self.features & FLUSH_FLAG == 0);
    }

    fn set_protocol(&mut self, bits: u64) -> Handled {
        let chosen = Protocol::from_bits(bits).filter(|chosen| offered_protocol().contains(*chosen));
        self.protocol =
            chosen.ok_or_else(|| format!("protocol features {bits:#x} include some that were not offered"))?;
        Ok(Answer::Done)
    }

    fn get_config(&self, message: &Message) -> Handled {
        let header = size_of::<VhostUserConfig>();
        let mut asked = VhostUserConfig::default();
        let bytes = message.body.get(..header).ok_or("half of a request")?;
        asked.as_mut_slice().copy_from_slice(bytes);
        let (offset, size) = (asked.offset as usize, asked.size as usize);
        if !asked.is_valid() || message.body.len() != header + size {
            return Err(format!("{size} bytes from {offset} of a space of {VHOST_USER_CONFIG_SIZE}"));
        }
        let mut space = config::space(&self.device.disk.info(), &self.device.options, self.is_writeback).to_vec();
        space.resize(VHOST_USER_CONFIG_SIZE as usize, 0);
        Ok(Answer::Body([asked.as_slice(), &space[offset..offset + size]].concat()))
    }

    /// The mode of the write cache is the only field that the guest can change.
    fn set_config(&mut self, message: &Message) -> Handled {
        let header = size_of::<VhostUserConfig>();
        let mut asked = VhostUserConfig::default();
        let bytes = message.body.get(..header).ok_or("half of a request")?;
        asked.as_mut_slice().copy_from_slice(bytes);
        let (offset, size) = (asked.offset as usize, asked.size as usize);
        let payload = &message.body[header..];
        if offset != WRITEBACK_OFFSET || size != 1 || payload.len() != 1 || payload[0] > 1 {
            return Err(format!("{size} bytes from {offset} cannot be written"));
        }
        self.is_writeback = payload[0] == 1;
        self.choose_cache();
        Ok(Answer::Done)
    }

    fn set_memory(&mut self, message: Message) -> Handled {
        let (header, entry) = (size_of::<VhostUserMemory>(), size_of::<VhostUserMemoryRegion>());
        let mut table = VhostUserMemory::default();
        let bytes = message.body.get(..header).ok_or("half of a table")?;
        table.as_mut_slice().copy_from_slice(bytes);
        let count = table.num_regions as usize;
        if count != message.files.len() || message.body.len() != header + count * entry {
            return Err(format!("a table of {count} regions has {} files", message.files.len()));
        }
        let mut memory = self.device.memory.borrow().emptied();
        for (bytes, file) in message.body[header..].chunks_exact(entry).zip(message.files) {
            let mut region = VhostUserMemoryRegion::default();
            region.as_mut_slice().copy_from_slice(bytes);
            memory = memory.with(&region, file)?;
        }
        self.use_memory(memory)
    }

    fn use_memory(&mut self, memory: Memory) -> Handled {
        let memory = Rc::new(memory);
        for vring in &self.vrings {
            vring.check_memory(&memory)?;
        }
        for vring in &self.vrings {
            vring.follow_memory(&memory)?;
        }
        *self.device.memory.borrow_mut() = memory;
        Ok(Answer::Done)
    }

    fn set_channel(&self, file: ForeignFile) -> Handled {
        let kind = socket_type(&file).map_err(|_| "the channel is no socket".to_string())?;
        let is_unix = socket_domain(&file).is_ok_and(|domain| domain == AddressFamily::UNIX);
        if kind != SocketType::STREAM || !is_unix {
            return Err("the channel is no stream of unix sockets".to_string());
        }
        let socket = UnixStream::from(OwnedFd::from(file.into_known()));
        // The other end of a pair has no name. A connection to a socket of this server would never end.
        if !socket.peer_addr().is_ok_and(|peer| peer.is_unnamed()) {
            return Err("the channel is no end of a pair of sockets".to_string());
        }
        let channel = Stream::from_fd(&self.device.rt, socket.into());
        *self.control.channel.borrow_mut() = Some(channel);
        Ok(Answer::Done)
    }

    fn get_inflight(&mut self, asked: VhostUserInflight) -> Handled {
        let (queues, size) = self.check_inflight(&asked)?;
        let (inflight, file, len) = Inflight::make(queues, size)?;
        self.inflight = Some(inflight);
        Ok(Answer::WithFile(VhostUserInflight::new(len, 0, queues, size).as_slice().to_vec(), file))
    }

    fn set_inflight(&mut self, given: VhostUserInflight, file: ForeignFile) -> Handled {
        let (queues, size) = self.check_inflight(&given)?;
        self.inflight = Some(Inflight::of(file, given.mmap_offset, given.mmap_size, queues, size)?);
        Ok(Answer::Done)
    }

    fn check_inflight(&self, asked: &VhostUserInflight) -> Result<(u16, u16), String> {
        let (queues, size) = (asked.num_queues, asked.queue_size);
        let fits = (1..=self.vrings.len()).contains(&usize::from(queues)) && (1..=MAX_QUEUE_SIZE).contains(&size);
        if fits { Ok((queues, size)) } else { Err(format!("there are no {queues} queues of {size}")) }
    }

    /// The driver's status; 0 resets the device.
    async fn set_status(&mut self, status: u64) -> Handled {
        self.status = status & 0xff;
        if self.status == 0 {
            for vring in &mut self.vrings {
                vring.stop().await;
            }
        }
        Ok(Answer::Done)
    }
}

fn offered_protocol() -> Protocol {
    Protocol::MQ
        | Protocol::CONFIG
        | Protocol::REPLY_ACK
        | Protocol::BACKEND_REQ
        | Protocol::INFLIGHT_SHMFD
        | Protocol::RESET_DEVICE
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::STATUS
}

/// Whether the request has a reply of its own.
fn has_reply(code: u32) -> bool {
    let code = FrontendReq::try_from(code);
    matches!(
        code,
        Ok(FrontendReq::GET_FEATURES
            | FrontendReq::GET_PROTOCOL_FEATURES
            | FrontendReq::GET_QUEUE_NUM
            | FrontendReq::GET_CONFIG
            | FrontendReq::GET_VRING_BASE
            | FrontendReq::GET_INFLIGHT_FD
            | FrontendReq::GET_MAX_MEM_SLOTS
            | FrontendReq::GET_STATUS)
    )
}

fn value(value: u64) -> Handled {
    Ok(Answer::Body(VhostUserU64::new(value).as_slice().to_vec()))
}
