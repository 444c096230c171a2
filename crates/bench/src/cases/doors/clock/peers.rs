//! Others on the same disk: qemu-nbd on a raw file, file systems with clones, qcow2 images.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::cases::file;
use crate::cases::fio::{self, At};
use crate::cases::server::Server;
use crate::cases::w5::peers::KINDS;
use crate::limits::output_of;
use crate::mounted::Mounted;
use crate::runner::Context;

use super::{ALONE, BASE, CLONE, Named, QEMU_NBD, Target, Work};

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Target>>;

/// Names and makers: what shares nothing, a clone.
const PEERS: [(&str, &str, Make); 5] = [
    (QEMU_NBD, "", raw),
    ("xfs", "xfs-clone", xfs),
    ("btrfs", "btrfs-clone", btrfs),
    ("", "qcow2-snapshot", snapshot),
    ("", "qcow2-overlay", overlay),
];

/// Opens all peers. What cannot be opened is told and left out.
pub fn open(context: &Context<'_>, span: u64) -> Vec<Named> {
    let mut all = Vec::new();
    for (alone, shared, make) in PEERS {
        match make(context, span) {
            Ok(target) => all.push(Named { alone: alone.into(), shared: shared.into(), ours: None, target }),
            Err(error) => {
                let name = if shared.is_empty() { alone } else { shared };
                context.say(&format!("    {name} cannot be measured here: {error:#}"));
            }
        }
    }
    all
}

/// A raw file over NBD.
struct Raw(Server);

fn raw(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let plain = context.disk("qemu-nbd.raw");
    file::plain(&plain, span)?;
    Ok(Box::new(Raw(Server::qemu_nbd(&plain, &context.ram("qemu-nbd.sock"))?)))
}

impl Target for Raw {
    fn has(&self) -> (bool, bool) {
        (true, false)
    }

    fn measure(&mut self, work: &Work, _shared: bool) -> Result<f64> {
        work.fio(|load| self.0.load(load))
    }
}

/// A file system on a loop device over a file that was completely written.
struct FileSystem(Mounted);

fn xfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    file_system(context, span, "xfs")
}

fn btrfs(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    file_system(context, span, "btrfs")
}

fn file_system(context: &Context<'_>, span: u64, name: &str) -> Result<Box<dyn Target>> {
    let kind = KINDS.iter().find(|kind| kind.name == name).copied();
    let kind = kind.ok_or_else(|| anyhow::anyhow!("no such file system"))?;
    let backing = context.disk(&format!("{name}.disk"));
    file::plain(&backing, 4 * span + (1 << 30))?;
    let backing = File::options().read(true).write(true).open(backing)?;
    let mounted = Mounted::new(&backing, context.disk(&format!("{name}.mnt")), kind.mkfs, &["-o", "noatime"])?;
    for file in [BASE, ALONE] {
        file::plain(&mounted.dir().join(file), span)?;
    }
    Ok(Box::new(FileSystem(mounted)))
}

impl Target for FileSystem {
    fn measure(&mut self, work: &Work, shared: bool) -> Result<f64> {
        let dir = self.0.dir();
        let file = dir.join(if shared { CLONE } else { ALONE });
        if shared {
            if file.exists() {
                fs::remove_file(&file)?;
            }
            output_of(Command::new("cp").arg("--reflink=always").arg(dir.join(BASE)).arg(&file))?;
        }
        rustix::fs::syncfs(File::open(dir)?)?;
        work.fio(|load| fio::run(&At::File(&file), load))
    }
}

/// A qcow2 image with an internal snapshot of all that it has.
struct Snapshot {
    image: PathBuf,
    sockets: PathBuf,
    count: usize,
}

fn snapshot(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let image = context.disk("snapshot.qcow2");
    let size = span.to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=full"], &[&image, Path::new(&size)])?;
    Ok(Box::new(Snapshot { image, sockets: context.ram("snapshot"), count: 0 }))
}

impl Target for Snapshot {
    fn has(&self) -> (bool, bool) {
        (false, true)
    }

    fn measure(&mut self, work: &Work, _shared: bool) -> Result<f64> {
        if self.count > 0 {
            qemu_img(&["snapshot", "-d", "s"], &[&self.image])?;
        }
        qemu_img(&["snapshot", "-c", "s"], &[&self.image])?;
        self.count += 1;
        served(&self.image, &self.sockets.with_extension(format!("{}.sock", self.count)), work)
    }
}

/// A qcow2 image over a raw file.
struct Overlay {
    base: PathBuf,
    image: PathBuf,
    sockets: PathBuf,
    count: usize,
}

fn overlay(context: &Context<'_>, span: u64) -> Result<Box<dyn Target>> {
    let (base, image) = (context.disk("overlay.raw"), context.disk("overlay.qcow2"));
    file::plain(&base, span)?;
    // Fails at once if there is no such program.
    qemu_img(&["info"], &[&base])?;
    Ok(Box::new(Overlay { base, image, sockets: context.ram("overlay"), count: 0 }))
}

impl Target for Overlay {
    fn has(&self) -> (bool, bool) {
        (false, true)
    }

    fn measure(&mut self, work: &Work, _shared: bool) -> Result<f64> {
        if self.image.exists() {
            fs::remove_file(&self.image)?;
        }
        let base = Path::new(&self.base);
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b"], &[base, &self.image])?;
        self.count += 1;
        served(&self.image, &self.sockets.with_extension(format!("{}.sock", self.count)), work)
    }
}

fn qemu_img(arguments: &[&str], paths: &[&Path]) -> Result<()> {
    output_of(Command::new("qemu-img").args(arguments).args(paths)).map(drop)
}

/// Serves an image for one measurement: it changes between two.
fn served(image: &Path, socket: &Path, work: &Work) -> Result<f64> {
    let server = Server::qemu_nbd_on(image, &["-f", "qcow2"], socket)?;
    let rate = work.fio(|load| server.load(load))?;
    server.stop()?;
    Ok(rate)
}
