//! A volume gets other contents while programs have its file open.
//!
//! The kernel writes a page that it has cached as a whole. Written back after the exchange, the unchanged bytes of such
//! a page would be those of the old contents. So what is cached is written back before; what the kernel writes from its
//! cache after that waits until the exchange has taken place, and is then dropped: it was written to the old contents.
//! Then the kernel drops its cache.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Poll, Waker};

use forkdisk::{Device, VolumeId};

use super::Volumes;

/// Volumes that are getting other contents.
#[derive(Default)]
pub(super) struct Exchanges(RefCell<HashMap<VolumeId, State>>);

/// State of one exchange.
#[derive(Default)]
struct State {
    has_taken_place: bool,
    waiting: Vec<Waker>,
}

impl State {
    fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

impl Exchanges {
    /// Whether `id` is getting other contents.
    pub(super) fn has(&self, id: VolumeId) -> bool {
        self.0.borrow().contains_key(&id)
    }

    /// Waits while it is open whether `id` gets other contents. Returns whether a write from the cache of the kernel
    /// was one to the old contents.
    pub(super) async fn is_outdated(&self, id: VolumeId) -> bool {
        poll_fn(|cx| match self.0.borrow_mut().get_mut(&id) {
            None => Poll::Ready(false),
            Some(State { has_taken_place: true, .. }) => Poll::Ready(true),
            Some(state) => {
                state.waiting.push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

/// A volume that is getting other contents; dropped when it has them or keeps the old ones.
pub struct Exchange<D: Device> {
    volumes: Rc<Volumes<D>>,
    id: VolumeId,
}

impl<D: Device> Exchange<D> {
    /// The volume has its new contents. After this resolves, programs read them.
    pub fn taken_place(&self) -> impl Future<Output = ()> + 'static {
        if let Some(state) = self.volumes.exchanges.0.borrow_mut().get_mut(&self.id) {
            state.has_taken_place = true;
            state.wake();
        }
        let (volumes, id) = (self.volumes.clone(), self.id);
        async move { volumes.changed(id, 0, 0).await }
    }
}

impl<D: Device> Drop for Exchange<D> {
    fn drop(&mut self) {
        if let Some(mut state) = self.volumes.exchanges.0.borrow_mut().remove(&self.id) {
            state.wake();
        }
    }
}

impl<D: Device> Volumes<D> {
    /// Volume `id` is about to get other contents: writes back what the kernel has cached of it.
    ///
    /// # Errors
    /// The write-back failed, or another exchange of the volume is going on.
    pub async fn exchange(self: &Rc<Self>, id: VolumeId) -> io::Result<Exchange<D>> {
        let volume = self.pool.volume_by_id(id).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        self.settle(&volume).await.map_err(|failed| io::Error::from_raw_os_error(failed.0))?;
        let mut all = self.exchanges.0.borrow_mut();
        if all.contains_key(&id) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        all.insert(id, State::default());
        Ok(Exchange { volumes: self.clone(), id })
    }
}
