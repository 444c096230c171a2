//! The kernel's own targets, measured next to forkdisk: dm-thin, dm-snapshot and md RAID5 in
//! user-mode Linux, a kernel that is an ordinary process.
//!
//! - [`Lab`] finds the required programs, or reports what is missing; its scripts are part of this program.
//! - [`guest`] runs one scenario in one guest and returns its measurements. Its disks are served by
//!   this same program inside the guest ([`inside`]), from memory, and every request is
//!   recorded in the order of its arrival, so that the same code counts and times both sides.
//! - [`guard`] kills a guest with all its processes when the benchmark has ended.

mod guard;
pub mod guest;
mod inside;
mod lab;
mod random;
mod result;
mod trace;

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Result, bail};

pub use guest::Guest;
pub use lab::Lab;
pub use result::Measured;

/// Delay of every request to a guest's disks, for cases in which requests must arrive while another
/// is served. A guest takes about 40 ms to send 1 MiB to a server inside it, about a hundred times
/// as long as a real machine, and an SSD half a millisecond to read or write it.
pub const LATENCY: Duration = Duration::from_millis(50);

/// Runs a part of a benchmark that needs a separate process: `arguments` select it, and are built
/// by this crate only.
pub fn inside(arguments: &[OsString]) -> Result<()> {
    let Some((role, rest)) = arguments.split_first() else { bail!("no part of a benchmark is named") };
    match role.to_str() {
        Some("guard") => guard::run(rest),
        Some("disks") => inside::run(rest),
        Some("random") => random::run(rest),
        _ => bail!("there is no such part of a benchmark: {}", role.display()),
    }
}
