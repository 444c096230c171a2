//! The parameters of all methods as a JSON Schema, from their declaration in `method`.
//!
//! `docs/control.schema.json` is this schema, and the tables of methods and parameters in `docs/control.md` are made
//! from the declaration, too; tests keep them equal.

use serde_json::{Map, Value, json};

use crate::declared::Field;
use crate::method::Request;

/// Returns the name of the type of a parameter in JSON, and whether `null` is allowed.
fn json_type(field: &Field) -> (&'static str, bool) {
    let inner = field.kind.strip_prefix("Option<").and_then(|kind| kind.strip_suffix('>'));
    let name = match inner.unwrap_or(field.kind) {
        "String" => "string",
        "bool" => "boolean",
        "Vec<String>" => "array",
        _ => "integer",
    };
    (name, inner.is_some())
}

fn property(field: &Field) -> Value {
    let (name, nullable) = json_type(field);
    let kinds = if nullable { json!([name, "null"]) } else { json!(name) };
    let mut schema = json!({ "type": kinds, "description": field.text() });
    match name {
        "array" => schema["items"] = json!({ "type": "string" }),
        "integer" => schema["minimum"] = json!(0),
        _ => {}
    }
    schema
}

/// Returns the JSON Schema of a request: one alternative for each method.
pub fn schema() -> Value {
    let methods = Request::DECLARED.iter().map(|declared| {
        let (method, fields) = (declared.method, declared.fields);
        let properties: Map<_, _> = fields.iter().map(|field| (field.key().to_string(), property(field))).collect();
        let required: Vec<_> = fields.iter().filter(|field| !field.is_optional()).map(Field::key).collect();
        json!({
            "title": method,
            "description": declared.text(),
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
mod tests;
