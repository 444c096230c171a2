//! Start and end of a daemon.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Lab, PATIENCE, POOL, Server, has_ended, noise, wait_until};
use crate::nbd::Client;

/// A daemon that is stopped when its test ends, even if it fails.
struct Daemon<'a> {
    lab: &'a Lab,
    pid: i32,
}

impl<'a> Daemon<'a> {
    #[track_caller]
    fn start(lab: &'a Lab, more: &[&str]) -> Daemon<'a> {
        let args = ["serve", POOL, "--daemon", "--socket", "nbd.sock", "--pid-file", "pid"];
        lab.ok(&[&args, more].concat());
        let pid = fs::read_to_string(lab.path("pid")).unwrap().trim().parse().unwrap();
        Daemon { lab, pid }
    }

    fn is_running(&self) -> bool {
        !has_ended(self.pid.unsigned_abs())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid).unwrap(), signal).unwrap();
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // The file exists as long as the process, unless that was killed.
        let is_running = fs::read_to_string(self.lab.path("pid")).is_ok_and(|pid| pid.trim() == self.pid.to_string());
        if is_running && self.is_running() {
            self.signal(Signal::KILL);
        }
    }
}

fn connect(lab: &Lab) -> Client {
    Client::connect(Path::new(&lab.path("nbd.sock")), "a").unwrap()
}

#[test]
fn a_daemon_is_there_when_its_start_returns_and_gone_when_its_stop_does() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let daemon = Daemon::start(&lab, &[]);
    let mut client = connect(&lab);
    client.write(0, &noise(1, 4096), false).unwrap();
    drop(client);
    assert!(daemon.is_running());
    assert_eq!(lab.ok(&["stop", POOL]), "");
    assert!(!daemon.is_running());
    for left in ["nbd.sock", "pid"] {
        assert!(!lab.path(left).exists(), "{left}");
    }
    assert_eq!(lab.json(&["stats", POOL])["clean"], true);
    assert!(lab.contents("a")[..4096] == noise(1, 4096));
}

#[test]
fn what_keeps_a_daemon_from_serving_is_said_to_whoever_started_it() {
    let lab = Lab::with_pool("64M");
    let message = lab.run(&["serve", POOL, "--daemon", "--socket", "/dev/null/x"]).refused();
    assert!(message.contains("/dev/null/x"), "{message}");
    let message = lab.run(&["serve", "none.img", "--daemon"]).refused();
    assert!(message.contains("none.img"), "{message}");
    lab.assert_clean();
}

#[test]
fn a_second_daemon_is_told_who_serves_the_pool() {
    let lab = Lab::with_pool("64M");
    let daemon = Daemon::start(&lab, &[]);
    for more in [&["--daemon"][..], &[]] {
        let message = lab.run(&[&["serve", POOL, "--socket", "other.sock"], more].concat()).refused();
        assert!(message.contains(&format!("forkdisk serve (pid {})", daemon.pid)), "{message}");
        assert!(message.contains("nbd.sock") && message.contains("forkdisk stop"), "{message}");
    }
    assert!(!lab.path("other.sock").exists());
    lab.ok(&["stop", POOL]);
}

#[test]
fn a_pool_that_nobody_serves_cannot_be_stopped() {
    let lab = Lab::with_pool("64M");
    let message = lab.run(&["stop", POOL]).refused();
    assert!(message.contains("no daemon"), "{message}");
}

#[test]
fn sockets_of_a_killed_daemon_are_in_nobodys_way() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let daemon = Daemon::start(&lab, &[]);
    connect(&lab).write(0, &noise(1, 4096), true).unwrap();
    daemon.signal(Signal::KILL);
    wait_until("it is gone", || !daemon.is_running());
    assert!(lab.path("nbd.sock").exists());
    assert_eq!(lab.names(), ["a"], "a verb is not held up by a socket without a listener");
    let daemon = Daemon::start(&lab, &[]);
    assert!(connect(&lab).read(0, 4096).unwrap() == noise(1, 4096));
    lab.ok(&["stop", POOL]);
    assert!(!daemon.is_running());
    lab.assert_clean();
}

#[test]
fn the_log_of_a_daemon_goes_to_its_file() {
    let lab = Lab::with_pool("64M");
    let daemon = Daemon::start(&lab, &["--log-file", "log"]);
    let log = || fs::read_to_string(lab.path("log")).unwrap_or_default();
    wait_until("it says that it serves", || log().contains("serving"));
    fs::rename(lab.path("log"), lab.path("log.1")).unwrap();
    daemon.signal(Signal::HUP);
    wait_until("it has begun a new file", || lab.path("log").exists());
    lab.ok(&["stop", POOL]);
    assert!(log().contains("stopped"), "{}", log());
}

#[test]
fn a_daemon_without_a_log_file_logs_to_the_system() {
    let lab = Lab::with_pool("64M");
    let system = UnixDatagram::bind(lab.path("log.sock")).unwrap();
    system.set_read_timeout(Some(PATIENCE)).unwrap();
    let daemon = Daemon::start(&lab, &["--syslog", "log.sock"]);
    let hear = || {
        let mut line = [0; 4096];
        let n = system.recv(&mut line).expect("a line of the log");
        String::from_utf8(line[..n].to_vec()).unwrap()
    };
    let said = hear();
    // Facility daemon, severity info; paths in plain form.
    assert!(said.starts_with(&format!("<30>forkdisk[{}]: ", daemon.pid)) && said.contains("serving"), "{said}");
    let pool = lab.path(POOL).canonicalize().unwrap();
    assert!(said.contains(&format!("pool={}", pool.display())) && !said.contains("Some("), "{said}");
    lab.ok(&["stop", POOL]);
    assert!(std::iter::repeat_with(hear).any(|said| said.contains("stopped")));
    // The socket does not exist: the daemon works all the same.
    let _unheard = Daemon::start(&lab, &["--syslog", "none.sock"]);
    lab.ok(&["stop", POOL]);
}

#[test]
fn delete_rollback_and_shrinking_of_what_is_in_use_are_refused_and_say_who_uses_it() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 1 << 20));
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(2, 4096), false).unwrap();
    let me = format!("(pid {})", std::process::id());
    for args in [
        &["delete", "-r", "pool.img/a"][..],
        &["rollback", "pool.img/a@x"],
        &["resize", "pool.img/a", "--size", "4K", "--allow-shrink"],
    ] {
        let message = lab.run(args).refused();
        assert!(message.contains("in use by an NBD client") && message.contains(&me), "{args:?}: {message}");
    }
    assert!(client.read(0, 4096).unwrap() == noise(2, 4096));
    lab.ok(&["rollback", "pool.img/a@x", "--force"]);
    assert!(client.read(0, 4096).is_err(), "the client was disconnected");
    let mut client = Client::connect(server.socket(), "a").unwrap();
    assert!(client.read(0, 4096).unwrap() == noise(1, 4096));
    drop(client);
    wait_until("it is not in use", || lab.run(&["delete", "-r", "pool.img/a"]).status.success());
    server.stop();
    lab.assert_clean();
}
