//! The configuration: sources of values and their precedence.

use crate::harness::{LIMIT, Lab, Limited, POOL};

fn effective(lab: &Lab, env: &[(&str, &str)], args: &[&str]) -> Vec<(String, String, String)> {
    let mut command = lab.command(&[&["config", "--json"], args].concat());
    let output = command.envs(env.iter().copied()).output_within(LIMIT).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let records: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("-").to_string();
    let record = |record: &serde_json::Value| (text(&record["key"]), text(&record["value"]), text(&record["from"]));
    records.as_array().unwrap().iter().map(record).collect()
}

#[test]
fn a_flag_counts_before_a_variable_before_the_file_before_the_default() {
    let lab = Lab::empty();
    lab.write_file("c.toml", b"socket = \"file\"\npid_file = \"file\"\nlog_file = \"file\"\n");
    let env = [("FORKDISK_SOCKET", "variable"), ("FORKDISK_PID_FILE", "variable"), ("FORKDISK_CONFIG", "c.toml")];
    let found = effective(&lab, &env, &["--socket", "flag"]);
    for (key, value, from) in [
        ("socket", "flag", "flag --socket"),
        ("pid_file", "variable", "environment FORKDISK_PID_FILE"),
        ("log_file", "file", "c.toml:3"),
        ("max_requests", "128", "default"),
    ] {
        let expected = (key.to_string(), value.to_string(), from.to_string());
        assert!(found.contains(&expected), "{expected:?} in {found:?}");
    }
}

#[test]
fn the_help_of_serve_and_the_configuration_know_the_same_keys() {
    let lab = Lab::empty();
    let help = lab.ok(&["serve", "--help"]);
    let keys = effective(&lab, &[], &[]);
    assert!(keys.len() > 20);
    for (key, _, _) in keys {
        assert!(help.contains(&format!("--{}", key.replace('_', "-"))), "{key} in {help}");
    }
}

#[test]
fn a_key_that_does_not_exist_is_refused_with_its_place_and_the_nearest_one() {
    let lab = Lab::with_pool("64M");
    lab.write_file("c.toml", b"# ours\nsoket = \"s\"\n");
    for args in [&["--config", "c.toml", "list", POOL][..], &["serve", POOL, "--config", "c.toml"]] {
        let message = lab.run(args).refused();
        assert!(message.contains("c.toml:2") && message.contains("did you mean socket?"), "{message}");
    }
    let message = lab.run(&["list", POOL, "--config", "none.toml"]).refused();
    assert!(message.contains("none.toml"), "{message}");
}

#[test]
fn every_verb_finds_its_pool_in_the_file() {
    let lab = Lab::with_pool("64M");
    let pool = lab.path(POOL);
    lab.write_file("c.toml", format!("pool = {:?}\n", pool.to_str().unwrap()).as_bytes());
    lab.ok(&["--config", "c.toml", "create", "a", "--size", "1M"]);
    assert!(lab.ok(&["list", "-H", "--config", "c.toml"]).starts_with("a\tvolume"));
    assert_eq!(lab.run(&["list", "--log", "loud"]).status.code(), Some(2));
}

#[test]
fn the_documentation_lists_every_key() {
    let lab = Lab::empty();
    let records = lab.json(&["config"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().replace('|', "\\|");
    let row = |key: &serde_json::Value| {
        let default = key["default"].as_str().map_or(String::new(), |default| format!("`{default}`"));
        format!("| `{}` | {} | {default} | {} |", text(&key["key"]), text(&key["takes"]), text(&key["help"]))
    };
    let rows: Vec<String> = records.as_array().unwrap().iter().map(row).collect();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let documented = std::fs::read_to_string(path).expect("docs/configuration.md");
    let found: Vec<&str> = documented.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(found, rows, "the table should read:\n{}", rows.join("\n"));
}
