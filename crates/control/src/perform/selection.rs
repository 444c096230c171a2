//! Selection of volumes and snapshots by label, name, age and lifetime.

use forkdisk::{ErrorKind, VolumeInfo};
use glob::Pattern;

use crate::failure::Failure;

/// What is selected; by default everything.
#[derive(Default)]
pub struct Selection {
    labels: Vec<(String, Option<String>)>,
    patterns: Option<Vec<Pattern>>,
    older_than: Option<u64>,
    expires_before: Option<u64>,
}

/// The selection that parameters have.
macro_rules! selection {
    ($p:ident) => {
        crate::perform::selection::Selection::new(&$p.label, $p.pattern.as_deref(), $p.older_than, $p.expires_before)
    };
}
pub(crate) use selection;

impl Selection {
    /// Parses a selection.
    ///
    /// # Errors
    /// `Invalid` for a bad pattern.
    pub fn new(
        labels: &[String],
        pattern: Option<&str>,
        older_than: Option<u64>,
        expires_before: Option<u64>,
    ) -> Result<Selection, Failure> {
        let label = |text: &String| match text.split_once('=') {
            Some((key, value)) => (key.to_string(), Some(value.to_string())),
            None => (text.clone(), None),
        };
        let parsed = |part: &str| {
            let bad = |_| Failure::new(ErrorKind::Invalid, format!("match: {part:?} is no pattern of names"));
            Pattern::new(part).map_err(bad)
        };
        let split = |text: &str| text.split(',').filter(|part| !part.is_empty()).map(parsed).collect();
        let patterns = pattern.map(split).transpose()?;
        Ok(Selection { labels: labels.iter().map(label).collect(), patterns, older_than, expires_before })
    }

    /// Whether it leaves nothing out.
    pub fn is_everything(&self) -> bool {
        let Selection { labels, patterns, older_than, expires_before } = self;
        labels.is_empty() && patterns.is_none() && older_than.is_none() && expires_before.is_none()
    }

    /// Whether a volume or snapshot is selected at `now`.
    pub fn has(&self, info: &VolumeInfo, now: u64) -> bool {
        let has_label = |(key, value): &(String, Option<String>)| {
            info.labels.get(key).is_some_and(|found| value.as_ref().is_none_or(|value| value == found))
        };
        self.labels.iter().all(has_label)
            && self.patterns.as_ref().is_none_or(|all| all.iter().any(|pattern| pattern.matches(&info.name)))
            && self.older_than.is_none_or(|age| info.created.saturating_add(age) < now)
            && self.expires_before.is_none_or(|time| info.expires != 0 && info.expires < time)
    }

    /// The failure of a verb that needs something, when nothing is selected.
    pub fn nothing(&self) -> Failure {
        let text = "nothing matches the selection; `forkdisk list` with the same options shows what does";
        Failure::new(ErrorKind::NotFound, text)
    }
}
