//! The parameters of all methods as a JSON Schema, from their declaration in `method`.
//!
//! `docs/control.schema.json` is this schema; a test keeps both equal, and compares the table of methods in
//! `docs/control.md` with the declaration.

use serde_json::{Map, Value, json};

use crate::method::Request;

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
    /// Name of the field.
    pub name: &'static str,
    /// Its type.
    pub kind: &'static str,
    /// Contents of its `serde` attribute.
    pub serde: &'static str,
    /// Its documentation.
    pub doc: &'static str,
}

impl Field {
    /// Returns its name in requests.
    fn key(&self) -> &'static str {
        let renamed = self.serde.split_once("rename = \"").and_then(|(_, rest)| rest.split('"').next());
        renamed.unwrap_or(self.name)
    }

    fn is_optional(&self) -> bool {
        self.serde.split(',').any(|word| word.trim() == "default")
    }

    fn schema(&self) -> Value {
        let inner = self.kind.strip_prefix("Option<").and_then(|kind| kind.strip_suffix('>'));
        let kind = inner.unwrap_or(self.kind);
        let name = match kind {
            "String" => "string",
            "bool" => "boolean",
            "Vec<String>" => "array",
            _ => "integer",
        };
        let kinds = if inner.is_some() { json!([name, "null"]) } else { json!(name) };
        let mut schema = json!({ "type": kinds, "description": one_line(self.doc) });
        match kind {
            "Vec<String>" => schema["items"] = json!({ "type": "string" }),
            "u8" | "u32" | "u64" => schema["minimum"] = json!(0),
            _ => {}
        }
        schema
    }
}

fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the JSON Schema of a request: one alternative for each method.
pub fn schema() -> Value {
    let methods = Request::DECLARED.iter().map(|(method, about, fields)| {
        let properties: Map<_, _> = fields.iter().map(|field| (field.key().to_string(), field.schema())).collect();
        let required: Vec<_> = fields.iter().filter(|field| !field.is_optional()).map(Field::key).collect();
        json!({
            "title": method,
            "description": one_line(about),
            "type": "object",
            "required": ["jsonrpc", "method"],
            "properties": {
                "jsonrpc": { "const": "2.0" },
                "id": { "type": ["string", "integer", "null"] },
                "method": { "const": method },
                "params": {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": false,
                },
            },
        })
    });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Requests to the control socket of forkdisk",
        "oneOf": methods.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(name: &str) -> String {
        let path = format!("{}/docs/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    #[test]
    fn the_schema_in_the_documents_is_that_of_the_declaration() {
        let text = serde_json::to_string_pretty(&schema()).unwrap() + "\n";
        if std::env::var_os("FORKDISK_TEST_BLESS").is_some() {
            std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/control.schema.json"), &text).unwrap();
        }
        assert!(document("control.schema.json") == text, "run this test with FORKDISK_TEST_BLESS=1, then look at it");
    }

    #[test]
    fn the_table_of_methods_lists_the_declared_parameters() {
        let text = document("control.md");
        for (method, _, fields) in Request::DECLARED {
            let row = text.lines().find(|line| line.starts_with(&format!("| `{method}` | ")));
            let row = row.unwrap_or_else(|| panic!("docs/control.md has no row for {method}"));
            let cell = row.split(" | ").nth(1).unwrap();
            for field in *fields {
                let (optional, plain) = (format!("[`{}`]", field.key()), format!("`{}`", field.key()));
                assert_eq!(cell.contains(&optional), field.is_optional(), "{method}: {optional} in: {cell}");
                assert!(cell.contains(&plain), "{method} lacks {plain}: {cell}");
            }
            for named in cell.split("[`").skip(1).filter_map(|rest| rest.split('`').next()) {
                assert!(fields.iter().any(|field| field.key() == named), "{method} has no parameter {named}");
            }
        }
    }

    #[test]
    fn what_a_method_requires_and_its_types_are_in_the_schema() {
        let all = schema();
        let create = &all["oneOf"][0]["properties"]["params"];
        assert_eq!(create["required"], json!(["volumes", "size"]));
        assert_eq!(create["properties"]["break"]["type"], json!(["string", "null"]));
        assert_eq!(
            create["properties"]["size"],
            json!({"type": "integer", "minimum": 0, "description": "The size of each."})
        );
    }
}
