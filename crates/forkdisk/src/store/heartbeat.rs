//! With a heartbeat, one of the hosts that share a pool's storage has the pool open.
//!
//! At every beat the owner reads a page and writes it. If the page contains another host's claim, the pool
//! fails and writes nothing more. An open first watches the page for beats of an owner that has not closed
//! the pool, then writes its claim and reads the page again after two beats: the claim must still be there.
//! An owner that pauses for longer than others wait (`TAKEOVER_BEATS`) may be overtaken and then still write
//! requests under way: only the storage itself can fence it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use smallvec::smallvec;

use crate::device::{Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{HEARTBEAT_PAGE, Heartbeat, MAX_HOST_BYTES, Superblock};
use crate::runtime::Runtime;
use crate::sync::{LockMode, RangeLocks};
use crate::types::PAGE_SIZE;

use super::{OpenOptions, Store};

/// Beats for which an open waits for an owner that has not closed the pool.
const TAKEOVER_BEATS: u32 = 5;
/// Reads during a beat.
const READS_PER_BEAT: u32 = 4;

/// The host that opens a pool, and this open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostIdentity {
    /// Its name, for messages; cut at 64 bytes.
    pub name: String,
    /// A number of this boot of this machine: owners of the same boot are told apart by locks, not by the
    /// heartbeat.
    pub boot: [u8; 16],
    /// A random number.
    pub open: [u8; 16],
}

/// The beats of this open.
#[derive(Default)]
pub struct Beats {
    sequence: Cell<u64>,
    ended: Cell<bool>,
    /// Held while the page is read and written.
    turn: Rc<RangeLocks>,
}

/// The page, if it was ever completely written.
async fn read<D: Device>(device: &D, uuid: [u8; 16]) -> Result<Option<Heartbeat>> {
    let segment = Segment { offset: HEARTBEAT_PAGE.offset(), at: 0, len: PAGE_SIZE };
    let (result, page) = device.read(device.buffer(PAGE_SIZE), smallvec![segment]).await;
    result.map_err(|e| Error::io("reading the heartbeat", e))?;
    Ok(Heartbeat::decode(uuid, &page))
}

async fn write<D: Device>(device: &D, uuid: [u8; 16], beat: &Heartbeat) -> Result<()> {
    let mut page = device.buffer(PAGE_SIZE);
    beat.encode(uuid, &mut page);
    let segment = Segment { offset: HEARTBEAT_PAGE.offset(), at: 0, len: PAGE_SIZE };
    let (result, _) = device.write(page, smallvec![segment], true).await;
    result.map_err(|e| Error::io("writing the heartbeat", e))
}

fn beat(host: &HostIdentity, sequence: u64, interval: u32, active: bool) -> Heartbeat {
    let cut = (0..=MAX_HOST_BYTES.min(host.name.len())).rev().find(|&n| host.name.is_char_boundary(n));
    let name = host.name[..cut.unwrap_or(0)].to_string();
    Heartbeat { open: host.open, boot: host.boot, sequence, interval, active, host: name }
}

fn in_use(owner: &Heartbeat) -> Error {
    let what = format!("the pool is in use on another host, {:?}, by its heartbeat", owner.host);
    Error::new(ErrorKind::Busy, format!("{what}; close it there first"))
}

/// Claims a pool with a heartbeat for this host before it is opened. Fails with `Busy` if another host has it open.
pub(super) async fn claim<D: Device>(
    device: &D,
    runtime: &Rc<dyn Runtime>,
    options: &OpenOptions,
    superblock: &Superblock,
) -> Result<()> {
    let (uuid, interval) = (superblock.checksum_uuid, superblock.heartbeat);
    if interval == 0 {
        return Ok(());
    }
    let Some(host) = &options.host else {
        let why = "the pool has a heartbeat, by which hosts are told apart: open it with the identity of this one";
        return Err(Error::new(ErrorKind::Unsupported, why));
    };
    let found = read(device, uuid).await?;
    let ours = found.as_ref().is_some_and(|found| found.boot == host.boot);
    if let Some(owner) = found.filter(|found| found.active && !ours) {
        let beat = Duration::from_millis(owner.interval.max(interval).into());
        for _ in 0..TAKEOVER_BEATS * READS_PER_BEAT {
            runtime.sleep(beat / READS_PER_BEAT).await;
            match read(device, uuid).await? {
                Some(now) if now == owner => {}
                Some(now) => return Err(in_use(&now)),
                None => return Err(in_use(&owner)),
            }
        }
    }
    if options.read_only {
        return Ok(());
    }
    write(device, uuid, &beat(host, 0, interval, true)).await?;
    if !ours {
        runtime.sleep(Duration::from_millis(interval.into()) * 2).await;
        match read(device, uuid).await? {
            Some(now) if now.open == host.open => {}
            Some(other) => return Err(in_use(&other)),
            None => return Err(Error::new(ErrorKind::Busy, "another host writes the pool's heartbeat; try again")),
        }
    }
    Ok(())
}

fn heartbeat<D: Device>(store: &Store<D>) -> Option<(HostIdentity, u32)> {
    let interval = store.superblock.borrow().heartbeat;
    let host = store.options.host.clone().filter(|_| interval > 0 && !store.options.read_only);
    host.map(|host| (host, interval))
}

/// Beats until the pool is closed or dropped.
pub(super) fn begin_heartbeat<D: Device>(store: &Rc<Store<D>>) {
    let Some((host, interval)) = heartbeat(store) else { return };
    let (weak, runtime) = (Rc::downgrade(store), store.runtime.clone());
    store.runtime.spawn(Box::pin(async move {
        loop {
            runtime.sleep(Duration::from_millis(interval.into())).await;
            let Some(store) = weak.upgrade() else { return };
            if !beat_once(&store, &host, interval).await {
                return;
            }
        }
    }));
}

/// One beat; returns whether there is another one.
async fn beat_once<D: Device>(store: &Store<D>, host: &HostIdentity, interval: u32) -> bool {
    let _turn = store.beats.turn.lock(0..1, LockMode::Exclusive).await;
    if store.beats.ended.get() {
        return false;
    }
    let uuid = store.superblock.borrow().checksum_uuid;
    match read(&*store.device, uuid).await {
        Ok(found) if found.as_ref().is_none_or(|found| found.open == host.open) => {}
        Ok(found) => {
            let name = found.map(|found| found.host).unwrap_or_default();
            store.beats.ended.set(true);
            store.fail(&Error::new(ErrorKind::Busy, format!("another host, {name:?}, has opened the pool")));
            return false;
        }
        // The next one may succeed.
        Err(_) => return true,
    }
    let sequence = store.beats.sequence.get() + 1;
    store.beats.sequence.set(sequence);
    let _ = write(&*store.device, uuid, &beat(host, sequence, interval, true)).await;
    true
}

/// Marks the pool as closed: other hosts need not wait.
pub(super) async fn end_heartbeat<D: Device>(store: &Store<D>) -> Result<()> {
    let Some((host, interval)) = heartbeat(store) else { return Ok(()) };
    let _turn = store.beats.turn.lock(0..1, LockMode::Exclusive).await;
    if store.beats.ended.replace(true) {
        return Ok(());
    }
    let (uuid, sequence) = (store.superblock.borrow().checksum_uuid, store.beats.sequence.get() + 1);
    write(&*store.device, uuid, &beat(&host, sequence, interval, false)).await
}
