//! Verbs on an idle pool wait for each other.

use std::io::Write;
use std::process::Stdio;

use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Run, Server, noise, wait_until};

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

#[test]
fn many_verbs_at_once_are_all_carried_out() {
    let lab = Lab::with_pool("64M");
    lab.import("golden", &noise(1, 1 << 20));
    lab.ok(&["snapshot", &at("golden@1")]);
    let start = |i: usize| {
        let (source, clone) = (at("golden@1"), at(&format!("job-{i}")));
        lab.command(&["clone", &source, &clone, "--wait", "60"]).stderr(Stdio::piped()).spawn().unwrap()
    };
    let all: Vec<_> = (0..12).map(start).collect();
    for child in all {
        Run::from(child.output_within(LIMIT).unwrap()).ok();
    }
    assert_eq!(lab.names().len(), 14);
    lab.assert_clean();
}

#[test]
fn a_list_waits_for_an_import_and_sees_what_it_made() {
    let lab = Lab::with_pool("64M");
    let mut import = lab.command(&["import", "-", &at("a")]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = import.stdin.take().unwrap();
    stdin.write_all(&noise(1, 1 << 20)).unwrap();
    wait_until("the import has the pool", || !lab.run(&["list", POOL, "--wait", "0"]).status.success());
    let list = lab.command(&["list", POOL, "-H", "--wait", "1m"]).stdout(Stdio::piped()).spawn().unwrap();
    let end = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(stdin);
    });
    let serve = Server::start_with(&lab, POOL, &["--wait", "1m"]);
    end.join().unwrap();
    assert!(import.wait_within(LIMIT).unwrap().success());
    let listed = Run::from(list.output_within(LIMIT).unwrap()).ok();
    assert!(listed.starts_with("a\t"), "{listed}");
    serve.stop();
}
