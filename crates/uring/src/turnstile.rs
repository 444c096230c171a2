//! A turnstile before something that can be exchanged: requests pass it, and it is closed for the exchange.

use std::cell::Cell;
use std::rc::Rc;

use crate::waiting::Changes;

/// A turnstile. What lies behind it stays the same for a request from its [`pass`](Self::pass) to its end.
#[derive(Default)]
pub struct Turnstile {
    inside: Cell<usize>,
    is_closed: Cell<bool>,
    exchanges: Cell<u64>,
    changes: Changes,
}

impl Turnstile {
    /// Lets a request pass; waits while the turnstile is closed.
    pub async fn pass(self: &Rc<Self>) -> Pass {
        self.changes.until(|| !self.is_closed.get()).await;
        self.inside.set(self.inside.get() + 1);
        Pass(self.clone())
    }

    /// Lets a request pass a turnstile, if there is one.
    pub async fn pass_any(turnstile: Option<&Rc<Turnstile>>) -> Option<Pass> {
        match turnstile {
            Some(turnstile) => Some(turnstile.pass().await),
            None => None,
        }
    }

    /// Closes the turnstile until the result is dropped; `None` if it is closed already.
    pub fn close(self: &Rc<Self>) -> Option<Closed> {
        (!self.is_closed.replace(true)).then(|| Closed(self.clone()))
    }

    /// Returns how often what lies behind it was exchanged.
    pub fn exchanges(&self) -> u64 {
        self.exchanges.get()
    }
}

/// A request that has passed a turnstile and has not ended.
pub struct Pass(Rc<Turnstile>);

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.inside.set(self.0.inside.get() - 1);
        if self.0.inside.get() == 0 {
            self.0.changes.wake();
        }
    }
}

/// A closed turnstile: requests that come wait until this is dropped.
pub struct Closed(Rc<Turnstile>);

impl Closed {
    /// Waits for the end of the requests that have passed.
    pub async fn emptied(&self) {
        self.0.changes.until(|| self.0.inside.get() == 0).await;
    }

    /// Records that what lies behind the turnstile was exchanged.
    pub fn exchanged(&self) {
        self.0.exchanges.set(self.0.exchanges.get() + 1);
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.is_closed.set(false);
        self.0.changes.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn requests_that_have_passed_end_before_the_gate_is_empty_and_later_ones_wait() {
        let turnstile = Rc::new(Turnstile::default());
        let first = now(pin!(turnstile.pass())).unwrap();
        let closed = turnstile.close().unwrap();
        assert!(turnstile.close().is_none(), "it is closed already");
        assert!(now(pin!(closed.emptied())).is_none());
        let mut later = pin!(turnstile.pass());
        assert!(now(later.as_mut()).is_none());
        drop(first);
        assert!(now(pin!(closed.emptied())).is_some());
        closed.exchanged();
        assert!(now(later.as_mut()).is_none(), "until it is opened");
        drop(closed);
        assert!(now(later.as_mut()).is_some());
        assert_eq!(turnstile.exchanges(), 1);
        assert!(turnstile.close().is_some(), "again");
    }

    #[test]
    fn a_gate_that_is_opened_without_an_exchange_has_changed_nothing() {
        let turnstile = Rc::new(Turnstile::default());
        drop(turnstile.close());
        assert_eq!(turnstile.exchanges(), 0);
        assert!(now(pin!(Turnstile::pass_any(None))).unwrap().is_none());
        assert!(now(pin!(Turnstile::pass_any(Some(&turnstile)))).unwrap().is_some());
    }
}
