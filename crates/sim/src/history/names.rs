//! Names, attributes and volumes without a name, as a mount uses them.
//!
//! Most of these calls end at once and are durable with the next flush. See [`Names`](crate::model::Names)
//! for what a crash may leave. A volume without a name is never visible, and gone after a crash, unless it
//! was given one.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{Attributes, Child, CreateOptions, Error, ErrorKind, Mode, Pool, Volume};

use super::Violation;
use super::op::Op;
use super::recover::Session;
use super::run::Run;
use crate::disk::{PAGE, SimDisk};
use crate::driver::{Class, Life, Start};
use crate::model::{Entry, Model, Names, PREFIX, Time, Tree, has_children};
use crate::rng::Rng;

/// What gives a volume its name, and what writes one without a name.
pub(super) const NAMING: &str = "give name";
const FILLING: &str = "fill unnamed";

/// Folders that are created.
const FOLDERS: [&str; 5] = ["n/a", "n/b", "n/a/c", "n/b/c", "n/a/c/d"];
/// Names of files in them.
const MAX_FILES: u64 = 6;
/// Most volumes without a name at once.
const MAX_UNNAMED_VOLUMES: usize = 4;
/// Most names at once.
const MAX_NAMES: usize = 24;

/// An open volume without a name.
pub(super) struct Open {
    volume: Volume<SimDisk>,
    size: u64,
    /// Whether it has had no name so far: then it can be given one.
    is_new: bool,
    /// The operation whose mark it is filled with: a volume that has lost its name may have it again after a
    /// crash.
    mark: u32,
    /// Whether its first pages have been filled.
    filled: Rc<Cell<bool>>,
}

fn attributes(mark: u32) -> Attributes {
    Attributes { mode: 0o640, uid: mark, gid: mark, accessed: 0, modified: 0, changed: 0 }
}

/// Returns the contents of a volume without a name.
fn pattern(mark: u32, len: usize) -> Vec<u8> {
    mark.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Returns all names under [`PREFIX`].
fn observe(pool: &Pool<SimDisk>) -> Result<Tree, Violation> {
    let (mut tree, mut folders) = (Tree::new(), vec![PREFIX.trim_end_matches('/').to_string()]);
    while let Some(folder) = folders.pop() {
        for (name, is_folder) in pool.children(&folder) {
            let name = format!("{folder}/{name}");
            let wrong = |e| Violation::new("P4", format!("{name} is listed, but: {e}"));
            let (attributes, size) = match pool.child(&name).map_err(wrong)? {
                Child::Volume(info) => (info.attributes, info.size),
                Child::Folder(attributes, _) => (attributes, 0),
            };
            // If only times are known, there is no owner.
            let mark = attributes.map(|a| a.uid).filter(|&uid| uid != u32::MAX).unwrap_or(0);
            if !is_folder || attributes.is_some() {
                tree.insert(name.clone(), Entry { folder: is_folder, mark, size, filled: 0 });
            }
            if is_folder {
                folders.push(name);
            }
        }
    }
    Ok(tree)
}

impl Session {
    /// Compares the names with the model, which adopts them, and the contents of volumes that were named
    /// after they had been filled.
    pub(super) fn compare_names(&self, model: &mut Model) -> Result<(), Violation> {
        model.names.settle(&observe(&self.pool)?)?;
        for (name, entry) in model.names.now().into_iter().filter(|(_, entry)| entry.filled > 0) {
            let found = self.read(&name, 0, PAGE as u64)?;
            if let Some(at) = found.iter().zip(pattern(entry.filled, PAGE)).position(|(a, b)| *a != b) {
                let (end, held) = ((at + 16).min(PAGE), entry.filled);
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

impl Run {
    /// Waits until no other operation changes names.
    fn await_naming(&mut self) -> Result<bool, Violation> {
        self.wait(|o| o.class.is(NAMING))?;
        Ok(self.session.pool.info().mode != Mode::Failed)
    }

    /// Notes that a call that ends at once has ended.
    fn noted(&mut self, text: String, result: Result<(), Error>, tree: Tree) -> Result<(), Violation> {
        self.stats.operations += 1;
        self.say(|| format!("{text}: {result:?}"));
        let Err(e) = result else {
            let now = self.known.model.tick();
            self.known.model.names.push(now, tree);
            if !self.session.pool.is_process_safe() {
                self.keep_names(now);
            }
            return Ok(());
        };
        match e.kind() {
            ErrorKind::NoSpace => Ok(()),
            ErrorKind::Io | ErrorKind::Failed if self.session.disk.faults_hit() > 0 => Ok(()),
            _ => Err(Violation::new("P4", format!("refused without a reason: {text}: {e:?}"))),
        }
    }

    /// A change made at this time is acknowledged when it outlives the process.
    fn keep_names(&mut self, time: Time) {
        self.known.model.names.hold(time);
        let pool = self.session.pool.clone();
        let text = format!("wait until names are kept, since {time}");
        let start = Start::new(Class::Other("keep names"), self.known.model.tick(), Vec::new(), text);
        self.submit(start, async move { pool.wait_process_safe().await.into() }, |run, ended| {
            if ended.is_ok() {
                run.known.model.names.kept(ended.op.start);
            }
            Ok(())
        });
    }

    /// Makes some calls on names and attributes in sequence.
    pub(super) fn names(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[0]);
        if !self.await_naming()? {
            return Ok(());
        }
        if rng.one_in(8) {
            self.compare_names_now()?;
        }
        // Sometimes more than the volatile log holds.
        let many = match rng.below(96) {
            0 => 800,
            1..7 => 40,
            _ => 3,
        };
        (0..1 + rng.below(many)).try_for_each(|i| self.change_names(&mut rng, op.number + i as u32 * 10_000))
    }

    /// While the pool is open only the last state is valid.
    fn compare_names_now(&self) -> Result<(), Violation> {
        let mut now = Names::default();
        now.push(1, self.known.model.names.now());
        now.flushed(2);
        Ok(now.settle(&observe(&self.session.pool)?)?)
    }

    fn change_names(&mut self, rng: &mut Rng, mark: u32) -> Result<(), Violation> {
        let pool = self.session.pool.clone();
        let mut tree = self.known.model.names.now();
        let files: Vec<String> = tree.iter().filter(|(_, e)| !e.folder).map(|(name, _)| name.clone()).collect();
        let mut folders: Vec<String> = tree.iter().filter(|(_, e)| e.folder).map(|(name, _)| name.clone()).collect();
        folders.extend(FOLDERS.map(String::from));
        let (file, folder) = ((!files.is_empty()).then(|| rng.pick(&files).clone()), rng.pick(&folders).clone());
        let new_file = self.file_name(rng);
        let is_free = |tree: &Tree, name: &str| !tree.contains_key(name) && !has_children(tree, name);
        let is_there = |tree: &Tree, name: &str| tree.contains_key(name) || has_children(tree, name);
        let made = Entry { folder: true, mark, size: 0, filled: 0 };
        match (rng.below(10), file) {
            (0, _) if is_free(&tree, &folder) && tree.len() < MAX_NAMES => {
                let result = pool.create_folder(&folder, attributes(mark), 1);
                tree.insert(folder.clone(), made);
                self.noted(format!("make the folder {folder}, mark {mark}"), result, tree)
            }
            (1 | 2, _) if is_there(&tree, &folder) => {
                let result = pool.set_folder_attributes(&folder, attributes(mark), 1);
                tree.insert(folder.clone(), made);
                self.noted(format!("attributes of the folder {folder}, mark {mark}"), result, tree)
            }
            (3, _) if tree.contains_key(&folder) && !has_children(&tree, &folder) => {
                tree.remove(&folder);
                self.noted(format!("remove the folder {folder}"), pool.remove_folder(&folder), tree)
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
                self.noted(format!("rename the folder {folder} to {to}"), pool.rename_folder(&folder, to), tree)
            }
            (5, Some(file)) => {
                let result = pool.find(&file).and_then(|info| pool.set_attributes(info.id, attributes(mark)));
                tree.entry(file.clone()).and_modify(|entry| entry.mark = mark);
                self.noted(format!("attributes of {file}, mark {mark}"), result, tree)
            }
            (6, Some(file)) => {
                let filled = tree.get(&file).map_or(0, |entry| entry.filled);
                let open = rng.one_in(3).then(|| pool.volume(&file)).transpose();
                let result = open.and_then(|open| pool.remove_file(&file).map(|()| open));
                tree.remove(&file);
                let (result, open) = (result.as_ref().map(drop).map_err(Error::clone), result.ok().flatten());
                self.noted(format!("remove {file}"), result, tree)?;
                // Otherwise it is deleted with its handle.
                if let Some(volume) = open.filter(|_| self.world.unnamed.len() < MAX_UNNAMED_VOLUMES) {
                    let (size, mark) = (volume.size(), if filled > 0 { filled } else { mark });
                    self.world.unnamed.push(Open { volume, size, is_new: false, mark, filled: Rc::default() });
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
                self.noted(text, result, tree)
            }
            (8 | 9, _) if !tree.contains_key(&new_file) && tree.len() < MAX_NAMES => {
                let size = (1 + rng.below(8)) * PAGE as u64;
                let result = pool.create_file(&new_file, &CreateOptions::new(size, 1), attributes(mark)).map(drop);
                let entry = Entry { folder: false, mark: 0, size, filled: 0 };
                // Two changes.
                tree.insert(new_file.clone(), entry);
                let named = tree.clone();
                tree.insert(new_file.clone(), Entry { mark, ..entry });
                let text = format!("create {new_file}, {size} bytes, mark {mark}");
                self.noted(text.clone(), result.as_ref().map(drop).map_err(Error::clone), named)?;
                if result.is_ok() { self.noted(text, Ok(()), tree) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    fn file_name(&self, rng: &mut Rng) -> String {
        let folder = if rng.one_in(3) { "n" } else { *rng.pick(&FOLDERS) };
        format!("{folder}/x{}", rng.below(MAX_FILES))
    }

    /// Makes one step in the life of a volume without a name.
    pub(super) fn unnamed(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[0]);
        if !self.await_naming()? {
            return Ok(());
        }
        let at = (!self.world.unnamed.is_empty()).then(|| rng.index(self.world.unnamed.len()));
        match (rng.below(6), at) {
            (0..=2, _) if self.world.unnamed.len() < MAX_UNNAMED_VOLUMES => self.create_unnamed(op, &mut rng),
            (3, Some(at)) => {
                let Open { volume, .. } = self.world.unnamed.swap_remove(at);
                self.say(|| "a volume without a name is closed".into());
                drop(volume);
                Ok(())
            }
            (4, Some(at)) => self.fill_unnamed(at, &mut rng),
            (_, Some(at)) if self.world.unnamed[at].is_new => self.give_name(at, &mut rng),
            _ => Ok(()),
        }
    }

    fn create_unnamed(&mut self, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
        let size = (1 + rng.below(64)) * PAGE as u64;
        let made = self.session.pool.create_unnamed(&CreateOptions::new(size, 1));
        let (text, tree) = (format!("create a volume without a name, {size} bytes"), self.known.model.names.now());
        let (result, volume) = (made.as_ref().map(drop).map_err(Error::clone), made.ok());
        self.noted(text, result, tree)?;
        let Some(volume) = volume else { return Ok(()) };
        self.world.unnamed.push(Open { volume, size, is_new: true, mark: op.number, filled: Rc::default() });
        if rng.one_in(4) { Ok(()) } else { self.fill_unnamed(self.world.unnamed.len() - 1, rng) }
    }

    /// Writes the first pages; a filled volume keeps its contents.
    fn fill_unnamed(&mut self, at: usize, rng: &mut Rng) -> Result<(), Violation> {
        let open = &self.world.unnamed[at];
        let len = (1 + rng.below(open.size / PAGE as u64)) * PAGE as u64;
        let mut buf = self.session.pool.buffer(len as usize);
        buf[..].copy_from_slice(&pattern(open.mark, len as usize));
        let (volume, filled, fua) = (open.volume.clone(), Rc::clone(&open.filled), rng.one_in(4));
        let text = format!("write {len} bytes of a volume without a name");
        let start = Start::new(Class::Other(FILLING), self.known.model.tick(), Vec::new(), text);
        let future = async move {
            let (result, _) = volume.write(0, buf, fua).await;
            filled.set(filled.get() || result.is_ok());
            result.into()
        };
        self.submit(start.with_need(true), future, |_, _| Ok(()));
        Ok(())
    }

    fn give_name(&mut self, at: usize, rng: &mut Rng) -> Result<(), Violation> {
        // A write in flight may fail half way.
        self.wait(|o| o.class.is(NAMING) || o.class.is(FILLING))?;
        let (name, mut tree) = (self.file_name(rng), self.known.model.names.now());
        if tree.contains_key(&name) || self.session.pool.info().mode == Mode::Failed || at >= self.world.unnamed.len() {
            return Ok(());
        }
        let Open { volume, size, mark, filled, .. } = self.world.unnamed.swap_remove(at);
        let filled = if filled.get() { mark } else { 0 };
        tree.insert(name.clone(), Entry { folder: false, mark: 0, size, filled });
        self.known.model.names.begin(tree);
        let (pool, text) = (self.session.pool.clone(), format!("give a volume the name {name}"));
        let start = Start::new(Class::Other(NAMING), self.known.model.tick(), Vec::new(), text);
        let future = async move { pool.name_volume(&volume, &name).await.into() };
        self.submit(start.with_need(true), future, |run, ended| {
            // If it failed together with the pool, the next open tells whether it happened.
            if ended.is_ok() || !run.session.has_failed() {
                let now = run.known.model.tick();
                run.known.model.names.end(now, ended.is_ok());
            }
            Ok(())
        });
        Ok(())
    }

    /// Removes all names and all volumes without one.
    pub(super) fn remove_names(&mut self) -> Result<(), Violation> {
        self.world.unnamed.clear();
        self.compare_names_now()?;
        for (name, entry) in self.known.model.names.now().into_iter().rev() {
            let pool = self.session.pool.clone();
            let mut tree = self.known.model.names.now();
            tree.remove(&name);
            let result = if entry.folder { pool.remove_folder(&name) } else { pool.remove_file(&name) };
            self.noted(format!("remove {name}"), result, tree)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Profile, Setup};

    #[test]
    fn the_profile_of_names_has_all_that_is_done_to_them() {
        let ops = Setup::new(3, Some(Profile::Names)).operations(300);
        assert!([Kind::Names, Kind::Unnamed].iter().all(|kind| ops.iter().any(|op| op.kind == *kind)));
    }
}
