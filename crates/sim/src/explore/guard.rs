//! Turns panics of the engine into findings that do not end the campaign.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};

use crate::history::Violation;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    static GUARDED: RefCell<u32> = const { RefCell::new(0) };
}

/// Silences panics inside guarded runs: they are reported as violations instead. Others are printed as
/// before.
pub fn silence_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if GUARDED.with_borrow(|n| *n > 0) {
            LAST.set(Some(info.to_string()));
        } else {
            before(info);
        }
    }));
}

/// Runs `f`; a panic becomes a violation.
pub(super) fn catch<T>(f: impl FnOnce() -> T) -> Result<T, Violation> {
    GUARDED.with_borrow_mut(|n| *n += 1);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    GUARDED.with_borrow_mut(|n| *n -= 1);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        let what = LAST.take().or(text).unwrap_or_else(|| "a panic without a message".into());
        Violation::new("panic", what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_violation() {
        assert_eq!(catch(|| 5).unwrap(), 5);
        let violation = catch(|| panic!("lost {}", 3)).unwrap_err();
        assert_eq!(violation.promise, "panic");
        assert!(violation.what.contains("lost 3"), "{}", violation.what);
    }
}
