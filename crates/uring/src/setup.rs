//! Creates a ring with the best flags that the running kernel supports, and registers its buffers if possible.

use std::io;
use std::rc::Rc;

use forkdisk::device::BufPool;
use forkdisk::{Error, ErrorKind};
use io_uring::squeue::EntryMarker;
use io_uring::{Builder, IoUring};

use crate::kernel;
use crate::ring::Ring;

/// Size of the completion queue per submission entry; further completions are queued by the kernel separately.
const COMPLETIONS_PER_ENTRY: u32 = 4;

/// Number of sets of flags, from best to plainest: the first that the kernel accepts is used.
const FLAVOURS_COUNT: usize = 4;

fn add_flags<S: EntryMarker>(flavour: usize, b: &mut Builder<S>) {
    match flavour {
        0 => {
            b.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all().setup_no_sqarray();
        }
        1 => {
            b.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        2 => {
            b.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        _ => {}
    }
}

/// Creates the ring. It is wide where the kernel has commands that this crate sends by wide entries.
pub(crate) fn ring(entries: u32) -> forkdisk::Result<Ring> {
    kernel::check()?;
    match kernel::has_fuse_commands() {
        true => build(entries).map(Ring::Wide).or_else(|_| build(entries).map(Ring::Narrow)),
        false => build(entries).map(Ring::Narrow),
    }
}

fn build<S: EntryMarker>(entries: u32) -> forkdisk::Result<IoUring<S>> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for flavour in 0..FLAVOURS_COUNT {
        let mut builder = IoUring::<S>::builder();
        builder.setup_clamp().setup_cqsize(entries.saturating_mul(COMPLETIONS_PER_ENTRY));
        add_flags(flavour, &mut builder);
        match builder.build(entries) {
            Ok(ring) if ring.params().is_feature_ext_arg() && ring.params().is_feature_nodrop() => return Ok(ring),
            Ok(_) => {
                let text =
                    "io_uring of this kernel lacks what Linux 5.11 has (IORING_FEAT_EXT_ARG), which forkdisk needs";
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => refused = e,
            Err(e) => return Err(why_refused(e)),
        }
    }
    Err(why_refused(refused))
}

fn why_refused(error: io::Error) -> Error {
    let text = match error.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring, which forkdisk needs (CONFIG_IO_URING)".to_string(),
        Some(libc::EPERM | libc::EACCES) => {
            let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            match sysctl.trim() {
                "1" | "2" => format!(
                    "io_uring is disabled on this machine (kernel.io_uring_disabled = {}); \
                     `sysctl kernel.io_uring_disabled=0` as root enables it",
                    sysctl.trim()
                ),
                _ => "io_uring is forbidden to this process, probably by a container's seccomp profile; \
                      allow io_uring_setup, io_uring_enter and io_uring_register"
                    .to_string(),
            }
        }
        Some(libc::ENOMEM) => {
            return Error::io("no memory may be locked for an io_uring ring (raise `ulimit -l`)", error);
        }
        _ => return Error::io("cannot set up an io_uring ring", error),
    };
    Error::new(ErrorKind::Unsupported, text)
}

/// Registers the pool's memory; returns the address of each slot, or nothing if the kernel refuses
/// (for example because of a low `ulimit -l`), which only costs a little time per request.
pub(crate) fn register_buffers(ring: &Ring, pool: &Rc<BufPool>) -> Vec<*const u8> {
    let memory = pool.memory();
    let iovecs: Vec<libc::iovec> =
        memory.iter().map(|&(base, len)| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len }).collect();
    if iovecs.is_empty() {
        return Vec::new();
    }
    // SAFETY: the memory belongs to the pool or to a buffer taken from it. The driver keeps the
    // pool, and uses a slot only for a buffer at the slot's address. The kernel pins the
    // pages, so even memory that is freed early is never written under another owner.
    match unsafe { ring.submitter().register_buffers(&iovecs) } {
        Ok(()) => memory.into_iter().map(|(base, _)| base).collect(),
        Err(_) => Vec::new(),
    }
}
