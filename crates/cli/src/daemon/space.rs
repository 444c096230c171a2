//! Says in time that a pool runs full, and when it is.

use std::time::Duration;

use forkdisk::{Mode, Pool};
use forkdisk_control::size::human;
use forkdisk_uring::{Rt, UringDevice};

/// How often it looks.
const LOOK: Duration = Duration::from_secs(1);

/// Warns when free space falls below the low-water mark, and again only after it has risen above it; and likewise when
/// there is none for a write.
pub async fn watch(runtime: Rt, pool: Pool<UringDevice>) {
    let (mut was_low, mut was_full) = (false, false);
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
        was_full = is_full;
        runtime.sleep_for(LOOK).await;
    }
}

fn tell(pool: &Pool<UringDevice>, is_low: bool) {
    let info = pool.info();
    let (used, free, low_water) = (human(info.used), human(info.free), human(info.low_water));
    match is_low {
        true => tracing::warn!(
            %used, %free, %low_water,
            "the pool runs full: grow it, delete volumes or snapshots, or have origins drop their oldest snapshots (set when-full=drop-oldest)"
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
            "the pool is out of data space: what needs new space waits or fails (when-full) until the pool, or the file \
             system under it, has room"
        ),
        false => tracing::info!(%used, %free, "the pool has data space again"),
    }
}
