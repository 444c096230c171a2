//! Kill loop with verbs in between: run to their end, or killed at some point, after which
//! they must have happened completely or not at all.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::rngs::SmallRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, LimitedWait, POOL, Server};
use crate::kill_loop::{CLIENTS, PART, Part, SECTOR, number_from_env};

/// Bytes that the clients write; the volume may be longer.
const WRITTEN: usize = CLIENTS as usize * PART as usize * SECTOR;
/// Most volumes and snapshots besides `a`.
const MOST: usize = 6;

/// The known state of the pool, and the one step that may have happened or not.
struct World {
    lab: Lab,
    rng: SmallRng,
    parts: Vec<Part>,
    /// All volumes and snapshots, including `a`, with their contents.
    known: BTreeMap<String, Vec<u8>>,
    next: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let lab = Lab::with_pool("512M");
        lab.ok(&["create", "pool.img/a", "--size", &WRITTEN.to_string()]);
        let versions = Arc::new(AtomicU64::new(0));
        let parts = (0..CLIENTS).map(|client| Part::new(client, &versions)).collect();
        let known = BTreeMap::from([("a".to_string(), vec![0; WRITTEN])]);
        World { lab, rng: SmallRng::seed_from_u64(seed), parts, known, next: 0 }
    }

    /// Clients write until their server is killed; then checks the contents of `a`.
    fn serve_and_kill(&mut self) {
        let server = Server::start(&self.lab);
        std::thread::scope(|scope| {
            for part in &mut self.parts {
                let (socket, mut rng) = (server.socket().to_path_buf(), SmallRng::seed_from_u64(self.rng.random()));
                scope.spawn(move || part.work(&socket, &mut rng));
            }
            std::thread::sleep(Duration::from_millis(self.rng.random_range(20..400)));
            server.kill();
        });
        let contents = self.lab.contents("a");
        assert_eq!(contents.len(), self.known["a"].len(), "it was not resized");
        self.parts.iter_mut().for_each(|part| part.verify(&contents));
        assert!(contents[WRITTEN..].iter().all(|&byte| byte == 0), "that range was not written");
        self.known.insert("a".to_string(), contents);
    }

    /// Chooses a verb; returns it with the state after it.
    fn choose(&mut self) -> (Vec<String>, BTreeMap<String, Vec<u8>>) {
        let mut then = self.known.clone();
        self.next += 1;
        let fresh = self.next;
        let words = |words: &[&str]| words.iter().map(|word| word.to_string()).collect();
        let at = |name: &str| format!("{POOL}/{name}");
        let snapshot = self.known.keys().filter(|name| name.starts_with("a@")).choose(&mut self.rng).cloned();
        let clone = self.known.keys().filter(|name| name.starts_with("c/")).choose(&mut self.rng).cloned();
        match (self.rng.random_range(0..6), snapshot, clone) {
            (0, _, _) if self.known.len() <= MOST => {
                then.insert(format!("a@{fresh}"), self.known["a"].clone());
                (words(&["snapshot", &at(&format!("a@{fresh}"))]), then)
            }
            (1, Some(snapshot), _) if self.known.len() <= MOST => {
                then.insert(format!("c/{fresh}"), self.known[&snapshot].clone());
                (words(&["clone", &at(&snapshot), &at(&format!("c/{fresh}"))]), then)
            }
            (2, Some(snapshot), _) => {
                then.insert("a".to_string(), self.known[&snapshot].clone());
                (words(&["rollback", &at(&snapshot)]), then)
            }
            (3, snapshot, Some(clone)) => {
                let both: Vec<String> = [Some(clone), snapshot].into_iter().flatten().collect();
                then.retain(|name, _| !both.contains(name));
                (["delete".to_string()].into_iter().chain(both.iter().map(|name| at(name))).collect(), then)
            }
            (4, Some(snapshot), None) => {
                then.remove(&snapshot);
                (words(&["delete", &at(&snapshot)]), then)
            }
            _ => {
                let size = WRITTEN + self.rng.random_range(0..3_000_000);
                then.get_mut("a").expect("always there").resize(size, 0);
                (words(&["resize", &at("a"), "--allow-shrink", "--size", &size.to_string()]), then)
            }
        }
    }

    fn run_verb(&mut self) {
        let (words, then) = self.choose();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        if self.rng.random_ratio(1, 2) {
            self.lab.ok(&words);
            self.known = then;
            return self.verify(&words);
        }
        let mut child = self.lab.command(&words).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(self.rng.random_range(0..60_000)));
        child.put_down().unwrap();
        let names = self.lab.names();
        let is_done = match words[0] {
            "rollback" | "resize" => self.lab.contents("a") == then["a"],
            _ => names.len() == then.len(),
        };
        if is_done {
            self.known = then;
        }
        self.verify(&words);
    }

    /// Checks that exactly the known volumes and snapshots exist, with allowed contents.
    fn verify(&mut self, after: &[&str]) {
        self.lab.assert_clean();
        let expected: Vec<&String> = self.known.keys().collect();
        assert_eq!(self.lab.names().iter().collect::<Vec<_>>(), expected, "after {after:?}");
        for (name, contents) in &self.known {
            assert!(self.lab.contents(name) == *contents, "{name} has changed after {after:?}");
        }
        let contents = &self.known["a"];
        self.parts.iter_mut().for_each(|part| part.adopt(contents));
    }
}

#[test]
fn verbs_between_kills_happen_or_do_not() {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_env("FORKDISK_TEST_SEED", clock);
    let kills = number_from_env("FORKDISK_TEST_KILLS", 6);
    println!("replay with FORKDISK_TEST_SEED={seed} FORKDISK_TEST_KILLS={kills}");
    let mut world = World::new(seed);
    for _ in 0..kills {
        world.serve_and_kill();
        for _ in 0..world.rng.random_range(1..5) {
            world.run_verb();
        }
    }
    world.lab.ok(&["delete", "-r", "pool.img/a"]);
    if world.known.keys().any(|name| name.starts_with("c/")) {
        world.lab.ok(&["delete", "-r", "pool.img/c"]);
    }
    let empty = Lab::with_pool("512M");
    assert_eq!(world.lab.stat("used"), empty.stat("used"), "space is lost");
}
