//! Hard links: further names of files, which are removed, renamed, exchanged and forked as all names are.

use std::collections::BTreeMap;

use forkdisk::{CreateOptions, FileKind, ForkOptions};

use super::links::rename;
use super::names::{attributes, await_naming, file_name, noted, submit_naming};
use crate::disk::PAGE;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::{Entry, Tree, has_children};
use crate::rng::Rng;

pub static HARD_LINKS: Operation<Volumes> = Operation {
    name: "hard-links",
    weight: |profile| match profile {
        Folders => 32,
        _ => 0,
    },
    launch: hard_links,
};

/// Most names at once.
const MAX_NAMES: usize = 20;
/// Folders that are forked, and what their forks are called.
const FORKED: [&str; 3] = ["n/a", "n/b", "n/k0"];
const FORKS_COUNT: u64 = 2;

fn hard_links(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[0]);
    if !await_naming(run)? {
        return Ok(());
    }
    let (pool, mut tree, mark) = (run.session.pool.clone(), run.known.model.names.now(), op.number);
    let all: Vec<String> = tree.iter().filter(|(_, entry)| !entry.folder).map(|(name, _)| name.clone()).collect();
    let (old, new) = ((!all.is_empty()).then(|| rng.pick(&all).clone()), file_name(&mut rng));
    let is_free = !tree.contains_key(&new) && !has_children(&tree, &new) && all.len() < MAX_NAMES;
    match (rng.below(9), old) {
        (0..=2, Some(old)) if is_free => {
            let result = pool.find(&old).and_then(|info| pool.link_file(info.id, &new));
            tree.insert(new.clone(), tree[&old]);
            noted(run, format!("link {old} to {new}"), result, tree)
        }
        (3, _) if is_free => {
            let size = (1 + rng.below(8)) * PAGE as u64;
            let result = pool.create_file(&new, &CreateOptions::new(size, 1), attributes(mark)).map(drop);
            tree.insert(new.clone(), Entry { folder: false, mark, size, filled: 0, kind: FileKind::File, file: mark });
            noted(run, format!("create the file {new}, {size} bytes, mark {mark}"), result, tree)
        }
        (4 | 5, Some(old)) => {
            let open = rng.one_in(3).then(|| pool.find(&old).and_then(|info| pool.volume_by_id(info.id)).ok());
            tree.remove(&old);
            noted(run, format!("remove the name {old}"), pool.remove_file(&old), tree)?;
            drop(open);
            Ok(())
        }
        (6, Some(old)) if old != new => {
            let result = pool.rename_file(&old, &new, true);
            rename(&mut tree, &old, &new);
            noted(run, format!("rename the name {old} to {new}"), result, tree)
        }
        (7, Some(old)) if old != new && tree.contains_key(&new) => {
            let (a, b) = (tree[&old], tree[&new]);
            tree.extend([(old.clone(), b), (new.clone(), a)]);
            noted(run, format!("exchange {old} and {new}"), pool.swap_files(&old, &new), tree)
        }
        (8, _) => fork(run, tree, mark, &mut rng),
        _ => Ok(()),
    }
}

/// Forks a folder: names of one file are those of one file in the fork.
fn fork(run: &mut Run, mut tree: Tree, mark: u32, rng: &mut Rng) -> Result<(), Violation> {
    let (from, to) = (*rng.pick(&FORKED), format!("n/k{}", rng.below(FORKS_COUNT)));
    let is_taken = tree.contains_key(&to) || has_children(&tree, &to);
    if from == to || is_taken || !has_children(&tree, from) || tree.len() > MAX_NAMES {
        return Ok(());
    }
    let within: Vec<(String, Entry)> = tree
        .iter()
        .filter_map(|(name, entry)| Some((name.strip_prefix(from)?, entry)))
        .filter(|(rest, _)| rest.is_empty() || rest.starts_with('/'))
        .map(|(rest, entry)| (format!("{to}{rest}"), *entry))
        .collect();
    let mut files = BTreeMap::new();
    for (name, entry) in within {
        let next = 100_000_000 + mark * 100 + files.len() as u32;
        let file = if entry.folder { 0 } else { *files.entry(entry.file).or_insert(next) };
        tree.insert(name, Entry { file, ..entry });
    }
    run.known.model.names.begin(tree);
    let (pool, text) = (run.session.pool.clone(), format!("fork the folder {from} to {to}"));
    let future = async move { pool.fork(from, &[&to], &ForkOptions::new(1)).await.map(drop).into() };
    submit_naming(run, text, future);
    Ok(())
}
