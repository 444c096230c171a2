//! The kernel's queues for FUSE over io_uring (Linux 6.14): one for each processor, with entries that each hold one
//! request at a time, in memory of this process. A request belongs to the addresses of its entry, not to the process
//! that received it: another process that has the same memory at the same place can answer it.
//!
//! Invariants: the memory of an entry stays where it is while the kernel may access it: it belongs to the command that
//! lends it, too; and it is accessed here only between a command's completion and the next command of its entry.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::Buf;

use crate::executor::Rt;
use crate::fixed_memory::FixedMemory;
use crate::fuse_command::{AREA_BYTES, EntryMemory, FuseCommand, HEADER_BYTES, ID_AT_BYTES, LENGTH_AT_BYTES, Layout};
use crate::handle::Handle;
use crate::huge_pages::HUGE_PAGE_BYTES;
use crate::op::{Work, outcome};

/// Interval at which a buffer is looked for that a handler has not released yet.
const LOOK: Duration = Duration::from_millis(1);
/// Most entries that keep the memory of a large request.
const LARGE_COUNT: usize = 32;
/// How many of them are moved into huge pages. More than [`LARGE_COUNT`] come and go too often for that.
const HUGE_COUNT: usize = 16;
/// Length of a reply's header.
const REPLY_BYTES: usize = 16;

/// An entry of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusePlace {
    /// The queue.
    pub queue: u16,
    /// Number of the entry among all of them.
    pub index: usize,
}

/// A request. Its buffer must be dropped, or passed to the reply, before the request is answered.
pub struct FuseRequest {
    /// Id of the request.
    pub id: u64,
    /// The request's header, followed by the operation's own fields.
    pub head: [u8; HEADER_BYTES + AREA_BYTES],
    /// The rest, such as names or data: its first bytes.
    pub payload: Buf,
    /// Length of the rest, in bytes.
    pub payload_len: usize,
}

/// Sizes of the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FuseSizes {
    /// Number of queues.
    pub queues: u16,
    /// Entries of each queue.
    pub depth: u16,
    /// Bytes of each entry's payload: whole pages, at least 64 KiB and at most 16 MiB.
    pub payload: usize,
    /// Distance between the payloads of two entries, in bytes: whole pages, and no less than a payload.
    pub stride: usize,
}

impl FuseSizes {
    /// Sizes of the queues. Each payload has huge pages of its own.
    pub fn new(queues: u16, depth: u16, payload: usize) -> FuseSizes {
        FuseSizes { queues, depth, payload, stride: payload.next_multiple_of(HUGE_PAGE_BYTES) }
    }

    fn entries(&self) -> usize {
        usize::from(self.queues) * usize::from(self.depth)
    }

    fn layout(&self) -> Layout {
        Layout { count: self.entries(), payload: self.payload, stride: self.stride }
    }
}

/// All queues of a connection.
pub struct FuseQueues {
    rt: Rt,
    handle: Rc<Handle>,
    memory: Rc<FixedMemory>,
    entries: Vec<Rc<EntryMemory>>,
    sizes: FuseSizes,
    /// Number of entries with more than the least memory.
    large: Cell<usize>,
}

impl FuseQueues {
    /// Returns the number of queues that the kernel has: one for each processor that can exist. `None` if this runtime
    /// cannot serve them.
    pub fn count(rt: &Rt) -> Option<u16> {
        let possible = fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        processors(possible.trim()).filter(|_| rt.driver().takes_fuse())
    }

    /// Allocates all entries, in memory that costs nothing before it is touched. Every place must be
    /// [fetched](Self::fetch).
    ///
    /// # Errors
    /// There is no room for them.
    pub fn new(rt: &Rt, connection: OwnedFd, sizes: FuseSizes) -> io::Result<FuseQueues> {
        Ok(FuseQueues::of(rt, connection, FixedMemory::new(sizes.layout().memory())?, sizes))
    }

    /// Continues with the [memory](Self::memory) of another process.
    ///
    /// # Errors
    /// Something else lies at its address here.
    pub fn resume(
        rt: &Rt,
        connection: OwnedFd,
        (memory, address): (OwnedFd, u64),
        sizes: FuseSizes,
    ) -> io::Result<FuseQueues> {
        let memory = FixedMemory::again(address as usize, sizes.layout().memory(), memory)?;
        Ok(FuseQueues::of(rt, connection, memory, sizes))
    }

    fn of(rt: &Rt, connection: OwnedFd, memory: Rc<FixedMemory>, sizes: FuseSizes) -> FuseQueues {
        let entry = |index| Rc::new(EntryMemory::new(&memory, index, sizes.layout()));
        let entries = (0..sizes.entries()).map(entry).collect();
        FuseQueues {
            rt: rt.clone(),
            handle: Handle::new(rt.driver(), connection),
            memory,
            entries,
            sizes,
            large: Cell::new(0),
        }
    }

    /// Returns the memory of all entries, and its address.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn memory(&self) -> io::Result<(OwnedFd, u64)> {
        Ok((self.memory.file().try_clone()?, self.memory.address() as u64))
    }

    /// Returns the sizes.
    pub fn sizes(&self) -> FuseSizes {
        self.sizes
    }

    /// Returns all entries, those of different queues by turns.
    pub fn places(&self) -> impl Iterator<Item = FusePlace> + use<> {
        let queues = usize::from(self.sizes.queues);
        (0..self.entries.len()).map(move |index| FusePlace { queue: (index % queues) as u16, index })
    }

    /// Registers an entry; resolves when it has [received](Self::received) a request.
    ///
    /// # Errors
    /// The kernel refuses the entry, or the mount has ended (`ENOTCONN`).
    pub async fn fetch(&self, place: FusePlace) -> io::Result<()> {
        let memory = self.entries[place.index].clone();
        self.command(FuseCommand::register(memory, place.queue)).await
    }

    /// Returns the request that an entry has received.
    ///
    /// # Errors
    /// The buffer of the request before has not been dropped.
    pub fn received(&self, place: FusePlace) -> io::Result<FuseRequest> {
        let memory = &self.entries[place.index];
        let mut head = [0; HEADER_BYTES + AREA_BYTES];
        head[..HEADER_BYTES].copy_from_slice(&memory.read::<HEADER_BYTES>(0));
        head[HEADER_BYTES..].copy_from_slice(&memory.read::<AREA_BYTES>(AREA_BYTES));
        let id = u64::from_ne_bytes(memory.read(ID_AT_BYTES));
        let payload_len = u32::from_ne_bytes(memory.read(LENGTH_AT_BYTES)) as usize;
        let payload = memory.take().ok_or(io::ErrorKind::ResourceBusy)?;
        let payload_len = payload_len.min(payload.len());
        self.touch(memory, payload_len);
        Ok(FuseRequest { id, head, payload, payload_len })
    }

    /// Puts the reply to request `id` into its entry. `head` is the reply's header of 16 bytes and what follows it,
    /// except contents, which are in `data`; these are not copied if it is the request's buffer.
    pub async fn put(&self, place: FusePlace, id: u64, head: &[u8], data: Option<Buf>) {
        let memory = &self.entries[place.index];
        let (header, rest) = head.split_at(REPLY_BYTES);
        let len = match data {
            Some(data) if memory.is_own(&data) => data.len(),
            data => {
                let mut buf = loop {
                    match memory.take() {
                        Some(buf) => break buf,
                        None => self.rt.sleep_for(LOOK).await,
                    }
                };
                let contents = data.as_deref().unwrap_or(rest);
                buf[..contents.len()].copy_from_slice(contents);
                contents.len()
            }
        };
        self.touch(memory, len);
        if self.large.get() > LARGE_COUNT && memory.shrink(len) {
            self.large.set(self.large.get() - 1);
        }
        memory.write(0, header);
        memory.write(ID_AT_BYTES, &id.to_ne_bytes());
        memory.write(LENGTH_AT_BYTES, &(len as u32).to_ne_bytes());
    }

    /// Sends the reply to request `id`, which was put into the entry by this process or another; resolves when the
    /// entry has received the next request.
    ///
    /// # Errors
    /// The mount has ended (`ENOTCONN`).
    pub async fn answer(&self, place: FusePlace, id: u64) -> io::Result<()> {
        let memory = self.entries[place.index].clone();
        self.command(FuseCommand::answer(memory, place.queue, id)).await
    }

    fn touch(&self, memory: &EntryMemory, len: usize) {
        if memory.touch(len) {
            self.large.set(self.large.get() + 1);
            if self.large.get() <= HUGE_COUNT {
                memory.collapse();
            }
        }
    }

    async fn command(&self, command: FuseCommand) -> io::Result<()> {
        outcome(self.rt.driver().start(&self.handle, Work::Fuse(command)).await.result).map(drop)
    }
}

/// Returns how many processors a list such as `0-3` names, if it has no gaps.
fn processors(list: &str) -> Option<u16> {
    let last = match list.strip_prefix("0-") {
        Some(last) => last.parse::<u16>().ok()?,
        None if list == "0" => 0,
        None => return None,
    };
    last.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_if_the_list_has_no_gaps() {
        assert_eq!([processors("0"), processors("0-1"), processors("0-127")], [Some(1), Some(2), Some(128)]);
        assert_eq!(["", "1-3", "0-1,4-5", "0-65535", "0,2"].map(processors), [None; 5]);
    }
}
