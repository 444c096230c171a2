//! Generations of plans: lets a task wait for all plans made before a moment without delaying later ones.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::Event;

#[derive(Default)]
struct Generation {
    live: Cell<usize>,
    ended: Event,
}

/// The current generation and the earlier ones that still have plans under way.
#[derive(Default)]
pub struct Generations {
    current: RefCell<Rc<Generation>>,
    older: RefCell<Vec<Rc<Generation>>>,
    /// A task waits for the plans of the generation that was current.
    turned: Event,
}

/// A plan under way; dropping it ends the plan.
pub struct PlanGuard(Rc<Generation>);

impl Drop for PlanGuard {
    fn drop(&mut self) {
        self.0.live.set(self.0.live.get() - 1);
        if self.0.live.get() == 0 {
            self.0.ended.notify();
        }
    }
}

impl Generations {
    /// Begins a plan.
    pub fn enter(&self) -> PlanGuard {
        let current = self.current.borrow().clone();
        current.live.set(current.live.get() + 1);
        PlanGuard(current)
    }

    /// Resolves when a task waits for this plan.
    pub async fn turned(&self, plan: &PlanGuard) {
        while Rc::ptr_eq(&plan.0, &self.current.borrow()) {
            self.turned.wait().await;
        }
    }

    /// Waits until every plan begun before this call has ended.
    pub async fn barrier(&self) {
        let old = self.current.replace(Rc::default());
        self.turned.notify();
        let mut waiting = {
            let mut older = self.older.borrow_mut();
            older.push(old);
            older.retain(|g| g.live.get() > 0);
            older.clone()
        };
        while let Some(generation) = waiting.pop() {
            while generation.live.get() > 0 {
                generation.ended.wait().await;
            }
        }
    }
}
