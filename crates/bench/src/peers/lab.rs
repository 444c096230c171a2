//! Components of a guest: a kernel, its modules, programs of the host, and the laboratory's
//! scripts, which are compiled into this program and unpacked on demand.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::limits::{LIMIT, Limited as _};
use anyhow::{Context as _, Result, bail, ensure};

/// Program name of the kernel.
const KERNEL: &str = "linux";
/// Directory of its modules, as packaged.
const MODULES: &str = "/usr/lib/uml/modules";
/// Search path of the host's programs inside the guest.
const PLACES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Required programs and their Debian packages.
const PROGRAMS: [(&str, &str); 7] = [
    (KERNEL, "user-mode-linux"),
    ("modprobe", "kmod"),
    ("depmod", "kmod"),
    ("dmsetup", "dmsetup"),
    ("nbd-client", "nbd-client"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mdadm", "mdadm"),
];

macro_rules! scripts {
    ($($name:literal),* $(,)?) => { [$(($name, include_str!(concat!("../../../../lab/uml/", $name)))),*] };
}

const SCRIPTS: [(&str, &str); 9] = scripts![
    "init.sh",
    "lib.sh",
    "dev.sh",
    "scenarios/bench-thin-break.sh",
    "scenarios/bench-thin-random.sh",
    "scenarios/bench-ext4.sh",
    "scenarios/bench-thin-first.sh",
    "scenarios/bench-md-first.sh",
    "scenarios/bench-origin-many.sh",
];

/// Source of the library for processors with AMX; see its own comment.
const XSTATE: &str = include_str!("../../../../lab/uml/xstate.c");

/// An unpacked laboratory, ready for guests.
pub struct Lab {
    /// Directory of the scripts; `lib/modules` lies beside them.
    pub scripts: PathBuf,
    /// Library that the guest's kernel must preload on this machine, if any.
    pub preload: Option<PathBuf>,
    /// The kernel.
    pub kernel: PathBuf,
}

impl Lab {
    /// Unpacks into `folder`. The error names what this machine lacks, and the packages that contain it.
    pub fn unpack(folder: &Path) -> Result<Lab> {
        let kernel = programs()?;
        let scripts = folder.join("lab");
        for (name, text) in SCRIPTS {
            let path = scripts.join(name);
            fs::create_dir_all(path.parent().context("a script lies in a folder")?)?;
            fs::write(&path, text).with_context(|| path.display().to_string())?;
        }
        run(Command::new("chmod").arg("+x").arg(scripts.join("init.sh")))?;
        modules(&scripts)?;
        Ok(Lab { preload: preload(&scripts)?, scripts, kernel })
    }
}

/// Checks for all programs; returns the kernel's path.
fn programs() -> Result<PathBuf> {
    let missing: Vec<_> = PROGRAMS.iter().filter(|(name, _)| find(name).is_none()).collect();
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(|&&(name, _)| name).collect();
        let mut packages: Vec<&str> = missing.iter().map(|&&(_, package)| package).collect();
        packages.dedup();
        bail!("not installed: {}; on Debian: apt-get install {}", names.join(", "), packages.join(" "));
    }
    find(KERNEL).context("found before")
}

fn find(name: &str) -> Option<PathBuf> {
    PLACES.iter().map(|place| Path::new(place).join(name)).find(|path| path.is_file())
}

/// Creates a tree in which `modprobe -d` finds the guest's modules, without changing the host's.
fn modules(scripts: &Path) -> Result<()> {
    let versions = fs::read_dir(MODULES).with_context(|| format!("{MODULES}: the guest's kernel has no modules"))?;
    let mut versions: Vec<_> = versions.flatten().map(|entry| entry.file_name()).collect();
    versions.sort();
    let version = versions.last().with_context(|| format!("{MODULES} is empty"))?;
    let tree = scripts.join("lib/modules").join(version);
    fs::create_dir_all(&tree)?;
    let of_package = Path::new(MODULES).join(version);
    for part in ["kernel", "modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        symlink(of_package.join(part), tree.join(part))?;
    }
    let depmod = find("depmod").context("found before")?;
    run(Command::new(depmod).arg("-b").arg(scripts).arg(version))
}

/// Builds the library of `xstate.c`, if the processor needs it.
fn preload(scripts: &Path) -> Result<Option<PathBuf>> {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !processor.split_whitespace().any(|word| word == "amx_tile") {
        return Ok(None);
    }
    let Some(compiler) = ["cc", "gcc", "clang"].iter().find_map(|name| find(name)) else {
        bail!(
            "not installed: a C compiler (this processor has AMX, which needs one for the guest's kernel); \
             on Debian: apt-get install gcc libc6-dev"
        );
    };
    let (source, library) = (scripts.join("xstate.c"), scripts.join("xstate.so"));
    fs::write(&source, XSTATE)?;
    run(Command::new(compiler).args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source))?;
    Ok(Some(library))
}

fn run(command: &mut Command) -> Result<()> {
    let what = command.get_program().to_string_lossy().into_owned();
    command.env("PATH", path());
    let output = command.output_within(LIMIT).with_context(|| what.clone())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what} failed: {}", said.trim());
    Ok(())
}

/// Returns the caller's search path plus the directories of system programs.
fn path() -> String {
    let own = env::var("PATH").unwrap_or_default();
    format!("{own}:{}", PLACES.join(":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_of_a_benchmark_is_part_of_the_program() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/uml/scenarios");
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        for name in files.filter(|name| name.starts_with("bench-")) {
            assert!(SCRIPTS.iter().any(|(of, _)| of.strip_prefix("scenarios/") == Some(&name)), "{name}");
        }
    }
}
