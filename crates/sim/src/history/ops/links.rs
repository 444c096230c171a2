//! Symbolic links, FIFOs and sockets, which are files without the contents of a disk.

use forkdisk::{FileKind, Mode};

use super::names::{attributes, await_naming, file_name, noted, submit_naming};
use super::unnamed::pattern;
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::recover::Session;
use crate::history::run::{Run, Volumes};
use crate::model::{Entry, Tree, has_children};
use crate::rng::Rng;

pub static LINKS: Operation<Volumes> = Operation {
    name: "links",
    weight: |profile| match profile {
        Folders => 24,
        _ => 0,
    },
    launch: links,
};

/// Most of them at once.
const MAX_LINKS: usize = 8;

impl Session {
    /// Returns the target of a symbolic link.
    pub fn target(&self, name: &str) -> Result<Vec<u8>, Violation> {
        let unreadable = |e| Violation::new("P6", format!("the link {name} cannot be read: {e}"));
        let (pool, id) = (self.pool.clone(), self.pool.find(name).map_err(unreadable)?.id);
        self.exec.run(PATIENCE_STEPS, async move { pool.read_link(id).await })?.map_err(unreadable)
    }
}

fn links(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[0]);
    if !await_naming(run)? {
        return Ok(());
    }
    let (pool, mut tree, mark) = (run.session.pool.clone(), run.known.model.names.now(), op.number);
    let all: Vec<String> = tree.iter().filter(|(_, entry)| !entry.folder).map(|(name, _)| name.clone()).collect();
    let (old, new) = ((!all.is_empty()).then(|| rng.pick(&all).clone()), file_name(&mut rng));
    match (rng.below(8), old) {
        (0..=2, _) if !tree.contains_key(&new) && !has_children(&tree, &new) && all.len() < MAX_LINKS => {
            make_link(run, &new, mark, &mut rng)
        }
        (3, _) if !tree.contains_key(&new) && all.len() < MAX_LINKS => {
            let kind = if rng.one_in(2) { FileKind::Fifo } else { FileKind::Socket };
            let result = pool.create_special(&new, kind, attributes(mark), 1).map(drop);
            tree.insert(new.clone(), Entry { folder: false, mark, size: 0, filled: 0, kind, file: mark });
            noted(run, format!("create the {kind:?} {new}, mark {mark}"), result, tree)
        }
        (4 | 5, Some(old)) => {
            let result = pool.find(&old).and_then(|info| pool.set_attributes(info.id, attributes(mark)));
            set_mark(&mut tree, &old, mark);
            noted(run, format!("attributes of {old}, mark {mark}"), result, tree)
        }
        (6, Some(old)) => {
            tree.remove(&old);
            noted(run, format!("remove {old}"), pool.remove_file(&old), tree)
        }
        (7, Some(old)) if old != new => {
            let result = pool.rename_file(&old, &new, true);
            rename(&mut tree, &old, &new);
            noted(run, format!("rename {old} to {new}"), result, tree)
        }
        _ => Ok(()),
    }
}

/// Gives a file, with all of its names, other attributes.
fn set_mark(tree: &mut Tree, name: &str, mark: u32) {
    let file = tree[name].file;
    tree.values_mut().filter(|entry| !entry.folder && entry.file == file).for_each(|entry| entry.mark = mark);
}

/// Renames a file over what has the new name; two names of one file stay.
pub fn rename(tree: &mut Tree, old: &str, new: &str) {
    let entry = tree[old];
    if tree.get(new).is_none_or(|there| there.file != entry.file) {
        tree.remove(old);
        tree.insert(new.to_string(), entry);
    }
}

fn make_link(run: &mut Run, name: &str, mark: u32, rng: &mut Rng) -> Result<(), Violation> {
    if run.session.pool.info().mode == Mode::Failed {
        return Ok(());
    }
    let (mut tree, size) = (run.known.model.names.now(), 1 + rng.below(4095));
    let entry = Entry { folder: false, mark, size, filled: mark, kind: FileKind::Link, file: mark };
    tree.insert(name.to_owned(), entry);
    run.known.model.names.begin(tree);
    let (pool, name) = (run.session.pool.clone(), name.to_owned());
    let text = format!("make the link {name} of {size} bytes, mark {mark}");
    let future = async move {
        let made = pool.create_link(&name, &pattern(mark, size as usize), attributes(mark), 1).await;
        match made {
            Ok(_) => pool.flush().await.into(),
            Err(error) => Err(error).into(),
        }
    };
    submit_naming(run, text, future);
    Ok(())
}
