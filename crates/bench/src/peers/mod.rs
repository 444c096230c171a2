//! The kernel's own targets, measured beside forkdisk: dm-thin, dm-snapshot and md RAID5 in user-mode
//! Linux, a kernel that is an ordinary process.
//!
//! - [`Lab`] finds what that needs, or says what is missing; its scripts are part of this program.
//! - [`guest`] runs one scenario in one guest and hands out what it measured. Its disks are served by
//!   this same program inside the guest ([`inside`]), from memory, and every request is written
//!   down in the order of its arrival, so that the same code counts and charges both sides.
//! - [`guard`] kills a guest with everything it started when whoever asked for it is gone.

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

/// What every request of a guest's disks waits for where it matters who comes while another is served. A guest takes
/// some 40 ms to send 1 MiB to a server inside it, about a hundred times what a real machine takes, and an SSD half a
/// millisecond to read or write it.
pub const LATENCY: Duration = Duration::from_millis(50);

/// Carries out a part of a benchmark that has a process to itself: `arguments` say which, and are made
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
