//! Volumes that are deleted by themselves, labels, and verbs that select by them.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use forkdisk_control::{Client as Control, params};
use serde_json::Value;

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::nbd::Client;
use crate::upgrade::upgrade;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

/// A pool with the volume `base`.
fn lab() -> Lab {
    let lab = Lab::with_pool("1G");
    lab.import("base", &noise(1, 300_000));
    lab
}

fn listed(lab: &Lab, words: &[&str]) -> Vec<String> {
    let all = lab.json(&[&["list"], words].concat());
    all.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap().to_string()).collect()
}

fn control(server: &Server) -> Control {
    Control::connect(server.announced()["control"].as_str().unwrap().as_ref()).unwrap()
}

/// A process that runs until it is killed, or for a minute.
fn process() -> Child {
    Command::new("sleep").arg("60").stdin(Stdio::null()).process_group(0).spawn().unwrap()
}

#[test]
fn forks_expire_when_nothing_needs_them_and_others_stay() {
    let lab = lab();
    let server = Server::start(&lab);
    lab.ok(&["fork", &at("base"), &at("kids/{001..100}"), "--set", "quota=1G,expires=1h"]);
    let made = lab.json(&["list", &at("kids/100")]);
    assert!(made[0]["expires"].as_u64() > made[0]["created"].as_u64() && made[0]["quota"] == 1 << 30, "{made}");
    assert!(made[0]["created_by"].as_str().unwrap().starts_with("cli:uid="), "{made}");
    let held = Client::connect(server.socket(), "kids/001").unwrap();
    lab.ok(&["snapshot", &at("kids/003@kept"), &at("kids/004@gone")]);
    lab.ok(&["set", "expires=1s", &at("kids/004@gone")]);
    for number in 1..=100 {
        lab.ok(&["set", if number == 2 { "expires=none" } else { "expires=1s" }, &at(&format!("kids/{number:03}"))]);
    }
    let left = ["base", "kids/001", "kids/002", "kids/003", "kids/003@kept"];
    wait_until("what nothing needs has expired", || lab.names() == left);
    let shown = lab.json(&["list", &at("kids/001"), "--expires-before", "1s"]);
    assert_eq!(shown.as_array().unwrap().len(), 1, "it is listed as expired");
    drop(held);
    wait_until("the client has gone", || !lab.names().contains(&"kids/001".to_string()));
    lab.ok(&["delete", &at("kids/003@kept")]);
    wait_until("its snapshot has gone", || lab.names() == ["base", "kids/002"]);
    server.stop();
    assert!(lab.contents("kids/002") == noise(1, 300_000));
    lab.assert_clean();
}

#[test]
fn what_expires_while_no_daemon_runs_is_deleted_at_the_next_open() {
    let lab = lab();
    for round in 0..4 {
        let server = Server::start(&lab);
        lab.ok(&["fork", &at("base"), &at(&format!("r{round}/{{1..8}}")), "--set", "expires=1s,label.round=now"]);
        if round % 2 == 0 {
            // Killed before, while or after they are deleted.
            std::thread::sleep(std::time::Duration::from_millis(700 * round));
        }
        server.kill();
    }
    let server = Server::start(&lab);
    wait_until("all have expired", || lab.names() == ["base"]);
    lab.ok(&["create", &at("later"), "--size", "1M", "--set", "expires=1s"]);
    server.kill();
    wait_until("it has expired", || {
        // A verb that writes opens the pool, and deletes it.
        lab.ok(&["set", "label.a=b", &at("base")]);
        lab.names() == ["base"]
    });
    lab.assert_clean();
}

#[test]
fn a_lease_ends_with_its_process_or_connection() {
    let lab = lab();
    let server = Server::start(&lab);
    let (mut first, mut second) = (process(), process());
    let pids = [first.id(), second.id()].map(|pid| pid.to_string());
    lab.ok(&["fork", &at("base"), &at("a/{1..3}"), "--lease", &pids[0]]);
    lab.ok(&["clone", &at("base"), &at("b"), "--lease", &pids[1]]);
    assert_eq!(lab.json(&["list", &at("b")])[0]["lease"], pids[1].as_str());
    let mut holder = control(&server);
    let lease = Some("connection".to_string());
    let fork = params::Fork {
        source: "base".into(),
        children: vec!["c".into()],
        lease: lease.clone(),
        ..params::Fork::default()
    };
    holder.call(fork, None, |_| {}).unwrap();
    let mut program = lab.command(&["fork", &at("base"), &at("d"), "--lease", "connection"]).spawn().unwrap();
    wait_until("the program has forked", || lab.names().contains(&"d".to_string()));
    assert_eq!(lab.names(), ["a/1", "a/2", "a/3", "b", "base", "c", "d"]);
    program.kill().unwrap();
    program.wait().unwrap();
    wait_until("its connection has ended", || !lab.names().contains(&"d".to_string()));
    // Not waited for: it has ended all the same.
    first.kill().unwrap();
    wait_until("the process has ended", || lab.names() == ["b", "base", "c"]);
    drop(holder);
    wait_until("the connection has ended", || lab.names() == ["b", "base"]);

    let mut holder = control(&server);
    let create = params::Create { volumes: vec!["e".into()], size: 1 << 20, lease, ..params::Create::default() };
    holder.call(create, None, |_| {}).unwrap();
    lab.ok(&["create", &at("f"), "--size", "1M", "--lease", &pids[1]]);
    lab.ok(&["set", "lease=none", &at("f")]);
    server.kill();
    let server = Server::start(&lab);
    wait_until("no connection outlives the daemon", || lab.names() == ["b", "base", "f"]);
    server.kill();
    second.kill().unwrap();
    second.wait().unwrap();
    first.wait().unwrap();
    let server = Server::start(&lab);
    wait_until("the process has ended meanwhile", || lab.names() == ["base", "f"]);
    server.stop();
    for (lease, why) in [("0", "no such process"), ("me", "bad lease"), ("connection", "serve the pool")] {
        let message = lab.run(&["fork", &at("base"), &at("x"), "--lease", lease]).refused();
        assert!(message.contains(why), "{message}");
    }
    lab.assert_clean();
}

#[test]
fn a_new_program_keeps_what_is_leased_or_in_use() {
    let lab = lab();
    let server = Server::start(&lab);
    let mut holder = control(&server);
    let (source, children) = ("base".to_string(), vec!["leased".to_string()]);
    let lease = Some("connection".to_string());
    holder.call(params::Fork { source, children, lease, ..params::Fork::default() }, None, |_| {}).unwrap();
    lab.ok(&["clone", &at("base"), &at("used"), "--set", "expires=1s"]);
    let mut held = Client::connect(server.socket(), "used").unwrap();
    upgrade(&lab);
    lab.ok(&["create", &at("later"), "--size", "1M", "--set", "expires=1s"]);
    wait_until("the new program deletes it", || !lab.names().contains(&"later".to_string()));
    assert_eq!(lab.names(), ["base", "leased", "used"]);
    assert!(held.read(0, 4096).unwrap() == noise(1, 300_000)[..4096]);
    drop((held, holder));
    wait_until("both have gone", || lab.names() == ["base"]);
    server.stop();
    lab.assert_clean();
}

#[test]
fn labels_select_what_verbs_are_for() {
    let lab = lab();
    lab.ok(&["create", &at("ci/1"), &at("ci/2"), "--size", "1M", "--set", "label.owner=ci,label.job=42"]);
    lab.ok(&["clone", &at("ci/1"), &at("copy")]);
    lab.ok(&["set", "label.owner=me", &at("base")]);
    assert_eq!(listed(&lab, &[POOL, "--label", "owner"]), ["base", "ci/1", "ci/2"]);
    assert_eq!(listed(&lab, &[POOL, "--label", "owner=ci", "--label", "job"]), ["ci/1", "ci/2"]);
    assert_eq!(listed(&lab, &[POOL, "--match", "*/2,copy"]), ["ci/2", "copy"]);
    assert_eq!(listed(&lab, &[POOL, "--older-than", "1w"]), [""; 0]);
    let copy = &lab.json(&["list", &at("copy")])[0];
    assert!(copy["labels"] == serde_json::json!({}) && copy["expires"].is_null(), "a clone inherits nothing: {copy}");

    let plan = lab.ok(&["snapshot", "-n", &at("ci@daily"), "--label", "job=42"]);
    assert_eq!(plan, "would take ci/1@daily\nwould take ci/2@daily\n");
    lab.ok(&["set", "label.job=", &at("ci/2")]);
    lab.ok(&["snapshot", &at("@daily"), "--label", "job=42", "--set", "expires=1h,label.kind=daily"]);
    let taken = &lab.json(&["list", POOL, "--label", "kind=daily"]);
    assert!(taken[0]["name"] == "ci/1@daily" && taken[0]["expires"].is_u64() && taken[1] == Value::Null, "{taken}");
    lab.ok(&["set", "label.kind=weekly", &at("ci/1@daily")]);

    let message = lab.run(&["delete", POOL, "--label", "owner=ci"]).refused();
    assert!(message.contains("there are snapshots left: ci/1@daily"), "{message}");
    let message = lab.run(&["delete", POOL, "--label", "owner=nobody"]).refused();
    assert!(message.contains("nothing matches the selection"), "{message}");
    let plan = lab.ok(&["delete", "-n", "-r", POOL, "--label", "owner=ci"]);
    assert!(plan.starts_with("would delete ci/1\nwould delete ci/1@daily\nwould delete ci/2\nwould free"), "{plan}");
    lab.ok(&["delete", "-r", POOL, "--label", "owner=ci"]);
    assert_eq!(lab.names(), ["base", "copy"]);

    let long = format!("label.a={}", "v".repeat(320));
    for (property, why) in [
        ("label.a b=c", "bad key of a label"),
        (long.as_str(), "has room for 320"),
        ("expires=1999-01-01", "has passed"),
        ("expires=soon", "no date in UTC"),
        ("label=x", "no property 'label'"),
    ] {
        let run = lab.run(&["set", property, &at("base")]);
        assert!(!run.status.success() && run.stderr.contains(why), "{property}: {run:?}");
    }
    assert_eq!(lab.json(&["list", &at("base")])[0]["labels"], serde_json::json!({"owner": "me"}));
    let text = lab.ok(&["list", &at("base")]);
    assert!(text.contains("LABELS") && text.contains("owner=me") && !text.contains("EXPIRES"), "{text}");
    lab.assert_clean();
}
