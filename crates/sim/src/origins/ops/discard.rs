//! Discards.

use super::target::{any_of, handle, is_there, place};
use crate::driver::{Op, Operation, Violation};
use crate::origins::op::Focus::*;
use crate::origins::run::{Origins, Run};

pub static DISCARD: Operation<Origins> = Operation {
    name: "discard",
    weight: |focus| match focus {
        Plain => 1,
        _ => 0,
    },
    launch: discard,
};

/// Discards a range of the origin or of a clone with a backing, which must change nothing.
fn discard(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let (rests, flattening) = (run.known.rests.clone(), run.known.flattening.clone());
    let origin = run.known.origin;
    let rests = |key| rests.contains_key(&key) && !flattening.contains(&key);
    let wanted = |key, v: &crate::model::Volume| key == origin || v.of.is_none() && rests(key);
    let Some(key) = any_of(run, op.draws[0], wanted) else { return Ok(()) };
    if !is_there(run, key)? {
        return Ok(());
    }
    let size = run.known.model.get(key).map_or(0, |v| v.size);
    let (offset, len) = place([op.draws[1], op.draws[2]], size, false);
    let Some(volume) = handle(run, key)? else { return Ok(()) };
    let text = format!("discard {} {offset}+{len}", run.known.model.name(key));
    run.submit_upkeep("discard", vec![key], text, async move { volume.discard(offset, len).await.into() });
    Ok(())
}
