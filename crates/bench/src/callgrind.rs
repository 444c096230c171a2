//! Instructions of a part of a benchmark that runs in a separate process, counted by callgrind.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::limits::{LIMIT, Limited as _};
use crate::runner::Context;

/// Environment variable with what the other process does.
pub const WORK: &str = "FORKDISK_BENCH_WORK";

/// Instructions by function.
pub type Costs = BTreeMap<String, u64>;

/// Counts the instructions of the part `inside` of a workload, which finds `work` in the variable [`WORK`].
pub fn count(context: &Context<'_>, (workload, inside): (&str, &str), work: &str) -> Result<Costs> {
    let out = context.ram(&format!("callgrind-{}", work.replace(' ', "-")));
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "-q"]).arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(&context.options.program).args(["bench", workload, "--only", inside, "--json", "--dir"]);
    command.arg(&context.options.dir).env(WORK, work);
    let output = match command.output_within(LIMIT) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            bail!("valgrind is not installed (on Debian: apt-get install valgrind)")
        }
        output => output.context("starting valgrind")?,
    };
    ensure!(output.status.success(), "under valgrind: {}", String::from_utf8_lossy(&output.stderr));
    costs(&out)
}

/// Parses callgrind's file into each function's own instructions: `fn=(number) name`, then lines of
/// position and cost; the line after `calls=` holds the cost of a call and is skipped.
fn costs(path: &Path) -> Result<Costs> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (mut names, mut costs) = (BTreeMap::new(), Costs::new());
    let (mut current, mut of_call) = (String::new(), false);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("fn=") {
            let (number, name) = rest.split_once(' ').unwrap_or((rest, ""));
            if !name.is_empty() {
                names.insert(number.to_string(), short(name));
            }
            current = names.get(number).cloned().unwrap_or_default();
        } else if let Some(rest) = line.strip_prefix("cfn=").and_then(|rest| rest.split_once(' ')) {
            names.insert(rest.0.to_string(), short(rest.1));
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            let cost = line.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
            if let Some(cost) = cost.filter(|_| !std::mem::take(&mut of_call)) {
                *costs.entry(current.clone()).or_default() += cost;
            }
        }
    }
    ensure!(!costs.is_empty(), "callgrind counted nothing");
    Ok(costs)
}

/// Returns the last parts of a function's name, without type parameters, trait and hash.
fn short(name: &str) -> String {
    let of_trait = name.strip_prefix('<').and_then(|rest| rest.split_once(" as "));
    let name = match of_trait.and_then(|(of, rest)| Some((of, rest.rsplit_once(">::")?.1))) {
        Some((of, function)) => format!("{of}::{function}"),
        None => name.to_string(),
    };
    let mut depth = 0;
    let plain: String = name
        .chars()
        .filter(|&c| {
            depth += i32::from(c == '<');
            let keep = depth == 0;
            depth -= i32::from(c == '>');
            keep
        })
        .collect();
    let is_hash = |part: &str| part.len() == 17 && part.starts_with('h');
    let parts: Vec<&str> = plain.split("::").filter(|part| !part.is_empty() && !is_hash(part)).collect();
    parts[parts.len().saturating_sub(3)..].join("::")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_told_apart_from_what_they_call() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let text = "events: Ir\nfn=(1) a::b::<u8>::c\n10 5\n+1 3\ncfn=(2) d\ncalls=1 20\n12 100\nfn=(2)\n20 \
            100\nfn=(1)\n* 2\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(costs(&path).unwrap(), Costs::from([("a::b::c".into(), 10), ("d".into(), 100)]));
        assert_eq!(short("<forkdisk::x::Y<T> as a::Z<B>>::poll::h0123456789abcdef"), "x::Y::poll");
    }
}
