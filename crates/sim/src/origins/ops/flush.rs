//! Flushes.

use super::target::handle;
use super::write::target;
use crate::driver::{Class, Op, Operation, Start, Violation};
use crate::model::Key;
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static FLUSH: Operation<Origins> = Operation {
    name: "flush",
    weight: |focus| match focus {
        Plain => 12,
        Strikes => 6,
        Sweeps => 4,
    },
    launch: flush,
};

pub fn flush(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = target(run, op, false)? else { return Ok(()) };
    let Some(volume) = handle(run, key)? else { return Ok(()) };
    let text = format!("flush {}", run.known.model.name(key));
    let start = Start::new(Class::Flush, run.known.model.tick(), vec![key], text);
    // One of the pool covers all but the origin.
    run.submit(start, async move { volume.flush().await.into() }, move |run, ended| {
        let origin = run.known.origin;
        let all = run.known.model.volumes().map(|(k, _)| k);
        let keys: Vec<Key> = all.filter(|&k| (k == origin) == (key == origin)).collect();
        for key in keys.into_iter().filter(|_| ended.is_ok()) {
            run.known.model.flushed(Some(key), ended.op.start);
        }
        Ok(())
    });
    Ok(())
}
