//! For tests, examples and first programs: a runtime on the calling thread with a virtual clock, a device in memory,
//! and devices around another that delay, fail, or record requests for exact counts and modelled times.

mod delaying;
mod failing;
mod inline;
mod memory;
mod models;
mod recording;

pub use delaying::DelayingDevice;
pub use failing::FailingDevice;
pub use inline::Inline;
pub use memory::MemoryDevice;
pub use models::DeviceModel;
pub use recording::{Recording, RecordingDevice, Request, RequestKind, Rule, zeroes_are_data};

/// Polls until the future is ready. Only for futures that become ready by being polled.
#[cfg(test)]
pub fn run<T>(future: impl std::future::Future<Output = T>) -> T {
    use std::task::{Context, Poll, Waker};
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
}
