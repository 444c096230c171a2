//! The engine's switch for planted mistakes.
//!
//! The engine has none to offer yet: the list is empty.

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bug(&'static str);

impl Bug {
    /// All of them.
    pub const ALL: &'static [Bug] = &[];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        self.0
    }
}

/// Switches one on, for this thread, or all off.
pub fn set(_bug: Option<Bug>) {}
