//! Logs when a pool runs low on space, and when it is full; returns freed space.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Mode, Pool, PoolEvent};
use forkdisk_control::size::human;
use forkdisk_uring::{Rt, UringDevice};

use crate::session::tell_dropped;

/// Interval of the checks.
const LOOK: Duration = Duration::from_secs(1);
/// Interval at which freed space is returned to the pool and to the file system under it.
const GIVE_BACK: Duration = Duration::from_secs(5);

/// Runs checkpoints: only they make trimmed or deleted space free, and a hole in the pool's file.
/// The engine starts one when much has changed; this starts one for little, too.
pub async fn give_back(runtime: Rt, pool: Pool<UringDevice>, read_only: bool) {
    if read_only {
        return;
    }
    loop {
        runtime.sleep_for(GIVE_BACK).await;
        if pool.space().freeing > 0
            && let Err(error) = pool.checkpoint().await
        {
            return tracing::error!(%error, "space cannot be given back");
        }
    }
}

/// Warns when free space falls below the low-water mark, and again only after it has risen above
/// it. Does the same for a pool without space for a write.
pub async fn watch(runtime: Rt, pool: Pool<UringDevice>) {
    let (mut was_low, mut was_full) = (false, false);
    let told = Rc::new(Told::default());
    let telling = told.clone();
    pool.observe(move |event| telling.tell(event));
    loop {
        let is_low = pool.is_low();
        if is_low != was_low {
            tell(&pool, is_low);
        }
        was_low = is_low;
        let is_full = pool.mode() == Mode::OutOfDataSpace;
        if is_full != was_full {
            tell_full(&pool, is_full);
        }
        if !is_full {
            told.begin_anew();
        }
        was_full = is_full;
        runtime.sleep_for(LOOK).await;
    }
}

/// What was logged since the pool had space.
#[derive(Default)]
struct Told {
    waits: Cell<bool>,
    fails: Cell<bool>,
}

impl Told {
    /// Logs the first write that waits for space, and the first that fails.
    fn tell(&self, event: &PoolEvent) {
        match event {
            PoolEvent::WaitsForSpace { volume } if !self.waits.replace(true) => tracing::warn!(
                %volume,
                "a write waits for space: grow the pool, delete volumes or snapshots, or give the file system under it \
                 room; \
                 it fails after wait_for_space"
            ),
            PoolEvent::OutOfSpace { volume } if !self.fails.replace(true) => tracing::error!(
                %volume,
                "writes fail with ENOSPC for want of space: grow the pool, delete volumes or snapshots, or give the \
                 file \
                 system under it room"
            ),
            event => tell_dropped(event),
        }
    }

    /// Resets the state: the next write that finds no space is logged again.
    fn begin_anew(&self) {
        self.waits.set(false);
        self.fails.set(false);
    }
}

fn tell(pool: &Pool<UringDevice>, is_low: bool) {
    let info = pool.info();
    let (used, free, low_water) = (human(info.used), human(info.free), human(info.low_water));
    match is_low {
        true => tracing::warn!(
            %used, %free, %low_water,
            "the pool runs full: grow it, delete volumes or snapshots, or have origins drop their oldest snapshots \
             (set when-full=drop-oldest)"
        ),
        false => tracing::info!(%used, %free, %low_water, "the pool is no longer low on space"),
    }
}

fn tell_full(pool: &Pool<UringDevice>, is_full: bool) {
    let info = pool.info();
    let (used, free) = (human(info.used), human(info.free));
    match is_full {
        true => tracing::warn!(
            %used, %free,
            "the pool is out of data space: what needs new space waits or fails (when-full) until the pool, or the \
             file \
             system under it, has room"
        ),
        false => tracing::info!(%used, %free, "the pool has data space again"),
    }
}
