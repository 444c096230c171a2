//! What the built program contains.

/// Part of the mangled names of the engine's module of planted mistakes.
const PLANTED: &[u8] = b"8forkdisk7planted";

#[test]
fn the_program_has_no_planted_mistakes() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_forkdisk")).unwrap();
    assert!(!program.windows(PLANTED.len()).any(|name| name == PLANTED), "built with the feature `planted`");
}
