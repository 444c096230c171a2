//! The daemon as a service manager sees it: readiness, end, watchdog, and passed sockets.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, PATIENCE, POOL, has_ended, missing, noise, wait_until};
use crate::nbd::Client;

fn hear(socket: &UnixDatagram) -> String {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buf = [0; 4096];
    let n = socket.recv(&mut buf).expect("the service manager is told something");
    String::from_utf8(buf[..n].to_vec()).unwrap()
}

/// A process that is killed with its test.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.0.put_down();
    }
}

impl Service {
    #[track_caller]
    fn end(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(self.0.wait_within(LIMIT).unwrap().success());
    }
}

#[test]
fn readiness_the_watchdog_and_the_end_are_told() {
    let lab = Lab::with_pool("64M");
    let by_path = UnixDatagram::bind(lab.path("notify")).unwrap();
    let name = format!("forkdisk-e2e-{}", std::process::id());
    let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let path = lab.path("notify").to_str().unwrap().to_string();
    for (place, manager) in [(path, by_path), (format!("@{name}"), by_name)] {
        let mut command = lab.command(&["serve", POOL, "--socket", "nbd.sock"]);
        command.env("NOTIFY_SOCKET", place).env("WATCHDOG_USEC", "200000").stdout(Stdio::null()).stderr(Stdio::null());
        let mut service = Service(command.spawn().unwrap());
        let ready = hear(&manager);
        assert!(ready.contains("READY=1\n") && ready.contains("STATUS=serving"), "{ready}");
        assert!(ready.contains(&format!("MAINPID={}\n", service.0.id())), "{ready}");
        assert!(lab.path("nbd.sock").exists(), "clients can connect when it says so");
        assert_eq!([hear(&manager), hear(&manager)], ["WATCHDOG=1", "WATCHDOG=1"]);
        service.end();
        let stopping = std::iter::repeat_with(|| hear(&manager)).find(|said| said != "WATCHDOG=1").unwrap();
        assert!(stopping.starts_with("STOPPING=1\n"), "{stopping}");
    }
}

/// Starts `serve` as a service manager does that listens on `sockets`.
fn activate(lab: &Lab, sockets: &[(&str, &UnixListener)]) -> Service {
    let fds: Vec<_> = sockets.iter().map(|(name, socket)| (name.to_string(), socket.as_fd())).collect();
    let (mut command, _copies) = hand_over(&lab.command(&["serve", POOL]), lab, &fds);
    Service(command.stdout(Stdio::null()).spawn().unwrap())
}

/// Returns a command that runs `program` with descriptors as a service manager hands them over, and copies of these
/// that must be open when it starts.
fn hand_over(program: &Command, lab: &Lab, sockets: &[(String, BorrowedFd<'_>)]) -> (Command, Vec<OwnedFd>) {
    let mut copies = Vec::new();
    let mut script = "LISTEN_PID=$$ exec \"$@\"".to_string();
    for (i, (_, socket)) in sockets.iter().enumerate() {
        // Kept open at exec, unlike the original; the shell moves it to its number.
        let copy = rustix::io::fcntl_dupfd_cloexec(*socket, 50).unwrap();
        rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
        script = format!("exec {}<&{} {}<&-; {script}", 3 + i, copy.as_raw_fd(), copy.as_raw_fd());
        copies.push(copy);
    }
    let names: Vec<&str> = sockets.iter().map(|(name, _)| name.as_str()).collect();
    let mut shell = Command::new("bash");
    shell.args(["-c", &script, "bash"]).arg(program.get_program()).args(program.get_args());
    shell.current_dir(lab.path("")).env("LISTEN_FDS", sockets.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
    (shell, copies)
}

/// The store of a service manager: descriptors by name.
#[derive(Default)]
struct Store(BTreeMap<String, OwnedFd>);

impl Store {
    /// Receives messages until the service is ready or has ended.
    fn follow(&mut self, manager: &UnixDatagram) -> String {
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
        loop {
            let mut text = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut text)];
            let received = recvmsg(manager, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a message");
            let fd = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            });
            let text = String::from_utf8(text[..received.bytes].to_vec()).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).map(str::to_string);
            match (text.lines().next().unwrap(), name, fd) {
                ("FDSTORE=1", Some(name), Some(fd)) => drop(self.0.insert(name, fd)),
                ("FDSTOREREMOVE=1", Some(name), None) => drop(self.0.remove(&name)),
                ("WATCHDOG=1", None, None) => {}
                (_, None, None) if text.starts_with("READY") || text.starts_with("STOPPING") => return text,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_mount_waits_in_the_store_of_descriptors_for_the_next_start() {
    kill_a_service(&Lab::with_pool("64M"));
}

#[test]
fn a_request_log_waits_in_the_store_of_descriptors_too() {
    let lab = Lab::with_pool("64M");
    lab.log_requests();
    kill_a_service(&lab);
}

/// A mount waits in the store of descriptors for the next start.
fn kill_a_service(lab: &Lab) {
    std::fs::create_dir(lab.path("m")).unwrap();
    let manager = UnixDatagram::bind(lab.path("notify")).unwrap();
    let mut store = Store::default();
    let start = |store: &mut Store| {
        let program = lab.command(&["serve", POOL, "--mount", "m", "--keeper"]);
        let fds: Vec<_> = store.0.iter().map(|(name, fd)| (name.clone(), fd.as_fd())).collect();
        let (mut command, _copies) = hand_over(&program, lab, &fds);
        command
            .env("NOTIFY_SOCKET", lab.path("notify"))
            .env("FORKDISK_REQUEST_LOG", lab.request_log())
            .stdout(Stdio::null());
        let service = Service(command.spawn().unwrap());
        let said = store.follow(&manager);
        assert!(said.starts_with("READY=1"), "{said}");
        service
    };
    let mut service = start(&mut store);
    // Where the kernel cannot send requests again, there is always a log.
    let is_logged = lab.request_log() == "1" || store.0.len() == 5;
    assert_eq!(store.0.len(), if is_logged { 5 } else { 4 }, "{:?}", store.0.keys());
    crate::keeper::close_a_file_on(&lab.path("m"));
    let file = File::options().read(true).write(true).create_new(true).open(lab.path("m/a")).unwrap();
    for round in 0..3u64 {
        file.write_all_at(&noise(round, 1 << 20), round << 20).unwrap();
        service.0.kill().unwrap();
        service.0.wait_within(LIMIT).unwrap();
        service = start(&mut store);
        assert_eq!(file.metadata().unwrap().len(), (round + 1) << 20);
    }
    for round in 0..3u64 {
        let mut found = vec![0; 1 << 20];
        file.read_exact_at(&mut found, round << 20).unwrap();
        assert!(found == noise(round, 1 << 20));
    }
    drop(file);
    service.end();
    let said = store.follow(&manager);
    assert!(said.starts_with("STOPPING=1"), "{said}");
    while !store.0.is_empty() {
        store.follow(&manager);
    }
    lab.assert_clean();
}

/// The service manager waits at a stop for the end of a process only if it was its child when it was named.
#[test]
fn an_upgrade_names_no_child_of_the_process_before() {
    let lab = Lab::with_pool("64M");
    let manager = UnixDatagram::bind(lab.path("notify")).unwrap();
    let mut command = lab.command(&["serve", POOL]);
    command.env("NOTIFY_SOCKET", lab.path("notify")).stdout(Stdio::null());
    let mut service = Service(command.spawn().unwrap());
    assert!(hear(&manager).starts_with("READY=1"));
    // Sees what the daemon starts, and not what that starts.
    let seen = lab.path("seen");
    let real = lab.command(&[]).get_program().to_str().unwrap().to_string();
    let text = format!("echo $$ $PPID > {}\nexec {real} \"$@\"", seen.display());
    lab.ok(&["upgrade", POOL, "--program", &crate::upgrade::script(&lab, "program", &text)]);
    // Both processes name it.
    let named_in = |said: String| said.lines().find_map(|line| line.strip_prefix("MAINPID=")?.parse::<i32>().ok());
    let named = std::iter::repeat_with(|| hear(&manager)).find_map(named_in).unwrap();
    let seen = std::fs::read_to_string(seen).unwrap();
    let (first, parent) = seen.trim().split_once(' ').unwrap();
    assert_eq!(parent, service.0.id().to_string());
    assert_ne!(first, named.to_string(), "the process that was started ends, and another one serves");
    assert!(!Path::new("/proc").join(first).exists(), "before that one is named");
    assert!(service.0.wait_within(LIMIT).unwrap().success());
    kill_process(Pid::from_raw(named).unwrap(), Signal::TERM).unwrap();
    wait_until("the daemon has ended", || has_ended(named.unsigned_abs()));
    lab.assert_clean();
}

#[test]
fn sockets_that_are_handed_over_are_served_and_left_alone() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let data = UnixListener::bind(lab.path("data.sock")).unwrap();
    let control = UnixListener::bind(lab.path("control.sock")).unwrap();
    for _ in 0..2 {
        // A connection made before the service starts waits for it.
        let waiting = std::thread::spawn({
            let path = lab.path("data.sock");
            move || Client::connect(&path, "a").unwrap().size
        });
        let mut service = activate(&lab, &[("nbd", &data), ("control", &control)]);
        assert_eq!(waiting.join().unwrap(), 1 << 20);
        let named = lab.command(&["list", "-H", POOL, "--control", "control.sock"]).output_within(LIMIT).unwrap();
        assert!(String::from_utf8(named.stdout).unwrap().starts_with("a\tvolume"));
        service.end();
        assert!(lab.path("data.sock").exists() && lab.path("control.sock").exists());
    }
    lab.assert_clean();
}

#[test]
fn systemd_starts_it_when_the_first_client_connects() {
    let tool = Path::new("/usr/bin/systemd-socket-activate");
    if !tool.exists() {
        return missing("systemd-socket-activate is not installed: systemd has it");
    }
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let program = lab.command(&["serve", POOL, "--control", "control.sock"]);
    let mut command = Command::new(tool);
    command.arg("--listen").arg(lab.path("data.sock")).arg("--fdname=nbd");
    command.arg(program.get_program()).args(program.get_args()).current_dir(lab.path(""));
    let mut service = Service(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    wait_until("systemd listens", || lab.path("data.sock").exists());
    assert!(!lab.path("control.sock").exists(), "no client has connected yet");
    let mut client = Client::connect(&lab.path("data.sock"), "a").unwrap();
    client.write(0, &noise(1, 4096), true).unwrap();
    assert!(client.read(0, 4096).unwrap() == noise(1, 4096));
    drop(client);
    service.end();
    assert!(lab.contents("a")[..4096] == noise(1, 4096));
    lab.assert_clean();
}

#[test]
fn something_else_that_is_handed_over_is_refused() {
    let lab = Lab::with_pool("64M");
    let script = "LISTEN_PID=$$ exec \"$@\" 3</dev/null";
    let program = lab.command(&["serve", POOL]);
    let mut shell = Command::new("bash");
    shell.args(["-c", script, "bash"]).arg(program.get_program()).args(program.get_args());
    let output = shell.current_dir(lab.path("")).env("LISTEN_FDS", "1").output_within(LIMIT).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("'unknown'") && message.contains("socket"), "{message}");
    lab.assert_clean();
}

#[test]
fn the_units_are_accepted_by_systemd() {
    let verify = Path::new("/usr/bin/systemd-analyze");
    if !verify.exists() {
        return missing("systemd-analyze is not installed: systemd has it");
    }
    let lab = Lab::empty();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd");
    for unit in ["forkdisk@.service", "forkdisk@.socket"] {
        let text = std::fs::read_to_string(units.join(unit)).unwrap();
        let program = env!("CARGO_BIN_EXE_forkdisk");
        let instance = unit.replace("@.", "@srv-pool.img.");
        lab.write_file(&instance, text.replace("/usr/bin/forkdisk", program).as_bytes());
    }
    let output = Command::new(verify)
        .args(["verify", "--man=no", "./forkdisk@srv-pool.img.service", "./forkdisk@srv-pool.img.socket"])
        .current_dir(lab.path(""))
        .output_within(LIMIT)
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("forkdisk@")).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}
