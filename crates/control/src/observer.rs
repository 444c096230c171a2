//! Progress reports of verbs.

use serde::{Deserialize, Serialize};

/// Progress of a verb.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Step {
    /// Current activity, such as `importing`.
    pub what: String,
    /// Bytes done; `null` if the activity counts no bytes.
    pub done: Option<u64>,
    /// Total bytes, if known.
    pub total: Option<u64>,
}

impl Step {
    /// Creates a step without byte counts.
    pub fn lasting(what: &str) -> Step {
        Step { what: what.to_string(), done: None, total: None }
    }

    /// Creates a step of `done` bytes of `total`.
    pub fn bytes(what: &str, done: u64, total: Option<u64>) -> Step {
        Step { what: what.to_string(), done: Some(done), total }
    }
}

/// Receives the progress of a verb.
pub trait Observer {
    /// Reports the current step. Called often; must not block.
    fn reached(&self, step: Step);
}

/// Ignores all progress.
pub struct Silent;

impl Observer for Silent {
    fn reached(&self, _step: Step) {}
}
