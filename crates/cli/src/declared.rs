//! Help texts of arguments, from the declaration of the methods' parameters in `forkdisk-control`.
//!
//! An argument with the id of a parameter of the method with the verb's name has that parameter's text, and
//! none of its own. Value parsers, names of options and conflicts belong to the verb.

use clap::{Arg, Command};
use forkdisk_control::{Field, Request};

use crate::verbs::{copier, fork, lifetime, set};

/// Names that an argument of the form NAME=VALUE takes, each with the parameter that it sets.
type Names = [(&'static str, &'static str)];

/// Arguments of that form: verb, id of the argument, and its names.
const ASSIGNMENTS: [(&str, &str, &Names); 7] = [
    ("set", "property", &set::PROPERTIES),
    ("copier", "set", &copier::SETTINGS),
    ("fork", "set", &fork::PROPERTIES),
    ("create", "set", &lifetime::VOLUME_PROPERTIES),
    ("clone", "set", &lifetime::VOLUME_PROPERTIES),
    ("import", "set", &lifetime::VOLUME_PROPERTIES),
    ("snapshot", "set", &lifetime::PROPERTIES),
];

/// Adds the help of the arguments that are parameters of the method with the verb's name.
pub fn describe(verb: Command) -> Command {
    let Some(fields) = fields(verb.get_name()) else { return verb };
    let name = verb.get_name().to_string();
    verb.mut_args(|arg| {
        let id = arg.get_id().as_str();
        if let Some(field) = fields.iter().find(|field| field.name == id) {
            return arg.help(help(field));
        }
        match ASSIGNMENTS.iter().find(|(verb, argument, _)| *verb == name && *argument == id) {
            Some((_, _, names)) => with_list(arg, fields, names),
            None => arg,
        }
    })
}

fn fields(verb: &str) -> Option<&'static [Field]> {
    Request::DECLARED.iter().find(|declared| declared.method == verb).map(|declared| declared.fields)
}

/// Returns a parameter's text without the full stop at its end, as clap shows other texts.
fn help(field: &Field) -> String {
    let text = field.text();
    text.strip_suffix('.').unwrap_or(&text).to_string()
}

/// Adds a paragraph for each name to the long help.
fn with_list(arg: Arg, fields: &[Field], names: &Names) -> Arg {
    let line = |(name, field): &(&str, &str)| {
        let found = fields.iter().find(|other| other.name == *field);
        found.map(|field| format!("{name}: {}", field.text()))
    };
    let about = arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
    let paragraphs: Vec<String> = about.into_iter().chain(names.iter().filter_map(line)).collect();
    arg.long_help(paragraphs.join("\n\n"))
}

#[cfg(test)]
mod tests;
