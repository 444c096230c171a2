//! The life of a volume without a name.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::{CreateOptions, Error, FileKind, Mode, Volume};

use super::names::{await_naming, file_name, noted, submit_naming};
use crate::disk::{LyingDevice, PAGE};
use crate::driver::{Class, Op, Operation, Start, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::Entry;
use crate::rng::Rng;

/// The next step in the life of a volume without a name.
pub static UNNAMED: Operation<Volumes> = Operation {
    name: "unnamed",
    weight: |profile| match profile {
        Names => 24,
        _ => 0,
    },
    launch: unnamed,
};

/// What gives a volume its name, and what writes one without a name.
pub const NAMING: &str = "give name";
const FILLING: &str = "fill unnamed";

/// Most volumes without a name at once.
pub const MAX_UNNAMED_VOLUMES: usize = 4;

/// An open volume without a name.
pub struct Open {
    pub volume: Volume<LyingDevice>,
    pub size: u64,
    /// Whether it has had no name so far: then it can be given one.
    pub is_new: bool,
    /// The operation that marks its contents: a volume that has lost its name may have it again after a
    /// crash.
    pub mark: u32,
    /// Whether its first pages have been filled.
    pub filled: Rc<Cell<bool>>,
}

/// Returns the contents of a volume without a name.
pub fn pattern(mark: u32, len: usize) -> Vec<u8> {
    mark.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Makes one step in the life of a volume without a name.
pub fn unnamed(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[0]);
    if !await_naming(run)? {
        return Ok(());
    }
    let at = (!run.world.unnamed.is_empty()).then(|| rng.index(run.world.unnamed.len()));
    match (rng.below(6), at) {
        (0..=2, _) if run.world.unnamed.len() < MAX_UNNAMED_VOLUMES => create_unnamed(run, op, &mut rng),
        (3, Some(at)) => {
            let Open { volume, .. } = run.world.unnamed.swap_remove(at);
            run.say(|| "a volume without a name is closed".into());
            drop(volume);
            Ok(())
        }
        (4, Some(at)) => fill_unnamed(run, at, &mut rng),
        (_, Some(at)) if run.world.unnamed[at].is_new => give_name(run, at, &mut rng),
        _ => Ok(()),
    }
}

fn create_unnamed(run: &mut Run, op: &Op, rng: &mut Rng) -> Result<(), Violation> {
    let size = (1 + rng.below(64)) * PAGE as u64;
    let made = run.session.pool.create_unnamed(&CreateOptions::new(size, 1));
    let (text, tree) = (format!("create a volume without a name, {size} bytes"), run.known.model.names.now());
    let (result, volume) = (made.as_ref().map(drop).map_err(Error::clone), made.ok());
    noted(run, text, result, tree)?;
    let Some(volume) = volume else { return Ok(()) };
    run.world.unnamed.push(Open { volume, size, is_new: true, mark: op.number, filled: Rc::default() });
    if rng.one_in(4) { Ok(()) } else { fill_unnamed(run, run.world.unnamed.len() - 1, rng) }
}

/// Writes the first pages; a filled volume keeps its contents.
fn fill_unnamed(run: &mut Run, at: usize, rng: &mut Rng) -> Result<(), Violation> {
    let open = &run.world.unnamed[at];
    let len = (1 + rng.below(open.size / PAGE as u64)) * PAGE as u64;
    let mut buf = run.session.pool.buffer(len as usize);
    buf[..].copy_from_slice(&pattern(open.mark, len as usize));
    let (volume, filled, fua) = (open.volume.clone(), Rc::clone(&open.filled), rng.one_in(4));
    let text = format!("write {len} bytes of a volume without a name");
    let start = Start::new(Class::Other(FILLING), run.known.model.tick(), Vec::new(), text);
    let future = async move {
        let (result, _) = volume.write(0, buf, fua).await;
        filled.set(filled.get() || result.is_ok());
        result.into()
    };
    run.submit(start.with_need(true), future, |_, _| Ok(()));
    Ok(())
}

fn give_name(run: &mut Run, at: usize, rng: &mut Rng) -> Result<(), Violation> {
    // A write in flight may fail half way.
    run.wait(|o| o.class.is(NAMING) || o.class.is(FILLING))?;
    let (name, mut tree) = (file_name(rng), run.known.model.names.now());
    if tree.contains_key(&name) || run.session.pool.info().mode == Mode::Failed || at >= run.world.unnamed.len() {
        return Ok(());
    }
    let Open { volume, size, mark, filled, .. } = run.world.unnamed.swap_remove(at);
    let filled = if filled.get() { mark } else { 0 };
    tree.insert(name.clone(), Entry { folder: false, mark: 0, size, filled, kind: FileKind::File, file: mark });
    run.known.model.names.begin(tree);
    let (pool, text) = (run.session.pool.clone(), format!("give a volume the name {name}"));
    let future = async move { pool.name_volume(&volume, &name).await.into() };
    submit_naming(run, text, future);
    Ok(())
}
