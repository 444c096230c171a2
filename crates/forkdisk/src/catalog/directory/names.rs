//! Names: lookup, contents of folders, and which names are allowed.

use std::ops::Bound;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{FileKind, MAX_NAME_BYTES, NO_VOLUME, VolumeRecord, VolumeState};
use crate::names::{NAME_MARKS, escape_name, has_sound_escapes, is_name_character};
use crate::types::VolumeId;

use super::super::{CatalogEntry, Directory, check_origin_text};
use super::hard_links::file_of;
use super::remnants::{REMNANTS, kept_snapshot, kept_within, remnants_of};

/// Begins names that no volume can have.
const ASIDE: char = '\0';

/// How a name in a folder was found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// A volume, or the record of a folder.
    Child(FileKind),
    /// Something in a folder.
    Inside,
}

impl Directory {
    /// Renames a folder's record and everything in the folder.
    pub fn rename_folder(&mut self, from: &str, to: &str) {
        let within = |from: &str, to: &str| -> Vec<(VolumeId, String)> {
            entries_within(self, from).map(|(name, id)| (id, format!("{to}{}", &name[from.len()..]))).collect()
        };
        let mut moved = within(from, to);
        moved.extend(within(&remnants_of(from), &remnants_of(to)));
        moved.iter().for_each(|(id, name)| self.rename(*id, name));
    }

    /// Returns a number that changes whenever a name is added or removed.
    pub fn names_version(&self) -> u64 {
        self.names_version
    }

    /// Returns `volume` or `volume@snapshot`, if it exists and is visible.
    pub fn find(&self, name: &str) -> Result<&CatalogEntry> {
        let id = file_of(self, named(self, name)?);
        Ok(self.get(id).expect("found just now"))
    }

    /// Returns the record of a folder, if it has one; the root's name is empty.
    pub fn folder(&self, name: &str) -> Option<&VolumeRecord> {
        let record = &self.get(*self.names.get(&(NO_VOLUME, name.into()))?)?.record;
        (record.state == VolumeState::Folder).then_some(record)
    }

    /// Whether there is anything in the folder `name`.
    pub fn has_children(&self, name: &str) -> bool {
        next_child(self, name, "").is_some()
    }

    /// Returns the name as users see it.
    pub fn full_name(&self, volume: &VolumeRecord) -> String {
        match self.get(volume.parent) {
            Some(parent) if volume.state == VolumeState::Snapshot => format!("{}@{}", parent.record.name, volume.name),
            _ => volume.name.to_string(),
        }
    }

    /// Checks whether `name` may be given to a new volume (`parent` none) or snapshot.
    pub fn check_new(&self, parent: VolumeId, name: &str) -> Result<()> {
        match parent {
            NO_VOLUME => check_volume_name(name)?,
            _ => check_part(name, name)?,
        }
        let shown = match self.get(parent) {
            Some(volume) => format!("{}@{name}", volume.record.name),
            None => name.to_string(),
        };
        let taken = |what: &str| Err(Error::new(ErrorKind::Exists, format!("{shown:?} {what}; choose another name")));
        if parent == NO_VOLUME && self.folder(name).is_some() {
            return taken("is a folder");
        }
        if self.names.contains_key(&(parent, name.into())) {
            return taken("exists already");
        }
        if self.get(parent).is_some_and(|volume| kept_snapshot(self, &volume.record.name, name).is_some()) {
            return taken("exists already, of a file that had this name");
        }
        if parent != NO_VOLUME {
            return Ok(());
        }
        let folder = format!("{name}/");
        let inside = self.names.range((NO_VOLUME, folder.as_str().into())..).next();
        if inside.is_some_and(|((p, n), _)| *p == NO_VOLUME && n.starts_with(&folder)) {
            return taken("is a folder with volumes in it");
        }
        for (i, _) in name.match_indices('/') {
            let above = &name[..i];
            if self.names.contains_key(&(NO_VOLUME, above.into())) && self.folder(above).is_none() {
                return taken(&format!("would lie in {:?}, which is a volume and not a folder", &name[..i]));
            }
        }
        Ok(())
    }
}

/// Returns the number of `volume` or `volume@snapshot`, if it exists and is visible; that of a hard link, not of its
/// file.
pub fn named(directory: &Directory, name: &str) -> Result<VolumeId> {
    let not_found = |text: String| Error::new(ErrorKind::NotFound, text);
    let missing = || not_found(format!("there is no volume or snapshot {name:?}"));
    let is_folder = |volume: &str| not_found(format!("{volume:?} is a folder, not a volume"));
    let (volume, snapshot) = match name.split_once('@') {
        Some((v, s)) => (v, Some(s)),
        None => (name, None),
    };
    let kept = || snapshot.and_then(|snapshot| kept_snapshot(directory, volume, snapshot));
    let Some(mut id) = directory.names.get(&(NO_VOLUME, volume.into())).copied().or_else(kept) else {
        let is_one = directory.has_children(volume) && !volume.is_empty();
        return Err(if is_one { is_folder(volume) } else { missing() });
    };
    if let Some(snapshot) = snapshot.filter(|_| !directory.is_snapshot(id)) {
        id = directory.names.get(&(id, snapshot.into())).copied().or_else(kept).ok_or_else(missing)?;
    }
    match directory.get(file_of(directory, id)).filter(|v| !v.pending) {
        Some(v) if v.record.state == VolumeState::Folder => Err(is_folder(volume)),
        found => found.map(|_| id).ok_or_else(missing),
    }
}

fn check_part(part: &str, whole: &str) -> Result<()> {
    let bad = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("bad name {whole:?}: {why}")));
    if part.is_empty() {
        return bad("a part of it is empty");
    }
    if part == "." || part == ".." || part == ".snapshots" {
        return bad("'.', '..' and '.snapshots' are reserved");
    }
    if whole.len() > MAX_NAME_BYTES {
        return bad("it is longer than 255 bytes");
    }
    if part.starts_with(' ') || part.ends_with(' ') {
        return bad("a part of it begins or ends with a space");
    }
    match part.chars().find(|&c| !is_name_character(c)) {
        Some(c) => {
            let rule = format!("use letters, digits, spaces and any of {NAME_MARKS}, with '/' between folders");
            bad(&format!("{c:?} is not allowed; {rule}; the name that a mount gives it has {:?}", escape(c)))
        }
        None if !has_sound_escapes(part) => bad("'%' stands only before the number of a byte that needs it: '%40'"),
        None => Ok(()),
    }
}

fn escape(c: char) -> String {
    escape_name(c.encode_utf8(&mut [0; 4]).as_bytes())
}

/// Checks whether `name` may be a volume's name.
pub fn check_volume_name(name: &str) -> Result<()> {
    name.split('/').try_for_each(|part| check_part(part, name))
}

/// Whether every name in the folder may begin with `to` instead of `from`.
pub fn check_renamed(directory: &Directory, from: &str, to: &str) -> Result<()> {
    let is_long = |name: &str| name.len() - from.len() + to.len() > MAX_NAME_BYTES;
    if entries_within(directory, &remnants_of(from)).any(|(name, _)| is_long(name)) {
        let why = format!("bad name {to:?}: with it, names of snapshots of removed files are longer than 255 bytes");
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let within = format!("{from}/");
    let names = directory.names.range((NO_VOLUME, within.as_str().into())..);
    let mut inside = names.take_while(|((parent, name), _)| *parent == NO_VOLUME && name.starts_with(&within));
    inside.try_for_each(|((_, name), &id)| {
        let name = format!("{to}{}", &name[from.len()..]);
        check_volume_name(&name)?;
        match directory.get(id).filter(|v| v.record.origin_record.is_some()) {
            Some(CatalogEntry { record, .. }) => {
                let identity = record.stamp.as_ref().map(|stamp| &*stamp.device);
                check_origin_text(&name, &record.origin, identity)
            }
            None => Ok(()),
        }
    })
}

/// Exchanges the names of what has the name `a`, or is in that folder, and of what has the name `b`. The remnants of
/// what was in a folder go along; those of earlier files with the name of a volume stay.
pub fn exchange(directory: &mut Directory, a: &str, b: &str) {
    let within = |from: &str, to: &str| -> Vec<(VolumeId, String)> {
        entries_within(directory, from).map(|(name, id)| (id, format!("{to}{}", &name[from.len()..]))).collect()
    };
    let is_volume =
        |name: &str| directory.names.contains_key(&(NO_VOLUME, name.into())) && directory.folder(name).is_none();
    let all = |from: &str, to: &str| match is_volume(from) {
        true => within(from, to),
        false => [within(from, to), within(&remnants_of(from), &remnants_of(to))].concat(),
    };
    let (to_b, to_a) = (all(a, b), all(b, a));
    // No name may be taken while the other one still has it.
    for (id, name) in &to_b {
        directory.rename(*id, &format!("{ASIDE}{name}"));
    }
    to_a.iter().chain(&to_b).for_each(|(id, name)| directory.rename(*id, name));
}

/// The names and numbers of a folder (empty: the root), if it has a record, and of everything in it.
pub fn entries_within<'a>(directory: &'a Directory, folder: &'a str) -> impl Iterator<Item = (&'a str, VolumeId)> {
    let within = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let from_here = directory.names.range((NO_VOLUME, folder.into())..);
    let all = from_here.take_while(move |((parent, name), _)| *parent == NO_VOLUME && name.starts_with(folder));
    let all = all.filter(move |((_, name), _)| &**name == folder || name.starts_with(&within));
    // Remnants are not in the root.
    let all = all.filter(move |((_, name), _)| !folder.is_empty() || !name.starts_with(".snapshots/"));
    all.map(|((_, name), &id)| (&**name, id))
}

/// Returns the snapshot of volume `id` with this name, if it exists and is visible.
pub fn snapshot_named(directory: &Directory, id: VolumeId, name: &str) -> Option<VolumeId> {
    let snapshot = directory.get(*directory.names.get(&(id, name.into()))?)?;
    (!snapshot.pending).then_some(snapshot.record.id)
}

/// Returns the numbers of a folder, if it has a record, of everything in it, and of remnants of what was in it.
pub fn within_folder<'a>(directory: &'a Directory, folder: &'a str) -> impl Iterator<Item = VolumeId> {
    let kept = kept_within(directory, folder).into_iter().map(|(_, id)| id);
    entries_within(directory, folder).map(|(_, id)| id).chain(kept)
}

/// Iterates over the volumes with names after `after`, sorted by name.
fn volumes_after<'a>(directory: &'a Directory, after: &str) -> impl Iterator<Item = (&'a str, VolumeId)> + use<'a> {
    let behind = directory.names.range((Bound::Excluded((NO_VOLUME, after.into())), Bound::Unbounded));
    let all = behind.take_while(|((parent, _), _)| *parent == NO_VOLUME).map(|((_, name), &id)| (&**name, id));
    let is_visible = |id| directory.get(id).is_some_and(|v| !v.pending && v.record.state != VolumeState::Folder);
    all.filter(move |(_, id)| is_visible(file_of(directory, *id)))
}

/// Returns names of at most `most` volumes and, with `snapshots`, snapshots, each volume before its
/// snapshots: those behind the name `after`, whether that name exists or not.
pub fn names_after(directory: &Directory, after: &str, most: usize, snapshots: bool) -> Vec<String> {
    let of = |volume: VolumeId, name: &str, after: &str| -> Vec<String> {
        let behind = directory.names.range((Bound::Excluded((volume, after.into())), Bound::Unbounded));
        let all = behind.take_while(|((parent, _), _)| *parent == volume && snapshots);
        let all = all.filter(|(_, id)| directory.get(**id).is_some_and(|v| !v.pending));
        all.take(most).map(|((_, snapshot), _)| format!("{name}@{snapshot}")).collect()
    };
    let (volume, snapshot) = after.split_once('@').unwrap_or((after, ""));
    let mut names = match directory.names.get(&(NO_VOLUME, volume.into())) {
        Some(&id) => of(id, volume, snapshot),
        None => Vec::new(),
    };
    for (name, id) in volumes_after(directory, volume) {
        if names.len() >= most {
            break;
        }
        names.push(name.to_string());
        names.extend(of(id, name, ""));
    }
    names.truncate(most);
    names
}

/// Returns the last names of snapshots of a volume in the order of names, at most `most`, without the
/// volume's.
pub fn last_snapshot_names(directory: &Directory, volume: &str, most: usize) -> Vec<String> {
    let Some(&id) = directory.names.get(&(NO_VOLUME, volume.into())) else { return Vec::new() };
    let all = directory.names.range((id, "".into())..(VolumeId(id.0 + 1), "".into())).rev();
    let seen = all.filter(|(_, id)| directory.get(**id).is_some_and(|v| !v.pending));
    let mut names: Vec<String> = seen.take(most).map(|((_, name), _)| name.to_string()).collect();
    names.reverse();
    names
}

/// Returns the first name directly in `folder` that is not before `from`, and how it was found.
fn next_child<'a>(directory: &'a Directory, folder: &str, from: &str) -> Option<(&'a str, Found)> {
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let mut all = directory.names.range((NO_VOLUME, format!("{prefix}{from}").into())..);
    all.find_map(|((parent, name), id)| {
        if *parent != NO_VOLUME || !name.starts_with(&prefix) {
            return Some(None);
        }
        let volume = directory.get(file_of(directory, *id)).filter(|v| !v.pending && !name.is_empty())?;
        let rest = &name[prefix.len()..];
        Some(Some(match rest.split_once('/') {
            Some((child, _)) => (child, Found::Inside),
            None => (rest, Found::Child(volume.record.kind())),
        }))
    })
    .flatten()
}

/// Returns everything directly in `folder` (empty: the root), each with its kind.
pub fn children(directory: &Directory, folder: &str) -> Vec<(String, FileKind)> {
    let (mut out, mut from) = (Vec::new(), String::new());
    while let Some((child, found)) = next_child(directory, folder, &from) {
        let is_of_remnants = folder.is_empty() && child == REMNANTS;
        // The smallest name behind this one, or behind all that is in the folder: `0` comes after `/`.
        from = format!("{child}{}", if found == Found::Inside { '0' } else { '\0' });
        let path = if folder.is_empty() { child.to_string() } else { format!("{folder}/{child}") };
        // A folder with a record comes before what is in it, with other names in between.
        match found {
            Found::Child(kind) => out.push((child.to_string(), kind)),
            Found::Inside if directory.folder(&path).is_none() && !is_of_remnants => {
                out.push((child.to_string(), FileKind::Folder))
            }
            Found::Inside => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a directory with volumes, and folders (names that end with `/`), numbered from 1 on.
    fn directory(names: &[&str]) -> Directory {
        let mut d = Directory::default();
        for (i, name) in names.iter().enumerate() {
            let state = if name.ends_with('/') { VolumeState::Folder } else { VolumeState::Volume };
            let record = VolumeRecord::empty(VolumeId(i as u64 + 1), name.trim_end_matches('/'), 0);
            d.add(VolumeRecord { state, ..record });
        }
        d
    }

    #[test]
    fn names_follow_the_rules() {
        for good in [
            "a",
            "a/b/c",
            "A-1_x.raw",
            "a b/c  d",
            "lost+found",
            "#sql-1~",
            "k=1,12:30",
            "a%40b",
            "\u{e4}",
            &"x".repeat(255),
        ] {
            assert!(check_volume_name(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "/",
            "a/",
            "/a",
            "a//b",
            ".",
            "a/..",
            " a",
            "a /b",
            " ",
            "a\nb",
            "a\"",
            "a%",
            "a@b",
            "a%41",
            ".snapshots",
            &"x".repeat(256),
        ] {
            assert!(check_volume_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_listed_in_pieces_of_any_size() {
        let mut d = directory(&["a", "a-b", "e/", "e/x", "f"]);
        for (id, of, name) in [(10, 1, "2"), (11, 1, "1"), (12, 4, "s"), (13, 5, "t")] {
            let record = VolumeRecord { parent: VolumeId(of), ..VolumeRecord::empty(VolumeId(id), name, 0) };
            d.add(VolumeRecord { state: VolumeState::Snapshot, ..record });
        }
        let version = d.names_version();
        d.get_mut(VolumeId(13)).unwrap().pending = true;
        let all = ["a", "a@1", "a@2", "a-b", "e/x", "e/x@s", "f"];
        for most in 1..10 {
            let (mut names, mut after) = (Vec::new(), String::new());
            loop {
                let piece = names_after(&d, &after, most, true);
                let Some(last) = piece.last() else { break };
                assert!(piece.len() <= most);
                after = last.clone();
                names.extend(piece);
            }
            assert_eq!(names, all, "in pieces of {most}");
        }
        assert_eq!(names_after(&d, "", 2, false), ["a", "a-b"]);
        assert_eq!(names_after(&d, "a", 9, false), ["a-b", "e/x", "f"]);
        assert_eq!(names_after(&d, "a@15", 2, true), ["a@2", "a-b"], "behind one that has gone");
        assert_eq!(names_after(&d, "b@1", 2, true), ["e/x", "e/x@s"]);
        d.show(VolumeId(13));
        assert_eq!(names_after(&d, "f", 2, true), ["f@t"]);
        assert!(d.names_version() > version);
    }

    #[test]
    fn a_folder_lists_what_is_directly_in_it_once() {
        let d = directory(&["a/b/c", "a/b/d", "a/x", "a.b", "a0", "e/", "f/", "f/g", "f.x", "f-y/z"]);
        let all = |folder: &str| -> Vec<String> {
            let mark = |(name, kind)| if kind == FileKind::Folder { format!("{name}/") } else { name };
            children(&d, folder).into_iter().map(mark).collect()
        };
        assert_eq!(all(""), ["a.b", "a/", "a0", "e/", "f/", "f-y/", "f.x"]);
        assert_eq!(
            (all("a"), all("a/b"), all("f")),
            (vec!["b/".into(), "x".into()], vec!["c".into(), "d".into()], vec!["g".into()])
        );
        assert!(all("e").is_empty() && all("none").is_empty() && !d.has_children("e") && d.has_children("a/b"));
    }

    #[test]
    fn a_folder_takes_along_what_is_in_it_and_nothing_beside() {
        let mut d = directory(&["a/", "a/b", "a/c/d", "ab", "a.b/c"]);
        d.rename_folder("a", "x/y");
        assert!(["x/y/b", "x/y/c/d", "ab", "a.b/c"].iter().all(|name| d.find(name).is_ok()));
        assert!(d.folder("x/y").is_some() && d.folder("a").is_none() && d.find("a/b").is_err());
        let long = "n".repeat(253);
        assert!(check_renamed(&d, "x/y", "z").is_ok() && check_renamed(&d, "x/y", &long).is_err());
    }

    #[test]
    fn folders_and_volumes_share_their_names() {
        let d = directory(&["f/", "v", "g/v"]);
        let refused = |name: &str| d.check_new(NO_VOLUME, name).is_err();
        assert!(refused("f") && refused("g") && refused("v") && refused("v/x"));
        assert!(!refused("f/x") && !refused("g/x") && d.find("f").is_err() && d.find("g").is_err());
    }

    #[test]
    fn an_orphan_has_no_name_and_takes_none_from_others() {
        let mut d = directory(&["/", "v"]);
        assert!(d.folder("").is_some());
        d.orphan(VolumeId(2));
        assert!(d.find("v").is_err() && d.check_new(NO_VOLUME, "v").is_ok());
        d.mark_dead(VolumeId(2), 0);
        assert!(d.folder("").is_some(), "its empty name is the root's");
        assert_eq!(d.first_dead(), Some(VolumeId(2)));
    }
}
