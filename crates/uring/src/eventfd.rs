//! Event counters of other processes (eventfd): waiting for one, and adding to one.

use std::cell::{Cell, RefCell};
use std::fs;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use crate::driver::Ticket;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Work, outcome};
use crate::sys;

/// How long the last addition may take after the end of its `EventFd`.
const LAST_ADDITION: Duration = Duration::from_millis(100);

/// After how many additions a counter that is watched is reset, so that there is room in one that the peer has filled.
const RESET_KICKS_COUNT: u32 = 256;

/// An eventfd that a peer passed or that this process created. No call blocks the thread, whatever the peer does
/// with the counter.
pub struct EventFd {
    rt: Rt,
    handle: Rc<Handle>,
    raiser: RefCell<Option<Rc<Raiser>>>,
}

/// State of the task that adds to a counter. There is one addition at a time, so a counter that is full holds up one.
#[derive(Default)]
struct Raiser {
    is_wanted: Cell<bool>,
    has_ended: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl Raiser {
    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    async fn run(self: Rc<Self>, rt: Rt, handle: Rc<Handle>) {
        let driver = handle.driver().clone();
        let mut is_quick = driver.skips_successes.get() && sys::is_nonblocking(handle.fd());
        let mut adding: Option<Ticket> = None;
        poll_fn(|cx| {
            loop {
                if let Some(ticket) = &mut adding {
                    let Poll::Ready(op) = Pin::new(ticket).poll(cx) else { break };
                    adding = None;
                    if is_quick && op.result < 0 && !sys::is_nonblocking(handle.fd()) {
                        // The peer made it block meanwhile. A counter that is full needs no addition.
                        is_quick = false;
                        self.is_wanted.set(true);
                    }
                }
                if !self.is_wanted.replace(false) {
                    break;
                }
                adding = Some(driver.start(&handle, if is_quick { Work::RaiseNow } else { Work::Raise }));
            }
            if self.has_ended.get() {
                return Poll::Ready(());
            }
            self.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        if let Some(last) = adding.filter(|_| !is_quick) {
            // It is done at once, unless the counter is full: then the peer has news to read already.
            let _ = rt.timeout(LAST_ADDITION, last).await;
        }
    }
}

impl EventFd {
    /// Returns whether a descriptor is an eventfd: reading another file could end at once every time, or block.
    ///
    /// # Errors
    /// The descriptor cannot be looked at.
    pub fn is_one(fd: BorrowedFd<'_>) -> io::Result<bool> {
        let shown = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        Ok(shown.as_os_str() == "anon_inode:[eventfd]")
    }

    /// Takes ownership of `fd`.
    ///
    /// # Errors
    /// `InvalidInput` if it is [not an eventfd](Self::is_one).
    pub fn from_fd(rt: &Rt, fd: OwnedFd) -> io::Result<EventFd> {
        if !EventFd::is_one(fd.as_fd())? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is not an eventfd"));
        }
        Ok(EventFd { rt: rt.clone(), handle: Handle::new(rt.driver(), fd), raiser: RefCell::default() })
    }

    /// Watches the counter for as long as the result lives. It is seldom reset.
    pub fn kicks(&self) -> Kicks<'_> {
        let driver = self.handle.driver();
        let watch = driver.skips_successes.get().then(|| driver.start(&self.handle, Work::Watch));
        Kicks { event: self, watch, once: None, seen: 0 }
    }

    /// Adds 1 to the counter at the end of this turn of the executor. While the counter is at its maximum, one addition
    /// waits until the peer reads it; more are not needed.
    pub fn raise(&self) {
        let mut slot = self.raiser.borrow_mut();
        let raiser = slot.get_or_insert_with(|| {
            let raiser = Rc::new(Raiser::default());
            drop(self.rt.spawn(raiser.clone().run(self.rt.clone(), self.handle.clone())));
            raiser
        });
        raiser.is_wanted.set(true);
        raiser.wake();
    }
}

/// Additions to a counter, from [`EventFd::kicks`]. Where the kernel can watch it permanently, waiting takes no system
/// call of its own.
pub struct Kicks<'a> {
    event: &'a EventFd,
    /// `None` on kernels that cannot.
    watch: Option<Ticket>,
    /// Waits for one addition.
    once: Option<Ticket>,
    /// Number of times that something was added.
    seen: u32,
}

impl Kicks<'_> {
    /// Resolves when something was added since it last did, or before its first call. May resolve without an addition.
    ///
    /// # Errors
    /// The kernel refuses to watch or to read the counter.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(watch) = &mut self.watch {
            if ready!(watch.poll_occurrence(cx)) {
                if self.seen.is_multiple_of(RESET_KICKS_COUNT) {
                    sys::eventfd_take(self.event.handle.fd())?;
                }
                self.seen = self.seen.wrapping_add(1);
                return Poll::Ready(Ok(()));
            }
            // The kernel ended it. If the reason lasts, the wait below fails with it.
            self.watch = None;
        }
        let handle = &self.event.handle;
        loop {
            let once = self.once.get_or_insert_with(|| handle.driver().start(handle, Work::Readable));
            let op = ready!(Pin::new(once).poll(cx));
            self.once = None;
            outcome(op.result)?;
            if sys::eventfd_take(handle.fd())? {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.fd()
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        if let Some(raiser) = self.raiser.take() {
            raiser.has_ended.set(true);
            raiser.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, block_on};

    /// Runs a test with what the kernel has, and as on Linux 5.15.
    fn on_all_kernels<F: Future<Output = ()>>(test: impl Fn(Rt) -> F) {
        for is_old in [false, true] {
            block_on(Config::default(), |rt| {
                if is_old {
                    rt.driver().skips_successes.set(false);
                }
                test(rt)
            })
            .unwrap();
        }
    }

    async fn is_kicked(rt: &Rt, kicks: &mut Kicks<'_>) -> bool {
        rt.timeout(Duration::from_millis(20), poll_fn(|cx| kicks.poll_next(cx))).await.is_ok_and(|kick| kick.is_ok())
    }

    /// Both ends of a counter with these flags.
    fn pair(rt: &Rt, flags: i32) -> (EventFd, EventFd) {
        // SAFETY: takes no pointers.
        let fd = sys::own(sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) }).unwrap());
        (EventFd::from_fd(rt, fd.try_clone().unwrap()).unwrap(), EventFd::from_fd(rt, fd).unwrap())
    }

    #[test]
    fn a_counter_wakes_its_waiter_once() {
        on_all_kernels(|rt| async move {
            for flags in [0, libc::EFD_NONBLOCK] {
                let (ours, theirs) = pair(&rt, flags);
                theirs.raise();
                theirs.raise();
                rt.yield_now().await;
                let mut kicks = ours.kicks();
                for _ in 0..3 {
                    assert!(is_kicked(&rt, &mut kicks).await);
                    assert!(!is_kicked(&rt, &mut kicks).await, "both additions were noticed at once");
                    theirs.raise();
                }
            }
        });
    }

    #[test]
    fn a_counter_that_blocks_from_some_time_on_is_still_raised() {
        on_all_kernels(|rt| async move {
            let (ours, theirs) = pair(&rt, libc::EFD_NONBLOCK);
            let mut kicks = ours.kicks();
            for _ in 0..3 {
                theirs.raise();
                assert!(is_kicked(&rt, &mut kicks).await);
                // SAFETY: takes no pointers.
                sys::check(unsafe { libc::fcntl(ours.as_fd().as_raw_fd(), libc::F_SETFL, 0) }).unwrap();
            }
        });
    }

    #[test]
    fn an_addition_has_no_completion_where_the_kernel_can_leave_it_out() {
        block_on(Config::default(), |rt| async move {
            let (_ours, theirs) = pair(&rt, libc::EFD_NONBLOCK);
            let turns = async |raises: bool| {
                let before = rt.driver().turns.get();
                for _ in 0..8 {
                    if raises {
                        theirs.raise();
                    }
                    rt.sleep_for(Duration::from_millis(2)).await;
                }
                rt.driver().turns.get() - before
            };
            let (idle, raising) = (turns(false).await, turns(true).await);
            assert!(!rt.driver().skips_successes.get() || raising <= idle + 8 + 1, "{raising} turns, {idle} without");
        })
        .unwrap();
    }

    #[test]
    fn a_full_counter_holds_up_one_addition_and_nothing_after_its_end() {
        block_on(Config::default(), |rt| async move {
            // Only counters: tests beside this one open files and sockets.
            let open = || {
                let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let places = all.filter_map(|file| std::fs::read_link(file.path()).ok());
                places.filter(|place| place.to_string_lossy().contains("eventfd")).count()
            };
            let before = open();
            for _ in 0..100 {
                // SAFETY: takes no pointers.
                let fd = sys::own(sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }).unwrap());
                let mut full = std::fs::File::from(fd.try_clone().unwrap());
                std::io::Write::write_all(&mut full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
                let event = EventFd::from_fd(&rt, fd).unwrap();
                for _ in 0..10 {
                    event.raise();
                    rt.yield_now().await;
                }
            }
            rt.sleep_for(3 * LAST_ADDITION).await;
            assert!(open() <= before + 2, "{} descriptors more", open() - before);
        })
        .unwrap();
    }

    #[test]
    fn a_file_that_is_no_counter_is_refused() {
        block_on(Config::default(), |rt| async move {
            let file = std::fs::File::open("/dev/zero").unwrap();
            let refused = EventFd::from_fd(&rt, file.into()).err().unwrap();
            assert!(refused.to_string().contains("not an eventfd"), "{refused}");
        })
        .unwrap();
    }
}
