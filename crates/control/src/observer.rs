//! How far a verb has come, for whoever waits for it.

use serde::{Deserialize, Serialize};

/// Where a verb is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What is going on, such as `importing`.
    pub what: String,
    /// Bytes done; `null` where there is nothing to count.
    pub done: Option<u64>,
    /// Bytes in all, if that is known.
    pub total: Option<u64>,
}

impl Step {
    /// Something that lasts, without anything to count.
    pub fn lasting(what: &str) -> Step {
        Step { what: what.to_string(), done: None, total: None }
    }

    /// `done` bytes of `total`.
    pub fn bytes(what: &str, done: u64, total: Option<u64>) -> Step {
        Step { what: what.to_string(), done: Some(done), total }
    }
}

/// Is told how far a verb has come.
pub trait Observer {
    /// The verb is here now. Called often; must not block.
    fn reached(&self, step: Step);
}

/// Wants to know nothing.
pub struct Silent;

impl Observer for Silent {
    fn reached(&self, _step: Step) {}
}
