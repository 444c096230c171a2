//! Exceptions from the rules: few, each with a reason.

use crate::Violation;

/// Most exceptions of all rules together.
pub const MOST_COUNT: usize = 10;

/// An exception: violations of `rule` in files whose path begins with `path` and whose text has `what` are not counted.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    pub rule: &'static str,
    pub path: &'static str,
    pub what: &'static str,
    pub reason: &'static str,
}

/// All exceptions.
pub const ALLOWED: &[Allowed] = &[
    Allowed {
        rule: "lines",
        path: "lab/",
        what: "line of",
        reason: "one-line commands of scenarios whose measured results are kept: they run as they ran then",
    },
    Allowed {
        rule: "units",
        path: "crates/bench/",
        what: "has no unit",
        reason: "numbers of one case each, beside the workload that they describe",
    },
];

/// Returns `violations` without those that `allowed` names for `rule`.
pub fn filter(allowed: &[Allowed], rule: &str, violations: Vec<Violation>) -> Vec<Violation> {
    let is_allowed = |violation: &Violation| {
        allowed.iter().any(|entry| {
            entry.rule == rule && violation.path.starts_with(entry.path) && violation.what.contains(entry.what)
        })
    };
    violations.into_iter().filter(|violation| !is_allowed(violation)).collect()
}

/// Returns the exceptions for `rule` that no violation needs any more.
pub fn unused<'a>(allowed: &'a [Allowed], rule: &str, violations: &[Violation]) -> Vec<&'a Allowed> {
    let is_needed = |entry: &Allowed| {
        violations.iter().any(|found| found.path.starts_with(entry.path) && found.what.contains(entry.what))
    };
    allowed.iter().filter(|entry| entry.rule == rule && !is_needed(entry)).collect()
}

/// Returns what is wrong with the list itself: too many entries, one without a reason.
pub fn check(allowed: &[Allowed]) -> Vec<String> {
    let mut problems = Vec::new();
    if allowed.len() > MOST_COUNT {
        problems.push(format!("{} exceptions, at most {MOST_COUNT}: mend the code instead", allowed.len()));
    }
    for entry in allowed {
        if entry.reason.split_whitespace().count() < 3 || entry.what.is_empty() {
            problems.push(format!("{} of {}: an exception needs a reason and a text", entry.rule, entry.path));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;

    const ENTRY: Allowed = Allowed { rule: "lines", path: "a.rs", what: "of 130", reason: "a table of the kernel" };

    #[test]
    fn only_what_is_named_is_allowed() {
        let of = |path: &str, what: &str| Violation::new(&Source::new(path, ""), 1, what);
        let all = vec![of("a.rs", "line of 130"), of("a.rs", "line of 140"), of("b.rs", "line of 130")];
        assert_eq!(filter(&[ENTRY], "lines", all.clone()).len(), 2);
        assert_eq!(filter(&[ENTRY], "files", all).len(), 3);
    }

    #[test]
    fn an_exception_that_nothing_needs_is_found() {
        let violation = Violation::new(&Source::new("a.rs", ""), 1, "line of 130");
        assert_eq!(unused(&[ENTRY], "lines", &[violation]).len(), 0);
        assert_eq!(unused(&[ENTRY], "lines", &[]).len(), 1);
        assert_eq!(unused(&[ENTRY], "files", &[]).len(), 0);
    }

    #[test]
    fn an_eleventh_exception_or_one_without_a_reason_is_found() {
        assert_eq!(check(&[ENTRY; 10]).len(), 0);
        assert_eq!(check(&[ENTRY; 11]).len(), 1);
        assert_eq!(check(&[Allowed { reason: "", ..ENTRY }]).len(), 1);
    }
}
