#![no_main]
#![allow(clippy::unwrap_used)]

#[path = "../src/rings.rs"]
mod rings;

thread_local! {
    static RINGS: rings::Rings = rings::Rings::default();
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| RINGS.with(|rings| rings.run_messages(input)));
