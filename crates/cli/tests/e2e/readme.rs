//! The first steps of the README, as documented.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{LIMIT, Lab, Limited, Run, client};

/// Separator of the outputs of two steps.
const MARK: &str = "== next step ==";

/// Returns the commands of the README's transcripts, with their documented output (if empty, it is not compared).
fn steps() -> Vec<(String, String)> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = fs::read_to_string(readme).expect("the README");
    let mut steps: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match line.strip_prefix("$ ") {
            _ if line.starts_with("```") => inside = line == "```console",
            _ if !inside => {}
            Some(command) => steps.push((command.to_string(), String::new())),
            None => {
                let said = &mut steps.last_mut().expect("a transcript begins with a command").1;
                said.push_str(line);
                said.push('\n');
            }
        }
    }
    steps
}

/// Returns a script for all steps: later steps end processes that earlier ones started.
fn script(steps: &[(String, String)]) -> String {
    let mut script = "set -e\n".to_string();
    for (command, _) in steps {
        script += &match command.strip_suffix(" &") {
            // Waits as a reader would by typing.
            Some(server) => {
                format!("{server} >/dev/null &\nfor i in $(seq 600); do [ -S nbd.sock ] || sleep 0.1; done\n")
            }
            None => format!("{command}\n"),
        };
        script += &format!("echo '{MARK}'\n");
    }
    script
}

#[test]
fn the_first_steps_of_the_readme_print_what_it_says() {
    if client("qemu-io", "qemu-utils").is_none() {
        return;
    }
    let (lab, steps) = (Lab::empty(), steps());
    assert!(steps.len() > 10, "the README shows the first steps");
    let program = Path::new(env!("CARGO_BIN_EXE_forkdisk")).parent().expect("a folder");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("bash");
    shell.args(["-c", &script(&steps)]).current_dir(lab.path("")).env("PATH", path).stdin(Stdio::null());
    shell.env_remove("FORKDISK_POOL").env_remove("FORKDISK_LOG");
    let printed = Run::from(shell.output_within(LIMIT).expect("bash runs")).ok();
    let outputs: Vec<&str> = printed.split(&format!("{MARK}\n")).collect();
    for ((command, said), output) in steps.iter().zip(outputs) {
        assert!(said.is_empty() || said == output, "$ {command}\n{output}the README says:\n{said}");
    }
}
