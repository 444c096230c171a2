//! What differs between the worlds that a history runs in.

use forkdisk::{Mode, Pool, VolatileMemory};

use super::{Inflight, Operation, Outcome, Run, Stats, Violation};
use crate::disk::{Crash, LyingDevice, SimDisk};
use crate::executor::{Executor, Step};
use crate::model::{Model, Pending};

/// What a setup of any world has.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// The seed of everything.
    pub seed: u64,
    /// Most operations in flight.
    pub depth: usize,
    /// Whether there is memory that outlives the process: then a kill loses nothing acknowledged.
    pub lasting: bool,
}

/// One life of the engine: an executor, the disks and the open pool.
pub trait Life {
    /// The disks at one instant.
    type Instant: Instant;

    fn exec(&self) -> &Executor;
    fn pool(&self) -> &Pool<LyingDevice>;
    /// Returns the disks, the pool's first.
    fn disks(&self) -> &[SimDisk];
    /// Returns the memory that outlives the process, if there is any.
    fn memory(&self) -> Option<&VolatileMemory>;
    fn freeze(&self, crash: Crash) -> Self::Instant;

    fn faults_hit(&self) -> u64 {
        self.disks().iter().map(SimDisk::faults_hit).sum()
    }

    fn has_failed(&self) -> bool {
        self.pool().info().mode == Mode::Failed
    }
}

/// The disks at one instant, to try crashes from.
pub trait Instant {
    /// What a crash leaves.
    type Media;
    /// What survives of the disks.
    type Mask: Copy;

    /// Returns the mask of this number, as replays have it.
    fn drawn(&self, mask: u64) -> Self::Mask;
    /// Returns the number of masks in the enumeration of all.
    fn masks(&self) -> u64;
    /// Returns the n-th mask of the enumeration.
    fn nth(&self, n: u64) -> Self::Mask;
    /// Returns what a crash leaves.
    fn crash(&self, mask: Self::Mask) -> Self::Media;
    /// Returns a number that is the same for two masks only if they leave the same.
    fn fingerprint(&self, mask: Self::Mask) -> u64;
    /// Describes what is lost.
    fn describe(&self, mask: Self::Mask) -> String;
}

/// What is known of the pool while a history runs.
pub trait Knowledge: Clone {
    fn model(&self) -> &Model;
    fn model_mut(&mut self) -> &mut Model;
    /// Returns the control operations that may or may not have happened.
    fn pending(&mut self) -> &mut Vec<Pending>;
}

/// How a recovery is carried out.
#[derive(Clone, Copy, Debug)]
pub struct Entrance {
    /// The seed of its choices.
    pub seed: u64,
    /// How often it may be cut and started over.
    pub cuts: u32,
    /// Whether to cut the power again afterwards and check that a second recovery finds the same.
    pub again: bool,
}

/// What a recovery follows.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// A crash beside the run, with the draw of its step.
    Beside(u64),
    /// A crash that is one of all that are tried at its step.
    Watched,
    /// The end of a life of the run.
    Cut,
}

/// What a history runs in. The value itself is the state of a run that only this world has.
pub trait World: Sized + 'static {
    type Setup: Clone;
    type Session: Life;
    type Known: Knowledge;
    /// What the weights of operations follow.
    type Focus: Copy + PartialEq + 'static;

    /// Numbers the draws of a run.
    const RUN_SEED: u64;
    /// Numbers the draws of side crashes.
    const CRASHES_SEED: u64;
    /// Operations from a failure until the pool is opened again.
    const PATIENCE_COUNT: u32;
    /// Most masks of an enumeration tried at one step, and further ones that are drawn.
    const WATCHED_DRAWN_MASKS: u64;

    fn common(setup: &Self::Setup) -> Common;
    /// Creates a pool.
    fn make(setup: &Self::Setup) -> Result<(Self, Self::Session, Self::Known), Violation>;
    /// Returns the table of operations, in the order in which histories draw them.
    fn operations() -> &'static [&'static Operation<Self>];
    /// Returns exceptions from that order: of which focus, which operation, after which other one.
    fn drawn_after() -> &'static [(Self::Focus, &'static str, &'static str)] {
        &[]
    }
    /// Called before an operation of a history starts.
    fn before_launch(_run: &mut Run<Self>) -> Result<(), Violation> {
        Ok(())
    }
    /// Ends a run.
    fn finish(run: &mut Run<Self>) -> Result<(), Violation>;

    /// Called before each step of the executor.
    fn before_step(_run: &mut Run<Self>) {}
    /// Called after each step of the executor, before what it ended is processed.
    fn after_step(_run: &mut Run<Self>, _ran: Step, _ended: bool) {}
    /// Checks what must be true after every step.
    fn judge_step(_run: &mut Run<Self>) -> Result<(), Violation> {
        Ok(())
    }
    /// Checks the rules for an acknowledgement or refusal.
    fn judge(run: &mut Run<Self>, op: &Inflight<Self>, outcome: &Outcome) -> Result<(), Violation>;
    /// Notes that a control operation has happened.
    fn apply(run: &mut Run<Self>, pending: &Pending) -> Result<(), Violation>;
    /// Called when an operation was processed.
    fn ended(_run: &mut Run<Self>, _id: u64) -> Result<(), Violation> {
        Ok(())
    }
    /// Whether something has failed that only a new life mends.
    fn has_failed(run: &Run<Self>) -> bool {
        run.session.has_failed()
    }

    /// Returns the masks that a run tries at one of its side crashes.
    fn masks(run: &Run<Self>, draw: u64) -> Vec<u64>;
    /// Whether a run tries side crashes at this step.
    fn cuts_here(run: &Run<Self>, draw: u64) -> bool;
    /// Returns the memory in the middle of the last step, if a kill can leave that.
    fn memory_within_step(_run: &Run<Self>, _draw: u64) -> Option<VolatileMemory> {
        None
    }
    /// Changes what is known to what holds after a crash that loses nothing acknowledged.
    fn keep_acknowledged(session: &Self::Session, known: &mut Self::Known);
    /// Called before the run itself is cut: returns the memory that is left, and whether nothing acknowledged
    /// is lost.
    fn before_cut(run: &mut Run<Self>, kind: Crash, draw: u64) -> Result<(Option<VolatileMemory>, bool), Violation> {
        let memory = run.memory_after(kind, draw);
        let keeps = memory.is_some();
        Ok((memory, keeps))
    }
    /// Returns how the recovery after a crash under this mask is carried out.
    fn entrance(run: &mut Run<Self>, moment: Moment, mask: u64) -> Entrance;
    /// Opens what a crash has left and compares everything; the findings resolve what was in flight.
    fn recover(
        setup: &Self::Setup,
        left: (<<Self::Session as Life>::Instant as Instant>::Media, Option<VolatileMemory>),
        known: &Self::Known,
        entrance: Entrance,
        stats: &mut Stats,
    ) -> Result<(Self::Session, Self::Known), Violation>;
    /// Forgets all state of the last life of the engine.
    fn begin_life(&mut self);
}
