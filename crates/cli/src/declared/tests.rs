use std::collections::BTreeSet;

use clap::CommandFactory;

use super::*;
use crate::cli::Cli;

/// Methods that have no verb of their own name; those of rollbacks are options of `rollback`.
const WITHOUT_VERB: [&str; 4] = ["statistics", "status", "rollback-folder", "rollback-to"];

/// Parameters that are no argument of their own, with the reason.
const EXCEPTIONS: [(&str, &[&str], &str); 14] = [
    ("create", &["created_by"], "this program and its user"),
    ("clone", &["created_by"], "this program and its user"),
    ("snapshot", &["created_by"], "this program and its user"),
    ("import", &["source", "created_by"], "the path that the argument names, for messages; this program and its user"),
    ("export", &["target"], "the path that the argument names, for messages"),
    ("diff", &["from"], "the verb requests all parts"),
    ("map", &["from"], "the verb requests all parts"),
    ("protect", &["volume", "path"], "both are in one list of words, since a pool may come before the volume"),
    ("unprotect", &["volume"], "in a list of words, since a pool may come before the volume"),
    ("copier", &["percent", "bytes_per_second"], "both are the setting `throttle`"),
    ("mount", &["dir", "uid", "gid", "gather", "show_snapshots"], "a path, this user, and mount options"),
    ("fork", &["uid", "gid", "mode", "created_by"], "names of a user and a group, an octal number; its user"),
    ("rollback", &["snapshot"], "with --to and --to-origin the argument is a volume"),
    ("detach", &["device"], "the argument may also be the address of the volume"),
];

fn verb_of<'a>(command: &'a Command, name: &str) -> &'a Command {
    command.find_subcommand(name).unwrap_or_else(|| panic!("there is no verb {name}"))
}

fn argument<'a>(verb: &'a Command, id: &str) -> Option<&'a Arg> {
    verb.get_arguments().find(|arg| arg.get_id() == id)
}

#[test]
fn every_parameter_is_an_argument_with_its_text_or_an_exception() {
    let (derived, complete) = (Cli::command(), Cli::definition());
    let mut used = BTreeSet::new();
    for declared in Request::DECLARED.iter().filter(|declared| !WITHOUT_VERB.contains(&declared.method)) {
        let name = declared.method;
        let (own, verb) = (verb_of(&derived, name), verb_of(&complete, name));
        for field in declared.fields {
            let shown = format!("{name}: {}", field.name);
            let assigned = ASSIGNMENTS
                .iter()
                .find(|(verb, _, names)| *verb == name && names.iter().any(|(_, parameter)| *parameter == field.name));
            let is_exception = EXCEPTIONS.iter().any(|(verb, names, _)| *verb == name && names.contains(&field.name));
            match (argument(verb, field.name), assigned, is_exception) {
                (Some(arg), None, false) => {
                    assert_eq!(arg.get_help().unwrap().to_string(), help(field), "{shown}");
                    let text = argument(own, field.name).unwrap();
                    assert!(text.get_help().is_none(), "{shown} has a text of its own: remove it");
                }
                (None, Some((_, id, _)), false) => {
                    let text = argument(verb, id).unwrap().get_long_help().unwrap().to_string();
                    assert!(text.contains(&field.text()), "{shown} is not described by {id}: {text}");
                }
                (None, None, true) => {
                    used.insert((name, field.name));
                }
                (None, None, false) => panic!("{shown} is no argument: add one, or an exception with the reason"),
                _ => panic!("{shown} is in two places of: arguments, assignments, exceptions"),
            }
        }
    }
    for (verb, names, reason) in EXCEPTIONS {
        assert!(!reason.is_empty() && names.iter().all(|name| used.contains(&(verb, name))), "{verb}: {names:?}");
    }
}

#[test]
fn every_argument_has_help() {
    let complete = Cli::definition();
    for verb in complete.get_subcommands() {
        for arg in verb.get_arguments() {
            assert!(arg.get_help().is_some(), "{} {}", verb.get_name(), arg.get_id());
        }
    }
}
