//! Gathering on real data: scattered by clients, gathered on an idle and on a served pool, nothing
//! lost and nothing unshared.

use serde_json::Value;

use crate::harness::{Lab, POOL, Server, noise};
use crate::nbd::Client;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const SIZE: u64 = 16 * MIB;

/// Overwrites every `step`th page, in a pseudo-random order.
fn scatter(client: &mut Client, step: u64, seed: u64) {
    let count = SIZE / PAGE / step;
    for i in 0..count {
        let page = i * 389 % count * step;
        client.write(page * PAGE, &noise(seed + page, PAGE as usize), false).unwrap();
    }
}

fn of(lab: &Lab, object: &str) -> Value {
    lab.json(&["list", &format!("{POOL}/{object}")])[0].clone()
}

/// Returns the referenced and exclusive bytes of each, without the tables, which vary by a few pages.
fn held(lab: &Lab) -> Vec<(String, u64, u64)> {
    let usage = lab.json(&["du", POOL]);
    let row = |v: &Value| {
        let exclusive = v["exclusive"].as_u64().unwrap();
        (v["name"].as_str().unwrap().to_string(), v["referenced"].as_u64().unwrap(), exclusive / (256 * 1024))
    };
    usage["volumes"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn what_is_scattered_is_brought_together_and_nothing_is_unshared() {
    let lab = Lab::with_pool("128M");
    lab.ok(&["create", "pool.img/vm", "--size", "16M", "--gather", "off"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "vm").unwrap();
    (0..SIZE / MIB).for_each(|i| client.write(i * MIB, &noise(i, MIB as usize), false).unwrap());
    lab.ok(&["snapshot", "pool.img/vm@a"]);
    scatter(&mut client, 4, 1_000_000);
    lab.ok(&["snapshot", "pool.img/vm@b"]);
    lab.ok(&["clone", "pool.img/vm@b", "pool.img/clone"]);
    scatter(&mut client, 16, 2_000_000);
    client.flush().unwrap();
    let names = ["vm", "vm@a", "vm@b", "clone"];
    let contents: Vec<Vec<u8>> = names.iter().map(|name| lab.contents(name)).collect();
    let before = held(&lab);
    assert!(of(&lab, "vm")["scattered"].as_u64().unwrap() > SIZE / 5);
    let told = lab.json(&["defrag", "pool.img/vm"]);
    assert_eq!(told["name"], "vm");
    assert_eq!(told["after"], 0, "{told}");
    assert_eq!(told["left"], 0, "{told}");
    assert!(told["moved"].as_u64().unwrap() > 0 && told["before"].as_u64().unwrap() > SIZE / 5, "{told}");
    assert_eq!(of(&lab, "vm")["scattered"], 0);
    assert_eq!(held(&lab), before);
    drop(client);
    server.stop();
    lab.assert_clean();
    // Now without a server.
    let told = lab.json(&["defrag", "pool.img/clone"]);
    assert_eq!(told["after"], 0, "{told}");
    assert_eq!(held(&lab), before);
    lab.assert_clean();
    for (name, bytes) in names.iter().zip(contents) {
        assert!(lab.contents(name) == bytes, "{name}");
    }
}

#[test]
fn the_policy_of_gathering_is_a_property() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/vm", "--size", "1M"]);
    assert_eq!(of(&lab, "vm")["gather"], "auto");
    for policy in ["idle", "20%", "off", "auto"] {
        lab.ok(&["set", &format!("gather={policy}"), "pool.img/vm"]);
        assert_eq!(of(&lab, "vm")["gather"], policy);
    }
    for bad in ["gather=0%", "gather=100%", "gather=on"] {
        let run = lab.run(&["set", bad, "pool.img/vm"]);
        assert_eq!(run.status.code(), Some(2), "{run:?}");
    }
    lab.ok(&["create", "pool.img/other", "--size", "1M", "--gather", "off"]);
    assert_eq!(of(&lab, "other")["gather"], "off");
    lab.ok(&["clone", "pool.img/other", "pool.img/clone"]);
    assert_eq!(of(&lab, "clone")["gather"], "off");
    lab.ok(&["snapshot", "pool.img/vm@then"]);
    lab.ok(&["clone", "pool.img/vm@then", "pool.img/back"]);
    assert_eq!(of(&lab, "back")["gather"], "auto", "as its volume had it");
    let run = lab.run(&["create", "pool.img/more", "--size", "1M", "--gather", "always"]);
    assert!(run.status.code() == Some(2) && run.stderr.contains("off, auto, idle and 1% to 99%"), "{run:?}");
    assert!(lab.ok(&["list", POOL]).lines().next().unwrap().contains("FRAGMENTED"));
    assert!(lab.ok(&["defrag", "pool.img/vm"]).contains("0 moved"));
}
