//! Which pages of a virtual block are brought together, and where.
//!
//! - *Home*: most of them lie in one block, as they lie in the volume, and the places of the others there are
//!   free: only the others move.
//! - *Elsewhere*: all that can be moved go to a place where they lie in one piece.
//!
//! A page is moved only together with all who refer to it, so that nothing is unshared: where not all of
//! them are known it stays.

use std::collections::BTreeMap;

use crate::format::{Moved, Record, VolumeRecord, VolumeState};
use crate::map::{Editor, Family, Movable, Stop, lookup, seams_if, seams_of};
use crate::pool::{Failure, Meta, pages_of};
use crate::space::Miss;
use crate::types::{BLOCK_PAGES, Block, FANOUT, PageAddr, VirtualPage, VolumeId};

/// Volumes and snapshots among which it is looked for those who share something.
const MAX_MEMBERS: usize = 256;
/// Most virtual blocks for which room in one piece is looked for.
const IN_A_ROW: u64 = 256;
/// Pages kept back for tables and for verbs that free space.
const RESERVE: u64 = 64;

/// Most pages that are moved by policy for each seam that is one no more: where they go home, and elsewhere.
const HOME_COST: u64 = 2;
const COST: u64 = 64;
/// Stands for the block where pages will go, whichever that is: nothing lies there.
const NOWHERE: Block = Block(1 << 31);

/// A page and where it is to go.
type Step = (usize, PageAddr, PageAddr);

enum Target {
    Home,
    /// A block of their own, in which each lies as in the volume.
    Block,
    /// One behind the other.
    Run,
}

/// At whose expense a volume is gathered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// As [`Unasked`](Way::Unasked), and pages only go home, in blocks without holes. What still fills up in random places
    /// would be moved again and again.
    Home,
    /// By policy: everybody's seams count, and no other volume gets more of them.
    Unasked,
    /// Somebody wants this volume in one piece, whoever pays for it.
    Asked,
    /// So does somebody, and its blocks are to lie one behind the other.
    InOrder,
}

/// What is to be moved. The places are real ones only where it goes home.
pub struct Wish {
    steps: Vec<Step>,
    target: Target,
    /// Tables that change.
    tables: u64,
    /// Where the virtual block before it ends, and how many follow with it.
    before: Option<Block>,
    follow: u64,
}

/// What came of placing a wish.
pub enum Placed {
    Moves(Vec<Moved>),
    NoRoom,
}

impl Wish {
    /// The pages that are to be moved.
    pub fn pages(&self) -> impl Iterator<Item = PageAddr> + '_ {
        self.steps.iter().map(|&(_, from, _)| from)
    }

    /// Where each page lies when they have been moved.
    fn now(&self) -> impl Fn(usize, PageAddr) -> PageAddr + use<> {
        let mut to: [Option<(PageAddr, PageAddr)>; FANOUT] = [None; FANOUT];
        self.steps.iter().for_each(|&(slot, from, place)| to[slot] = Some((from, place)));
        move |slot, page| to[slot].filter(|(from, _)| *from == page).map_or(page, |(_, to)| to)
    }

    /// Pages that go one behind the other do so, whichever they are.
    fn line_up(&mut self) {
        if let Target::Run = self.target {
            self.steps.iter_mut().enumerate().for_each(|(i, (_, _, to))| *to = NOWHERE.page(i));
        }
    }
}

/// All who may refer to what a volume has there, and what of it can be moved.
struct Survey {
    family: Family,
    movable: Movable,
}

impl Meta {
    /// The map of a volume that is not deleted: of one that is, tables go one by one, and what is above goes on
    /// naming them.
    pub(super) fn living(&mut self, id: VolumeId) -> Result<(Editor<'_>, &VolumeRecord), Failure> {
        match self.view(id) {
            Some((editor, record)) if record.state != VolumeState::Dead => Ok((editor, record)),
            _ => Err(Failure::Gone),
        }
    }

    fn survey(&mut self, id: VolumeId, at: VirtualPage) -> Result<Option<Survey>, Failure> {
        self.living(id)?;
        let alone = self.members([id].into_iter(), at);
        let Some(found) = self.look_at(alone, id, at)? else { return Ok(None) };
        if found.movable.pages == found.movable.all || self.directory.iter().count() > MAX_MEMBERS {
            return Ok(Some(found));
        }
        let ids: Vec<VolumeId> = self.directory.iter().map(|v| v.record.id).collect();
        let all = self.members(ids.into_iter(), at);
        self.look_at(all, id, at)
    }

    fn look_at(
        &mut self,
        members: Vec<crate::map::Member>,
        id: VolumeId,
        at: VirtualPage,
    ) -> Result<Option<Survey>, Failure> {
        let mut editor = self.editor();
        let family = editor.family(members, at)?;
        let movable = editor.movable(&family, id)?;
        Ok(movable.map(|movable| Survey { family, movable }))
    }

    /// What of the virtual block that begins at `at` is to be moved, if anything.
    pub fn wish_to_gather(&mut self, id: VolumeId, at: VirtualPage, way: Way) -> Result<Option<Wish>, Failure> {
        if way == Way::Home && self.has_holes(id, at)? {
            return Ok(None);
        }
        let Some(Survey { movable, .. }) = self.survey(id, at)? else { return Ok(None) };
        let (before, follow) = self.neighbours(id, at)?;
        let is_scattered = seams_of(&movable.all) > 0;
        let follows = before.is_some_and(|before| movable.all[0] == Some(Block(before.0 + 1).first_page()));
        let behind = (way == Way::InOrder && (is_scattered || !follows)).then(|| elsewhere(&movable)).flatten();
        let behind = behind.filter(|wish| matches!(wish.target, Target::Block));
        let mut wish = behind.and_then(|wish| worth(wish, &movable, way));
        if wish.is_none() && is_scattered {
            let wishes = self.apart(&movable, way)?;
            wish = wishes.into_iter().flatten().find_map(|wish| worth(wish, &movable, way.min(Way::Asked)));
        }
        Ok(wish.map(|wish| Wish { before, follow, ..wish }))
    }

    /// Whether nothing is mapped somewhere in the virtual block, before the end of the volume.
    fn has_holes(&mut self, id: VolumeId, at: VirtualPage) -> Result<bool, Failure> {
        let (editor, record) = self.living(id)?;
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

    /// The block in which the virtual block before `at` ends, and how many virtual blocks are left from `at` on.
    fn neighbours(&mut self, id: VolumeId, at: VirtualPage) -> Result<(Option<Block>, u64), Failure> {
        let (editor, record) = self.living(id)?;
        let left = pages_of(record.size).saturating_sub(at.0).div_ceil(BLOCK_PAGES).clamp(1, IN_A_ROW);
        let Some(last) = at.0.checked_sub(1) else { return Ok((None, left)) };
        let run = lookup(editor.tables, record, VirtualPage(last), 1).map_err(Stop::from)?;
        let end = run.data.map(|(page, _)| page).filter(|page| page.index() as u64 + 1 == BLOCK_PAGES);
        Ok((end.map(PageAddr::block), left))
    }

    /// What may be done about a block by itself, the best first.
    fn apart(&mut self, movable: &Movable, way: Way) -> Result<[Option<Wish>; 2], Failure> {
        let home = self.home(movable)?;
        Ok(match home {
            Some((home, _)) if way == Way::Home => [Some(home), None],
            None if way == Way::Home => [None, None],
            // Some of it stays scattered, which whoever asks did not ask for.
            Some((home, false)) if way >= Way::Asked => [elsewhere(movable), Some(home)],
            home => [home.map(|(home, _)| home), elsewhere(movable)],
        })
    }

    /// Everything that is not where most of it is goes there, as far as there is room; whether that is all of it.
    fn home(&mut self, movable: &Movable) -> Result<Option<(Wish, bool)>, Failure> {
        let mut blocks: BTreeMap<Block, u64> = BTreeMap::new();
        let in_place = |&(slot, page): &(usize, PageAddr)| page.index() == slot;
        let mapped = || movable.all.iter().enumerate().filter_map(|(slot, page)| Some((slot, (*page)?)));
        mapped().filter(in_place).for_each(|(_, page)| *blocks.entry(page.block()).or_default() += 1);
        let Some((&home, _)) = blocks.iter().max_by_key(|&(_, n)| *n) else { return Ok(None) };
        self.space.learn_free(home).map_err(Stop::from)?;
        let away: Vec<Step> =
            mapped().map(|(slot, page)| (slot, page, home.page(slot))).filter(|(_, page, to)| page != to).collect();
        let may_go = |&&(slot, page, to): &&Step| movable.pages[slot] == Some(page) && self.space.is_known_free(to);
        let steps: Vec<Step> = away.iter().filter(may_go).copied().collect();
        let is_all = steps.len() == away.len();
        let wish = Wish { steps, target: Target::Home, tables: movable.tables, before: None, follow: 1 };
        Ok((!wish.steps.is_empty()).then_some((wish, is_all)))
    }

    /// Finds room for a wish and takes it.
    pub fn place_gathered(&mut self, wish: Wish) -> Result<Placed, Miss> {
        let Wish { mut steps, target, tables, before, follow } = wish;
        let kept = self.checkpoint_pages() + tables + RESERVE;
        if !self.space.has_room_to_gather(steps.len() as u64, kept) {
            return Ok(Placed::NoRoom);
        }
        match target {
            Target::Home => {}
            Target::Block => match self.space.block_to_gather(before, follow)? {
                Some(block) => steps.iter_mut().for_each(|(slot, _, to)| *to = block.page(*slot)),
                None => return Ok(Placed::NoRoom),
            },
            Target::Run => {
                let Some(first) = self.space.run_to_gather(steps.len() as u64)? else { return Ok(Placed::NoRoom) };
                steps.iter_mut().zip(first.0..).for_each(|((_, _, to), place)| *to = PageAddr(place));
                return Ok(Placed::Moves(runs(&steps)));
            }
        }
        let all = self.space.take_all(steps.iter().map(|&(_, _, to)| to));
        Ok(if all { Placed::Moves(runs(&steps)) } else { Placed::NoRoom })
    }

    /// Of what was copied, what can be published: still there, unchanged, and everybody who refers to it known.
    /// `None` if nothing can.
    pub fn gather_record(&mut self, id: VolumeId, at: VirtualPage, moved: &[Moved]) -> Result<Option<Record>, Failure> {
        let Some(Survey { family, movable }) = self.survey(id, at)? else { return Ok(None) };
        let pages = moved.iter().flat_map(|run| run.slots().filter_map(|slot| run.of(slot).map(|(f, t)| (slot, f, t))));
        let stays = |&(slot, from, _): &Step| movable.pages[slot] == Some(from) && !self.moving.was_written(from);
        let steps: Vec<Step> = pages.filter(stays).collect();
        if steps.is_empty() || self.space.available() < self.checkpoint_pages() + movable.tables + RESERVE {
            return Ok(None);
        }
        let moved = runs(&steps);
        let leaves = self.editor().who_refers(&family, &moved);
        Ok(Some(Record::Gather { volumes: family.affected(&leaves), at, moved }))
    }
}

/// Everything that can be moved goes to a place in one piece.
fn elsewhere(movable: &Movable) -> Option<Wish> {
    let mapped = movable.all.iter().flatten().count() as u64;
    let target = if 2 * mapped > BLOCK_PAGES { Target::Block } else { Target::Run };
    let pages = movable.pages.iter().enumerate().filter_map(|(slot, page)| Some((slot, (*page)?)));
    let steps: Vec<Step> = pages.map(|(slot, page)| (slot, page, NOWHERE.page(slot))).collect();
    let mut wish = Wish { steps, target, tables: movable.tables, before: None, follow: 1 };
    wish.line_up();
    (!wish.steps.is_empty()).then_some(wish)
}

/// As much of a wish as is worth it.
fn worth(wish: Wish, movable: &Movable, way: Way) -> Option<Wish> {
    let (is_asked, wished) = (matches!(way, Way::Asked | Way::InOrder), wish.steps.len());
    let wish = if is_asked { wish } else { sparing(wish, movable) };
    let now = wish.now();
    let (before, after) = (seams_of(&movable.all), seams_if(&movable.all, &now));
    let is_worth = match way {
        Way::InOrder => after == 0 || after < before,
        Way::Asked => after < before,
        Way::Home | Way::Unasked => {
            let cost = if way == Way::Home { HOME_COST } else { COST };
            let is_cheap = after < before && wish.steps.len() as u64 <= cost * (before - after);
            // Where some of it has to stay it is all looked at again when the other is gone: not much is not worth it twice.
            let is_much = way != Way::Home || wish.steps.len() == wished || 2 * after <= before;
            is_cheap && is_much && movable.weight(&now) < movable.weight(|_, page| page)
        }
    };
    is_worth.then_some(wish)
}

/// Without pages that another volume has in better order than it would have them then.
fn sparing(mut wish: Wish, movable: &Movable) -> Wish {
    while let Some(leaf) = movable.burdened(wish.now()) {
        // It has some of them, so that there are fewer each time.
        wish.steps.retain(|&(slot, from, _)| leaf[slot] != Some(from));
        wish.line_up();
    }
    wish
}

/// Steps that go on where the one before ends, made one.
fn runs(steps: &[Step]) -> Vec<Moved> {
    let mut out: Vec<Moved> = Vec::new();
    for &(slot, from, to) in steps {
        match out.last_mut() {
            Some(last)
                if last.slots().end == slot
                    && last.from.0 + u64::from(last.len) == from.0
                    && last.to.0 + u64::from(last.len) == to.0 =>
            {
                last.len += 1;
            }
            _ => out.push(Moved { slot: slot as u8, len: 1, from, to }),
        }
    }
    out
}
