//! What is left of a verb that did not come to its end, and what is said of it.

use std::io::Write;
use std::process::Stdio;

use crate::harness::{Lab, LimitedWait, POOL, Server, noise};

const MIB: usize = 1 << 20;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

#[test]
fn no_volume_is_deleted_for_its_name() {
    let lab = Lab::with_pool("64M");
    lab.import("import-7.partial", b"mine");
    lab.write_file("image.raw", &noise(1, MIB));
    lab.ok(&["import", "image.raw", &at("x")]);
    assert_eq!(lab.names(), ["import-7.partial", "x"]);
    let server = Server::start(&lab);
    lab.ok(&["import", "image.raw", &at("y")]);
    server.stop();
    assert_eq!(lab.names(), ["import-7.partial", "x", "y"]);
    assert_eq!(lab.contents("import-7.partial"), b"mine");
    lab.assert_clean();
}

#[test]
fn an_import_that_was_killed_is_not_in_the_pool_idle_or_served() {
    for is_served in [false, true] {
        let lab = Lab::with_pool("64M");
        let fresh = lab.stat("used");
        let server = is_served.then(|| Server::start(&lab));
        let mut import = lab.command(&["import", "-", &at("a")]).stdin(Stdio::piped()).spawn().unwrap();
        import.stdin.as_mut().unwrap().write_all(&noise(1, 16 * MIB)).unwrap();
        if let Some(server) = server {
            server.kill();
        }
        import.put_down().unwrap();
        assert!(lab.names().is_empty(), "served: {is_served}");
        lab.ok(&["create", &at("b"), "--size", "1M"]);
        assert_eq!(lab.names(), ["b"]);
        assert!(lab.stat("used") < fresh + (MIB as u64), "its space has come back");
        lab.assert_clean();
    }
}
