//! Test of the example `branch`.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../examples/branch.rs"]
#[allow(dead_code, reason = "`main` is for the command line")]
mod branch;

use std::cell::RefCell;
use std::rc::Rc;

#[test]
fn the_example_shows_each_verb() {
    let dir = tempfile::tempdir().expect("a directory for the pool");
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = lines.clone();
    branch::run(&dir.path().join("pool.img"), move |line| sink.borrow_mut().push(line)).expect("the example runs");
    let expected = [
        "a pool of 64 MiB",
        "base: 1024 GiB long, 8 KiB of it are there",
        "base says \"second\", base@before says \"first\"",
        "branch says \"third\", base still \"second\"",
        "after a range clone branch says \"second\" there",
        "diff: 4096 bytes at 0: Different",
        "diff: 4096 bytes at 65536: RightOnly",
        "after a discard branch says \"\"",
        "all deleted: 0 KiB are used by volumes",
    ];
    assert_eq!(*lines.borrow(), expected);
}
