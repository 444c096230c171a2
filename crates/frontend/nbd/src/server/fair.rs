//! Fairness between connections: how many requests each may have under way in its export.
//!
//! All connections together have about [`ServerOptions::started_requests`] under way. Each has an
//! equal share, by the number of recently active connections, and a connection below
//! its share never waits for another: a client with one request at a time finds the exports no
//! fuller next to greedy clients than alone. No request is cancelled for another:
//! a request that hangs, for example for want of space, uses its own connection's share only.
//!
//! A place is held from when a request is complete (with its data) until its export has finished
//! it, not until the reply was sent: a client that does not fetch its replies holds memory
//! (`budget`), not places.
//!
//! [`ServerOptions::started_requests`]: super::ServerOptions::started_requests

use std::cell::Cell;
use std::rc::Rc;

use forkdisk_uring::WakeCell;

use super::options::ServerOptions;

/// Requests that each connection may always have under way.
const LEAST_REQUESTS: usize = 1;
/// Bytes of data that each connection may always have under way. A single request may have more.
const LEAST_BYTES: usize = 1 << 20;
/// Requests, of all connections, after which active connections are counted anew.
const PERIOD_REQUESTS: usize = 256;

/// State shared by all connections.
pub(super) struct Fair {
    requests: usize,
    bytes: usize,
    /// The current period, and how many requests started in it.
    period: Cell<u64>,
    begun: Cell<usize>,
    /// Connections that were active in the last period, and those in this one.
    before: Cell<usize>,
    now: Cell<usize>,
}

impl Fair {
    pub(super) fn new(options: &ServerOptions) -> Rc<Fair> {
        let (requests, bytes) = (options.started_requests, options.started_bytes);
        let (period, begun, before, now) = (Cell::new(1), Cell::new(0), Cell::new(0), Cell::new(0));
        Rc::new(Fair { requests, bytes, period, begun, before, now })
    }

    fn active(&self) -> usize {
        self.before.get().max(self.now.get()).max(1)
    }

    /// Returns a number that rises with each started request.
    pub(super) fn begun(&self) -> u64 {
        self.period.get() * PERIOD_REQUESTS as u64 + self.begun.get() as u64
    }

    fn count_request(&self) {
        let begun = self.begun.get() + 1;
        self.begun.set(begun);
        if begun >= PERIOD_REQUESTS {
            self.begun.set(0);
            self.period.set(self.period.get() + 1);
            self.before.set(self.now.replace(0));
        }
    }
}

/// Share of one connection.
pub(super) struct Share {
    fair: Rc<Fair>,
    /// The last period in which it started a request.
    seen: Cell<u64>,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    changed: WakeCell,
}

impl Share {
    pub(super) fn new(fair: &Rc<Fair>) -> Rc<Share> {
        let (seen, requests, bytes, changed) = Default::default();
        Rc::new(Share { fair: fair.clone(), seen, requests, bytes, changed })
    }

    /// Waits until a request with `bytes` bytes of data may start. One caller at a time; it waits
    /// for requests of this connection only.
    pub(super) async fn begin(self: &Rc<Self>, bytes: usize) -> Started {
        let fair = &self.fair;
        if self.seen.replace(fair.period.get()) != fair.period.get() {
            fair.now.set(fair.now.get() + 1);
        }
        if !self.has_room(bytes) {
            self.changed.until(|| self.has_room(bytes).then_some(())).await;
        }
        fair.count_request();
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Started { share: self.clone(), bytes }
    }

    fn has_room(&self, bytes: usize) -> bool {
        let active = self.fair.active();
        let requests = (self.fair.requests / active).max(LEAST_REQUESTS);
        let most = (self.fair.bytes / active).max(LEAST_BYTES);
        let begun = self.requests.get();
        begun == 0 || begun < requests && self.bytes.get() + bytes <= most
    }
}

/// A request that is under way in its export.
pub(super) struct Started {
    share: Rc<Share>,
    bytes: usize,
}

impl Drop for Started {
    fn drop(&mut self) {
        let share = &self.share;
        share.requests.set(share.requests.get() - 1);
        share.bytes.set(share.bytes.get() - self.bytes);
        share.changed.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn fair(requests: usize) -> Rc<Fair> {
        Fair::new(&ServerOptions { started_requests: requests, ..ServerOptions::default() })
    }

    fn now<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    /// Starts as many requests as possible.
    fn fill(share: &Rc<Share>) -> Vec<Started> {
        std::iter::from_fn(|| now(share.begin(0))).collect()
    }

    #[test]
    fn a_connection_alone_has_all_places() {
        assert_eq!(fill(&Share::new(&fair(100))).len(), 100);
    }

    #[test]
    fn a_connection_that_comes_later_need_not_wait_for_anybody() {
        let fair = fair(100);
        let greedy = Share::new(&fair);
        let _held = fill(&greedy);
        let modest = Share::new(&fair);
        assert_eq!(fill(&modest).len(), 50);
    }

    #[test]
    fn active_connections_have_equal_shares_and_those_that_rest_lose_theirs() {
        let fair = fair(100);
        let shares: Vec<_> = (0..10).map(|_| Share::new(&fair)).collect();
        shares.iter().for_each(|share| drop(now(share.begin(0)).expect("the first one")));
        assert_eq!(fill(&shares[3]).len(), 10);
        for _ in 0..2 * PERIOD_REQUESTS {
            drop(now(shares[0].begin(0)).expect("a place"));
        }
        assert_eq!(fill(&shares[0]).len(), 100, "the others have not been active for a whole period");
    }

    #[test]
    fn nobody_has_less_than_the_least() {
        let fair = fair(4);
        let shares: Vec<_> = (0..10).map(|_| Share::new(&fair)).collect();
        let held: Vec<_> = shares.iter().map(fill).collect();
        assert_eq!(held.last().map(Vec::len), Some(LEAST_REQUESTS));
    }

    #[test]
    fn bytes_are_shared_like_requests_and_one_request_is_always_possible() {
        let fair = fair(100);
        let share = Share::new(&fair);
        let most = ServerOptions::default().started_bytes;
        let one = now(share.begin(2 * most)).expect("alone, it may be as large as it is");
        assert!(now(share.begin(1)).is_none());
        drop(one);
        let _half = now(share.begin(most / 2)).expect("room");
        assert!(now(share.begin(most / 2 + 1)).is_none());
        assert!(now(share.begin(most / 2)).is_some());
    }
}
