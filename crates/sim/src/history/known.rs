//! What is known of a pool while a history runs.

use crate::driver::Knowledge;
use crate::model::{Model, Pending};

/// The model, and the control operations that may or may not have happened.
#[derive(Clone)]
pub struct Known {
    /// What every volume may hold.
    pub model: Model,
    /// The control operations.
    pub pending: Vec<Pending>,
}

impl Known {
    /// Returns it for a pool in which nothing is in doubt.
    pub fn of(model: Model) -> Known {
        Known { model, pending: Vec::new() }
    }
}

impl Knowledge for Known {
    fn model(&self) -> &Model {
        &self.model
    }

    fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    fn pending(&mut self) -> &mut Vec<Pending> {
        &mut self.pending
    }
}
