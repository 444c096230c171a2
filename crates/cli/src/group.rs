//! Users and groups by name or number.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Returns the number of a group.
pub fn number(group: &str) -> Result<u32> {
    number_in("group", group).with_context(|| format!("there is no group '{group}'"))
}

/// Returns the number of a user.
pub fn user_number(user: &str) -> Result<u32> {
    number_in("passwd", user).with_context(|| format!("there is no user '{user}'"))
}

/// Parses `USER`, `USER:GROUP` or `:GROUP`.
pub fn owner(text: &str) -> Result<(Option<u32>, Option<u32>)> {
    let (user, group) = text.split_once(':').map_or((text, ""), |(user, group)| (user, group));
    ensure!(!user.is_empty() || !group.is_empty(), "'{text}' is not USER, USER:GROUP or :GROUP");
    let user = (!user.is_empty()).then(|| user_number(user)).transpose()?;
    let group = (!group.is_empty()).then(|| number(group)).transpose()?;
    Ok((user, group))
}

fn number_in(database: &str, name: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let file = std::fs::read_to_string(Path::new("/etc").join(database)).unwrap_or_default();
    if let Some(number) = find(&file, name) {
        return Some(number);
    }
    // Those of a directory service, if one is configured.
    let asked = Command::new("getent").args([database, "--", name]).output();
    let answer = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    find(&answer, name)
}

fn find(lines: &str, name: &str) -> Option<u32> {
    lines.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
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
        assert_eq!(user_number("root").unwrap(), 0);
        assert!(user_number("no-such-user").unwrap_err().to_string().contains("no user 'no-such-user'"));
        let owners = ["7", "7:8", "root:", ":8"].map(|text| owner(text).unwrap());
        assert_eq!(owners, [(Some(7), None), (Some(7), Some(8)), (Some(0), None), (None, Some(8))]);
        assert!(owner(":").unwrap_err().to_string().contains("USER:GROUP"));
        assert_eq!(find("a:x:7:b\nkvm:x:104:\n", "kvm"), Some(104));
        assert_eq!(find("kvm:x\nx:kvm:1:", "kvm"), None);
    }
}
