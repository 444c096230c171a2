//! Which modules a Rust file names: `crate::…`, `super::…` and `self::…` in its tokens, macros included.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::Source;

/// The segments of a path from the root of its crate.
pub type Path = Vec<String>;

/// A path that code names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    pub line: usize,
    pub path: Path,
}

/// Parses a Rust file; one that does not parse is a failure of its own.
pub fn parse(source: &Source) -> syn::File {
    syn::parse_file(&source.text).unwrap_or_else(|error| panic!("{}: {error}", source.path))
}

/// Returns the module of a file: `pool/mod.rs` below `src` is `pool`, `lib.rs` and `main.rs` are the root.
pub fn module_of(path: &str, src: &str) -> Path {
    let below = path.strip_prefix(src).unwrap_or(path).trim_end_matches(".rs");
    let mut module: Path = below.split('/').map(String::from).collect();
    if module.last().is_some_and(|name| name == "mod") || below == "lib" || below == "main" {
        module.pop();
    }
    module
}

/// Returns the paths that `source` names, without those of its `#[cfg(test)]` items.
pub fn references(source: &Source, src: &str) -> Vec<Reference> {
    let stream: TokenStream = source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path));
    let mut found = Vec::new();
    walk(stream, &module_of(&source.path, src), &mut found);
    found
}

fn walk(stream: TokenStream, module: &Path, found: &mut Vec<Reference>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if is_test_attribute(&tokens[at..]) {
            at = end_of_item(&tokens, at);
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) => {
                let inner = inline_module(&tokens[..at]);
                let module: Path = module.iter().cloned().chain(inner).collect();
                walk(group.stream(), &module, found);
            }
            TokenTree::Ident(ident) => {
                if let Some(base) = base_of(&ident.to_string(), module)
                    && is_separator(&tokens[at + 1..])
                {
                    at = follow(&tokens, at + 3, base, module, found);
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// `#[cfg(test)]`.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [TokenTree::Punct(hash), TokenTree::Group(group), ..] = tokens else { return false };
    hash.as_char() == '#' && group.stream().to_string().replace(' ', "") == "cfg(test)"
}

/// Index behind the body or semicolon that ends the item whose attributes begin at `at`.
fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    };
    tokens[at..].iter().position(ends).map_or(tokens.len(), |length| at + length + 1)
}

/// The name in `mod name` at the end of `before`.
fn inline_module(before: &[TokenTree]) -> Option<String> {
    let [.., TokenTree::Ident(keyword), TokenTree::Ident(name)] = before else { return None };
    (keyword == "mod").then(|| name.to_string())
}

fn base_of(word: &str, module: &Path) -> Option<Path> {
    match word {
        "crate" => Some(Path::new()),
        "self" => Some(module.clone()),
        "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
        _ => None,
    }
}

/// `::`.
fn is_separator(tokens: &[TokenTree]) -> bool {
    let [TokenTree::Punct(first), TokenTree::Punct(second), ..] = tokens else { return false };
    first.as_char() == ':' && second.as_char() == ':'
}

/// Follows the path or tree of a `use` behind a `::` and returns the index behind it.
fn follow(tokens: &[TokenTree], mut at: usize, mut path: Path, module: &Path, found: &mut Vec<Reference>) -> usize {
    let line = tokens.get(at).map_or(0, |token| token.span().start().line);
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Ident(ident) if ident == "super" => {
                path.pop();
            }
            TokenTree::Ident(ident) if ident == "self" => {}
            TokenTree::Ident(ident) => path.push(ident.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                follow_group(group.stream(), &path, module, found);
                return at + 1;
            }
            _ => break,
        }
        at += 1;
        if !is_separator(&tokens[at..]) {
            break;
        }
        at += 2;
    }
    found.push(Reference { line, path });
    at
}

/// The parts between commas of `{a, b::{c, d}}`.
fn follow_group(stream: TokenStream, path: &Path, module: &Path, found: &mut Vec<Reference>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    for part in tokens.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',')) {
        if !part.is_empty() {
            follow(part, 0, path.clone(), module, found);
        }
    }
}

/// Returns what `pub use` of a root file re-exports: name and the path behind it.
pub fn exports(root: &Source) -> Vec<(String, Path)> {
    let mut exports = Vec::new();
    for item in parse(root).items {
        if let syn::Item::Use(item) = item {
            collect(&item.tree, &mut Path::new(), &mut exports);
        }
    }
    exports
}

fn collect(tree: &syn::UseTree, path: &mut Path, exports: &mut Vec<(String, Path)>) {
    match tree {
        syn::UseTree::Path(part) => {
            if part.ident != "crate" && part.ident != "self" {
                path.push(part.ident.to_string());
                collect(&part.tree, path, exports);
                path.pop();
            } else {
                collect(&part.tree, path, exports);
            }
        }
        syn::UseTree::Name(name) => exports.push((name.ident.to_string(), path.clone())),
        syn::UseTree::Rename(name) => exports.push((name.rename.to_string(), path.clone())),
        syn::UseTree::Group(group) => group.items.iter().for_each(|tree| collect(tree, path, exports)),
        syn::UseTree::Glob(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(path: &str, text: &str) -> Vec<String> {
        let found = references(&Source::new(path, text), "src/");
        found.into_iter().map(|reference| reference.path.join("::")).collect()
    }

    #[test]
    fn modules_are_named_by_their_files() {
        assert_eq!(module_of("src/lib.rs", "src/"), Path::new());
        assert_eq!(module_of("src/pool/mod.rs", "src/"), ["pool"]);
        assert_eq!(module_of("src/pool/open.rs", "src/"), ["pool", "open"]);
    }

    #[test]
    fn paths_of_uses_code_and_macros_are_found() {
        let text = "use crate::{map::{self, Entry as E}, space::*};\nfn f() { super::open(&[crate::pool::A::b()]) }\n\
            mod inner { use super::super::x; }\n";
        let expected = ["map", "map::Entry", "space", "volume::open", "pool::A::b", "volume::x"];
        assert_eq!(paths("src/volume/io.rs", text), expected);
        assert_eq!(paths("src/a.rs", "fn f() { assert!(crate::b::is()); self.x() }"), ["b::is"]);
    }

    #[test]
    fn paths_of_tests_are_left_out() {
        let text = "#[cfg(test)]\nmod tests { use crate::pool; }\n#[cfg(test)]\nuse crate::pool;\nuse crate::map;";
        assert_eq!(paths("src/a.rs", text), ["map"]);
    }

    #[test]
    fn re_exports_are_resolved() {
        let found = exports(&Source::new("src/lib.rs", "pub use error::{Error, Result as R};\nuse crate::a::B;"));
        let of = |name: &str, path: &str| (name.to_string(), vec![path.to_string()]);
        assert_eq!(found, [of("Error", "error"), of("R", "error"), of("B", "a")]);
    }
}
