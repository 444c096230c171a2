//! The name of a constant that is a size, a time or a count ends with its unit.
//!
//! Checked are constants of integer types in product code. A name of two words or more passes if its last
//! word is a plural (`_BYTES`, `_PAGES`, `_MS`, `_WRITERS`) or of [`UNITS`]. A name with `_PER_` passes, and
//! one that is itself a unit of length ([`LENGTHS`]: `PAGE` is a page in bytes). A `Duration` has its unit in
//! its type. Files of [`PROTOCOLS`] hold the numbers of protocols, formats and the kernel's interfaces under
//! the names that these have there, and so does a value that `libc` or `rustix` gives; a hexadecimal or octal
//! value is a pattern of bits.

use syn::visit::{self, Visit};

use crate::{Source, Violation};

/// Last words, besides plurals, of names that say what a number counts or what it is. A size is in bytes; a
/// part is one in so many.
pub const UNITS: &[&str] = &[
    "SIZE", "KIB", "MIB", "GIB", "OFFSET", "SHIFT", "PERCENT", "PERMILLE", "PART", "FACTOR", "COUNT", "EPOCH", "MAGIC",
    "VERSION", "PORT", "SEED", "MASK", "FANOUT", "FLAG", "ERRNO", "OPCODE", "CODE", "INDEX", "ID",
];

/// Names that are a length in bytes by themselves.
pub const LENGTHS: [&str; 6] = ["PAGE", "BLOCK", "SECTOR", "KIB", "MIB", "GIB"];

/// Parts of paths of files whose numbers are those of a protocol, format or kernel interface.
pub const PROTOCOLS: &[&str] = &[
    "/codec/",
    "/format/",
    "/attach/netlink.rs",
    "/attach/by_nbd.rs",
    "/attach/handshake.rs",
    "/device/lock.rs",
    "/loop_device.rs",
    "/server/contexts.rs",
    "/image/nbd.rs",
    "/message.rs",
    "/tls/records.rs",
    "/sys.rs",
    "/ublk.rs",
];

const INTEGERS: [&str; 12] = ["u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128", "isize"];

/// Whether the rule reads the file: product code outside [`PROTOCOLS`].
pub fn is_read(source: &Source) -> bool {
    let is_product = source.path.starts_with("crates/") && source.path.contains("/src/");
    let is_protocol = PROTOCOLS.iter().any(|part| source.path.contains(part));
    source.is_rust() && is_product && !is_protocol && !source.is_test()
}

/// Integer constants of `source` without a unit.
pub fn check(source: &Source) -> Vec<Violation> {
    let mut found = Found { source, violations: Vec::new() };
    found.visit_file(&crate::paths::parse(source));
    found.violations
}

struct Found<'a> {
    source: &'a Source,
    violations: Vec<Violation>,
}

impl Found<'_> {
    fn look(&mut self, name: &syn::Ident, r#type: &syn::Type, value: Option<&syn::Expr>) {
        if is_integer(r#type) && !has_unit(&name.to_string()) && !value.is_some_and(is_pattern_or_foreign) {
            let what = format!("const `{name}` has no unit: end its name with one (`_BYTES`, `_PAGES`, `_COUNT`, …)");
            self.violations.push(Violation::new(self.source, name.span().start().line, what));
        }
    }
}

impl<'ast> Visit<'ast> for Found<'_> {
    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.look(&item.ident, &item.ty, Some(&item.expr));
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.look(&item.ident, &item.ty, Some(&item.expr));
    }

    fn visit_trait_item_const(&mut self, item: &'ast syn::TraitItemConst) {
        self.look(&item.ident, &item.ty, None);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }
}

/// `#[cfg(test)]`.
pub fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    })
}

fn is_integer(r#type: &syn::Type) -> bool {
    matches!(r#type, syn::Type::Path(path) if INTEGERS.iter().any(|name| path.path.is_ident(name)))
}

fn is_pattern_or_foreign(value: &syn::Expr) -> bool {
    match value {
        syn::Expr::Lit(literal) => match &literal.lit {
            syn::Lit::Int(number) => ["0x", "0o"].iter().any(|prefix| number.to_string().starts_with(prefix)),
            _ => false,
        },
        syn::Expr::Path(path) => {
            path.path.segments.first().is_some_and(|first| first.ident == "libc" || first.ident == "rustix")
        }
        syn::Expr::Cast(cast) => is_pattern_or_foreign(&cast.expr),
        syn::Expr::Binary(binary) => is_pattern_or_foreign(&binary.left),
        syn::Expr::MethodCall(call) => is_pattern_or_foreign(&call.receiver),
        _ => false,
    }
}

fn has_unit(name: &str) -> bool {
    let is_unit = |last: &str| UNITS.contains(&last) || (last.ends_with('S') && !last.ends_with("SS"));
    LENGTHS.contains(&name) || name.contains("_PER_") || name.rsplit_once('_').is_some_and(|(_, last)| is_unit(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<usize> {
        check(&Source::new("crates/a/src/b.rs", text)).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_number_without_a_unit_is_found() {
        let text = "const MANY: usize = 8;\nconst MAX_BYTES: u64 = 1 << 20;\nconst PAGE: u64 = 4096;\n\
            impl A { const SLACK: u32 = 2; }\nfn f() { const NEAR: i64 = 3; }\ntrait T { const FAR: u8; }\n";
        assert_eq!(names(text), [1, 4, 5, 6]);
    }

    #[test]
    fn a_unit_alone_says_not_of_what() {
        assert_eq!(names("const BYTES: usize = 8;\n"), [1]);
    }

    #[test]
    fn durations_patterns_of_bits_and_tests_need_none() {
        let text = "const IDLE: Duration = Duration::from_secs(1);\nconst KEY: u64 = 0x1234;\n\
            const PUNCH: u32 = libc::PUNCH as u32;\nconst USER: u32 = 0o4000;\n\
            #[cfg(test)]\nmod tests { const MANY: usize = 8; }\n";
        assert_eq!(names(text), [0; 0]);
    }

    #[test]
    fn product_code_outside_protocols_is_read() {
        let is = |path: &str| is_read(&Source::new(path, ""));
        assert!(is("crates/forkdisk/src/pool/open.rs"));
        for path in ["crates/a/src/codec/b.rs", "crates/a/tests/b.rs", "crates/a/src/b/tests.rs", "docs/a.rs"] {
            assert!(!is(path), "{path}");
        }
    }
}
