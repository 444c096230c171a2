//! Names, attributes and volumes without a name, as a mount uses them.
//!
//! Most of these calls end at once and are durable with the next flush. See [`Names`](crate::model::Names)
//! for what a crash may leave. A volume without a name is never visible, and gone after a crash, unless it
//! was given one.

use std::collections::BTreeMap;
use std::rc::Rc;

use forkdisk::{Attributes, Child, CreateOptions, Error, ErrorKind, FileKind, Mode, Pool};

use super::unnamed::{MAX_UNNAMED_VOLUMES, NAMING, Open, pattern};
use crate::disk::{LyingDevice, PAGE};
use crate::driver::{Class, Life, Op, Operation, Outcome, Start, Violation};
use crate::history::op::Profile::*;
use crate::history::recover::Session;
use crate::history::run::{Run, Volumes};
use crate::model::{Entry, Model, Names, PREFIX, Time, Tree, has_children};
use crate::rng::Rng;

/// Changes names and attributes by calls that end at once.
pub static NAMES: Operation<Volumes> = Operation {
    name: "names",
    weight: |profile| match profile {
        Names => 60,
        _ => 0,
    },
    launch: names,
};

/// Folders that are created.
const FOLDERS: [&str; 5] = ["n/a", "n/b", "n/a/c", "n/b/c", "n/a/c/d"];
/// Names of files in them.
const MAX_FILES: u64 = 6;
/// Most names at once.
const MAX_NAMES: usize = 24;

pub(super) fn attributes(mark: u32) -> Attributes {
    Attributes { mode: 0o640, uid: mark, gid: mark, accessed: 0, modified: 0, changed: 0 }
}

/// Returns all names under [`PREFIX`].
fn observe(pool: &Pool<LyingDevice>) -> Result<Tree, Violation> {
    let (mut tree, mut folders) = (Tree::new(), vec![PREFIX.trim_end_matches('/').to_string()]);
    // How many names each file tells, and how many there are.
    let mut names: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for (name, kind) in pool.children(&folder) {
            let is_folder = kind == FileKind::Folder;
            let name = format!("{folder}/{name}");
            let wrong = |e| Violation::new("P4", format!("{name} is listed, but: {e}"));
            let (attributes, size, file) = match pool.child(&name).map_err(wrong)? {
                Child::Volume(info) => {
                    names.entry(info.id.0 as u32).or_insert((info.hard_links.len() + 1, 0)).1 += 1;
                    (info.attributes, info.size, info.id.0 as u32)
                }
                Child::Folder(attributes, _) => (attributes, 0, 0),
            };
            // If only times are known, there is no owner.
            let mark = attributes.map(|a| a.uid).filter(|&uid| uid != u32::MAX).unwrap_or(0);
            if !is_folder || attributes.is_some() {
                let kind = if is_folder { FileKind::File } else { kind };
                tree.insert(name.clone(), Entry { folder: is_folder, mark, size, filled: 0, kind, file });
            }
            if is_folder {
                folders.push(name);
            }
        }
    }
    if let Some((file, (told, found))) = names.into_iter().find(|(_, (told, found))| told != found) {
        return Err(Violation::new("P4", format!("file {file} has {found} names and tells {told}")));
    }
    Ok(tree)
}

impl Session {
    /// Compares the names with the model, which adopts them, and the contents of volumes that were named
    /// after they had been filled.
    pub fn compare_names(&self, model: &mut Model) -> Result<(), Violation> {
        model.names.settle(&observe(&self.pool)?)?;
        for (name, entry) in model.names.now().into_iter().filter(|(_, entry)| entry.filled > 0) {
            let found = match entry.kind {
                FileKind::Link => self.target(&name)?,
                _ => self.read(&name, 0, PAGE as u64)?.to_vec(),
            };
            if let Some(at) = found.iter().zip(pattern(entry.filled, PAGE)).position(|(a, b)| *a != b) {
                let (end, held) = ((at + 16).min(found.len()), entry.filled);
                let what = format!(
                    "{name} does not hold {held}, as it did before it had a name: {at}: {:x?}",
                    &found[at..end]
                );
                return Err(Violation::new("P1", what));
            }
        }
        Ok(())
    }
}

/// Waits until no other operation changes names.
pub fn await_naming(run: &mut Run) -> Result<bool, Violation> {
    run.wait(|o| o.class.is(NAMING))?;
    Ok(run.session.pool.info().mode != Mode::Failed)
}

/// Starts an operation that changes names as [`Names::begin`] has noted.
pub fn submit_naming(run: &mut Run, text: String, future: impl Future<Output = Outcome> + 'static) {
    let start = Start::new(Class::Other(NAMING), run.known.model.tick(), Vec::new(), text);
    run.submit(start.with_need(true), future, |run, ended| {
        // If it failed together with the pool, the next open tells whether it happened.
        if ended.is_ok() || !run.session.has_failed() {
            let now = run.known.model.tick();
            run.known.model.names.end(now, ended.is_ok());
        }
        Ok(())
    });
}

/// Notes that a call that ends at once has ended.
pub fn noted(run: &mut Run, text: String, result: Result<(), Error>, tree: Tree) -> Result<(), Violation> {
    run.stats.operations += 1;
    run.say(|| format!("{text}: {result:?}"));
    let Err(e) = result else {
        let now = run.known.model.tick();
        run.known.model.names.push(now, tree);
        if !run.session.pool.is_process_safe() {
            keep_names(run, now);
        }
        return Ok(());
    };
    match e.kind() {
        ErrorKind::NoSpace => Ok(()),
        ErrorKind::Io | ErrorKind::Failed if run.session.disk.faults_hit() > 0 => Ok(()),
        _ => Err(Violation::new("P4", format!("refused without a reason: {text}: {e:?}"))),
    }
}

/// A change made at this time is acknowledged when it outlives the process.
fn keep_names(run: &mut Run, time: Time) {
    run.known.model.names.hold(time);
    let pool = run.session.pool.clone();
    let text = format!("wait until names are kept, since {time}");
    let start = Start::new(Class::Other("keep names"), run.known.model.tick(), Vec::new(), text);
    run.submit(start, async move { pool.wait_process_safe().await.into() }, |run, ended| {
        if ended.is_ok() {
            run.known.model.names.kept(ended.op.start);
        }
        Ok(())
    });
}

/// Makes some calls on names and attributes in sequence.
pub fn names(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[0]);
    if !await_naming(run)? {
        return Ok(());
    }
    if rng.one_in(8) {
        compare_names_now(run)?;
    }
    // Sometimes more than the volatile log holds.
    let many = match rng.below(96) {
        0 => 800,
        1..7 => 40,
        _ => 3,
    };
    (0..1 + rng.below(many)).try_for_each(|i| change_names(run, &mut rng, op.number + i as u32 * 10_000))
}

/// While the pool is open only the last state is valid.
fn compare_names_now(run: &Run) -> Result<(), Violation> {
    let mut now = Names::default();
    now.push(1, run.known.model.names.now());
    now.flushed(2);
    Ok(now.settle(&observe(&run.session.pool)?)?)
}

fn change_names(run: &mut Run, rng: &mut Rng, mark: u32) -> Result<(), Violation> {
    let pool = run.session.pool.clone();
    let mut tree = run.known.model.names.now();
    let files: Vec<String> = tree.iter().filter(|(_, e)| !e.folder).map(|(name, _)| name.clone()).collect();
    let mut folders: Vec<String> = tree.iter().filter(|(_, e)| e.folder).map(|(name, _)| name.clone()).collect();
    folders.extend(FOLDERS.map(String::from));
    let (file, folder) = ((!files.is_empty()).then(|| rng.pick(&files).clone()), rng.pick(&folders).clone());
    let new_file = file_name(rng);
    let is_free = |tree: &Tree, name: &str| !tree.contains_key(name) && !has_children(tree, name);
    let is_there = |tree: &Tree, name: &str| tree.contains_key(name) || has_children(tree, name);
    let made = Entry { folder: true, mark, size: 0, filled: 0, kind: FileKind::File, file: 0 };
    match (rng.below(10), file) {
        (0, _) if is_free(&tree, &folder) && tree.len() < MAX_NAMES => {
            let result = pool.create_folder(&folder, attributes(mark), 1);
            tree.insert(folder.clone(), made);
            noted(run, format!("make the folder {folder}, mark {mark}"), result, tree)
        }
        (1 | 2, _) if is_there(&tree, &folder) => {
            let result = pool.set_folder_attributes(&folder, attributes(mark), 1);
            tree.insert(folder.clone(), made);
            noted(run, format!("attributes of the folder {folder}, mark {mark}"), result, tree)
        }
        (3, _) if tree.contains_key(&folder) && !has_children(&tree, &folder) => {
            tree.remove(&folder);
            noted(run, format!("remove the folder {folder}"), pool.remove_folder(&folder), tree)
        }
        (4, _) => {
            let to = *rng.pick(&FOLDERS);
            if !is_there(&tree, &folder) || !is_free(&tree, to) || to.starts_with(&format!("{folder}/")) {
                return Ok(());
            }
            let within = format!("{folder}/");
            let moved = |name: String| match name.strip_prefix(&folder) {
                Some(rest) if rest.is_empty() || name.starts_with(&within) => format!("{to}{rest}"),
                _ => name,
            };
            let tree = tree.into_iter().map(|(name, entry)| (moved(name), entry)).collect();
            noted(run, format!("rename the folder {folder} to {to}"), pool.rename_folder(&folder, to), tree)
        }
        (5, Some(file)) => {
            let result = pool.find(&file).and_then(|info| pool.set_attributes(info.id, attributes(mark)));
            tree.entry(file.clone()).and_modify(|entry| entry.mark = mark);
            noted(run, format!("attributes of {file}, mark {mark}"), result, tree)
        }
        (6, Some(file)) => {
            let filled = tree.get(&file).map_or(0, |entry| entry.filled);
            let open = rng.one_in(3).then(|| pool.volume(&file)).transpose();
            let result = open.and_then(|open| pool.remove_file(&file).map(|()| open));
            tree.remove(&file);
            let (result, open) = (result.as_ref().map(drop).map_err(Error::clone), result.ok().flatten());
            noted(run, format!("remove {file}"), result, tree)?;
            // Otherwise it is deleted with its handle.
            if let Some(volume) = open.filter(|_| run.world.unnamed.len() < MAX_UNNAMED_VOLUMES) {
                let (size, mark) = (volume.size(), if filled > 0 { filled } else { mark });
                run.world.unnamed.push(Open { volume, size, is_new: false, mark, filled: Rc::default() });
            }
            Ok(())
        }
        (7, Some(file)) if file != new_file => {
            let replace = rng.one_in(2);
            if !replace && tree.contains_key(&new_file) {
                return Ok(());
            }
            let open = rng.one_in(3).then(|| pool.volume(&new_file).ok()).flatten();
            let result = pool.rename_file(&file, &new_file, replace);
            let entry = tree.remove(&file).expect("a file");
            tree.insert(new_file.clone(), entry);
            let text =
                format!("rename {file} to {new_file}, which is {}open", if open.is_some() { "" } else { "not " });
            noted(run, text, result, tree)
        }
        (8 | 9, _) if !tree.contains_key(&new_file) && tree.len() < MAX_NAMES => {
            let size = (1 + rng.below(8)) * PAGE as u64;
            let result = pool.create_file(&new_file, &CreateOptions::new(size, 1), attributes(mark)).map(drop);
            let entry = Entry { folder: false, mark: 0, size, filled: 0, kind: FileKind::File, file: mark };
            // Two changes.
            tree.insert(new_file.clone(), entry);
            let named = tree.clone();
            tree.insert(new_file.clone(), Entry { mark, ..entry });
            let text = format!("create {new_file}, {size} bytes, mark {mark}");
            noted(run, text.clone(), result.as_ref().map(drop).map_err(Error::clone), named)?;
            if result.is_ok() { noted(run, text, Ok(()), tree) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

pub fn file_name(rng: &mut Rng) -> String {
    let folder = if rng.one_in(3) { "n" } else { *rng.pick(&FOLDERS) };
    format!("{folder}/x{}", rng.below(MAX_FILES))
}

/// Removes all names and all volumes without one.
pub fn remove_names(run: &mut Run) -> Result<(), Violation> {
    run.world.unnamed.clear();
    compare_names_now(run)?;
    for (name, entry) in run.known.model.names.now().into_iter().rev() {
        let pool = run.session.pool.clone();
        let mut tree = run.known.model.names.now();
        tree.remove(&name);
        let result = if entry.folder { pool.remove_folder(&name) } else { pool.remove_file(&name) };
        noted(run, format!("remove {name}"), result, tree)?;
    }
    Ok(())
}
