//! The seam beside the engine: whoever embeds it says how tasks run and how time passes.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// A boxed future that lives on one thread.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// What the engine needs of the executor it runs on. All of it happens on the thread that owns the
/// pool.
pub trait Runtime: 'static {
    /// Runs `task` to its end, independent of the caller.
    fn spawn(&self, task: LocalFuture<()>);

    /// Resolves once `time` has passed.
    fn sleep(&self, time: Duration) -> LocalFuture<()>;

    /// Time since some moment before the first call; it never goes back. What throttles and figures
    /// are measured by, never what is stored.
    fn now(&self) -> Duration;
}
