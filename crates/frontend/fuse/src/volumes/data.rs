//! Reading, writing and copying. A plain `cp` makes a clone: the kernel sends it as `copy_file_range`.

use std::rc::Rc;

use forkdisk::{Buf, Device, PAGE_SIZE, Volume};

use super::nodes::Node;
use super::passed::PassedFile;
use super::record::Change;
use super::{Failed, Open, Outcome, Volumes};
use crate::codec::{Header, Reply, open_flags, read_flags, write_flags};
use crate::off_thread::off_thread;

/// Most bytes shared by one request; the caller then requests the rest, and can be interrupted in between.
const SHARED_AT_ONCE_BYTES: u64 = 64 << 30;
/// Most bytes copied by one request that cannot share.
const COPIED_AT_ONCE_BYTES: u64 = 64 << 20;
/// Largest count that fits into a reply of 32 bits, in whole blocks.
const NARROW_BYTES: u64 = (u32::MAX as u64) & !((1 << 20) - 1);

impl<D: Device> Volumes<D> {
    pub(super) fn open(&self, header: &Header, flags: u32) -> Outcome {
        let Node::Volume(id) = self.node(header.node)? else { return Err(Failed(libc::EISDIR)) };
        let volume = self.pool.volume_by_id(id)?;
        let writes = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        if volume.read_only() && writes {
            return Err(Failed(libc::EROFS));
        }
        let info = volume.info();
        if !writes
            && info.referenced < info.size
            && self.copiers.opened(header.pid, header.node, &self.options.dir)
            && let Some(notifier) = self.notifier.get()
        {
            // The program queries the attributes again, and so do all others.
            notifier.forget_attributes(header.node).map_err(|e| Failed(e.raw_os_error().unwrap_or(libc::EIO)))?;
        }
        let (handle, flags) = self.opened(volume, writes, header);
        Ok(Reply::Opened(handle, flags))
    }

    /// Registers a handle for `volume`; returns it with the open flags for the kernel.
    pub(super) fn opened(&self, volume: Volume<D>, writes: bool, header: &Header) -> (u64, u32) {
        let (id, flags, request) = (volume.id(), self.open_flags(&volume), header.request());
        self.opens.borrow_mut().add(id, writes, flags & open_flags::KEEP_CACHE != 0);
        let handle = self.files.borrow_mut().insert(Rc::new(Open { volume, writes, request }));
        self.record(|| Change::Opened(PassedFile { handle, volume: id.0, writes, request }));
        (handle as u64, flags)
    }

    pub(super) fn open_flags(&self, volume: &Volume<D>) -> u32 {
        let keep = if self.keeps_cache(volume) { open_flags::KEEP_CACHE } else { 0 };
        // It got its limit after the mount was made.
        let is_limited = self.caches_writes && self.pool.is_limited(volume.id());
        let through = if is_limited { open_flags::DIRECT_IO } else { 0 };
        // The request would be answered with `ENOSYS`. Without it a program that has files of a mount open can start
        // the daemon that is to continue the mount.
        keep | through | open_flags::NO_FLUSH | open_flags::PARALLEL_DIRECT_WRITES
    }

    pub(super) fn release(&self, handle: u64) {
        let Some(file) = self.files.borrow_mut().try_remove(handle as usize) else { return };
        self.record(|| Change::Released(handle as usize));
        self.closed(&file.volume, file.writes);
    }

    /// Makes the kernel write back what it has cached for a volume that is open for writing.
    pub(super) async fn settle(&self, volume: &Volume<D>) -> Outcome<()> {
        let id = volume.id();
        let (true, Some(notifier)) = (self.opens.borrow().has_writer(id), self.notifier.get().cloned()) else {
            return Ok(());
        };
        let node = self.nodes.borrow().number(&Node::Volume(id));
        let settled = off_thread(move || notifier.write_back(node)).await;
        settled.map_err(|e| Failed(e.raw_os_error().unwrap_or(libc::EIO)))
    }

    pub(super) async fn read(self: Rc<Self>, handle: u64, offset: u64, flags: u32, mut buf: Buf) -> Outcome {
        let file = self.file(handle)?;
        if flags & read_flags::HAS_OWNER == 0 && !file.volume.read_only() {
            self.cached.add(file.volume.id(), offset, buf.len() as u64);
            self.opens.borrow_mut().used(file.volume.id());
        }
        let left = file.volume.size().saturating_sub(offset);
        if left < buf.len() as u64 {
            buf.set_len(left as usize);
        }
        if left == 0 {
            // The kernel may have a longer file cached that was not written back yet.
            return Ok(Reply::Data(buf));
        }
        let (result, buf) = file.volume.read(offset, buf).await;
        result?;
        Ok(Reply::Data(buf))
    }

    /// Not an `async` function, which would hold its arguments twice.
    pub(super) fn write(
        self: Rc<Self>,
        handle: u64,
        offset: u64,
        flags: u32,
        data: Buf,
    ) -> impl Future<Output = Outcome> {
        let file = self.file(handle);
        async move {
            let file = file?;
            if flags & write_flags::FROM_CACHE != 0
                && self.exchanges.has(file.volume.id())
                && Box::pin(self.exchanges.is_outdated(file.volume.id())).await
            {
                return Ok(Reply::Stored(data));
            }
            let end = offset.checked_add(data.len() as u64).ok_or(Failed(libc::EFBIG))?;
            if flags & write_flags::DROP_PRIVILEGES != 0 {
                self.drop_privileges(&file.volume)?;
            }
            if end > file.volume.size() {
                Box::pin(file.volume.grow_to(end)).await.map_err(too_large)?;
            }
            if !is_direct(flags) {
                self.cached.add(file.volume.id(), offset, data.len() as u64);
            }
            let (result, data) = file.volume.write(offset, data, false).await;
            // Also after an error: a part may be written.
            if let Some(visible) = self.make_visible(file.volume.id(), (offset, data.len() as u64), is_direct(flags)) {
                visible.await;
            }
            result?;
            Ok(Reply::Stored(data))
        }
    }

    pub(super) async fn copy_range(
        &self,
        header: &Header,
        from: (u64, u64),
        to: (u64, u64),
        (len, wide): (u64, bool),
    ) -> Outcome {
        let (source, target) = (self.file(from.0)?, self.file(to.0)?);
        let (source, target) = (&source.volume, &target.volume);
        let size = source.size();
        let len = len.min(size.saturating_sub(from.1));
        let copied = |n: u64| if wide { Reply::Copied(n) } else { Reply::Written(n as u32) };
        if len == 0 {
            return Ok(copied(0));
        }
        self.written_by(header, target)?;
        let whole = from.1 == 0 && to.1 == 0 && len == size && target.size() <= size && source.id() != target.id();
        let own = !target.has_backing() && !source.has_backing();
        if whole && own && (wide || size <= NARROW_BYTES) {
            target.replace_with(source).await?;
            self.tell(target.id(), 0, 0).await;
            return Ok(copied(len));
        }
        let page = PAGE_SIZE as u64;
        let alike = own && from.1 % page == to.1 % page;
        let most = if alike { SHARED_AT_ONCE_BYTES } else { COPIED_AT_ONCE_BYTES };
        let len = len.min(if wide { most } else { most.min(NARROW_BYTES) });
        let end = to.1.checked_add(len).ok_or(Failed(libc::EFBIG))?;
        target.grow_to(end).await.map_err(too_large)?;
        target.clone_range(source, from.1, to.1, len).await?;
        self.tell(target.id(), to.1, len).await;
        Ok(copied(len))
    }
}

/// Returns whether a write with these flags bypasses the page cache.
fn is_direct(flags: u32) -> bool {
    flags & (write_flags::HAS_OWNER | write_flags::FROM_CACHE) == write_flags::HAS_OWNER
}

/// Converts an error about a length that no volume can have.
fn too_large(error: forkdisk::Error) -> Failed {
    match error.kind() {
        forkdisk::ErrorKind::Invalid => Failed(libc::EFBIG),
        _ => error.into(),
    }
}
