//! Memory that outlives the process, as a kill in the middle of a step leaves it.
//!
//! A step of the executor runs one task until it waits; all that it stores happens between two moments at which the
//! simulator could kill the process. So the memory itself notes, for one of the stores of each step, what it held
//! before that store.

use std::cell::RefCell;
use std::rc::Rc;

use crate::rng::Rng;

#[derive(Default)]
struct Noted {
    /// Whether a step is running.
    runs: bool,
    stores: u64,
    before: Option<Vec<u8>>,
}

/// What the memory held before one of the stores of the last step.
#[derive(Default)]
pub struct Shadow(RefCell<Noted>);

impl Shadow {
    /// A step begins.
    pub fn begin(&self) {
        *self.0.borrow_mut() = Noted { runs: true, ..Noted::default() };
    }

    /// The step has ended.
    pub fn end(&self) {
        self.0.borrow_mut().runs = false;
    }

    /// Returns the contents before one of the stores of the last step, if it made any.
    pub fn before(&self) -> Option<Vec<u8>> {
        self.0.borrow().before.clone()
    }
}

/// The memory.
pub struct ShadowedMemory {
    bytes: Vec<u8>,
    shadow: Rc<Shadow>,
    rng: Rng,
}

impl ShadowedMemory {
    /// Creates memory with these contents.
    pub fn new(bytes: Vec<u8>, shadow: Rc<Shadow>) -> ShadowedMemory {
        ShadowedMemory { bytes, shadow, rng: Rng::new(1) }
    }
}

impl AsMut<[u8]> for ShadowedMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        let mut noted = self.shadow.0.borrow_mut();
        if noted.runs {
            noted.stores += 1;
            // Each store of the step with the same probability.
            if self.rng.below(noted.stores) == 0 {
                noted.before = Some(self.bytes.clone());
            }
        }
        drop(noted);
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_store_of_a_step_is_noted_at_some_time() {
        let shadow = Rc::<Shadow>::default();
        let mut memory = ShadowedMemory::new(vec![0; 1], shadow.clone());
        let mut seen = [0; 3];
        for _ in 0..300 {
            memory.as_mut()[0] = 0;
            shadow.begin();
            assert_eq!(shadow.before(), None);
            (0..3).for_each(|i| memory.as_mut()[0] = i + 1);
            shadow.end();
            memory.as_mut()[0] = 9;
            seen[usize::from(shadow.before().unwrap()[0])] += 1;
        }
        assert!(seen.iter().all(|&times| times > 50), "{seen:?}");
    }
}
