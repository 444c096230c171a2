//! Functions have at most 100 lines from signature to closing brace, names of tests at most 80 characters.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::{Source, Violation};

pub const MAX_FUNCTION_COUNT: usize = 100;
pub const MAX_NAME_COUNT: usize = 80;

/// Functions whose body has more than [`MAX_FUNCTION_COUNT`] lines.
pub fn check_length(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for function in functions(source) {
        if function.line_count > MAX_FUNCTION_COUNT {
            let Function { name, line_count, .. } = &function;
            let what = format!("`{name}` has {line_count} lines, at most {MAX_FUNCTION_COUNT}: cut it");
            violations.push(Violation::new(source, function.line, what));
        }
    }
    violations
}

/// Tests whose name has more than [`MAX_NAME_COUNT`] characters.
pub fn check_names(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for function in functions(source) {
        let length = function.name.len();
        if function.is_test && length > MAX_NAME_COUNT {
            let what = format!("test name of {length} characters, at most {MAX_NAME_COUNT}: `{}`", function.name);
            violations.push(Violation::new(source, function.line, what));
        }
    }
    violations
}

struct Function {
    name: String,
    line: usize,
    /// Lines of the body, with its braces.
    line_count: usize,
    is_test: bool,
}

fn functions(source: &Source) -> Vec<Function> {
    let mut found = Found::default();
    found.visit_file(&crate::paths::parse(source));
    found.0
}

#[derive(Default)]
struct Found(Vec<Function>);

impl Found {
    fn add(&mut self, name: &syn::Ident, block: &syn::Block, attributes: &[syn::Attribute]) {
        let span = block.span();
        self.0.push(Function {
            name: name.to_string(),
            line: name.span().start().line,
            line_count: span.end().line - span.start().line + 1,
            is_test: attributes.iter().any(|attribute| attribute.path().is_ident("test")),
        });
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig.ident, &item.block, &item.attrs);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig.ident, &item.block, &item.attrs);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.sig.ident, block, &item.attrs);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_function_is_found_wherever_it_stands() {
        let long = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(99));
        let short = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(98));
        for (before, after) in [("", ""), ("impl A {\n", "}\n"), ("trait A {\n", "}\n"), ("mod a {\n", "}\n")] {
            let count = |text: &str| check_length(&Source::new("a.rs", &format!("{before}{text}{after}"))).len();
            assert_eq!((count(&long), count(&short)), (1, 0), "{before}");
        }
    }

    #[test]
    fn a_long_name_of_a_test_is_found() {
        let name = "a".repeat(81);
        let text = format!("#[test]\nfn {name}() {{}}\nfn {name}b() {{}}\n#[test]\nfn {}() {{}}\n", "b".repeat(80));
        let found = check_names(&Source::new("a.rs", &text));
        assert_eq!(found.iter().map(|violation| violation.line).collect::<Vec<_>>(), [2]);
    }
}
