//! Shortens a failing history, as long as it still breaks the same promise.

use std::time::{Duration, Instant};

use super::{Recipe, Report};
use crate::history::Violation;

/// A failing history from which no single operation can be removed (within the budget).
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// What to run.
    pub recipe: Recipe,
    /// The violation.
    pub violation: Violation,
    /// Runs it took.
    pub runs: u32,
}

/// Drops operations from the history of `recipe`, which fails with `violation`, in at most `budget` runs;
/// none begins after `patience`, since runs of long histories take seconds.
pub fn shrink(recipe: &Recipe, violation: &Violation, budget: u32, patience: Duration) -> Shrunk {
    let began = Instant::now();
    // Without operations the steps move, so the crash has to be searched again: many of them.
    let dense = if violation.cut.is_some() { Some((16, 6)) } else { recipe.dense };
    let fails = |keep: &[u32]| {
        let candidate = Recipe { keep: Some(keep.to_vec()), aim: None, dense, ..recipe.clone() };
        let Report { violation: found, .. } = candidate.run(false);
        found.filter(|v| v.promise == violation.promise).map(|v| (candidate, v))
    };
    let all: Vec<u32> = recipe.keep.clone().unwrap_or_else(|| (1..=recipe.steps as u32).collect());
    let mut best = (all, recipe.aimed(violation), violation.clone());
    let mut runs = 0;
    let goes_on = |runs: u32| runs < budget && began.elapsed() < patience;
    let mut chunk = best.0.len().div_ceil(2);
    while chunk > 0 && goes_on(runs) {
        let mut at = 0;
        let mut shorter = false;
        while at < best.0.len() && goes_on(runs) {
            let end = (at + chunk).min(best.0.len());
            let keep = [&best.0[..at], &best.0[end..]].concat();
            runs += 1;
            match fails(&keep) {
                Some((candidate, v)) => {
                    best = (keep, candidate.aimed(&v), v);
                    shorter = true;
                }
                None => at = end,
            }
        }
        if chunk == 1 && !shorter {
            break;
        }
        chunk = if chunk == 1 { 1 } else { chunk.div_ceil(2) };
    }
    let (_, recipe, violation) = best;
    Shrunk { recipe, violation, runs }
}
