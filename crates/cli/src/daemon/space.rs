//! Says in time that a pool runs full.

use std::time::Duration;

use forkdisk::Pool;
use forkdisk_control::size::human;
use forkdisk_uring::{Rt, UringDevice};

/// How often it looks.
const LOOK: Duration = Duration::from_secs(1);

/// Warns when free space falls below the low-water mark, and again only after it has risen above it.
pub async fn watch(runtime: Rt, pool: Pool<UringDevice>) {
    let mut was_low = false;
    loop {
        let is_low = pool.is_low();
        if is_low != was_low {
            tell(&pool, is_low);
        }
        was_low = is_low;
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
