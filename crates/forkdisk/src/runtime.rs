//! The runtime: how the embedding program runs tasks and lets time pass.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// A boxed future that lives on one thread.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// The executor's interface to the engine. Everything runs on the thread that owns the pool.
pub trait Runtime: 'static {
    /// Runs `task` to its end, independent of the caller.
    fn spawn(&self, task: LocalFuture<()>);

    /// Resolves once `time` has passed.
    fn sleep(&self, time: Duration) -> LocalFuture<()>;

    /// Returns the time since some moment before the first call; it never decreases. Used for throttles and
    /// statistics, never stored.
    fn now(&self) -> Duration;
}

/// Lets every other ready task run first.
pub(crate) async fn yield_now() {
    struct Yield(bool);
    impl Future for Yield {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }
    Yield(false).await;
}
