//! Rules that keep the source of forkdisk tidy. `cargo test -p forkdisk-tidy` runs one test per rule
//! over the repository; each test lists all violations.
//!
//! Every rule is a function over source text, so its own tests plant a violation and find it. Exceptions
//! are in [`allow::ALLOWED`], each with a reason; there are at most [`allow::MOST_COUNT`] of them.

pub mod allow;
pub mod comments;
pub mod functions;
pub mod glossary;
pub mod layers;
pub mod lines;
pub mod manifests;
pub mod methods;
pub mod paths;
pub mod planted;
pub mod tree;
pub mod units;
pub mod words;

/// A text file of the repository.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path below the root of the repository, with `/`.
    pub path: String,
    pub text: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.into() }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub fn is_markdown(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// Whether the whole file is test code: in a folder `tests`, or a module file `tests.rs`.
    pub fn is_test(&self) -> bool {
        self.path.split('/').any(|part| part == "tests" || part == "tests.rs")
    }
}

/// One place that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    pub path: String,
    /// Line from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong, the limit, what to do.
    pub what: String,
}

impl Violation {
    pub fn new(source: &Source, line: usize, what: impl Into<String>) -> Violation {
        Violation { path: source.path.clone(), line, what: what.into() }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}
