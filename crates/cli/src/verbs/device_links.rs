//! `device-links`: prints the persistent names of a device, for udev.

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use crate::attach;
use crate::output::print_line;

/// Print the links of an attached volume's device, without /dev/
#[derive(Args)]
pub struct DeviceLinksArgs {
    /// The kernel's name of the device
    name: String,
}

/// Prints the links; fails for a device that forkdisk did not attach.
pub fn run(args: DeviceLinksArgs) -> Result<()> {
    let names = attach::links_of(&Path::new("/dev").join(&args.name));
    ensure!(!names.is_empty(), "{}: forkdisk attached nothing there", args.name);
    let names: Vec<String> = names.iter().map(|name| name.display().to_string()).collect();
    print_line(&names.join(" "))
}
