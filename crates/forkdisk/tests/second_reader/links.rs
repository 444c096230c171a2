//! Hard links, which are slots of state 8, and extended attributes.

use std::collections::BTreeMap;

use crate::reader::Volume;

/// The other names of each file that has some.
pub fn names(volumes: &BTreeMap<u64, Volume>) -> BTreeMap<u64, Vec<String>> {
    let mut names: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for link in volumes.values().filter(|v| v.state == 8) {
        names.entry(link.parent).or_default().push(link.name.clone());
    }
    names.values_mut().for_each(|names| names.sort());
    names
}

/// A further name of a file.
pub fn make(volumes: &mut BTreeMap<u64, Volume>, id: u64, file: u64, name: String) {
    if let Some(mut link) = volumes.get(&file).cloned() {
        (link.state, link.parent, link.name) = (8, file, name);
        volumes.insert(id, link);
    }
}

/// The file takes the name and the snapshots of the hard link.
pub fn take_name(volumes: &mut BTreeMap<u64, Volume>, file: u64, link: u64) {
    let Some(taken) = volumes.get_mut(&link) else { return };
    taken.state = 3;
    let name = taken.name.clone();
    volumes.get_mut(&file).expect("a record names a volume there is").name = name;
    volumes.values_mut().filter(|v| v.state == 2 && v.parent == link).for_each(|v| v.parent = file);
}

/// The file that this is a name of.
pub fn file_of(volumes: &BTreeMap<u64, Volume>, id: u64) -> u64 {
    volumes.get(&id).map_or(id, |v| if v.state == 8 { v.parent } else { id })
}

/// The value of an extended attribute with a name of one byte.
pub fn xattr(value: &[u8]) -> Vec<u8> {
    assert_eq!(&value[..2], b"\x01n", "length of the name, and the name");
    value[2..].to_vec()
}
