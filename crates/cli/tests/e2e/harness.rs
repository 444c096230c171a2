//! A folder with a pool in it, the program run on it, and servers that never outlive their test.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use forkdisk_bench::limits::{Limited, LimitedWait, first_line};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Name of the pool in its folder.
pub const POOL: &str = "pool.img";
/// How long a server may take to start or stop, or a mount to appear.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long the sockets of a killed server may accept connections. After an upgrade another process listens.
const CLOSING: Duration = Duration::from_secs(2);

/// How long a program may take that is run to its end.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A separate folder for one test.
pub struct Lab {
    dir: TempDir,
    logs_requests: AtomicBool,
}

/// Outcome of a run of the program.
#[derive(Debug)]
pub struct Run {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Run {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Run { status: output.status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

impl Run {
    /// Returns its standard output; fails unless it succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "failed with {}: {}", self.status, self.stderr);
        self.stdout
    }

    /// Returns its message; fails unless it ended with status 1 and an empty standard output.
    #[track_caller]
    pub fn refused(self) -> String {
        assert_eq!(self.status.code(), Some(1), "not refused: {self:?}");
        assert!(self.stderr.starts_with("forkdisk: "), "not our message: {:?}", self.stderr);
        assert_eq!(self.stdout, "", "a refusal prints nothing");
        self.stderr
    }
}

impl Lab {
    /// Creates an empty folder.
    pub fn empty() -> Lab {
        let dir = tempfile::Builder::new().prefix("forkdisk-e2e-").tempdir().expect("a temporary folder");
        Lab { dir, logs_requests: AtomicBool::new(false) }
    }

    /// Creates a folder with a pool of `size`.
    pub fn with_pool(size: &str) -> Lab {
        let lab = Lab::empty();
        lab.ok(&["init", POOL, "--size", size]);
        lab
    }

    /// Makes all programs use the request log for mounts with a keeper, as on kernels that cannot send requests again.
    pub fn log_requests(&self) {
        self.logs_requests.store(true, Ordering::Relaxed);
    }

    /// Returns the value of the variable for that.
    pub fn request_log(&self) -> &'static str {
        if self.logs_requests.load(Ordering::Relaxed) { "1" } else { "0" }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the program with these arguments, not yet started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkdisk"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env_remove("FORKDISK_POOL")
            .env_remove("FORKDISK_LOG")
            .env_remove("FORKDISK_CONFIG")
            .env("FORKDISK_REQUEST_LOG", self.request_log());
        command
    }

    pub fn run(&self, args: &[&str]) -> Run {
        self.command(args).stdin(Stdio::null()).output_within(LIMIT).expect("the program starts").into()
    }

    #[track_caller]
    pub fn ok(&self, args: &[&str]) -> String {
        self.run(args).ok()
    }

    /// Returns standard output as JSON.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(&[args, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
    }

    /// Returns the names of all volumes and snapshots, in the order of the list.
    #[track_caller]
    pub fn names(&self) -> Vec<String> {
        let list = self.json(&["list", POOL]);
        list.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap().to_string()).collect()
    }

    /// Returns one figure of `stats`.
    #[track_caller]
    pub fn stat(&self, name: &str) -> u64 {
        self.json(&["stats", POOL])[name].as_u64().unwrap()
    }

    /// Runs the program with `input` on its standard input.
    pub fn run_with_input(&self, args: &[&str], input: &[u8]) -> Run {
        let mut child = self
            .command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // A program that refuses its arguments does not read all input.
        let feeder = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.output_within(LIMIT).unwrap();
        feeder.join().unwrap();
        output.into()
    }

    /// Returns the contents of a volume or snapshot, through `export`.
    #[track_caller]
    pub fn contents(&self, name: &str) -> Vec<u8> {
        let output = self.command(&["export", &format!("{POOL}/{name}"), "-"]).output_within(LIMIT).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// Creates a volume that holds `bytes`.
    #[track_caller]
    pub fn import(&self, name: &str, bytes: &[u8]) {
        self.run_with_input(&["import", "-", &format!("{POOL}/{name}")], bytes).ok();
    }

    pub fn write_file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Checks that the pool is intact: no damage, no leaks.
    #[track_caller]
    pub fn assert_clean(&self) {
        let run = self.run(&["check", POOL]);
        assert_eq!(run.status.code(), Some(0), "{run:?}");
    }
}

/// Returns `len` incompressible bytes determined by `seed`.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// `forkdisk serve` on a pool, killed when dropped.
pub struct Server {
    child: Child,
    socket: PathBuf,
    exports: Value,
}

impl Server {
    /// Starts it and waits until it announces that it is ready.
    #[track_caller]
    pub fn start(lab: &Lab) -> Server {
        Server::start_on(lab, POOL)
    }

    /// As [`start`](Self::start), for a pool with another name.
    #[track_caller]
    pub fn start_on(lab: &Lab, pool: &str) -> Server {
        Server::start_with(lab, pool, &[])
    }

    /// As [`start_on`](Self::start_on), with more options.
    #[track_caller]
    pub fn start_with(lab: &Lab, pool: &str, options: &[&str]) -> Server {
        let socket = lab.path("nbd.sock");
        let program =
            lab.command(&[&["serve", pool, "--json", "--socket", socket.to_str().unwrap()], options].concat());
        // If the test fails, the kernel ends its server.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program.get_program()).args(program.get_args());
        command
            .current_dir(lab.dir.path())
            .env_remove("FORKDISK_POOL")
            .env_remove("FORKDISK_LOG")
            .env_remove("FORKDISK_CONFIG")
            .env("FORKDISK_REQUEST_LOG", lab.request_log());
        let log = File::options().create(true).append(true).open(lab.path("serve.log")).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().expect("setpriv");
        let ready = first_line(child.stdout.take().unwrap(), PATIENCE).unwrap_or_else(|e| format!("{e}"));
        let said = || fs::read_to_string(lab.path("serve.log")).unwrap_or_default();
        let exports = serde_json::from_str(&ready).unwrap_or_else(|_| panic!("not ready: {ready:?} {}", said()));
        Server { child, socket, exports }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns its announcement.
    pub fn announced(&self) -> &Value {
        &self.exports
    }

    /// Returns the NBD URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// Stops it by SIGTERM, and checks that it ends cleanly.
    #[track_caller]
    pub fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = wait_at_most(&mut self.child, PATIENCE);
        assert!(status.success(), "the server ended with {status}");
    }

    /// Sends SIGTERM repeatedly until it has ended, and checks that it ends cleanly.
    #[track_caller]
    pub fn stop_impatiently(mut self) {
        let mut status = None;
        wait_until("the server ends", || {
            kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.is_some_and(|status| status.success()), "the server ended with {status:?}");
    }

    /// Kills it, as a crash would.
    pub fn kill(mut self) {
        self.child.put_down().unwrap();
        // The kernel closes sockets that io_uring uses some time after the end of their process.
        let start = Instant::now();
        while start.elapsed() < CLOSING && UnixStream::connect(&self.socket).is_ok() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.put_down();
    }
}

#[track_caller]
pub fn wait_at_most(child: &mut Child, patience: Duration) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(start.elapsed() < patience, "process {} does not end", child.id());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns whether a process has ended: it is gone, or only its entry in the process table is left.
pub fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['Z', 'X']))
}

/// Waits until `is_so`.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns a client program, preferably from the system's own folders. `None` (after saying why) if
/// it is missing, unless the environment requires it.
pub fn client(name: &str, package: &str) -> Option<Command> {
    let found = search_path().find(|dir| dir.join(name).is_file());
    let Some(dir) = found else {
        missing(&format!("{name} is not installed: {package} has it"));
        return None;
    };
    let mut command = Command::new(dir.join(name));
    // Some clients start an interpreter by name, which must be the system's.
    command.env("PATH", std::env::join_paths(search_path()).unwrap());
    Some(command)
}

fn search_path() -> impl Iterator<Item = PathBuf> {
    let system = ["/usr/bin", "/usr/sbin", "/sbin", "/bin"].map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    system.into_iter().chain(std::env::split_paths(&path).collect::<Vec<_>>())
}

/// Reports that a test cannot run here: fails if clients are required, else prints the reason.
#[track_caller]
pub fn missing(why: &str) {
    let is_required = std::env::var_os("FORKDISK_TEST_REQUIRE_CLIENTS").is_some_and(|value| value == "1");
    assert!(!is_required, "{why}");
    eprintln!("not tested: {why}");
}

/// Runs a client to its end; returns its standard output, and fails unless it succeeded.
#[track_caller]
pub fn succeed(command: &mut Command) -> String {
    let run = Run::from(command.stdin(Stdio::null()).output_within(LIMIT).expect("a client that starts"));
    assert!(run.status.success(), "{command:?}\nended with {}\n{}\n{}", run.status, run.stdout, run.stderr);
    run.stdout
}

/// An export as a file, through FUSE. Unmounted when dropped.
pub struct Mount {
    child: Child,
    dir: PathBuf,
}

impl Mount {
    /// Mounts `export`; its file is [`file`](Self::file).
    pub fn new(lab: &Lab, server: &Server, export: &str) -> Option<Mount> {
        let mut nbdfuse = client("nbdfuse", "libnbd-bin")?;
        client("fusermount3", "fuse3")?;
        if !Path::new("/dev/fuse").exists() {
            missing("/dev/fuse does not exist: load the kernel module fuse");
            return None;
        }
        let dir = lab.path(&format!("mnt-{}", export.replace(['/', '@'], "-")));
        fs::create_dir_all(&dir).unwrap();
        let child = nbdfuse.arg(dir.join("disk")).arg(server.uri(export)).spawn().unwrap();
        let mount = Mount { child, dir };
        wait_until("the export is mounted", || mount.file().exists());
        Some(mount)
    }

    pub fn file(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// Unmounts and waits until everything is written.
    #[track_caller]
    pub fn unmount(mut self) {
        succeed(client("fusermount3", "fuse3").unwrap().arg("-u").arg(&self.dir));
        let status = wait_at_most(&mut self.child, PATIENCE);
        assert!(status.success(), "nbdfuse ended with {status}");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
            return;
        }
        if let Some(mut unmount) = client("fusermount3", "fuse3") {
            // Lazily, since a failed test may have left the file open.
            let _ = unmount.args(["-u", "-z"]).arg(&self.dir).output_within(LIMIT);
        }
        let _ = self.child.put_down();
    }
}

/// Reads a whole file in pieces and returns a hash of its contents.
pub fn fingerprint(path: &Path) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    let mut file = File::open(path).unwrap();
    let mut buf = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buf).unwrap();
        if n == 0 {
            return hasher.finish();
        }
        hasher.write(&buf[..n]);
    }
}
