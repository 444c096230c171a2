//! See the tests below.
