//! Examples of each verb, for its help and its manual page: an attribute of the verb's arguments.

use clap::Command;

/// Heading of the examples in the help.
const HEADING: &str = "Examples:\n  ";

/// Formats examples as the last part of a verb's help.
macro_rules! examples {
    ($first:literal $(, $more:literal)* $(,)?) => {
        concat!("Examples:\n  ", $first $(, "\n  ", $more)*)
    };
}
pub(crate) use examples;

/// Returns the examples of `verb`.
pub fn of(verb: &Command) -> Vec<String> {
    let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
    let lines = help.strip_prefix(HEADING).map(|lines| lines.split("\n  ").map(str::to_string).collect());
    lines.unwrap_or_default()
}
