//! The end of a life of the engine, and of the protection of the origin.

use super::target::{is_quiet, rolling};
use crate::disk::{Crash, LyingDevice, Medium};
use crate::driver::{Instant, Life, Op, Operation, PATIENCE_STEPS, Violation};
use crate::model::{Control, Rule};
use crate::origins::ORIGIN;
use crate::origins::op::Focus::*;
use crate::origins::recover::{protection, recover};
use crate::origins::run::{Origins, Run, entrance};

/// Closes cleanly, compares the origin as an ordinary disk, and opens again.
pub static REOPEN: Operation<Origins> = Operation {
    name: "reopen",
    weight: |focus| match focus {
        Sweeps => 2,
        Plain | Strikes => 1,
    },
    launch: reopen,
};

/// Cuts the power of both disks.
pub static CUT: Operation<Origins> = Operation {
    name: "cut",
    weight: |focus| match focus {
        Plain => 2,
        Strikes | Sweeps => 1,
    },
    launch: |run, op| run.cut(Crash::Power, op.draws[0]),
};

/// Kills the process.
pub static KILL: Operation<Origins> = Operation {
    name: "kill",
    weight: |focus| match focus {
        Plain | Strikes | Sweeps => 1,
    },
    launch: |run, op| run.cut(Crash::Kill, op.draws[0]),
};

/// Stops the protection of the origin, and protects it again.
pub static UNPROTECT: Operation<Origins> = Operation {
    name: "unprotect",
    weight: |focus| match focus {
        Plain | Strikes => 1,
        _ => 0,
    },
    launch: unprotect,
};

/// Closes cleanly: the origin is an ordinary disk that holds what was written, and nothing is lost.
pub fn reopen(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if !is_quiet(run)? {
        return Ok(());
    }
    run.say(|| "closes and opens again".into());
    let rolling = rolling(run).is_some();
    let pool = run.session.pool.clone();
    let closed = run.session.exec.run(PATIENCE_STEPS, async move {
        pool.detach_origin(ORIGIN, || 0).await?;
        pool.close().await
    })?;
    closed.map_err(|e| Violation::new("P6", format!("a clean stop fails: {e}")))?;
    let frozen = run.session.freeze(Crash::Power);
    let media = frozen.crash(frozen.drawn(op.draws[0]));
    if !rolling {
        compare_disk(run, &media[1])?;
    }
    let mut known = run.known.clone();
    let now = known.model.tick();
    known.model.flushed(None, now);
    let (session, known) = recover(&run.setup, (media, None), &known, entrance(op.draws[1]), &mut run.stats)?;
    run.begin_life(session, known);
    Ok(())
}

fn compare_disk(run: &mut Run, medium: &Medium) -> Result<(), Violation> {
    let mut bytes = vec![0; run.setup.origin as usize];
    medium.image().read(0, &mut bytes);
    let (origin, now) = (run.known.origin, run.known.model.tick());
    Ok(run.known.model.check(origin, 0, &bytes, Rule::Since(now))?)
}

/// Makes the origin an ordinary disk for a while.
pub fn unprotect(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if !is_quiet(run)? || !run.known.rests.is_empty() || rolling(run).is_some() {
        return Ok(());
    }
    run.say(|| "unprotects the origin and protects it again".into());
    let (pool, disk) = (run.session.pool.clone(), LyingDevice::of_origin(run.session.disks[1].clone()));
    let options = protection(&run.setup, op.draws[0]);
    let done = run.session.exec.run(PATIENCE_STEPS, async move {
        pool.unprotect(ORIGIN, true).await?;
        pool.protect(ORIGIN, disk, &options).await
    })?;
    done.map_err(|e| Violation::new("P6", format!("an origin cannot be unprotected and protected again: {e}")))?;
    let origin = run.known.origin;
    let keys = run.known.model.volumes().filter(|(_, v)| v.of == Some(origin)).map(|(k, _)| k).collect();
    let pending = run.known.model.begin(Control::Delete(keys));
    run.known.apply(&pending);
    let now = run.known.model.tick();
    run.known.model.flushed(Some(origin), now);
    compare_disk(run, &run.session.disks[1].freeze(Crash::Kill).crash(1))
}
