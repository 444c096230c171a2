//! Long lists of exports: every client gets them completely, and other clients continue meanwhile.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{Lab, LimitedWait, POOL, Server, client, noise, succeed};
use crate::nbd::Client;

const VOLUMES: usize = 2_000;
/// Snapshots of each volume.
const SNAPSHOTS: usize = 9;
const EXPORTS: usize = VOLUMES * (1 + SNAPSHOTS);

/// Serves a pool with many exports.
fn many(options: &[&str]) -> (Lab, Server) {
    let lab = Lab::with_pool("256M");
    let server = Server::start_with(&lab, POOL, options);
    let names: Vec<String> = (0..VOLUMES).map(|i| format!("pool.img/v{i:04}")).collect();
    let mut create = vec!["create"];
    create.extend(names.iter().map(String::as_str));
    create.extend(["--size", "1M"]);
    lab.ok(&create);
    for i in 0..SNAPSHOTS {
        let names: Vec<String> = names.iter().map(|name| format!("{name}@s{i}")).collect();
        let mut snapshot = vec!["snapshot"];
        snapshot.extend(names.iter().map(String::as_str));
        lab.ok(&snapshot);
    }
    (lab, server)
}

/// Ends the neighbour's reads, even if an assertion fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Measures 4 KiB reads of another client until `work` ends; returns the longest time and the number of reads.
fn beside(server: &Server, work: impl FnOnce()) -> (Duration, usize) {
    let mut neighbour = Client::connect(server.socket(), "v0000").unwrap();
    neighbour.write(0, &noise(1, 4096), true).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let (mut longest, mut count) = (Duration::ZERO, 0);
            while !is_over.load(Ordering::SeqCst) {
                let begin = Instant::now();
                neighbour.read(0, 4096).unwrap();
                longest = longest.max(begin.elapsed());
                count += 1;
                thread::sleep(Duration::from_millis(1));
            }
            (longest, count)
        });
        let over = Over(&is_over);
        work();
        drop(over);
        reads.join().unwrap()
    })
}

fn list(name: &str, package: &str, args: &[&str], uri: &str) -> Option<Command> {
    let mut command = client(name, package)?;
    command.args(args).arg(uri);
    Some(command)
}

#[test]
fn twenty_thousand_exports_are_listed_with_their_contexts_while_others_go_on() {
    // The timeout counts from the last answer, and each export is one: their number does not matter.
    let (lab, server) = many(&["--handshake-timeout", "2s"]);
    let uri = format!("nbd+unix:///?socket={}", server.socket().display());
    let Some(mut info) = list("nbdinfo", "libnbd-bin", &["--list", "--json"], &uri) else { return };
    let socket = server.socket().to_str().unwrap();
    let Some(mut qemu) = list("qemu-nbd", "qemu-utils", &["-L", "-k"], socket) else { return };
    let begin = Instant::now();
    let (longest, count) = beside(&server, || {
        let listed = succeed(&mut info);
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let exports = listed["exports"].as_array().unwrap();
        assert_eq!(exports.len(), EXPORTS);
        let one = exports.iter().find(|export| export["export-name"] == "v1234@s3").unwrap();
        let contexts = one["contexts"].as_array().unwrap();
        // Holes, depth, and the changes since each of the other snapshots.
        assert_eq!(contexts.len(), 2 + SNAPSHOTS - 1, "{one}");
        assert!(contexts.iter().any(|context| context == "qemu:dirty-bitmap:s4"), "{one}");
        let listed = succeed(&mut qemu);
        assert!(listed.contains(&format!("exports available: {EXPORTS}")), "{}", &listed[..200.min(listed.len())]);
    });
    // Coarse limits: a list with quadratic effort takes minutes and blocks other clients for seconds.
    assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
    assert!(longest < Duration::from_secs(2) && count > 50, "{count} reads, the longest {longest:?}");
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_client_that_goes_on_asking_is_not_taken_for_a_silent_one() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start_with(&lab, POOL, &["--handshake-timeout", "1s"]);
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let script = format!(
        "import time\n\
         h.set_opt_mode(True)\n\
         h.connect_unix({:?})\n\
         for i in range(8):\n    time.sleep(0.4)\n    h.set_export_name('a')\n    h.opt_info()\n\
         h.opt_go()\n\
         assert h.pread(4096, 0) == bytearray(4096)\n\
         h.shutdown()\n\
         h = nbd.NBD()\n\
         h.set_opt_mode(True)\n\
         h.connect_unix({:?})\n\
         time.sleep(3)\n\
         try:\n    h.opt_info()\n    print('still there')\n\
         except nbd.Error:\n    print('gone')\n",
        server.socket().display().to_string(),
        server.socket().display().to_string(),
    );
    let output = nbdsh.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let output = output.output_within(crate::harness::LIMIT).unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "gone", "a silent client");
    server.stop();
}

/// Snapshots of a single volume; a list that names all of them for each of them has 144 million names.
const OF_ONE: usize = 12_000;

#[test]
fn a_volume_with_very_many_snapshots_is_listed_and_each_of_them_can_be_asked_for() {
    let lab = Lab::with_pool("256M");
    let server = Server::start_with(&lab, POOL, &[]);
    lab.ok(&["create", "pool.img/v0000", "--size", "1M"]);
    for piece in 0..OF_ONE / 1_000 {
        let names: Vec<String> = (0..1_000).map(|i| format!("pool.img/v0000@s{:05}", piece * 1_000 + i)).collect();
        let mut snapshot = vec!["snapshot"];
        snapshot.extend(names.iter().map(String::as_str));
        lab.ok(&snapshot);
    }
    let uri = format!("nbd+unix:///?socket={}", server.socket().display());
    let Some(mut info) = list("nbdinfo", "libnbd-bin", &["--list", "--json"], &uri) else { return };
    let begin = Instant::now();
    let (longest, count) = beside(&server, || {
        let listed: serde_json::Value = serde_json::from_str(&succeed(&mut info)).unwrap();
        let exports = listed["exports"].as_array().unwrap();
        assert_eq!(exports.len(), 1 + OF_ONE);
        for (name, contexts) in [("v0000", 100), ("v0000@s11990", 10)] {
            let one = exports.iter().find(|export| export["export-name"] == name).unwrap();
            let listed = one["contexts"].as_array().unwrap();
            assert_eq!(listed.len(), 2 + contexts, "holes, depth, and the last names, of {name}");
            assert!(listed.iter().any(|context| context == "qemu:dirty-bitmap:s11999"), "{one}");
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(120), "{:?}", begin.elapsed());
    assert!(longest < Duration::from_secs(2) && count > 50, "{count} reads, the longest {longest:?}");
    // A context that no list names.
    let uri = format!("nbd+unix:///v0000@s11990?socket={}", server.socket().display());
    let Some(mut map) = list("nbdinfo", "libnbd-bin", &["--map=qemu:dirty-bitmap:s00000"], &uri) else { return };
    assert!(succeed(&mut map).contains("clean"));
    // Deleting many snapshots by name looks each of them up once.
    let names: Vec<String> = (0..OF_ONE / 2).map(|i| format!("pool.img/v0000@s{i:05}")).collect();
    let delete = [vec!["delete"], names.iter().map(String::as_str).collect()].concat();
    let (longest, _) = beside(&server, || drop(lab.ok(&delete)));
    assert!(longest < Duration::from_secs(1), "the longest read took {longest:?}");
    assert_eq!(lab.names().len(), 1 + OF_ONE / 2);
    server.stop();
    lab.assert_clean();
}
