//! Data sockets: which users may connect, and which exports they offer.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{LIMIT, Lab, Limited, POOL, Server, client, missing, noise, succeed, wait_until};
use crate::nbd::Client;

const CAN_MULTI_CONN: u16 = 1 << 8;
/// A user and a group that own no other files.
const USER: u32 = 47_120;
const GROUP: u32 = 47_110;

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display().to_string().replace('%', "%25"))
}

fn mode_and_group(path: &Path) -> (u32, u32) {
    let meta = fs::metadata(path).unwrap();
    assert!(meta.file_type().is_socket());
    (meta.mode() & 0o777, meta.gid())
}

/// Returns whether a user of `group` can open the default export of a socket.
fn opens(socket: &Path, group: u32) -> Option<bool> {
    let info = client("nbdinfo", "libnbd-bin")?;
    let mut command = Command::new("setpriv");
    let (user, group) = (USER.to_string(), group.to_string());
    command.args(["--reuid", &user, "--regid", &group, "--clear-groups", "--"]);
    command.arg(info.get_program()).arg("--size").arg(uri(socket));
    Some(command.stdin(Stdio::null()).output_within(LIMIT).unwrap().status.success())
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        missing("only root gives sockets to any group");
    }
    is_root
}

/// Lets other users traverse the lab's folder.
fn open_to_all(lab: &Lab) {
    fs::set_permissions(lab.path("."), fs::Permissions::from_mode(0o711)).unwrap();
}

#[test]
fn a_group_is_let_in_and_others_are_not() {
    if !is_root() {
        return;
    }
    let lab = Lab::with_pool("64M");
    open_to_all(&lab);
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let group = GROUP.to_string();
    let server = Server::start_with(&lab, POOL, &["--socket-group", &group, "--control", "control.sock"]);
    assert_eq!(mode_and_group(server.socket()), (0o660, GROUP));
    assert_eq!(mode_and_group(&lab.path("control.sock")), (0o600, 0), "verbs are for its own user");
    let Some(of_the_group) = opens(server.socket(), GROUP) else { return };
    assert!(of_the_group);
    assert_eq!(opens(server.socket(), GROUP + 1), Some(false), "of another group");
    server.stop();
    let server = Server::start_with(&lab, POOL, &["--socket-mode", "0666"]);
    assert_eq!(mode_and_group(server.socket()), (0o666, 0));
    assert_eq!(opens(server.socket(), GROUP + 1), Some(true), "all users");
    server.stop();
}

#[test]
fn modes_and_groups_that_let_nobody_in_are_refused() {
    let lab = Lab::with_pool("64M");
    let refused = |args: &[&str]| lab.run(&[&["serve", POOL], args].concat());
    let message = refused(&["--socket-mode", "0660"]).refused();
    assert!(message.contains("socket_dir"), "{message}");
    let message = refused(&["--socket", "s", "--socket-group", "no-such-group"]).refused();
    assert!(message.contains("no-such-group"), "{message}");
    let run = refused(&["--socket", "s", "--socket-mode", "0066"]);
    assert!(run.status.code() == Some(2) && run.stderr.contains("0066"), "{run:?}");
}

#[test]
fn each_volume_has_a_socket_that_offers_it_alone_and_follows_its_name() {
    let lab = Lab::with_pool("64M");
    lab.import("lab/vm1", &noise(1, 1 << 20));
    lab.ok(&["create", "pool.img/b", "--size", "2M"]);
    lab.ok(&["snapshot", "pool.img/b@monday"]);
    let server = Server::start_with(&lab, POOL, &["--socket-dir", "sockets"]);
    let announced = server.announced()["socket_dir"].as_str().unwrap().to_string();
    assert!(announced.ends_with("/sockets"), "{announced}");
    let sockets = || {
        let names = fs::read_dir(lab.path("sockets")).unwrap();
        let mut names: Vec<String> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let of = |name: &str| lab.path("sockets").join(name);
    assert_eq!(sockets(), ["b.sock", "lab%2Fvm1.sock"], "of volumes, not of snapshots");
    assert_eq!(fs::metadata(lab.path("sockets")).unwrap().mode() & 0o777, 0o700);
    assert_eq!(mode_and_group(&of("b.sock")).0, 0o600);

    // The default export, also by its own name, and no other.
    let mut one = Client::connect(&of("lab%2Fvm1.sock"), "").unwrap();
    assert!(one.read(0, 1 << 20).unwrap() == noise(1, 1 << 20));
    assert_eq!(Client::connect(&of("lab%2Fvm1.sock"), "lab/vm1").unwrap().size, 1 << 20);
    for other in ["b", "b@monday", "none"] {
        let error = Client::connect(&of("lab%2Fvm1.sock"), other).err().unwrap().to_string();
        assert!(error.contains("there is no export"), "{error}");
    }
    assert!(Client::connect(&of("b.sock"), "b@monday").is_err());
    if let Some(mut info) = client("nbdinfo", "libnbd-bin") {
        let listed = succeed(info.args(["--list", "--json"]).arg(uri(&of("b.sock"))));
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let exports = listed["exports"].as_array().unwrap();
        assert_eq!((exports.len(), &exports[0]["export-name"]), (1, &"b".into()));
        assert!(exports[0]["contexts"].as_array().unwrap().contains(&"qemu:dirty-bitmap:monday".into()));
    }
    if let Some(mut copy) = client("nbdcopy", "libnbd-bin") {
        let image = lab.path("image");
        succeed(copy.arg(uri(&of("lab%2Fvm1.sock"))).arg(&image));
        assert!(fs::read(image).unwrap() == noise(1, 1 << 20));
    }

    // Sockets are created, removed and renamed before the verb returns. Connected clients continue.
    lab.ok(&["create", "pool.img/c", "--size", "1M"]);
    lab.ok(&["clone", "pool.img/b@monday", "pool.img/d"]);
    lab.ok(&["rename", "pool.img/lab/vm1", "pool.img/vm2"]);
    assert_eq!(sockets(), ["b.sock", "c.sock", "d.sock", "vm2.sock"]);
    one.write(0, &noise(2, 4096), true).unwrap();
    assert!(Client::connect(&of("vm2.sock"), "").unwrap().read(0, 4096).unwrap() == noise(2, 4096));
    lab.ok(&["delete", "pool.img/c"]);
    assert_eq!(sockets(), ["b.sock", "d.sock", "vm2.sock"]);
    drop(one);

    // A crash leaves files behind, which the next start cleans up.
    server.kill();
    assert_eq!(sockets().len(), 3);
    lab.ok(&["delete", "pool.img/d"]);
    let server = Server::start_with(&lab, POOL, &["--socket-dir", "sockets"]);
    assert_eq!(sockets(), ["b.sock", "vm2.sock"]);
    assert_eq!(Client::connect(&of("b.sock"), "").unwrap().size, 2 << 20);
    server.stop();
    assert!(sockets().is_empty());
    lab.assert_clean();
}

#[test]
fn sockets_of_single_volumes_have_the_mode_and_group_that_are_set() {
    if !is_root() {
        return;
    }
    let lab = Lab::with_pool("64M");
    open_to_all(&lab);
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let group = GROUP.to_string();
    let options = ["--socket-dir", "sockets", "--socket-group", &group, "--socket-mode", "0660"];
    let server = Server::start_with(&lab, POOL, &options);
    lab.ok(&["create", "pool.img/b", "--size", "1M"]);
    for name in ["a.sock", "b.sock"] {
        let socket = lab.path("sockets").join(name);
        assert_eq!(mode_and_group(&socket), (0o660, GROUP));
        let Some(of_the_group) = opens(&socket, GROUP) else { return };
        assert!(of_the_group);
        assert_eq!(opens(&socket, GROUP + 1), Some(false));
    }
    server.stop();
}

#[test]
fn a_single_volumes_socket_may_have_a_mode_and_group_of_its_own() {
    if !is_root() {
        return;
    }
    let lab = Lab::with_pool("64M");
    open_to_all(&lab);
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let rules = [format!("a=0660:{GROUP}"), format!("lab/*=0660:{}", GROUP + 1)];
    let message = lab.run(&["serve", POOL, "--volume-sockets", &rules[0]]).refused();
    assert!(message.contains("socket_dir"), "{message}");
    let options = ["--socket-dir", "sockets", "--volume-sockets", &rules[0], "--volume-sockets", &rules[1]];
    let server = Server::start_with(&lab, POOL, &options);
    lab.ok(&["create", "pool.img/lab/b", "--size", "1M"]);
    lab.ok(&["create", "pool.img/c", "--size", "1M"]);
    let own = mode_and_group(&lab.path("sockets").join("c.sock")).1;
    for (name, mode, group) in [("a.sock", 0o660, GROUP), ("lab%2Fb.sock", 0o660, GROUP + 1), ("c.sock", 0o600, own)] {
        let socket = lab.path("sockets").join(name);
        assert_eq!(mode_and_group(&socket), (mode, group), "{name}");
        for user in [GROUP, GROUP + 1] {
            let Some(opened) = opens(&socket, user) else { return };
            assert_eq!(opened, user == group, "{name} by {user}");
        }
    }
    server.stop();
}

#[test]
fn several_connections_are_not_offered_where_they_would_be_refused() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, 8 << 20));
    for (options, offered) in
        [(&["--max-export-connections", "1"][..], false), (&["--max-connections", "2"], false), (&[], true)]
    {
        let server = Server::start_with(&lab, POOL, options);
        let flags = Client::connect(server.socket(), "a").unwrap().flags;
        assert_eq!(flags & CAN_MULTI_CONN != 0, offered, "{options:?}");
        let Some(mut copy) = client("nbdcopy", "libnbd-bin") else { return };
        let image = lab.path("image");
        wait_until("the first client has gone", || lab.json(&["stats", POOL])["live"]["server"]["connections"] == 0);
        succeed(copy.arg(server.uri("a")).arg(&image));
        assert!(fs::read(&image).unwrap() == noise(1, 8 << 20), "{options:?}");
        fs::remove_file(image).unwrap();
        server.stop();
    }
}

#[test]
fn a_door_that_is_open_to_every_user_of_the_machine_is_told() {
    let lab = Lab::with_pool("64M");
    let server = Server::start_with(&lab, POOL, &["--tcp", "127.0.0.1:0"]);
    let said = || fs::read_to_string(lab.path("serve.log")).unwrap_or_default();
    assert_eq!(said().lines().filter(|line| line.contains("every user of this machine")).count(), 1, "{}", said());
    server.stop();
    fs::remove_file(lab.path("serve.log")).unwrap();
    Server::start(&lab).stop();
    assert!(!said().contains("every user"), "{}", said());
}
