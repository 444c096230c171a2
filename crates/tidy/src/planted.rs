//! Planted bugs of the engine have one form: `correct!(right, Bug::Name => wrong)`.
//!
//! A bug replaces one expression by another and never adds a statement: the right side is not `()`, and no side
//! has statements. A right side and a wrong one that are both `true` or `false` would only pass on whether the bug
//! is switched on. Outside of the macro, [`MODULE`] alone names bugs; a function or an import for a wrong side
//! stands behind `#[cfg(feature = "planted")]`, and nothing else does.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use syn::parse::{Parse, ParseStream};
use syn::visit::{self, Visit};
use syn::{Expr, Stmt, Token};

use crate::{Source, Violation};

/// The file that defines the macro and the bugs.
pub const MODULE: &str = "crates/forkdisk/src/planted.rs";

/// Words that begin an item behind its attributes.
const ITEM_WORDS: [&str; 6] = ["pub", "fn", "async", "use", "mod", "impl"];

/// Planted bugs of another form.
pub fn check(source: &Source) -> Vec<Violation> {
    if source.path == MODULE {
        return Vec::new();
    }
    let stream: TokenStream = source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path));
    let mut found = Found { source, violations: Vec::new() };
    found.walk(stream, false);
    found.violations
}

/// The arguments of the macro.
struct Correct {
    right: Expr,
    wrong: Vec<Expr>,
}

impl Parse for Correct {
    fn parse(input: ParseStream<'_>) -> syn::Result<Correct> {
        let (right, mut wrong) = (input.parse()?, Vec::new());
        while wrong.is_empty() || !input.is_empty() {
            input.parse::<Token![,]>()?;
            let bug: syn::Ident = input.parse()?;
            if bug != "Bug" {
                return Err(syn::Error::new(bug.span(), "no bug"));
            }
            input.parse::<Token![::]>()?;
            input.parse::<syn::Ident>()?;
            input.parse::<Token![=>]>()?;
            wrong.push(input.parse()?);
        }
        Ok(Correct { right, wrong })
    }
}

struct Found<'a> {
    source: &'a Source,
    violations: Vec<Violation>,
}

impl Found<'_> {
    fn add(&mut self, token: &TokenTree, what: &str) {
        let what = format!("{what}: write `correct!(right, Bug::Name => wrong)`");
        self.violations.push(Violation::new(self.source, token.span().start().line, what));
    }

    /// Reads tokens, which stand within the macro or elsewhere.
    fn walk(&mut self, stream: TokenStream, is_inside: bool) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at..] {
                [token @ TokenTree::Ident(name), TokenTree::Punct(mark), TokenTree::Group(group), ..]
                    if name == "correct" && mark.as_char() == '!' =>
                {
                    if is_inside {
                        self.add(token, "one planted bug within another");
                    }
                    self.look(token, group);
                    self.walk(group.stream(), true);
                    at += 3;
                    continue;
                }
                [token @ TokenTree::Ident(name), ..] if name == "Bug" && !(is_inside && is_arm(&tokens, at)) => {
                    self.add(token, "a planted bug outside of the macro");
                }
                [token @ TokenTree::Ident(name), ..] if name == "planted" && !is_path(&tokens, at, is_inside) => {
                    self.add(token, "a switch of planted bugs outside of the macro");
                }
                [token @ TokenTree::Literal(text), ..] if text.to_string() == "\"planted\"" => {
                    self.add(token, "the feature `planted` at something else than an item");
                }
                [TokenTree::Punct(hash), TokenTree::Group(group), rest @ ..]
                    if hash.as_char() == '#' && is_feature(group) && begins_item(rest) =>
                {
                    at += 2;
                    continue;
                }
                [TokenTree::Group(group), ..] => self.walk(group.stream(), is_inside),
                _ => {}
            }
            at += 1;
        }
    }

    /// Reads the arguments of one macro.
    fn look(&mut self, token: &TokenTree, group: &Group) {
        let Ok(Correct { right, wrong }) = syn::parse2(group.stream()) else {
            return self.add(token, "arguments of another form");
        };
        if group.delimiter() != Delimiter::Parenthesis {
            self.add(token, "the macro without parentheses");
        }
        if matches!(&right, Expr::Tuple(tuple) if tuple.elems.is_empty()) {
            self.add(token, "a planted bug that adds a statement");
        }
        if is_bool(&right) && wrong.iter().any(is_bool) {
            self.add(token, "a planted bug as a value of its own");
        }
        let mut statements = Statements(false);
        [&right].into_iter().chain(&wrong).for_each(|side| statements.visit_expr(side));
        if statements.0 {
            self.add(token, "a planted bug that replaces statements");
        }
    }
}

/// Whether a block has more than an expression.
struct Statements(bool);

impl<'ast> Visit<'ast> for Statements {
    fn visit_block(&mut self, block: &'ast syn::Block) {
        self.0 |= !matches!(&block.stmts[..], [] | [Stmt::Expr(_, None)] | [Stmt::Macro(_)]);
        visit::visit_block(self, block);
    }
}

fn is_bool(side: &Expr) -> bool {
    matches!(side, Expr::Lit(literal) if matches!(literal.lit, syn::Lit::Bool(_)))
}

/// Whether `Bug` at `at` begins `Bug::Name =>` behind a comma.
fn is_arm(tokens: &[TokenTree], at: usize) -> bool {
    let behind: String = tokens[at + 1..].iter().take(5).map(mark).collect();
    at > 0 && mark(&tokens[at - 1]) == ',' && behind == "::a=>"
}

/// Whether `planted` at `at` is the module itself, the import of the macro, or a helper within the macro.
fn is_path(tokens: &[TokenTree], at: usize, is_inside: bool) -> bool {
    let text = |token: Option<&TokenTree>| token.map(ToString::to_string).unwrap_or_default();
    let (name, end) = (text(tokens.get(at + 3)), text(tokens.get(at + 4)));
    let before = text(at.checked_sub(1).and_then(|before| tokens.get(before)));
    let is_import = name == "correct" && end == ";";
    before == "mod" || is_import || is_inside && name == "released"
}

/// The character of a mark; `a` for a word.
fn mark(token: &TokenTree) -> char {
    match token {
        TokenTree::Punct(punct) => punct.as_char(),
        TokenTree::Ident(_) => 'a',
        _ => ' ',
    }
}

/// `[cfg(feature = "planted")]`.
fn is_feature(attribute: &Group) -> bool {
    attribute.stream().to_string().replace(' ', "") == "cfg(feature=\"planted\")"
}

/// Whether an item begins here, behind further attributes.
fn begins_item(tokens: &[TokenTree]) -> bool {
    match tokens {
        [TokenTree::Punct(hash), TokenTree::Group(_), rest @ ..] if hash.as_char() == '#' => begins_item(rest),
        [TokenTree::Ident(word), ..] => ITEM_WORDS.iter().any(|item| word == item),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<usize> {
        let source = Source::new("crates/forkdisk/src/a.rs", text);
        check(&source).iter().map(|violation| violation.line).collect()
    }

    fn in_function(body: &str) -> usize {
        found(&format!("async fn f() {{ {body} }}")).len()
    }

    #[test]
    fn the_form_of_planted_bugs_passes() {
        for body in [
            "correct!(flush().await?, Bug::A => ());",
            "if correct!(a && b, Bug::A => true) { c() }",
            "let a = correct!(a, Bug::A => b, Bug::B => c + 1);",
            "let a = correct!(Some(guard), Bug::A => crate::planted::released(guard));",
            "correct!(a.b(c), Bug::A => match d { 0 => (), _ => a.b(c) }); bugs.push(Bugs::A)",
            "correct!(true, Bug::A => old.flag)",
        ] {
            assert_eq!(in_function(body), 0, "{body}");
        }
        assert_eq!(found("pub mod planted;\nuse crate::planted::correct;\nfn unplanted() {}\n"), [0; 0]);
        assert_eq!(found("#[cfg(feature = \"planted\")]\n#[inline]\nasync fn f() {}\n"), [0; 0]);
    }

    #[test]
    fn another_form_is_found() {
        for body in [
            "if planted(Bug::A) { a() }",
            "if crate::planted::is_on(crate::planted::Bug::A) { a() }",
            "match a { b if !planted(Bug::A) => c, _ => d }",
            "let bug = Bug::A;",
            "correct!(a, Bug::A, b)",
            "correct!(Bug::A => a, b)",
            "correct!(a)",
            "correct![a, Bug::A => b]",
            "crate::planted::released(guard)",
            "assert!(is(Bug::A))",
        ] {
            assert!(in_function(body) > 0, "{body}");
        }
        assert_eq!(found("use crate::planted::{Bug, planted};\n"), [1, 1, 1]);
        assert_eq!(found("\nuse crate::planted::correct as right;\n"), [2]);
    }

    #[test]
    fn a_planted_bug_that_adds_a_statement_is_found() {
        for body in [
            "correct!((), Bug::A => a());",
            "correct!(a(), Bug::A => { b(); a() });",
            "correct!({ a(); b() }, Bug::A => ());",
            "correct!(a(), Bug::A => if b { c(); });",
            "correct!(false, Bug::A => true)",
            "correct!(a, Bug::A => correct!(b, Bug::B => c))",
        ] {
            assert_eq!(in_function(body), 1, "{body}");
        }
    }

    #[test]
    fn the_feature_at_a_statement_or_expression_is_found() {
        for body in [
            "#[cfg(feature = \"planted\")] let a = 1;",
            "#[cfg(not(feature = \"planted\"))] a();",
            "if cfg!(feature = \"planted\") { a() }",
            "#[cfg(feature = \"planted\")] { a(); }",
        ] {
            assert_eq!(in_function(body), 1, "{body}");
        }
    }
}
