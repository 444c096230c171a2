//! A daemon is killed during verbs on many names or properties: after a restart all changes of a verb are there, or
//! none.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::harness::{LIMIT, Lab, POOL, Server};

/// Names of a large verb.
const NAMES: usize = 1500;
/// Kills of each test.
const KILLS: u64 = 12;

/// Sends a request, and waits `delay` before the daemon is killed. Returns whether the answer came before that.
fn kill_during(server: Server, method: &str, params: &Value, delay: Option<Duration>) -> bool {
    let mut stream = UnixStream::connect(server.announced()["control"].as_str().unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let reader = BufReader::new(stream.try_clone().unwrap());
    stream.write_all(format!("{request}\n").as_bytes()).unwrap();
    let answer = |mut reader: BufReader<UnixStream>| {
        let mut line = String::new();
        let whole = reader.read_line(&mut line).is_ok() && line.ends_with('\n');
        assert!(!whole || line.contains("\"result\""), "{line}");
        whole
    };
    match delay {
        None => {
            let answered = answer(reader);
            server.kill();
            answered
        }
        Some(delay) => {
            std::thread::sleep(delay);
            server.kill();
            answer(reader)
        }
    }
}

/// Runs `verb` with kills at random moments, the first one after its answer. `is_done` tells whether it has happened,
/// and fails if that is so in part.
fn kill_at_any_moment(lab: &Lab, method: &str, verb: impl Fn(u64) -> Value, is_done: impl Fn(u64) -> bool) {
    let mut rng = SmallRng::seed_from_u64(7);
    let (mut took, mut done) = (Duration::ZERO, 0);
    for round in 0..KILLS {
        let delay = (round > 0).then(|| took.mul_f64(rng.random_range(0.0..0.9)));
        let (server, params) = (Server::start(lab), verb(round));
        let start = Instant::now();
        let answered = kill_during(server, method, &params, delay);
        if round == 0 {
            assert!(answered, "{method} ends if nobody is killed");
            took = start.elapsed();
        }
        let happened = is_done(round);
        assert!(happened || !answered, "{method} was acknowledged, and it is lost");
        done += u64::from(happened);
    }
    println!("{method}: {done} of {KILLS} happened; the first took {took:?}");
    lab.assert_clean();
}

/// Whether the folder `made` has all names with this quota; fails if it has some.
fn has_all(lab: &Lab, made: u64, quota: u64) -> bool {
    let list = lab.json(&["list", POOL]);
    let mine = format!("f{made}/");
    let all = list.as_array().unwrap().iter().filter(|v| v["name"].as_str().unwrap().starts_with(&mine));
    let all: Vec<&Value> = all.collect();
    assert!(all.is_empty() || all.len() == NAMES, "{} of {NAMES} names", all.len());
    let without: Vec<_> = all.iter().filter(|v| v["quota"].as_u64().unwrap_or(0) != quota).take(3).collect();
    assert!(without.is_empty(), "without their quota: {without:?}");
    !all.is_empty()
}

fn names(round: u64) -> Vec<String> {
    (0..NAMES).map(|i| format!("f{round}/volume-{i}")).collect()
}

#[test]
fn a_killed_create_of_1500_names_has_made_all_of_them_or_none() {
    let lab = Lab::with_pool("256M");
    let params = |round| json!({"volumes": names(round), "size": 1 << 20, "quota": 2 << 20});
    kill_at_any_moment(&lab, "create", params, |round| has_all(&lab, round, 2 << 20));
}

#[test]
fn a_killed_clone_of_1500_names_has_made_all_of_them_or_none() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", &format!("{POOL}/source"), "--size", "1M"]);
    let params = |round| json!({"source": "source", "volumes": names(round)});
    kill_at_any_moment(&lab, "clone", params, |round| has_all(&lab, round, 0));
}

#[test]
fn a_killed_fork_of_a_folder_has_made_all_of_it_or_nothing() {
    let lab = Lab::with_pool("256M");
    let volumes: Vec<String> = (0..3).map(|i| format!("vm/{i}")).collect();
    for volume in &volumes {
        lab.ok(&["create", &format!("{POOL}/{volume}"), "--size", "1M"]);
    }
    let children = |round| (0..NAMES / 3).map(|i| format!("f{round}/{i}")).collect::<Vec<_>>();
    let params = |round| json!({"source": "vm", "children": children(round), "quota": 3 << 20});
    kill_at_any_moment(&lab, "fork", params, |round| has_all(&lab, round, 3 << 20));
}

#[test]
fn a_killed_rollback_of_a_folder_has_reverted_all_of_it_or_nothing() {
    let lab = Lab::with_pool("256M");
    let volumes: Vec<String> = (0..60).map(|i| format!("{POOL}/vm/{i}")).collect();
    let words = |verb: &str| -> Vec<String> { [verb.to_string()].into_iter().chain(volumes.iter().cloned()).collect() };
    let mut create = words("create");
    create.extend(["--size".to_string(), "1M".to_string()]);
    lab.ok(&create.iter().map(String::as_str).collect::<Vec<_>>());
    lab.ok(&["snapshot", "-r", &format!("{POOL}/vm@s")]);
    let sizes = || -> Vec<u64> {
        let list = lab.json(&["list", POOL]);
        let all = list.as_array().unwrap().iter().filter(|v| !v["name"].as_str().unwrap().contains('@'));
        all.map(|v| v["size"].as_u64().unwrap()).collect()
    };
    let grow = || volumes.iter().for_each(|volume| drop(lab.ok(&["resize", volume, "--size", "2M"])));
    grow();
    kill_at_any_moment(
        &lab,
        "rollback-folder",
        |_| json!({"snapshot": "vm@s"}),
        |_| {
            let found = sizes();
            assert!(found.iter().all(|&size| size == found[0]), "reverted in part: {found:?}");
            let happened = found[0] == 1 << 20;
            if happened {
                grow();
            }
            happened
        },
    );
}

#[test]
fn a_killed_set_has_set_all_properties_or_none() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "1M"]);
    let properties = |round: u64| {
        let odd = round % 2 == 1;
        let (policy, gather) = if odd { ("copy", "20%") } else { ("split", "off") };
        json!({"chunk": if odd { 4096 } else { 8192 }, "break": policy, "quota": (round + 1) << 20, "gather": gather})
    };
    let verb = |round| {
        let mut params = properties(round);
        params["volume"] = "a".into();
        params
    };
    let found = || {
        let list = lab.json(&["list", POOL]);
        let of = |name: &str| list[0][name].clone();
        json!({"chunk": of("chunk"), "break": of("break"), "quota": of("quota"), "gather": of("gather")})
    };
    let last = std::cell::RefCell::new(found());
    kill_at_any_moment(&lab, "set", verb, |round| {
        let (now, wanted) = (found(), properties(round));
        assert!(now == wanted || now == *last.borrow(), "{now} is neither {wanted} nor {}", last.borrow());
        last.replace(now.clone());
        now == wanted
    });
}
