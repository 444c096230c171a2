//! File descriptors: settings beyond the limit are refused, connections beyond it are closed, and
//! verbs always have some.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::harness::{LIMIT, Lab, Limited, POOL, Run, succeed, wait_until};
use crate::nbd::Client;

/// Starts a server whose process has the limits `soft` and `hard` of open files.
fn limited(lab: &Lab, (soft, hard): (u32, u32), options: &[&str]) -> Run {
    let program = lab.command(&[&["serve", POOL, "--daemon", "--socket", "nbd.sock"], options].concat());
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={soft}:{hard}")).arg("--").arg(program.get_program()).args(program.get_args());
    command.current_dir(lab.path(".")).env_remove("FORKDISK_POOL").env_remove("FORKDISK_CONFIG");
    command.stdin(Stdio::null()).output_within(LIMIT).expect("prlimit").into()
}

/// Stops the daemon of a lab, even if the test fails.
struct Stopped<'a>(&'a Lab);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.run(&["stop", POOL, "--force"]);
    }
}

#[test]
fn connections_for_which_there_are_no_descriptors_are_refused_at_the_start() {
    let lab = Lab::with_pool("64M");
    let message = limited(&lab, (512, 1024), &["--max-connections", "2000"]).refused();
    for word in ["max_connections = 2000", "1024", "max_connections to 768", "LimitNOFILE"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    // The soft limit is raised.
    limited(&lab, (256, 4096), &["--max-connections", "2000", "--pid-file", "pid"]).ok();
    let _stopped = Stopped(&lab);
    let pid = fs::read_to_string(lab.path("pid")).unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", pid.trim())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().nth(3), Some("4096"), "{files}");
}

#[test]
fn clients_that_take_all_they_can_leave_descriptors_for_verbs() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let options =
        ["--max-connections", "144", "--max-export-connections", "144", "--log-file", "log", "--pid-file", "pid"];
    limited(&lab, (400, 400), &options).ok();
    let _stopped = Stopped(&lab);
    let connect = || UnixStream::connect(lab.path("nbd.sock")).unwrap();
    let is_served = |client: &mut UnixStream| {
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.read_exact(&mut [0; 18]).is_ok()
    };
    let mut clients: Vec<Client> = (0..144).map(|_| Client::connect(&lab.path("nbd.sock"), "a").unwrap()).collect();
    let refused = (0..300).filter(|_| !is_served(&mut connect())).count();
    assert_eq!(refused, 300, "closed at once, not left waiting");
    assert_eq!(lab.names(), ["a"]);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let said = fs::read_to_string(lab.path("log")).unwrap();
    let told = said.lines().filter(|line| line.contains("max_connections")).count();
    assert!((1..40).contains(&told), "{told} lines name max_connections");

    // Fewer are left: connections that cannot be served are closed, and verbs continue.
    let pid = fs::read_to_string(lab.path("pid")).unwrap();
    let files = || {
        let names = fs::read_dir(format!("/proc/{}/fd", pid.trim())).unwrap();
        let numbers = names.map(|entry| entry.unwrap().file_name().into_string().unwrap().parse().unwrap());
        numbers.collect::<BTreeSet<usize>>()
    };
    let open = files().len();
    clients.truncate(100);
    wait_until("44 have gone", || files().len() <= open - 44);
    let files = files();
    let unused = (0..).find(|number| !files.contains(number)).unwrap();
    succeed(Command::new("prlimit").args(["--pid", pid.trim(), &format!("--nofile={unused}:{unused}")]));
    let refused = (0..50).filter(|_| !is_served(&mut connect())).count();
    // One or two may get a descriptor that was just closed.
    assert!(refused >= 45, "{refused} of 50 are closed");
    assert_eq!(lab.names(), ["a", "a@x"]);
    lab.ok(&["snapshot", "pool.img/a@y"]);
    clients.iter_mut().for_each(|client| client.flush().unwrap());
}
