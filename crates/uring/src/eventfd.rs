//! Event counters of other processes (eventfd): waiting for one, and adding to one.

use std::cell::{Cell, RefCell};
use std::fs;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::driver::Ticket;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Work, outcome};
use crate::sys;

/// How long the last addition may take after the end of its `EventFd`.
const LAST_ADDITION: Duration = Duration::from_millis(100);

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
        let mut adding: Option<Ticket> = None;
        poll_fn(|cx| {
            loop {
                if let Some(ticket) = &mut adding {
                    if Pin::new(ticket).poll(cx).is_pending() {
                        break;
                    }
                    adding = None;
                }
                if !self.is_wanted.replace(false) {
                    break;
                }
                adding = Some(handle.driver().start(&handle, Work::Raise));
            }
            if self.has_ended.get() {
                return Poll::Ready(());
            }
            self.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        if let Some(last) = adding {
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

    /// Waits until the counter is not 0, and resets it.
    ///
    /// # Errors
    /// The kernel refuses to watch or to read it.
    pub async fn wait(&self) -> io::Result<()> {
        loop {
            outcome(self.handle.driver().start(&self.handle, Work::Readable).await.result)?;
            if sys::eventfd_take(self.handle.fd())? {
                return Ok(());
            }
        }
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

    #[test]
    fn a_counter_wakes_its_waiter_once() {
        block_on(Config::default(), |rt| async move {
            let fd = sys::eventfd().unwrap();
            let (ours, theirs) = (EventFd::from_fd(&rt, fd.try_clone().unwrap()).unwrap(), fd);
            let theirs = EventFd::from_fd(&rt, theirs).unwrap();
            theirs.raise();
            theirs.raise();
            rt.yield_now().await;
            ours.wait().await.unwrap();
            let again = rt.timeout(std::time::Duration::from_millis(20), ours.wait()).await;
            assert!(again.is_err(), "both additions were read at once");
        })
        .unwrap();
    }

    #[test]
    fn a_full_counter_holds_up_one_addition_and_nothing_after_its_end() {
        block_on(Config::default(), |rt| async move {
            let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
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
