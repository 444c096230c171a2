//! A type of the engine or of the simulator has at most 40 methods in all its inherent `impl` blocks, except the faces.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use crate::{Source, Violation};

/// Most methods of a type.
pub const MAX_METHOD_COUNT: usize = 40;

/// What users of the library call: a method per verb.
pub const FACES: &[&str] = &["Pool", "Volume"];

/// Types with more than [`MAX_METHOD_COUNT`] methods in these files, tests left out.
pub fn check<'a>(sources: impl Iterator<Item = &'a Source>) -> Vec<Violation> {
    let mut counts: BTreeMap<String, (usize, &Source)> = BTreeMap::new();
    for source in sources.filter(|source| source.is_rust() && !source.is_test()) {
        let mut found = Methods::default();
        found.visit_file(&crate::paths::parse(source));
        for (name, count) in found.0 {
            counts.entry(name).or_insert((0, source)).0 += count;
        }
    }
    counts.retain(|name, (count, _)| *count > MAX_METHOD_COUNT && !FACES.contains(&name.as_str()));
    let violation = |(name, (count, source)): (String, (usize, &Source))| {
        let what = format!("`{name}` has {count} methods, at most {MAX_METHOD_COUNT}: part it by concern");
        Violation::new(source, 0, what)
    };
    counts.into_iter().map(violation).collect()
}

#[derive(Default)]
struct Methods(BTreeMap<String, usize>);

impl<'ast> Visit<'ast> for Methods {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !item.attrs.iter().any(|attribute| attribute.path().is_ident("cfg")) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if item.trait_.is_none()
            && let syn::Type::Path(of) = &*item.self_ty
            && let Some(name) = of.path.segments.last()
        {
            let count = item.items.iter().filter(|item| matches!(item, syn::ImplItem::Fn(_))).count();
            *self.0.entry(name.ident.to_string()).or_default() += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, name: &str, count: usize) -> Source {
        let methods: String = (0..count).map(|i| format!("    fn f{i}(&self) {{}}\n")).collect();
        Source::new(path, &format!("impl<D: Device> {name}<D> {{\n{methods}}}\n"))
    }

    #[test]
    fn methods_of_all_files_count_together() {
        let (a, b, c) = (source("a.rs", "Store", 30), source("b.rs", "Store", 10), source("c.rs", "Store", 1));
        assert_eq!(check([&a, &b].into_iter()), []);
        assert_eq!(check([&a, &b, &c].into_iter()).len(), 1);
        assert_eq!(check([&source("a.rs", "Pool", 41)].into_iter()), []);
    }
}
