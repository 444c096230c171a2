//! Disks of other formats, read through `qemu-nbd` and written by `qemu-img`. An image is read over a
//! socket that only this process can reach. Both programs end with this process, even if it is killed.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Error, Result, anyhow, bail};
use serde_json::Value;

/// Passes the listening socket as systemd does.
const HAND_OVER: &str = r#"exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@""#;

/// Exit codes of `qemu-img check`: check not possible; damage found. (3: leaks only. 63: the format has no check.)
const NOT_CHECKED_STATUS: i32 = 1;
const DAMAGED_STATUS: i32 = 2;

/// A running `qemu-nbd` that reads an image, and the connection to it.
pub struct Reader {
    child: Child,
    stream: UnixStream,
}

impl Reader {
    /// Starts `qemu-nbd` on the image at `path`; `file` is an open handle of it.
    pub fn start(path: &Path, file: &File, format: &str, driver: &str, force: bool) -> Result<Reader> {
        let shown = path.display();
        let program = find("qemu-nbd").ok_or_else(|| {
            anyhow!(
                "{shown}: is in the format {format}, and qemu-nbd, which reads it, is not installed: install it \
                 (Debian: qemu-utils), or convert the image elsewhere with `qemu-img convert -O raw` and import that; \
                 --format raw imports the bytes as they are"
            )
        })?;
        let whole = fs::canonicalize(path).with_context(|| format!("{shown}: cannot be found"))?;
        let is_device = file.metadata()?.file_type().is_block_device();
        if !force {
            check(&whole, file, driver, is_device)?;
        }
        let (listener, stream) = connection().context("making a socket for qemu-nbd")?;
        let child = with_parent()
            .args(["/bin/sh", "-c", HAND_OVER])
            .arg(program)
            .args(["--read-only", "--image-opts"])
            .arg(options(&whole, driver, is_device, force))
            .stdin(OwnedFd::from(listener))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting qemu-nbd")?;
        Ok(Reader { child, stream })
    }

    /// Returns the connection, for the import.
    pub fn socket(&self) -> Result<OwnedFd> {
        Ok(self.stream.try_clone()?.into())
    }

    /// Ends the program; returns its messages.
    pub fn end(mut self) -> String {
        drop(self.stream);
        // All data has arrived, or its error has. Before the first request it would wait forever.
        let _ = self.child.kill();
        let mut said = Vec::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            // Messages that cannot be read are not shown.
            let _ = stderr.read_to_end(&mut said);
        }
        // Its output is complete.
        let _ = self.child.wait();
        String::from_utf8_lossy(&said).trim().replace('\n', "; ")
    }
}

/// Refuses an image that is damaged or truncated: QEMU reads zeroes past the end of a file. Backing files are
/// checked, too. Images in formats without a check, and without `qemu-img` beside `qemu-nbd`, are accepted unchecked.
fn check(path: &Path, file: &File, driver: &str, is_device: bool) -> Result<()> {
    let refuse = |image: &str, why: &str| {
        let way = "get it again, or repair a copy with `qemu-img check -r all`; --force imports what can be read";
        Err(anyhow!("{image}: is damaged or was cut off ({why}): {way}"))
    };
    if driver == "vdi" && !is_device && is_cut_vdi(file)? {
        return refuse(&path.display().to_string(), "it is shorter than its header says");
    }
    let Some(program) = find("qemu-img") else { return Ok(()) };
    let query = |words: &[&str], image: OsString| {
        let mut command = with_parent();
        command.arg(&program).args(words).arg(image).stdin(Stdio::null()).output().context("starting qemu-img")
    };
    let chain = ["info", "--backing-chain", "--output=json", "--force-share", "--image-opts"];
    let found = query(&chain, options(path, driver, is_device, true))?;
    // An image that cannot be opened fails with the reason when it is read.
    let chain: Vec<Value> = serde_json::from_slice(&found.stdout).unwrap_or_default();
    for (i, image) in chain.iter().enumerate() {
        let name = image["filename"].as_str().unwrap_or_default();
        let checked = match i {
            0 => query(&["check", "--force-share", "--image-opts"], options(path, driver, is_device, true))?,
            _ => {
                let format = image["format"].as_str().unwrap_or("raw");
                query(&["check", "--force-share", "-f", format], name.into())?
            }
        };
        let code = checked.status.code();
        if code == Some(NOT_CHECKED_STATUS) || code == Some(DAMAGED_STATUS) {
            let shown = if i == 0 { path.display().to_string() } else { name.to_string() };
            let said =
                [checked.stderr, checked.stdout].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
            let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
            return refuse(&shown, &format!("qemu-img check: {first}"));
        }
    }
    Ok(())
}

/// Returns whether a VDI is shorter than the blocks that its header counts.
fn is_cut_vdi(file: &File) -> Result<bool> {
    let mut header = [0; 0x188];
    if file.read_exact_at(&mut header, 0).is_err() {
        return Ok(true);
    }
    let field = |at: usize| u64::from(u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes")));
    let (data, block, extra, allocated) = (field(0x158), field(0x178), field(0x17c), field(0x184));
    Ok(file.metadata()?.len() < data.saturating_add((block + extra).saturating_mul(allocated)))
}

/// Adds the messages of `qemu-nbd` to the failure of an import.
pub fn explain(error: Error, shown: &str, format: &str, said: String) -> Error {
    match said.is_empty() {
        true => error,
        false => anyhow!("{shown} ({format}): {error}; {said}"),
    }
}

/// Creates a listening socket and a connection to it. No other process can have connected before:
/// the socket's name is removed when this returns.
fn connection() -> io::Result<(UnixListener, UnixStream)> {
    let base = std::env::temp_dir();
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    let pid = std::process::id();
    let mut names = (0..1000).map(|i| base.join(format!("forkdisk-{pid}-{i}")));
    let dir = loop {
        let dir = names.next().ok_or(io::ErrorKind::AlreadyExists)?;
        match builder.create(&dir) {
            Ok(()) => break dir,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    };
    let path = dir.join("s");
    let made = UnixListener::bind(&path).and_then(|listener| Ok((listener, UnixStream::connect(&path)?)));
    // A socket that could not be made has no file.
    let _ = fs::remove_file(&path);
    fs::remove_dir(&dir)?;
    made
}

/// Returns QEMU's options for the image. In them a comma is written twice.
fn options(path: &Path, driver: &str, is_device: bool, force: bool) -> OsString {
    let mut out =
        format!("driver={driver},file.driver={}", if is_device { "host_device" } else { "file" }).into_bytes();
    if force {
        out.extend(b",force-share=on");
    }
    out.extend(b",file.filename=");
    for &byte in path.as_os_str().as_bytes() {
        out.push(byte);
        if byte == b',' {
            out.push(byte);
        }
    }
    OsString::from_vec(out)
}

/// Returns a command that starts the program added to it and ends it with this process.
fn with_parent() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["with-parent", &std::process::id().to_string(), "--"]);
    command
}

/// Finds a program in the folders of `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Runs one of QEMU's programs to its end; it ends early if this process does.
pub fn run(program: &Path, words: impl Iterator<Item = OsString>) -> Result<()> {
    let mut command = with_parent();
    command.arg(program).args(words);
    let name = program.file_name().unwrap_or_default().display();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    if !output.status.success() {
        bail!("{name} failed ({}): {said}", output.status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_an_option_whatever_is_in_it() {
        let text = options(Path::new("/a,b=c/x.vmdk"), "vmdk", false, true);
        assert_eq!(text, "driver=vmdk,file.driver=file,force-share=on,file.filename=/a,,b=c/x.vmdk");
        assert_eq!(
            options(Path::new("/dev/x"), "qcow2", true, false),
            "driver=qcow2,file.driver=host_device,file.filename=/dev/x"
        );
    }

    #[test]
    fn a_connection_leaves_no_name() {
        let (listener, stream) = connection().unwrap();
        drop(stream);
        assert!(listener.accept().is_ok());
        assert!(!fs::exists(listener.local_addr().unwrap().as_pathname().unwrap()).unwrap());
    }
}
