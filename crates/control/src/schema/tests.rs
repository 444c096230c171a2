use std::collections::HashMap;

use super::*;
use crate::declared::Declaration;

/// Heading of the table of methods; its last column is written by hand.
const METHODS: [&str; 2] = ["| method | parameters | result |", "|---|---|---|"];
/// Heading of the table of parameters, which is made from the declaration alone.
const PARAMETERS: [&str; 2] = ["| method | parameter | type | meaning |", "|---|---|---|---|"];
/// Stands for the result of a new method until it is described.
const UNDESCRIBED: &str = "?";

fn document(name: &str) -> String {
    let path = format!("{}/docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Compares a document with `text`, or replaces it by `text` if the variable is set.
fn expect(name: &str, text: &str) {
    if std::env::var_os("FORKDISK_TEST_BLESS").is_some() {
        std::fs::write(format!("{}/docs/{name}", env!("CARGO_MANIFEST_DIR")), text).unwrap();
    }
    assert!(document(name) == text, "docs/{name}: run this test with FORKDISK_TEST_BLESS=1, then look at the changes");
}

/// Returns the name as the tables show it: in brackets if it may be left out.
fn shown(field: &Field) -> String {
    if field.is_optional() { format!("[`{}`]", field.key()) } else { format!("`{}`", field.key()) }
}

/// Returns the rows of the table of methods, with the results that `old` has.
fn method_rows(old: &[&str]) -> Vec<String> {
    let results: HashMap<&str, &str> = old
        .iter()
        .filter_map(|row| match row.splitn(3, " | ").collect::<Vec<_>>()[..] {
            [method, _, result] => Some((method, result)),
            _ => None,
        })
        .collect();
    let row = |declared: &Declaration| {
        let method = format!("| `{}`", declared.method);
        let names: Vec<String> = declared.fields.iter().map(shown).collect();
        let names = if names.is_empty() { "none".to_string() } else { names.join(", ") };
        let result = results.get(method.as_str()).map_or_else(|| format!("{UNDESCRIBED} |"), |text| text.to_string());
        format!("{method} | {names} | {result}")
    };
    Request::DECLARED.iter().map(row).collect()
}

/// Returns the rows of the table of parameters.
fn parameter_rows() -> Vec<String> {
    let of_method = |declared: &'static Declaration| {
        declared.fields.iter().map(|field| {
            let kind = match json_type(field).0 {
                "array" => "strings",
                other => other,
            };
            format!("| `{}` | {} | {kind} | {} |", declared.method, shown(field), field.text())
        })
    };
    Request::DECLARED.iter().flat_map(of_method).collect()
}

/// Returns `text` with the rows of the table under `heading` replaced.
fn with_rows(text: &str, heading: [&str; 2], rows: impl Fn(&[&str]) -> Vec<String>) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let begin = lines.windows(2).position(|pair| pair == heading).expect("the table is in the document") + 2;
    let length = lines[begin..].iter().take_while(|line| line.starts_with('|')).count();
    let rows = rows(&lines[begin..begin + length]);
    let before = lines[..begin].iter().map(|line| line.to_string());
    let after = lines[begin + length..].iter().map(|line| line.to_string());
    before.chain(rows).chain(after).map(|line| line + "\n").collect()
}

#[test]
fn the_schema_in_the_documents_is_that_of_the_declaration() {
    expect("control.schema.json", &(serde_json::to_string_pretty(&schema()).unwrap() + "\n"));
}

#[test]
fn the_tables_of_the_schema_in_the_documents_are_the_declaration() {
    let text = document("control.md");
    let text = with_rows(&with_rows(&text, METHODS, method_rows), PARAMETERS, |_| parameter_rows());
    expect("control.md", &text);
    let undescribed = format!("| {UNDESCRIBED} |");
    assert!(!text.contains(&undescribed), "docs/control.md: describe the result of the method");
}

#[test]
fn what_a_method_requires_and_its_types_are_in_the_schema() {
    let all = schema();
    let create = &all["oneOf"][0]["properties"]["params"];
    assert_eq!(create["required"], json!(["volumes", "size"]));
    assert_eq!(create["properties"]["break"]["type"], json!(["string", "null"]));
    let text = "Size of each volume in bytes. Space is allocated only where it is written.";
    assert_eq!(create["properties"]["size"], json!({"type": "integer", "minimum": 0, "description": text}));
    assert_eq!(create["properties"]["volumes"]["items"], json!({"type": "string"}));
}
