//! Table of the exports that each certificate may open.
//!
//! The entries have an order. The first entry that matches the client *and* the export
//! determines the access; without one the export does not exist for that client.

use forkdisk::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::identity::{Identity, parse_fingerprint};

/// One entry of the table, as written in TOML.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessEntry {
    /// Common name or one of the alternative names of the certificate; `*` matches any run of
    /// characters. `None`: any name.
    pub name: Option<String>,
    /// SHA-256 of the certificate in hexadecimal digits, with or without colons; `None`: any.
    pub fingerprint: Option<String>,
    /// Exports it may open: names in which `*` matches any run of characters.
    pub exports: Vec<String>,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
}

/// Access of a client to an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// None: it does not exist for this client.
    None,
    /// Read-only.
    ReadOnly,
    /// As the export allows.
    Full,
}

#[derive(Clone, Debug)]
struct Rule {
    exports: Vec<String>,
    permission: Permission,
}

#[derive(Clone, Debug)]
struct Entry {
    name: Option<String>,
    fingerprint: Option<[u8; 32]>,
    rule: Rule,
}

/// The access table, as described above.
#[derive(Clone, Debug, Default)]
pub struct AccessTable {
    /// `None`: every client may open every export.
    entries: Option<Vec<Entry>>,
}

impl AccessTable {
    /// Creates a table that allows every client every export.
    pub fn open() -> AccessTable {
        AccessTable::default()
    }

    /// Creates a table with these entries.
    ///
    /// # Errors
    /// `Invalid` for an entry without a client or without exports, or with a fingerprint that is none.
    pub fn new(entries: Vec<AccessEntry>) -> Result<AccessTable> {
        let entries: Result<Vec<Entry>> = entries.into_iter().enumerate().map(|(i, e)| entry(i, e)).collect();
        Ok(AccessTable { entries: Some(entries?) })
    }

    /// Returns whether the table restricts clients.
    pub fn is_restricted(&self) -> bool {
        self.entries.is_some()
    }

    /// Returns what the client with this certificate may open.
    pub fn grants(&self, identity: Option<&Identity>) -> Grants {
        let Some(entries) = &self.entries else {
            return Grants::everything();
        };
        let mine = entries.iter().filter(|e| identity.is_some_and(|i| e.is_about(i)));
        Grants { rules: Some(mine.map(|e| e.rule.clone()).collect()) }
    }
}

fn entry(index: usize, entry: AccessEntry) -> Result<Entry> {
    let bad = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("client {} of the table {what}", index + 1)));
    if entry.name.is_none() && entry.fingerprint.is_none() {
        return bad("has neither a name nor a fingerprint; name = \"*\" matches every client");
    }
    if entry.exports.is_empty() {
        return bad("may open nothing: exports is empty; leave the client out instead");
    }
    let fingerprint = entry.fingerprint.as_deref().map(parse_fingerprint);
    if fingerprint == Some(None) {
        return bad("has a fingerprint that is not the 64 hexadecimal digits of a SHA-256");
    }
    let permission = if entry.read_only { Permission::ReadOnly } else { Permission::Full };
    let rule = Rule { exports: entry.exports, permission };
    Ok(Entry { name: entry.name, fingerprint: fingerprint.flatten(), rule })
}

impl Entry {
    fn is_about(&self, identity: &Identity) -> bool {
        let named = self.name.as_ref().is_none_or(|p| identity.names.iter().any(|name| matches(p, name)));
        named && self.fingerprint.is_none_or(|f| f == identity.fingerprint)
    }
}

/// Exports that one client may open.
#[derive(Clone, Debug)]
pub struct Grants {
    rules: Option<Vec<Rule>>,
}

impl Grants {
    /// Returns grants for all exports.
    pub fn everything() -> Grants {
        Grants { rules: None }
    }

    /// Returns whether some exports may be closed to the client.
    pub fn is_restricted(&self) -> bool {
        self.rules.is_some()
    }

    /// Returns the client's access to `export`.
    pub fn on(&self, export: &str) -> Permission {
        let Some(rules) = &self.rules else {
            return Permission::Full;
        };
        let rule = rules.iter().find(|rule| rule.exports.iter().any(|pattern| matches(pattern, export)));
        rule.map_or(Permission::None, |rule| rule.permission)
    }
}

/// Returns whether `text` matches `pattern`, in which `*` matches any run of characters.
fn matches(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let Some(last) = pieces.next_back() else {
        return rest.is_empty();
    };
    for piece in pieces {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, mark: u8) -> Identity {
        Identity { names: vec!["other".to_owned(), name.to_owned()], fingerprint: [mark; 32] }
    }

    fn client(name: &str, exports: &[&str], read_only: bool) -> AccessEntry {
        let exports = exports.iter().map(|e| (*e).to_owned()).collect();
        AccessEntry { name: Some(name.to_owned()), fingerprint: None, exports, read_only }
    }

    #[test]
    fn stars_stand_for_any_run_of_characters() {
        let cases = [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "ac", true),
            ("a*c", "acb", false),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "a1c", false),
            ("ab*ba", "aba", false),
            ("vm/*@*", "vm/x@y", true),
            ("vm/*@*", "vm/x", false),
        ];
        for (pattern, text, expected) in cases {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn the_first_entry_about_client_and_export_decides() {
        let table = AccessTable::new(vec![
            client("vm*", &["disks/frozen"], true),
            client("vm1", &["disks/*"], false),
            client("backup", &["*"], true),
        ]);
        let table = table.expect("a sound table");
        let vm1 = table.grants(Some(&identity("vm1", 1)));
        assert_eq!(vm1.on("disks/frozen"), Permission::ReadOnly);
        assert_eq!(vm1.on("disks/a"), Permission::Full);
        assert_eq!(vm1.on("elsewhere"), Permission::None);
        let vm2 = table.grants(Some(&identity("vm2", 1)));
        assert_eq!([vm2.on("disks/frozen"), vm2.on("disks/a")], [Permission::ReadOnly, Permission::None]);
        assert_eq!(table.grants(Some(&identity("backup", 1))).on("disks/a"), Permission::ReadOnly);
        assert_eq!(table.grants(Some(&identity("stranger", 1))).on("disks/a"), Permission::None);
        assert_eq!(
            table.grants(None).on("disks/a"),
            Permission::None,
            "with a table, a client without a name has no permission"
        );
        assert_eq!(AccessTable::open().grants(None).on("disks/a"), Permission::Full);
    }

    #[test]
    fn a_fingerprint_binds_an_entry_to_one_certificate() {
        let fingerprint = Some("07".repeat(32));
        let bound = AccessEntry { fingerprint, ..client("vm", &["*"], false) };
        let table = AccessTable::new(vec![bound]).expect("a sound table");
        assert_eq!(table.grants(Some(&identity("vm", 7))).on("a"), Permission::Full);
        assert_eq!(table.grants(Some(&identity("vm", 8))).on("a"), Permission::None, "same name, another certificate");
        assert_eq!(table.grants(Some(&identity("x", 7))).on("a"), Permission::None, "both must fit");
    }

    #[test]
    fn entries_that_mean_nothing_are_refused() {
        let nobody = AccessEntry { name: None, ..client("", &["*"], false) };
        let nothing = client("a", &[], false);
        let bad = AccessEntry { fingerprint: Some("12".to_owned()), ..client("a", &["*"], false) };
        for (entry, word) in [(nobody, "neither"), (nothing, "empty"), (bad, "SHA-256")] {
            let error = AccessTable::new(vec![client("ok", &["*"], false), entry]).expect_err("refused").to_string();
            assert!(error.contains("client 2") && error.contains(word), "{error}");
        }
    }
}
