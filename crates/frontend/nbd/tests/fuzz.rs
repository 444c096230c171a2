//! The fuzz targets of the server, without libFuzzer: every input of the corpus, and random
//! mutations of them.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../../../../fuzz/src/lib.rs"]
mod fuzz;
#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;

use fuzz::{Fuzzer, Target};

/// Mutated inputs per target.
const INPUTS: usize = 34_000;

fn fuzz(target: Target, name: &str) {
    let fuzzer = Fuzzer::new();
    mutate::fuzz(name, INPUTS, |input| fuzzer.run(target, input));
}

#[test]
fn any_bytes_from_the_first_one_on_are_answered_as_the_protocol_says() {
    fuzz(Target::Handshake, "nbd_handshake");
}

#[test]
fn any_options_lead_to_what_was_agreed_on() {
    fuzz(Target::Options, "nbd_options");
}

#[test]
fn any_requests_are_answered_once_and_reads_return_what_was_written() {
    fuzz(Target::Transmission, "nbd_transmission");
}
