//! Which pages of a virtual block are gathered, and where.
//!
//! - *Home*: most of them lie in one block, as they lie in the volume, and the places of the others there are
//!   free: only the others move.
//! - *Elsewhere*: all that can be moved go to one contiguous place.
//!
//! A page is moved only together with all references to it, so that nothing is unshared: if not all of them
//! are known it stays.

use std::collections::BTreeMap;

use crate::catalog::{Catalog, Failure, pages_of};
use crate::format::{MovedRun, Record, VolumeRecord, VolumeState};
use crate::map::{Editor, Family, Movable, Stop, lookup, seams_if, seams_of};
use crate::space::{Miss, Need, contiguous};
use crate::types::{BLOCK_PAGES, Block, PageAddr, TABLE_FANOUT, VirtualPage, VolumeId};

/// Volumes and snapshots that are searched for references to the same pages.
const MAX_MEMBERS: usize = 256;
/// Most virtual blocks for which contiguous space is looked for.
const MAX_ROW_BLOCKS: u64 = 256;

/// Most pages that are moved by policy for each seam removed: when they go home, and elsewhere.
const RETURN_PAGES_PER_SEAM: u64 = 2;
const MOVED_PAGES_PER_SEAM: u64 = 64;
/// Placeholder for the block that is not chosen yet: nothing lies there.
const NOWHERE: Block = Block(1 << 31);

/// A page: its slot, its place and its new place.
type PageMove = (usize, PageAddr, PageAddr);

enum Target {
    Return,
    /// A separate block, in which each page lies as in the volume.
    Block,
    /// Contiguous.
    Run,
}

/// How much a volume is gathered at the cost of others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GatherMode {
    /// As [`ByPolicy`](GatherMode::ByPolicy), but pages only go home, in blocks without holes. A block that
    /// still fills up in random places would be moved again and again.
    Home,
    /// By policy: the seams of all volumes count, and no other volume gets more of them.
    ByPolicy,
    /// Gathering this volume was requested, whatever it costs others.
    Requested,
    /// Requested, and its blocks must be contiguous with each other, too.
    Sequential,
}

/// The pages to be moved. The places are final only if they go home.
pub struct MovePlan {
    steps: Vec<PageMove>,
    target: Target,
    /// Tables that change.
    tables: u64,
    /// Where the virtual block before it ends, and how many follow with it.
    before: Option<Block>,
    follow: u64,
}

/// Result of placing a plan.
pub enum Placed {
    Moves(Vec<MovedRun>),
    NoRoom,
}

impl MovePlan {
    /// Returns the pages to be moved.
    pub fn pages(&self) -> impl Iterator<Item = PageAddr> + '_ {
        self.steps.iter().map(|&(_, from, _)| from)
    }

    /// Returns where each page lies after the move.
    fn places_after(&self) -> impl Fn(usize, PageAddr) -> PageAddr + use<> {
        let mut to: [Option<(PageAddr, PageAddr)>; TABLE_FANOUT] = [None; TABLE_FANOUT];
        self.steps.iter().for_each(|&(slot, from, place)| to[slot] = Some((from, place)));
        move |slot, page| to[slot].filter(|(from, _)| *from == page).map_or(page, |(_, to)| to)
    }

    /// Makes pages that go to a run contiguous, whichever they are.
    fn make_sequential(&mut self) {
        if let Target::Run = self.target {
            self.steps.iter_mut().enumerate().for_each(|(i, (_, _, to))| *to = NOWHERE.page(i));
        }
    }
}

/// Everything that may refer to a volume's pages there, and which of them can be moved.
struct Survey {
    family: Family,
    movable: Movable,
}

/// Plans to move all movable pages to one contiguous place.
fn plan_move_all(movable: &Movable) -> Option<MovePlan> {
    let mapped = movable.all.iter().flatten().count() as u64;
    let target = if 2 * mapped > BLOCK_PAGES { Target::Block } else { Target::Run };
    let pages = movable.pages.iter().enumerate().filter_map(|(slot, page)| Some((slot, (*page)?)));
    let steps: Vec<PageMove> = pages.map(|(slot, page)| (slot, page, NOWHERE.page(slot))).collect();
    let mut plan = MovePlan { steps, target, tables: movable.tables, before: None, follow: 1 };
    plan.make_sequential();
    (!plan.steps.is_empty()).then_some(plan)
}

/// Limits a plan to the part that is worth it.
fn limit_to_worthwhile(plan: MovePlan, movable: &Movable, way: GatherMode) -> Option<MovePlan> {
    let (is_asked, wished) = (matches!(way, GatherMode::Requested | GatherMode::Sequential), plan.steps.len());
    let plan = if is_asked { plan } else { without_worse_order(plan, movable) };
    let now = plan.places_after();
    let (before, after) = (seams_of(&movable.all), seams_if(&movable.all, &now));
    let is_worth = match way {
        GatherMode::Sequential => after == 0 || after < before,
        GatherMode::Requested => after < before,
        GatherMode::Home | GatherMode::ByPolicy => {
            let cost = if way == GatherMode::Home { RETURN_PAGES_PER_SEAM } else { MOVED_PAGES_PER_SEAM };
            let is_cheap = after < before && plan.steps.len() as u64 <= cost * (before - after);
            // If some of it has to stay, all of it is examined again when the other volume is deleted: a
            // little is not worth it twice.
            let is_much = way != GatherMode::Home || plan.steps.len() == wished || 2 * after <= before;
            is_cheap && is_much && movable.weight(&now) < movable.weight(|_, page| page)
        }
    };
    is_worth.then_some(plan)
}

/// Removes pages that another volume has in better order than it would have after the move.
fn without_worse_order(mut plan: MovePlan, movable: &Movable) -> MovePlan {
    while let Some(leaf) = movable.burdened(plan.places_after()) {
        // It has some of them, so that there are fewer each time.
        plan.steps.retain(|&(slot, from, _)| leaf[slot] != Some(from));
        plan.make_sequential();
    }
    plan
}

/// Merges contiguous steps into runs.
fn runs(steps: &[PageMove]) -> Vec<MovedRun> {
    let mut out: Vec<MovedRun> = Vec::new();
    for &(slot, from, to) in steps {
        match out.last_mut() {
            Some(last)
                if last.slots().end == slot
                    && last.from.0 + u64::from(last.len) == from.0
                    && last.to.0 + u64::from(last.len) == to.0 =>
            {
                last.len += 1;
            }
            _ => out.push(MovedRun { slot: slot as u8, len: 1, from, to }),
        }
    }
    out
}

/// Returns the map of a volume that is not deleted: the tables of a deleted one are released one by one,
/// and the tables above still refer to them.
pub(super) fn living(catalog: &mut Catalog, id: VolumeId) -> Result<(Editor<'_>, &VolumeRecord), Failure> {
    match catalog.read_editor(id) {
        Some((editor, record)) if record.state != VolumeState::Dead => Ok((editor, record)),
        _ => Err(Failure::Gone),
    }
}

fn survey(catalog: &mut Catalog, id: VolumeId, at: VirtualPage) -> Result<Option<Survey>, Failure> {
    living(catalog, id)?;
    let alone = catalog.members([id].into_iter(), at);
    let Some(found) = look_at(catalog, alone, id, at)? else { return Ok(None) };
    if found.movable.pages == found.movable.all || catalog.directory.iter().count() > MAX_MEMBERS {
        return Ok(Some(found));
    }
    let ids: Vec<VolumeId> = catalog.directory.iter().map(|v| v.record.id).collect();
    let all = catalog.members(ids.into_iter(), at);
    look_at(catalog, all, id, at)
}

fn look_at(
    catalog: &mut Catalog,
    members: Vec<crate::map::Member>,
    id: VolumeId,
    at: VirtualPage,
) -> Result<Option<Survey>, Failure> {
    let mut editor = catalog.editor();
    let family = editor.family(members, at)?;
    let movable = editor.movable(&family, id)?;
    Ok(movable.map(|movable| Survey { family, movable }))
}

/// Returns what to move of the virtual block that begins at `at`, if anything.
pub fn plan_moves(
    catalog: &mut Catalog,
    id: VolumeId,
    at: VirtualPage,
    way: GatherMode,
) -> Result<Option<MovePlan>, Failure> {
    if way == GatherMode::Home && has_holes(catalog, id, at)? {
        return Ok(None);
    }
    let Some(Survey { movable, .. }) = survey(catalog, id, at)? else { return Ok(None) };
    let (before, follow) = neighbours(catalog, id, at)?;
    let is_scattered = seams_of(&movable.all) > 0;
    let follows = before.is_some_and(|before| movable.all[0] == Some(Block(before.0 + 1).first_page()));
    let behind =
        (way == GatherMode::Sequential && (is_scattered || !follows)).then(|| plan_move_all(&movable)).flatten();
    let behind = behind.filter(|plan| matches!(plan.target, Target::Block));
    let mut plan = behind.and_then(|plan| limit_to_worthwhile(plan, &movable, way));
    if plan.is_none() && is_scattered {
        let plans = single_block_plans(catalog, &movable, way)?;
        plan = plans
            .into_iter()
            .flatten()
            .find_map(|plan| limit_to_worthwhile(plan, &movable, way.min(GatherMode::Requested)));
    }
    Ok(plan.map(|plan| MovePlan { before, follow, ..plan }))
}

/// Whether the virtual block has a hole before the end of the volume.
fn has_holes(catalog: &mut Catalog, id: VolumeId, at: VirtualPage) -> Result<bool, Failure> {
    let (editor, record) = living(catalog, id)?;
    let (mut page, end) = (at.0, pages_of(record.size).min(at.0 + BLOCK_PAGES));
    while page < end {
        let run = lookup(editor.tables, record, VirtualPage(page), end - page).map_err(Stop::from)?;
        if run.data.is_none() {
            return Ok(true);
        }
        page += run.len;
    }
    Ok(false)
}

/// Returns the block in which the virtual block before `at` ends, and how many virtual blocks are left
/// from `at` on.
fn neighbours(catalog: &mut Catalog, id: VolumeId, at: VirtualPage) -> Result<(Option<Block>, u64), Failure> {
    let (editor, record) = living(catalog, id)?;
    let left = pages_of(record.size).saturating_sub(at.0).div_ceil(BLOCK_PAGES).clamp(1, MAX_ROW_BLOCKS);
    let Some(last) = at.0.checked_sub(1) else { return Ok((None, left)) };
    let run = lookup(editor.tables, record, VirtualPage(last), 1).map_err(Stop::from)?;
    let end = run.data.map(|(page, _)| page).filter(|page| page.index() as u64 + 1 == BLOCK_PAGES);
    Ok((end.map(PageAddr::block), left))
}

/// Returns the possible plans for a single block, the best first.
fn single_block_plans(
    catalog: &mut Catalog,
    movable: &Movable,
    way: GatherMode,
) -> Result<[Option<MovePlan>; 2], Failure> {
    let home = plan_return(catalog, movable)?;
    Ok(match home {
        Some((home, _)) if way == GatherMode::Home => [Some(home), None],
        None if way == GatherMode::Home => [None, None],
        // Some of it would stay scattered, which is not what was requested.
        Some((home, false)) if way >= GatherMode::Requested => [plan_move_all(movable), Some(home)],
        home => [home.map(|(home, _)| home), plan_move_all(movable)],
    })
}

/// Plans to move everything else to the block where most pages lie, as far as there is space; returns
/// also whether that is all of it.
fn plan_return(catalog: &mut Catalog, movable: &Movable) -> Result<Option<(MovePlan, bool)>, Failure> {
    let mut blocks: BTreeMap<Block, u64> = BTreeMap::new();
    let in_place = |&(slot, page): &(usize, PageAddr)| page.index() == slot;
    let mapped = || movable.all.iter().enumerate().filter_map(|(slot, page)| Some((slot, (*page)?)));
    mapped().filter(in_place).for_each(|(_, page)| *blocks.entry(page.block()).or_default() += 1);
    let Some((&home, _)) = blocks.iter().max_by_key(|&(_, n)| *n) else { return Ok(None) };
    contiguous::learn_free(&mut catalog.space, home).map_err(Stop::from)?;
    let away: Vec<PageMove> =
        mapped().map(|(slot, page)| (slot, page, home.page(slot))).filter(|(_, page, to)| page != to).collect();
    let may_go = |&&(slot, page, to): &&PageMove| {
        movable.pages[slot] == Some(page) && contiguous::is_known_free(&catalog.space, to)
    };
    let steps: Vec<PageMove> = away.iter().filter(may_go).copied().collect();
    let is_all = steps.len() == away.len();
    let plan = MovePlan { steps, target: Target::Return, tables: movable.tables, before: None, follow: 1 };
    Ok((!plan.steps.is_empty()).then_some((plan, is_all)))
}

/// Finds space for a plan and allocates it.
pub fn place_gathered(catalog: &mut Catalog, plan: MovePlan) -> Result<Placed, Miss> {
    let MovePlan { mut steps, target, tables, before, follow } = plan;
    let Ok(reserved) = catalog.reserve(Need::Move { pages: steps.len() as u64, tables }) else {
        return Ok(Placed::NoRoom);
    };
    match target {
        Target::Return => {}
        Target::Block => match contiguous::block_to_gather(&mut catalog.space, before, follow)? {
            Some(block) => steps.iter_mut().for_each(|(slot, _, to)| *to = block.page(*slot)),
            None => return Ok(Placed::NoRoom),
        },
        Target::Run => {
            let Some(first) = contiguous::run_to_gather(&mut catalog.space, steps.len() as u64, &reserved)? else {
                return Ok(Placed::NoRoom);
            };
            steps.iter_mut().zip(first.0..).for_each(|((_, _, to), place)| *to = PageAddr(place));
            return Ok(Placed::Moves(runs(&steps)));
        }
    }
    let all = contiguous::take_all(&mut catalog.space, steps.iter().map(|&(_, _, to)| to), &reserved);
    Ok(if all { Placed::Moves(runs(&steps)) } else { Placed::NoRoom })
}

/// Returns the record for the copied pages that can be published: still there, unchanged, and with all
/// references known. `None` if there are none.
pub fn gather_record(
    catalog: &mut Catalog,
    id: VolumeId,
    at: VirtualPage,
    moved: &[MovedRun],
) -> Result<Option<Record>, Failure> {
    let Some(Survey { family, movable }) = survey(catalog, id, at)? else { return Ok(None) };
    let pages = moved.iter().flat_map(|run| run.slots().filter_map(|slot| run.of(slot).map(|(f, t)| (slot, f, t))));
    let stays = |&(slot, from, _): &PageMove| movable.pages[slot] == Some(from) && !catalog.watched.was_written(from);
    let steps: Vec<PageMove> = pages.filter(stays).collect();
    if steps.is_empty() || catalog.reserve(Need::PublishMove { tables: movable.tables }).is_err() {
        return Ok(None);
    }
    let moved = runs(&steps);
    let leaves = catalog.editor().who_refers(&family, &moved);
    Ok(Some(Record::Gather { volumes: family.affected(&leaves), at, moved }))
}
