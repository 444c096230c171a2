//! The command line's definition for parser, manual and completions: adds what the derived
//! definition cannot express for all verbs at once.

use clap::{Arg, Command};

use crate::declared;

/// Heading of the options common to all verbs.
const OF_EVERY_VERB: &str = "Options of every verb";
/// Value names of numbers: `-5G` is refused as a negative number instead of an unknown option.
const NUMBERS: [&str; 5] = ["SIZE", "TIME", "NUMBER", "SECONDS", "SIZE|PERCENT%"];

/// Verbs of other programs that forkdisk lacks, and what to use instead.
const ELSEWHERE: [(&[&str], &str); 5] = [
    (
        &["send", "receive", "recv"],
        "`export` writes a volume or snapshot as an image, `import` reads one; NBD clients copy only what changed \
         since a \
         snapshot (docs/nbd.md)",
    ),
    (&["prune", "purge", "expire"], "`list` shows snapshots with their times, `delete` takes several at once"),
    (&["backup", "restore"], "`export` writes a volume or snapshot as an image, `import` reads one"),
    (&["cp", "copy"], "`clone` makes a volume that shares everything with another, `export` writes an image"),
    (&["start", "nbd"], "`serve` offers the volumes of a pool over NBD"),
];

/// Completes the `derived` definition.
pub fn complete(derived: Command) -> Command {
    derived.mut_args(tune).mut_subcommands(|verb| declared::describe(verb.mut_args(tune)))
}

/// Returns the definition `whole` without the verbs that only forkdisk itself and udev use.
pub fn without_hidden_verbs(whole: Command) -> Command {
    let shown: Vec<Command> = whole.get_subcommands().filter(|verb| !verb.is_hide_set()).cloned().collect();
    let about = whole.get_about().cloned().unwrap_or_default();
    let more = whole.get_after_help().cloned().unwrap_or_default();
    let pared =
        Command::new("forkdisk").about(about).after_help(more).args(whole.get_arguments().cloned()).subcommands(shown);
    match whole.get_version() {
        Some(version) => pared.version(version.to_string()),
        None => pared,
    }
}

fn tune(arg: Arg) -> Arg {
    let is_number = |name: &str| NUMBERS.contains(&name);
    let takes_number = arg.get_value_names().is_some_and(|names| names.len() == 1 && is_number(&names[0]));
    let arg = if takes_number { arg.allow_hyphen_values(true) } else { arg };
    if arg.is_global_set() { arg.help_heading(OF_EVERY_VERB) } else { arg }
}

/// Returns the message for an unknown verb that is known from other programs.
pub fn elsewhere(word: &str) -> Option<String> {
    let (_, way) = ELSEWHERE.iter().find(|(words, _)| words.contains(&word))?;
    Some(format!("there is no verb `{word}`: {way}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::verbs::examples;

    #[test]
    fn the_definition_is_consistent() {
        Cli::definition().debug_assert();
        without_hidden_verbs(Cli::definition()).debug_assert();
    }

    /// Clap checks this in debug builds only.
    #[test]
    fn no_two_options_of_a_verb_have_one_name() {
        let mut command = Cli::definition();
        command.build();
        let mut verbs = vec![&command];
        while let Some(verb) = verbs.pop() {
            verbs.extend(verb.get_subcommands());
            let mut names: Vec<String> = verb
                .get_arguments()
                .flat_map(|arg| {
                    let longs = arg.get_long_and_visible_aliases().unwrap_or_default().into_iter().map(str::to_string);
                    let shorts = arg.get_short_and_visible_aliases().unwrap_or_default();
                    longs.chain(shorts.into_iter().map(|short| format!("-{short}"))).collect::<Vec<_>>()
                })
                .collect();
            names.sort();
            let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(twice, None, "{}", verb.get_name());
        }
    }

    #[test]
    fn every_verb_has_examples_that_its_parser_takes() {
        // Started by forkdisk itself, or by udev.
        let internal = ["device-links", "hold-frozen", "keeper", "on-mount", "on-run", "with-parent"];
        let definition = Cli::definition();
        for verb in definition.get_subcommands().filter(|verb| !internal.contains(&verb.get_name())) {
            let lines = examples::of(verb);
            assert!(!lines.is_empty(), "{} has no example", verb.get_name());
            for line in lines {
                let words = line.split_whitespace().take_while(|word| !["|", ">"].contains(word));
                Cli::definition().try_get_matches_from(words).unwrap_or_else(|e| panic!("{line}: {e}"));
            }
        }
    }

    #[test]
    fn no_word_of_another_program_is_a_verb_or_its_alias() {
        for word in ELSEWHERE.iter().flat_map(|(words, _)| *words) {
            let error = Cli::definition().try_get_matches_from(["forkdisk", word]).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::InvalidSubcommand, "{word}");
        }
    }
}
