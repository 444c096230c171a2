//! A pool as a file system.
//!
//! ```text
//! /                        the root
//! /vm/1                    the volume `vm/1`, a file in the folder `vm`
//! /.snapshots/vm/1/NAME    its snapshot `vm/1@NAME`, a read-only file
//! ```
//!
//! Names, attributes and lengths are stored in the pool: this module keeps only what the kernel holds
//! references to. Every change is visible at once and durable with the next `fsync` of any file.

mod attributes;
mod cached;
mod copiers;
mod data;
mod destination;
mod exchange;
mod folders;
mod links;
mod names;
mod nodes;
mod opens;
mod passed;
mod record;
mod resent;
mod seek;
mod shared;
mod snapshots;
mod swap;
mod xattr;

use std::cell::{Cell, OnceCell, RefCell};
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use forkdisk::{Buf, Device, ErrorKind, GatherPolicy, LocalFuture, Pool, Volume, VolumeId};
use pin_project_lite::pin_project;
use slab::Slab;

use crate::codec::{Entry, Header, Operation, Reply, Time};
use crate::session::{Handler, Notifier, OverIoUring};
use crate::syscall_helper::SyscallHelper;
use cached::Cached;
use nodes::{Node, Nodes};
use record::Change;

pub use exchange::Exchange;
pub use passed::PassedMount;
pub use record::MountRecord;

/// Options of a mounted pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VolumesOptions {
    /// Mount point, now or in future.
    pub dir: PathBuf,
    /// Owner of files whose owner was never set.
    pub uid: u32,
    /// Group of such files.
    pub gid: u32,
    /// Volumes are read and changed through this mount only, so that the kernel may keep its cache
    /// between opens and delay writes. Otherwise every write is sent at once, and other changes of
    /// a volume must be reported with [`Volumes::changed`].
    pub alone: bool,
    /// When scattered pages of files created here are gathered.
    pub gather: GatherPolicy,
    /// Whether `.snapshots` is listed in the root; it can be entered by name in any case.
    pub show_snapshots: bool,
    /// Whether requests come through queues of io_uring; see [`Handler::over_io_uring`].
    pub over_io_uring: OverIoUring,
    /// Helper for system calls on the mount itself; see [`Handler::syscall_helper`].
    pub syscall_helper: Option<SyscallHelper>,
}

forkdisk::setters! {
    VolumesOptions {
        with_alone alone: bool,
        with_gather gather: GatherPolicy,
        with_show_snapshots show_snapshots: bool,
        with_over_io_uring over_io_uring: OverIoUring,
        with_syscall_helper syscall_helper: impl Into<Option<SyscallHelper>>,
    }
}

impl VolumesOptions {
    /// A pool shown at `dir` beside other users of it; files without an owner belong to `uid` and `gid`. Nothing is
    /// gathered, `.snapshots` is not listed, requests come through `/dev/fuse`, and there is no helper.
    pub fn new(dir: impl Into<PathBuf>, uid: u32, gid: u32) -> VolumesOptions {
        VolumesOptions {
            dir: dir.into(),
            uid,
            gid,
            alone: false,
            gather: GatherPolicy::Off,
            show_snapshots: false,
            over_io_uring: OverIoUring::No,
            syscall_helper: None,
        }
    }
}

/// An open file.
struct Open<D: Device> {
    volume: Volume<D>,
    writes: bool,
    /// Id of the request that opened it.
    request: u64,
}

/// The file system, as described above.
pub struct Volumes<D: Device> {
    pool: Pool<D>,
    options: VolumesOptions,
    /// Whether the kernel delays writes. Not if a quota or a bound may refuse them: a program would find out late.
    caches_writes: bool,
    nodes: RefCell<Nodes>,
    files: RefCell<Slab<Rc<Open<D>>>>,
    folders: RefCell<Slab<folders::Opened>>,
    /// How often each volume is open. Only of those open for writing can the kernel have data to write back.
    opens: RefCell<opens::Opens>,
    copiers: copiers::Copiers,
    cached: Cached,
    notifier: OnceCell<Notifier>,
    watcher: OnceCell<Watcher>,
    in_use: OnceCell<InUse>,
    /// Last change of the root's entries; the pool has no record of it.
    root_changed: Cell<Time>,
    /// Where what the kernel holds is recorded.
    record: OnceCell<MountRecord>,
    exchanges: exchange::Exchanges,
    swaps: RefCell<swap::Swaps>,
}

/// Called when a volume was changed through the file system, with offset and length of the change
/// (0: to its end); resolves when the change may be acknowledged.
pub type Watcher = Box<dyn Fn(VolumeId, u64, u64) -> LocalFuture<()>>;

/// Returns whether a volume is in use other than through this file system, so that its name and length must stay.
pub type InUse = Box<dyn Fn(&str) -> bool>;

/// A reply or an errno.
type Outcome<T = Reply> = std::result::Result<T, Failed>;

/// Failure of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Failed(i32);

impl From<forkdisk::Error> for Failed {
    fn from(error: forkdisk::Error) -> Failed {
        if matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Failed) {
            tracing::error!("{error}");
        } else {
            tracing::debug!("{error}");
        }
        Failed(error.errno())
    }
}

/// Returns whether an operation changes names or attributes. For changes of contents the engine waits itself.
fn changes_names(operation: &Operation) -> bool {
    use Operation::*;
    matches!(
        operation,
        SetAttr(_)
            | MakeNode { .. }
            | MakeFolder { .. }
            | MakeLink { .. }
            | CreateUnnamed { .. }
            | Link { .. }
            | Unlink { .. }
            | RemoveFolder { .. }
            | Rename { .. }
            | Create { .. }
            | SetXattr { .. }
            | RemoveXattr { .. }
            | Allocate { .. }
            | CopyRange { .. }
    )
}

/// Returns the current time.
fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
}

impl<D: Device> Volumes<D> {
    /// Creates the file system for `pool`.
    pub fn new(pool: Pool<D>, options: VolumesOptions) -> Rc<Volumes<D>> {
        let (nodes, files, folders, opens, notifier, watcher, in_use) = Default::default();
        let (copiers, cached, root_changed) = (Default::default(), Cached::default(), Cell::new(now()));
        Rc::new(Volumes {
            caches_writes: options.alone && !pool.has_limits(),
            pool,
            options,
            nodes,
            files,
            folders,
            opens,
            copiers,
            cached,
            notifier,
            watcher,
            in_use,
            root_changed,
            record: OnceCell::new(),
            swaps: RefCell::default(),
            exchanges: Default::default(),
        })
    }

    /// Records a change that has been made. If that fails the mount cannot be continued after a kill.
    fn record(&self, change: impl FnOnce() -> Change) {
        let Some(record) = self.record.get() else { return };
        let recorded = record.append(&change()).and_then(|appended| match appended {
            true => Ok(()),
            false => record.write_whole(&self.pass_on()),
        });
        if let Err(error) = recorded {
            record.clear();
            tracing::error!(%error, "the mount is not kept any more: a kill of this process ends it");
        }
    }

    fn node(&self, number: u64) -> Outcome<Node> {
        self.nodes.borrow().get(number).ok_or(Failed(libc::ESTALE))
    }

    fn file(&self, handle: u64) -> Outcome<Rc<Open<D>>> {
        self.files.borrow().get(handle as usize).cloned().ok_or(Failed(libc::EBADF))
    }

    /// Carries out an operation; replies when its changes survive a crash of this process.
    async fn answer(&self, header: Header, operation: Operation) -> Outcome {
        if header.resent
            && let Some(reply) = self.reply_again(&header, &operation)?
        {
            return Ok(reply);
        }
        let changes = changes_names(&operation);
        if changes {
            self.pool.prepare_verb().await;
        }
        let reply = self.carry_out(header, operation).await?;
        if changes {
            self.pool.wait_process_safe().await?;
        }
        Ok(reply)
    }

    async fn carry_out(&self, header: Header, operation: Operation) -> Outcome {
        let node = header.node;
        match operation {
            Operation::Lookup { name } => self.look_up(&header, &name),
            Operation::Forget(all) => {
                all.iter().for_each(|&(node, n)| self.nodes.borrow_mut().forget(node, n));
                let listed = all.into_iter().filter(|(node, _)| !nodes::is_fixed(*node)).collect::<Vec<_>>();
                if !listed.is_empty() {
                    self.record(|| Change::Forgotten(listed));
                }
                Ok(Reply::Done)
            }
            Operation::GetAttr { handle } => self.get_attr(node, handle, header.pid),
            Operation::SetAttr(set) => self.set_attr(node, &set).await,
            Operation::MakeNode { name, mode } => self.make_node(&header, &name, mode),
            Operation::MakeFolder { name, mode } => self.make_folder(&header, &name, mode).await.map(Reply::Entry),
            Operation::MakeLink { name, target } => self.make_link(&header, &name, &target).await,
            Operation::ReadLink => self.read_link(node).await,
            Operation::CreateUnnamed { mode, .. } => self.create_unnamed(&header, mode),
            Operation::Link { node: file, name } => self.give_name(file, node, &name),
            Operation::Unlink { name } => self.unlink(node, &name),
            Operation::RemoveFolder { name } => self.remove_folder(node, &name),
            Operation::Rename { name, folder, new_name, flags } => {
                self.rename(header.request(), (node, &name), (folder, &new_name), flags).await
            }
            Operation::Open { flags } => self.open(&header, flags),
            Operation::Create { name, mode, .. } => self.create(&header, &name, mode),
            Operation::Release { handle } => {
                self.release(handle);
                Ok(Reply::Done)
            }
            Operation::Sync { .. } | Operation::SyncFolder => {
                self.pool.flush().await?;
                Ok(Reply::Done)
            }
            Operation::OpenFolder => self.open_folder(&header),
            Operation::ReadFolder { handle, offset, size, plus } => self.read_folder(node, handle, offset, size, plus),
            Operation::ReleaseFolder { handle } => {
                self.folders.borrow_mut().try_remove(handle as usize);
                self.record(|| Change::FolderReleased(handle as usize));
                Ok(Reply::Done)
            }
            Operation::StatFs => Ok(self.stat_fs()),
            Operation::SetXattr { name, value, flags } => self.set_xattr(node, &name, &value, flags).await,
            Operation::GetXattr { name, size } => self.get_xattr(node, &name, size),
            Operation::ListXattr { size } => self.list_xattr(node, size),
            Operation::RemoveXattr { name } => self.remove_xattr(node, &name),
            Operation::Allocate { handle, offset, len, mode } => {
                self.allocate(&header, (handle, offset, len, mode)).await
            }
            Operation::Seek { handle, offset, whence } => self.seek(handle, offset, whence).await,
            Operation::CopyRange { handle, offset, to_handle, to_offset, len, wide } => {
                self.copy_range(&header, (handle, offset), (to_handle, to_offset), (len, wide)).await
            }
            Operation::Destroy | Operation::Interrupt => Ok(Reply::Done),
            Operation::Read { .. } | Operation::Write { .. } => unreachable!("carried out by `handle`"),
            Operation::Init(_) | Operation::Other(_) => Err(Failed(libc::ENOSYS)),
        }
    }

    /// Builds an entry and counts the reference that the kernel gets with it.
    fn entry(&self, node: Node, name_valid: u32) -> Outcome<Entry> {
        let attr = self.attr_of(&node)?;
        let number = self.nodes.borrow_mut().remember(node.clone());
        if !nodes::is_fixed(number) {
            self.record(|| Change::Referenced(node));
        }
        Ok(Entry {
            node: number,
            name_valid,
            attr_valid: self.valid(),
            attr: crate::codec::Attr { ino: number, ..attr },
        })
    }
}

pin_project! {
    /// Future of a request. Reads and writes are frequent, and a task is moved as a whole: the
    /// larger state of other requests is boxed.
    #[project = WorkPin]
    enum Work<R, W> {
        Read {
            #[pin]
            work: R,
        },
        Write {
            #[pin]
            work: W,
        },
        Other {
            work: LocalFuture<Outcome>,
        },
    }
}

impl<R: Future<Output = Outcome>, W: Future<Output = Outcome>> Future for Work<R, W> {
    type Output = Reply;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Reply> {
        let outcome = match self.project() {
            WorkPin::Read { work } => work.poll(cx),
            WorkPin::Write { work } => work.poll(cx),
            WorkPin::Other { work } => work.as_mut().poll(cx),
        };
        outcome.map(|outcome| outcome.unwrap_or_else(|Failed(errno)| Reply::Error(errno)))
    }
}

impl<D: Device> Handler for Volumes<D> {
    fn handle(self: Rc<Self>, header: Header, operation: Operation) -> impl Future<Output = Reply> {
        match operation {
            Operation::Read { handle, offset, flags, buf } => {
                Work::Read { work: self.read(handle, offset, flags, buf) }
            }
            Operation::Write { handle, offset, flags, data } => {
                Work::Write { work: self.write(handle, offset, flags, data) }
            }
            other => Work::Other { work: Box::pin(async move { self.answer(header, other).await }) },
        }
    }

    fn mounted(&self, notifier: Notifier) {
        // Called once.
        let _ = self.notifier.set(notifier);
    }

    fn caches_writes(&self) -> bool {
        self.caches_writes
    }

    fn over_io_uring(&self) -> OverIoUring {
        self.options.over_io_uring
    }

    fn syscall_helper(&self) -> Option<SyscallHelper> {
        self.options.syscall_helper.clone()
    }

    fn buffer(&self, len: usize) -> Buf {
        self.pool.buffer(len)
    }
}

#[cfg(test)]
mod tests {
    use forkdisk_uring::UringDevice;

    use super::*;

    /// Allocators keep free pieces of up to 1 KiB; the session and the executor add about 100 bytes.
    #[test]
    fn a_task_that_reads_or_writes_fits_a_piece_that_is_at_hand() {
        fn size<A, F>(_: impl Fn(A) -> F) -> usize {
            size_of::<F>()
        }
        let read = size(|volumes: Rc<Volumes<UringDevice>>| volumes.read(0, 0, 0, Buf::zeroed(0)));
        let write = size(|volumes: Rc<Volumes<UringDevice>>| volumes.write(0, 0, 0, Buf::zeroed(0)));
        let handled = size(|(volumes, header, operation): (Rc<Volumes<UringDevice>>, Header, Operation)| {
            volumes.handle(header, operation)
        });
        assert!(handled <= 900, "{handled}: {read}, {write}");
    }
}
