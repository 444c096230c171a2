#![no_main]

use forkdisk_fuzz::{Fuzzer, Target};

thread_local! {
    static FUZZER: Fuzzer = Fuzzer::new();
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| FUZZER.with(|fuzzer| fuzzer.run(Target::Handshake, input)));
