//! A served pool and an idle pool behave the same: every verb, its output, its messages, its exit status.

use std::fs;

use serde_json::Value;

use crate::harness::{Lab, POOL, Run, Server, noise};
use crate::nbd::Client;

/// One command, and how its output is compared.
struct Step {
    args: Vec<String>,
    input: Option<Vec<u8>>,
    compare: fn(&str) -> String,
}

fn all(text: &str) -> String {
    text.to_string()
}

/// Returns only the first word: the rest counts pages, which depend on when a checkpoint was written.
fn verdict(text: &str) -> String {
    text.split(':').next().unwrap_or_default().to_string()
}

/// Returns the part of a pool's state that does not depend on when a checkpoint was written.
fn lasting(text: &str) -> String {
    let Ok(state) = serde_json::from_str::<Value>(text) else { return text.to_string() };
    ["mode", "size", "volumes", "snapshots", "metadata", "journal_size"].map(|name| state[name].to_string()).join(" ")
}

fn step(line: &str) -> Step {
    Step { args: line.split(' ').map(str::to_string).collect(), input: None, compare: all }
}

fn scenario() -> Vec<Step> {
    let with = |line: &str, compare| Step { compare, ..step(line) };
    let fed = |line: &str, input: Vec<u8>| Step { input: Some(input), ..step(line) };
    vec![
        step("create pool.img/a pool.img/dir/b --size 16M"),
        step("create pool.img/a --size 1M"),
        step("create pool.img/c pool.img/a --size 1M"),
        step("create pool.img/odd --size 1M --chunk 5K"),
        fed("import - pool.img/pipe", noise(1, 3_000_001)),
        step("import image.raw pool.img/file --json --chunk 128K"),
        step("import image.raw pool.img/file"),
        step("import none.raw pool.img/none"),
        step("import . pool.img/none"),
        step("snapshot pool.img/file@x pool.img/pipe@x"),
        step("snapshot pool.img/file@y pool.img/none@y"),
        step("snapshot pool.img/file@x"),
        step("clone pool.img/file@x pool.img/c1 pool.img/c2 --json"),
        step("clone pool.img/file@none pool.img/c3"),
        step("clone pool.img/file pool.img/c4 pool.img/c1"),
        step("list pool.img"),
        step("list -H -p pool.img/file pool.img/dir"),
        step("list pool.img --json"),
        step("list pool.img/none"),
        step("du pool.img/file"),
        step("du -p pool.img/c1 pool.img/c2 --json"),
        step("diff pool.img/file@x pool.img/pipe"),
        step("diff pool.img/file@x --json"),
        step("diff pool.img/file pool.img/none"),
        step("map pool.img/file --json"),
        step("map pool.img/none"),
        step("rename pool.img/c2 pool.img/dir/c2"),
        step("rename pool.img/c1 pool.img/a"),
        step("rename pool.img/c1 pool.img/c1@x"),
        step("rename pool.img/file@x pool.img/file@first --json"),
        step("resize pool.img/c1 --size 40M --json"),
        step("resize pool.img/c1 --size 1M"),
        step("resize pool.img/c1 --size 1M --allow-shrink"),
        step("set chunk=1M pool.img/c1 --json"),
        step("set chunk=1000 pool.img/c1"),
        step("set colour=red pool.img/c1"),
        step("rollback pool.img/file@first --json"),
        step("rollback pool.img/file@none"),
        step("export pool.img/file out.raw"),
        step("export pool.img/pipe out.raw"),
        step("export pool.img/pipe out.raw --force"),
        step("export pool.img/none none.out"),
        step("export pool.img/pipe pool.img --force"),
        with("export pool.img/pipe@x -", |text| format!("{} bytes", text.len())),
        step("delete pool.img/file"),
        step("delete pool.img/dir"),
        step("delete -n -v -r pool.img/dir"),
        step("delete -r pool.img/dir pool.img/c1 --json"),
        step("delete pool.img/none"),
        step("grow pool.img --size 1M"),
        with("grow pool.img --size 384M --json", lasting),
        with("stats pool.img --json", lasting),
        with("check pool.img", verdict),
        step("list -H -p pool.img"),
        step("delete -v -r pool.img/pipe"),
        step("diff pool.img/file@first pool.img/file --json"),
    ]
}

/// Replaces times, which differ between both runs: seconds since 1970, and dates.
fn without_times(text: &str) -> String {
    let is_seconds = |word: &str| word.len() == 10 && word.bytes().all(|byte| byte.is_ascii_digit());
    let is_date = |word: &str| word.len() == 20 && word.ends_with('Z') && word.as_bytes()[10] == b'T';
    let is_end = |c: char| c.is_whitespace() || c == ',';
    let words = text.split_inclusive(is_end).map(|word| {
        let bare = word.trim_end_matches(is_end);
        if is_seconds(bare) || is_date(bare) { word.replace(bare, "TIME") } else { word.to_string() }
    });
    words.collect()
}

/// Drops the times of the last use: a pool that a verb has open only to read records none.
fn without_last_use(text: &str) -> String {
    let in_columns = |line: &str| {
        let mut columns: Vec<&str> = line.split('\t').collect();
        if let [.., last_used, _] = &mut columns[..]
            && columns_are_of_a_list(line)
        {
            *last_used = "-";
        }
        columns.join("\t")
    };
    let mut parts = text.split("\"last_used\":");
    let first = parts.next().unwrap_or_default().to_string();
    let after = |part: &str| part.find([',', '\n', '}']).map_or(String::new(), |end| part[end..].to_string());
    let json = parts.map(after).fold(first, |all, part| all + "\"last_used\":-" + &part);
    json.split_inclusive('\n').map(in_columns).collect()
}

/// Whether it is a line of `list -H -p`: its last columns are the time of the last use and `created_by`.
fn columns_are_of_a_list(line: &str) -> bool {
    line.matches('\t').count() == 21
}

fn play(lab: &Lab) -> Vec<(String, Option<i32>, String, String)> {
    let one = |step: Step| {
        let args: Vec<&str> = step.args.iter().map(String::as_str).collect();
        let run: Run = match &step.input {
            Some(input) => lab.run_with_input(&args, input),
            None => lab.run(&args),
        };
        let stdout = without_times(&without_last_use(&(step.compare)(&run.stdout)));
        (step.args.join(" "), run.status.code(), stdout, without_times(&run.stderr))
    };
    scenario().into_iter().map(one).collect()
}

fn lab() -> Lab {
    let lab = Lab::with_pool("256M");
    let mut image = noise(7, 8 << 20);
    image[1 << 20..3 << 20].fill(0);
    lab.write_file("image.raw", &image);
    lab
}

#[test]
fn every_verb_does_and_says_the_same_on_a_served_and_on_an_idle_pool() {
    let (idle, served) = (lab(), lab());
    let server = Server::start(&served);
    let (expected, found) = (play(&idle), play(&served));
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(found, expected, "served (left), idle (right)");
    }
    assert!(fs::read(served.path("out.raw")).unwrap() == fs::read(idle.path("out.raw")).unwrap());
    assert!(!served.path("none.out").exists());
    server.stop();
    served.assert_clean();
    assert!(served.contents("file") == idle.contents("file"));
}

#[test]
fn what_verbs_change_clients_see_at_once() {
    let lab = lab();
    let server = Server::start(&lab);
    lab.ok(&["import", "image.raw", "pool.img/a"]);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    assert!(client.read(0, 4096).unwrap() == noise(7, 4096));
    lab.ok(&["snapshot", "pool.img/a@x"]);
    client.write(0, &noise(8, 4096), false).unwrap();
    lab.ok(&["clone", "pool.img/a@x", "pool.img/b"]);
    let mut clone = Client::connect(server.socket(), "b").unwrap();
    assert!(clone.read(0, 4096).unwrap() == noise(7, 4096));
    assert!(client.read(0, 4096).unwrap() == noise(8, 4096));
    let changes = lab.json(&["diff", "pool.img/a@x"]);
    assert_eq!(changes, serde_json::json!([{"offset": 0, "length": 4096, "exists": true}]));
}

#[test]
fn a_copy_of_a_pool_is_not_mistaken_for_the_served_one() {
    // Pools with the same UUID: one is open at a time.
    let lab = lab();
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    fs::copy(lab.path(POOL), lab.path("copy.img")).unwrap();
    let server = Server::start(&lab);
    lab.run(&["delete", "copy.img/a"]).refused();
    server.stop();
    lab.ok(&["delete", "copy.img/a"]);
    assert_eq!(lab.names(), ["a"]);
}
