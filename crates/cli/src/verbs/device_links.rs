//! `device-links`: the lasting names of a device, for udev.

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;

use crate::attach;
use crate::output::print_line;

/// Print the links that a device of an attached volume has, without /dev/
#[derive(Args)]
pub struct DeviceLinksArgs {
    /// The kernel's name of the device
    name: String,
}

/// Fails for a device that forkdisk did not attach.
pub fn run(args: DeviceLinksArgs) -> Result<()> {
    let names = attach::links_of(&Path::new("/dev").join(&args.name));
    ensure!(!names.is_empty(), "{}: forkdisk attached nothing there", args.name);
    let names: Vec<String> = names.iter().map(|name| name.display().to_string()).collect();
    print_line(&names.join(" "))
}
