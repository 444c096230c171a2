//! A quota bounds the space of one volume, for independent clients, too.

use std::io::Write;
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::harness::{LIMIT, Lab, Limited, POOL, Server, client, noise, succeed};
use crate::nbd::Client;

const MIB: usize = 1 << 20;
const ENOSPC: i32 = 28;

fn of(lab: &Lab, volume: &str) -> Value {
    lab.json(&["list", volume])[0].clone()
}

#[test]
fn one_client_cannot_fill_the_pool_past_its_volumes_quota() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/greedy", "--size", "1G", "--quota", "8M"]);
    lab.ok(&["create", "pool.img/other", "--size", "1G"]);
    let server = Server::start(&lab);
    let mut greedy = Client::connect(server.socket(), "greedy").unwrap();
    let mut written = 0;
    let refused = loop {
        match greedy.write(written, &noise(written, MIB), false) {
            Ok(()) => written += MIB as u64,
            Err(error) => break error,
        }
    };
    assert_eq!((refused.raw_os_error(), written), (Some(ENOSPC), 8 * MIB as u64));
    greedy.write(0, &noise(9, 8 * MIB), true).unwrap();
    greedy.flush().unwrap();
    let mut other = Client::connect(server.socket(), "other").unwrap();
    (0..24).for_each(|i| other.write(i << 20, &noise(i, MIB), false).unwrap());
    greedy.trim(MIB as u64, MIB as u32).unwrap();
    greedy.write(500 << 20, &noise(3, MIB), false).unwrap();
    assert!(greedy.write(600 << 20, &[1], false).is_err());
    lab.ok(&["set", "quota=9M", "pool.img/greedy"]);
    greedy.write(600 << 20, &noise(4, MIB), false).unwrap();
    assert!(greedy.read(600 << 20, MIB).unwrap() == noise(4, MIB));
    assert_eq!(of(&lab, "pool.img/greedy")["referenced"], 9 * MIB);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_quota_is_shown_lasts_and_can_be_taken_away() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "16M", "--quota", "4M"]);
    assert_eq!(of(&lab, "pool.img/a")["quota"], 4 * MIB);
    assert!(lab.ok(&["list", POOL]).lines().next().unwrap().contains("QUOTA"));
    lab.ok(&["snapshot", "pool.img/a@s"]);
    lab.ok(&["clone", "pool.img/a", "pool.img/c"]);
    for bare in ["pool.img/a@s", "pool.img/c"] {
        assert_eq!(of(&lab, bare)["quota"], Value::Null);
    }
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics"]);
    lab.ok(&["set", "quota=5M", "pool.img/a"]);
    let mut metrics = UnixStream::connect(lab.path("metrics")).unwrap();
    metrics.set_read_timeout(Some(LIMIT)).unwrap();
    metrics.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let told = std::io::read_to_string(metrics).unwrap();
    let lines: Vec<&str> = told.lines().filter(|line| line.starts_with("forkdisk_volume_quota_bytes")).collect();
    assert_eq!(lines, ["forkdisk_volume_quota_bytes{volume=\"a\"} 5242880"]);
    let live = lab.json(&["stats", POOL])["live"]["volumes"].clone();
    assert_eq!([&live[0]["quota"], &live[2]["quota"]], [&Value::from(5 * MIB), &Value::Null]);
    server.kill();
    assert_eq!(of(&lab, "pool.img/a")["quota"], 5 * MIB);
    for bad in ["quota=", "quota=5X", "quota=2P", "quota=-1"] {
        assert!(!lab.run(&["set", bad, "pool.img/a"]).status.success(), "{bad}");
    }
    assert!(lab.run(&["set", "quota=1M", "pool.img/a@s"]).refused().contains("snapshot"));
    lab.ok(&["set", "quota=none", "pool.img/a"]);
    assert_eq!(of(&lab, "pool.img/a")["quota"], Value::Null);
}

#[test]
fn clients_see_enospc_at_the_quota_and_go_on() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "64M", "--quota", "4M"]);
    let server = Server::start(&lab);
    if let Some(mut qemu_io) = client("qemu-io", "qemu-utils") {
        let commands =
            ["-c", "write -P 1 0 4M", "-c", "write -P 2 8M 64k", "-c", "write -P 3 0 1M", "-c", "discard 0 1M"];
        let run = qemu_io
            .args(["-f", "raw", &server.uri("a")])
            .args(commands)
            .args(["-c", "write -P 4 8M 1M"])
            .output_within(LIMIT)
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        assert!(said.matches("No space left on device").count() == 1 && said.matches("wrote").count() == 3, "{said}");
    }
    if let Some(mut nbdcopy) = client("nbdcopy", "libnbd-bin") {
        let image = lab.write_file("image.raw", &noise(5, 5 * MIB));
        let run = nbdcopy.arg(image).arg(server.uri("a")).output_within(LIMIT).unwrap();
        assert!(!run.status.success() && String::from_utf8_lossy(&run.stderr).contains("No space left"), "{run:?}");
        let small = lab.write_file("small.raw", &noise(6, 4 * MIB));
        let mut again = client("nbdcopy", "libnbd-bin").unwrap();
        lab.ok(&["set", "quota=8M", "pool.img/a"]);
        succeed(again.arg(small).arg(server.uri("a")));
    }
    server.stop();
    lab.assert_clean();
}
