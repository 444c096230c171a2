//! What the methods declare about their parameters: the only source of names, types and texts for the JSON Schema,
//! the tables of docs/control.md and the help of the command line.

/// A method as it is declared.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// Name of the method.
    pub method: &'static str,
    /// What the method does.
    pub(crate) about: &'static str,
    /// Its parameters.
    pub fields: &'static [Field],
}

/// What a struct of parameters declares.
pub trait Declared {
    /// What the method does.
    const ABOUT: &'static str;
    /// Its parameters.
    const FIELDS: &'static [Field];
}

/// One parameter as it is declared.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name of the field of the struct.
    pub name: &'static str,
    /// Its type.
    pub(crate) kind: &'static str,
    /// Contents of its `serde` attribute.
    pub(crate) serde: &'static str,
    /// Its documentation as it is written, with its lines.
    pub(crate) doc: &'static str,
}

impl Declaration {
    /// Returns what the method does, in one line.
    pub(crate) fn text(&self) -> String {
        one_line(self.about)
    }
}

impl Field {
    /// Returns its name in requests.
    pub(crate) fn key(&self) -> &'static str {
        let renamed = self.serde.split_once("rename = \"").and_then(|(_, rest)| rest.split('"').next());
        renamed.unwrap_or(self.name)
    }

    /// Returns whether a request may leave it out.
    pub(crate) fn is_optional(&self) -> bool {
        self.serde.split(',').any(|word| word.trim() == "default")
    }

    /// Returns its documentation in one line.
    pub fn text(&self) -> String {
        one_line(self.doc)
    }
}

fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}
