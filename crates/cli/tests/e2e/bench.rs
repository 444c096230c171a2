//! `bench`: runs to its end and reports what it measured. The measurements themselves are not
//! tested, except exact counts.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Lab, missing, wait_at_most, wait_until};

#[test]
fn the_counts_of_the_engine_are_written_as_rows_and_meet_their_goals() {
    let lab = Lab::empty();
    let text = lab.ok(&["bench", "engine", "--quick", "--only", "counts", "--dir", ".", "--json", "rows.json"]);
    assert!(text.starts_with("case "), "a table besides: {text}");
    let rows: Value = serde_json::from_slice(&std::fs::read(lab.path("rows.json")).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    let keys = ["case", "goal", "max", "median", "met", "metric", "min", "n", "sense", "target", "unit", "workload"];
    for row in rows {
        let mut names: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, keys);
        assert_eq!(row["workload"], "engine");
        assert_ne!(row["met"], false, "{row}");
    }
    let first = rows.iter().find(|r| r["case"] == "counts/first-4k-seq" && r["metric"] == "data_bytes_per_byte");
    let first = first.expect("first writes are counted");
    assert_eq!((&first["median"], &first["sense"], &first["met"]), (&1.0.into(), &"<=".into(), &true.into()));
    let left: Vec<_> = std::fs::read_dir(lab.path(".")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["rows.json"], "what it made is removed");
}

#[test]
fn a_case_or_a_folder_that_is_not_there_is_refused() {
    let lab = Lab::empty();
    let message = lab.run(&["bench", "engine", "--only", "nothing"]).refused();
    assert!(message.contains("\"nothing\"") && message.contains("counts"), "{message}");
    let message = lab.run(&["bench", "engine", "--only", "counts", "--dir", "nowhere"]).refused();
    assert!(message.contains("nowhere"), "{message}");
    let message = lab.run(&["bench", "engine", "rows.json"]).refused();
    assert!(message.contains("--json"), "{message}");
}

#[test]
fn breaks_copy_nothing_and_first_writes_keep_their_order() {
    let lab = Lab::empty();
    let met = |arguments: &[&str], metric: &str| {
        let text = lab.ok(&[&["bench"], arguments, &["--quick", "--no-peers", "--dir", ".", "--json"]].concat());
        let rows: Value = serde_json::from_str(&text).unwrap();
        let of_metric: Vec<Value> =
            rows.as_array().unwrap().iter().filter(|row| row["metric"] == metric).cloned().collect();
        assert!(!of_metric.is_empty(), "{metric} is measured");
        of_metric.iter().for_each(|row| assert_eq!(row["met"], true, "{row}"));
    };
    met(&["w2", "--only", "split"], "data_bytes_per_byte");
    met(&["w2", "--only", "split"], "read_bytes_per_byte");
    met(&["w3", "--only", "thin"], "inversions");
}

#[test]
fn without_peers_nothing_of_theirs_is_missing() {
    let rows = rows_of(&Lab::empty(), &["w1"]);
    let is_ours = |row: &Value| row["target"] == "forkdisk" && row["case"].as_str().unwrap().starts_with("attached/");
    assert!(!rows.is_empty() && rows.iter().all(is_ours), "{rows:?}");
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return missing("a volume cannot be attached: that needs root and /dev/fuse");
    }
    let figure = |row: &Value| row["median"].as_f64().is_some();
    assert!(rows.iter().all(figure), "{rows:?}");
    let read = |row: &&Value| row["metric"] == "read_bytes_per_byte";
    assert!(rows.iter().filter(read).all(|row| row["median"] == 0.0), "nothing is copied: {rows:?}");
}

/// A benchmark that waits for its own mount could not be killed, and would block every `sync`.
#[test]
fn a_benchmark_that_is_told_to_end_takes_its_mount_with_it() {
    let lab = Lab::empty();
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return missing("a benchmark cannot mount: that needs root and /dev/fuse");
    }
    let args = ["bench", "w5", "--no-peers", "--only", "random-described", "--dir", "."];
    let mut child = lab.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let here = std::fs::canonicalize(lab.path(".")).unwrap().to_string_lossy().into_owned();
    let is_mounted = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&here);
    let its_own = || std::fs::read_dir(lab.path(".")).unwrap().next().map(|entry| entry.unwrap().path());
    wait_until("it writes to a clone", || is_mounted() && its_own().is_some_and(|dir| dir.join("mnt/b").exists()));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = wait_at_most(&mut child, Duration::from_secs(20));
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{status:?}");
    assert!(!is_mounted() && its_own().is_none(), "what it made is removed");
}

/// Returns the rows of a benchmark without peers, with `--only` one of its cases.
fn rows_of(lab: &Lab, arguments: &[&str]) -> Vec<Value> {
    let run = [&["bench"], arguments, &["--quick", "--no-peers", "--dir", ".", "--json"]].concat();
    let rows: Value = serde_json::from_str(&lab.ok(&run)).unwrap();
    rows.as_array().unwrap().clone()
}

#[test]
fn an_origin_is_read_once_and_copied_once_and_deleting_moves_no_data() {
    let lab = Lab::empty();
    let figure = |rows: &[Value], case: &str, metric: &str| {
        let fits = |row: &&Value| row["case"] == case && row["metric"] == metric;
        rows.iter().find(fits).and_then(|row| row["median"].as_f64()).unwrap_or_else(|| panic!("{case} {metric}"))
    };
    let rows = rows_of(&lab, &["w1", "--origin", "--only", "origin-512k"]);
    for device in ["same-device", "second-device"] {
        let case = format!("origin-512k/{device}");
        let (read, written) =
            (figure(&rows, &case, "read_bytes_per_byte"), figure(&rows, &case, "written_bytes_per_byte"));
        assert!(
            (1.0..1.01).contains(&read) && (2.0..2.01).contains(&written),
            "{case}: {read} read, {written} written"
        );
        for model in ["spindle", "ssd", "cloud"] {
            let of_bound = figure(&rows, &case, &format!("{model}_of_bound"));
            assert!(of_bound > 0.0 && of_bound <= 1.05, "{case}, {model}: {of_bound} of a bound");
        }
    }
    let rows = rows_of(&lab, &["w4", "--only", "delete"]);
    for snapshots in [16, 1000] {
        assert_eq!(figure(&rows, &format!("delete/4096-chunks-of-{snapshots}"), "data_bytes"), 0.0);
    }
}

#[test]
fn every_case_of_w4_has_all_its_rows() {
    let lab = Lab::empty();
    for case in ["chained", "independent", "random", "read-of-1-of-1000"] {
        let rows = rows_of(&lab, &["w4", "--only", case]);
        assert!(rows.len() > 3, "{case}");
        for row in &rows {
            assert!(row["median"].is_number(), "a row that is required, or was measured, has a figure: {row}");
        }
    }
}

#[test]
fn rounds_through_a_mount_cost_and_hold_the_same() {
    let lab = Lab::empty();
    if !std::path::Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
        return crate::harness::missing("mounting a pool needs root and the kernel module fuse");
    }
    let rows = |only: &str| -> Vec<Value> {
        let run = ["bench", "w5", "--quick", "--no-peers", "--rounds", "3", "--size", "16M", "--only", only];
        serde_json::from_str(&lab.ok(&[&run[..], &["--dir", ".", "--json"]].concat())).unwrap()
    };
    for mode in ["random-described", "incremental-coded"] {
        let rows = rows(mode);
        let exact = rows.iter().find(|row| row["metric"] == "contents_off_distinct_pages").expect("space is counted");
        assert_eq!(exact["median"], 0.0, "{exact}");
        let case = format!("{mode}/clone");
        let pages = rows.iter().find(|row| row["case"] == case && row["metric"] == "map_pages").expect("counted");
        let (least, most) = (pages["min"].as_f64().unwrap(), pages["max"].as_f64().unwrap());
        assert!(least > 0.0 && most - least <= 2.0, "clones of later rounds cost what the first did: {pages}");
    }
    let size = rows("size");
    assert!(size.iter().all(|row| row["met"] != false), "{size:?}");
}

#[test]
fn a_fleet_reads_its_image_once_and_is_as_cheap_at_any_depth() {
    let lab = Lab::empty();
    if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
        return missing("loop devices and mounts need root and the kernel module fuse");
    }
    let rows = rows_of(&lab, &["fleet", "--only", "storm"]);
    for door in ["nbd", "mount", "vhost-user"] {
        let is_it = |row: &&Value| row["case"] == format!("storm/{door}") && row["metric"] == "seconds";
        assert!(rows.iter().find(is_it).is_some_and(|row| row["median"].as_f64() > Some(0.0)), "{door}: {rows:?}");
    }
    let counted = |rows: &[Value], metric: &str, number: usize| {
        let of_metric: Vec<&Value> = rows.iter().filter(|row| row["metric"] == metric).collect();
        assert_eq!(of_metric.len(), number, "{metric}: {rows:?}");
        of_metric.iter().for_each(|row| assert_eq!(row["met"], true, "{row}"));
    };
    counted(&rows, "device_bytes_read_over_image", 3);
    let rows = rows_of(&lab, &["fleet", "--only", "depth"]);
    counted(&rows, "device_reads_ratio_to_depth_1", 3);
    let rows = rows_of(&lab, &["fleet", "--only", "fork"]);
    let flushes: Vec<f64> =
        rows.iter().filter(|row| row["metric"] == "flushes").map(|row| row["median"].as_f64().unwrap()).collect();
    assert_eq!(flushes.len(), 3, "{rows:?}");
    assert!(flushes.iter().all(|&n| n == flushes[0]), "a fork of a hundred flushes as often as one: {flushes:?}");
}
