//! Groups of users by name or number.

use std::process::Command;

use anyhow::{Result, bail};

const FILE: &str = "/etc/group";

/// Returns the number of a group.
pub fn number(group: &str) -> Result<u32> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let file = std::fs::read_to_string(FILE).unwrap_or_default();
    if let Some(number) = find(&file, group) {
        return Ok(number);
    }
    // Groups of a directory service, if one is configured.
    let asked = Command::new("getent").args(["group", "--", group]).output();
    let answer = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    match find(&answer, group) {
        Some(number) => Ok(number),
        None => bail!("there is no group '{group}'"),
    }
}

fn find(lines: &str, group: &str) -> Option<u32> {
    lines.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(number("4711").unwrap(), 4711);
        assert_eq!(number("root").unwrap(), 0);
        assert!(number("no-such-group").unwrap_err().to_string().contains("no-such-group"));
        assert_eq!(find("a:x:7:b\nkvm:x:104:\n", "kvm"), Some(104));
        assert_eq!(find("kvm:x\nx:kvm:1:", "kvm"), None);
    }
}
