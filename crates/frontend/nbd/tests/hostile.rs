//! Hostile clients: each test tries to harm the server or another client, and shows that it
//! fails.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::time::Duration;

use forkdisk_nbd::ServerOptions;
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryExports;
use proptest::collection::vec;
use proptest::prelude::*;
use support::{Client, Probe, ProbeExports, Reply, TestServer};

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

fn start() -> (Probe, TestServer) {
    let probe = Probe::new();
    let server = TestServer::of_probe(&probe, ServerOptions::default());
    (probe, server)
}

/// Starts a server with an export of 64 MiB in memory called `big`, and one of 1 TiB called `vast`
/// that stores nothing.
fn start_big(options: ServerOptions) -> (Probe, TestServer) {
    let probe = Probe::new();
    let of = probe.clone();
    let server = TestServer::start(options, move |rt| {
        ProbeExports::new(rt, &of).with("big", 64 << 20, false).with_vast(1 << 40)
    });
    (probe, server)
}

/// Checks that the server still serves `client`.
fn assert_alive(client: &mut Client) {
    assert_eq!(client.write(0, 50, b"alive"), 0);
    assert_eq!(client.read(50, 5), Ok(b"alive".to_vec()));
}

#[test]
fn option_length_is_capped_before_allocation() {
    let (_, server) = start();
    for option in [OPT_GO, OPT_INFO] {
        let mut c = server.raw();
        c.option(option, &vec![0; MAX_OPTION_DATA + 1]);
        assert_eq!(c.option_reply(option).0, REP_ERROR + 9);
        c.go("a");
    }
    let mut endless = server.raw();
    endless.option_header(99, u32::MAX);
    endless.send(&vec![0; 1 << 20]);
    assert_alive(&mut server.client("a"));
}

#[test]
fn name_length_is_capped_before_allocation() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_GO, &[&u32::MAX.to_be_bytes()[..], b"a\0\0"].concat());
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 9);
    c.ask(OPT_GO, &"n".repeat(MAX_NAME + 1), &[]);
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 9);
    c.ask(OPT_GO, &"n".repeat(MAX_NAME), &[]);
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 6, "only unknown");
    c.option_header(OPT_EXPORT_NAME, MAX_NAME as u32 + 1);
    c.expect_end();
}

#[test]
fn names_that_are_no_text_or_paths_lead_nowhere() {
    let (_, server) = start();
    let mut c = server.raw();
    for name in ["../a", "/a", "a/", ".", "a\u{202e}", "%61"] {
        c.ask(OPT_GO, name, &[]);
        assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 6, "{name:?}");
    }
    c.option(OPT_GO, &[0, 0, 0, 2, 0xc3, 0x28, 0, 0]);
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 3, "not UTF-8");
    c.option(OPT_GO, &[0, 0, 0, 2, b'a', 0, 0, 0]);
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 3, "NUL");
    c.go("a");
}

#[test]
fn a_list_with_data_is_invalid() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_LIST, b"x");
    assert_eq!(c.option_reply(OPT_LIST).0, REP_ERROR + 3);
    c.go("a");
}

#[test]
fn unknown_client_flags_end_the_session() {
    let (_, server) = start();
    let mut c = support::connect(&server.socket());
    c.bytes(18);
    c.send(&7u32.to_be_bytes());
    c.expect_end();
}

#[test]
fn a_payload_above_32_mib_is_read_and_refused() {
    let (probe, server) = start_big(ServerOptions::default());
    let mut c = server.client("big");
    assert_eq!(c.write(0, 0, &vec![1; MAX_PAYLOAD as usize + 1]), EINVAL);
    assert_eq!(c.read(0, MAX_PAYLOAD + 1), Err(EINVAL));
    assert_eq!(probe.calls(), [""; 0]);
    assert_alive(&mut c);
}

#[test]
fn a_payload_above_64_mib_ends_the_session() {
    let (_, server) = start_big(ServerOptions::default());
    let mut c = server.client("vast");
    c.request(CMD_WRITE, 0, 1, 0, MAX_DRAIN as u32 + 1);
    c.expect_end();
    assert_alive(&mut server.client("big"));
}

#[test]
fn offset_plus_length_may_not_overflow() {
    let (probe, server) = start();
    let mut c = server.client("a");
    for offset in [u64::MAX, u64::MAX - 511, 1 << 63] {
        assert!(matches!(c.read(offset, 512), Err(EINVAL)));
        assert_eq!(c.call(CMD_TRIM, 0, offset, 512), EINVAL);
    }
    assert_eq!(c.write(0, u64::MAX, &[1; 512]), EINVAL);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, u64::MAX, 512), EINVAL);
    assert_eq!(probe.calls(), [""; 0]);
    assert_alive(&mut c);
}

#[test]
fn ranges_past_the_end_are_refused() {
    let (probe, server) = start();
    let mut c = server.client("a");
    let end = 1 << 20;
    assert_eq!(c.read(end - 1, 2), Err(EINVAL));
    assert_eq!(c.call(CMD_TRIM, 0, end, 1), EINVAL);
    assert_eq!(c.write(0, end - 511, &[1; 512]), ENOSPC);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, end - 511, 512), ENOSPC);
    assert_eq!(probe.calls(), [""; 0]);
    assert_alive(&mut c);
}

#[test]
fn unknown_flags_are_invalid_and_a_write_with_them_is_skipped() {
    let (probe, server) = start();
    let mut c = server.client("a");
    for bit in 1..16 {
        assert_eq!(c.write(1 << bit, 0, &[1; 100]), EINVAL);
        assert_eq!(c.call(CMD_READ, 1 << bit, 0, 100), EINVAL);
        assert_eq!(c.call(CMD_FLUSH, 1 << bit, 0, 0), EINVAL);
        assert_eq!(c.call(CMD_CACHE, 1 << bit, 0, 100), EINVAL);
    }
    assert_eq!(probe.calls(), [""; 0]);
    assert_alive(&mut c);
}

#[test]
fn unknown_commands_are_invalid() {
    let (_, server) = start();
    let mut c = server.client("a");
    for command in [8, 9, 100, u16::MAX] {
        assert_eq!(c.call(command, 0, 0, u32::MAX), EINVAL);
    }
    assert_alive(&mut c);
}

#[test]
fn misaligned_requests_are_served_to_the_byte() {
    let (_, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.write(0, 4095, b"xyz"), 0);
    assert_eq!(c.read(4094, 5), Ok(b"\0xyz\0".to_vec()));
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 4096, 1), 0);
    assert_eq!(c.read(4094, 5), Ok(b"\0x\0z\0".to_vec()));
}

#[test]
fn writes_to_a_read_only_export_are_not_permitted() {
    let (probe, server) = start();
    let mut c = server.client("frozen");
    assert_eq!(c.write(0, 0, &[1; 70_000]), EPERM);
    assert_eq!(c.call(CMD_TRIM, 0, 0, 512), EPERM);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 0, 512), EPERM);
    assert_eq!(probe.calls(), [""; 0]);
    assert_eq!(c.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(c.flush(), 0);
}

#[test]
fn trim_and_zeroes_of_all_but_one_byte_of_4_gib_are_one_call_each() {
    let (probe, server) = start_big(ServerOptions::default());
    let mut c = server.client("vast");
    assert_eq!(c.call(CMD_TRIM, 0, 1, u32::MAX), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 2, u32::MAX), 0);
    assert_eq!(probe.calls(), ["trim 1 4294967295", "zero 2 4294967295"]);
    let mut small = server.client("big");
    assert_eq!(small.call(CMD_TRIM, 0, 0, u32::MAX), EINVAL);
    assert_eq!(small.call(CMD_WRITE_ZEROES, 0, 0, u32::MAX), ENOSPC);
    assert_eq!(c.call(CMD_BLOCK_STATUS, CMD_FLAG_REQ_ONE, 0, u32::MAX), EINVAL, "it was not negotiated");
    assert_eq!(c.call(CMD_TRIM, CMD_FLAG_REQ_ONE, 0, u32::MAX), EINVAL);
}

#[test]
fn block_status_of_all_but_one_byte_of_4_gib_is_bounded_with_req_one_too() {
    let (probe, server) = start_big(ServerOptions::default());
    let mut c = server.styled(ReplyStyle::Structured, "vast", &["base:allocation"]);
    let most = u64::from(u32::MAX);
    assert_eq!(c.status(CMD_FLAG_REQ_ONE, 1, u32::MAX), Ok(vec![(1, vec![(most, 3)])]));
    assert_eq!(c.status(0, (1 << 40) - most, u32::MAX), Ok(vec![(1, vec![(most, 3)])]));
    assert_eq!(c.status(0, (1 << 40) - most + 1, u32::MAX), Err(EINVAL), "one byte past the end");
    assert_eq!(probe.calls().len(), 2);
    let mut small = server.styled(ReplyStyle::Structured, "big", &["base:allocation"]);
    for flags in [0, CMD_FLAG_REQ_ONE] {
        assert_eq!(small.status(flags, 0, u32::MAX), Err(EINVAL));
        assert_eq!(small.status(flags, u64::MAX, u32::MAX), Err(EINVAL));
    }
}

#[test]
fn queries_of_contexts_are_capped_before_allocation() {
    let (_, server) = start();
    for option in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        let mut c = server.raw();
        c.negotiate(ReplyStyle::Structured);
        let name = [&1u32.to_be_bytes()[..], b"a"].concat();
        let lies: [(Vec<u8>, u32); 5] = [
            ([&name[..], &u32::MAX.to_be_bytes()].concat(), 9),
            ([&name[..], &1u32.to_be_bytes(), &u32::MAX.to_be_bytes()].concat(), 9),
            (u32::MAX.to_be_bytes().to_vec(), 9),
            ([&name[..], &2u32.to_be_bytes(), &[0; 4]].concat(), 3),
            (vec![0; MAX_OPTION_DATA + 1], 9),
        ];
        for (data, error) in lies {
            c.option(option, &data);
            assert_eq!(c.option_reply(option).0, REP_ERROR + error, "{} bytes", data.len());
        }
        assert_eq!(c.contexts(option, "a", &[""; MAX_QUERIES]), Ok(vec![]));
        assert_eq!(c.contexts(option, "a", &[""; MAX_QUERIES + 1]), Err(REP_ERROR + 9));
        c.go("a");
    }
}

#[test]
fn the_limits_are_those_that_are_promised() {
    let limits = ServerOptions::default();
    assert_eq!(limits.handshake_timeout, Duration::from_secs(10));
    assert_eq!((limits.max_requests, limits.max_request_bytes), (128, 64 << 20));
    assert_eq!((limits.max_connections, limits.shared_memory), (128, 256 << 20));
    assert_eq!((MAX_NAME, MAX_PAYLOAD), (4096, 32 << 20));
}

#[test]
fn answers_to_block_status_count_as_memory_in_flight() {
    let options = ServerOptions::default().with_connection_reserve(0).with_shared_memory(33 << 20);
    let (probe, server) = start_big(options);
    probe.hold(true);
    let mut c = server.styled(ReplyStyle::Structured, "big", &["base:allocation"]);
    c.request(CMD_BLOCK_STATUS, 0, 1, 0, 4096);
    probe.wait_for(1);
    let mut other = server.client("vast");
    other.request(CMD_READ, 0, 1, 1, MAX_PAYLOAD);
    other.request(CMD_READ, 0, 2, 1, 1 << 20);
    probe.wait_for(2);
    assert_eq!(probe.calls().len(), 2, "16 KiB are taken, so 1 MiB more is not to be had");
    probe.hold(false);
    assert_eq!(c.chunks().len(), 1);
    for len in [MAX_PAYLOAD as usize, 1 << 20] {
        assert_eq!(other.reply().error, 0);
        other.bytes(len);
    }
}

#[test]
fn duplicate_cookies_get_a_reply_each() {
    let (probe, server) = start();
    let mut c = server.client("a");
    probe.hold(true);
    for _ in 0..3 {
        c.request(CMD_READ, 0, 42, 0, 8);
    }
    probe.wait_for(3);
    probe.hold(false);
    for _ in 0..3 {
        assert_eq!(c.reply(), Reply { error: 0, cookie: 42 });
        c.bytes(8);
    }
}

#[test]
fn disconnect_in_mid_payload_writes_nothing() {
    let (probe, server) = start();
    for (len, sent) in [(4096, 0), (4096, 4095), (500_000, 20_000), (500_000, 499_999)] {
        let mut c = server.client("a");
        c.request(CMD_WRITE, 0, 1, 0, len);
        c.send(&vec![1; sent]);
        c.finish();
        c.expect_end();
    }
    assert_eq!(probe.calls(), [""; 0]);
    assert_eq!(server.client("a").read(0, 4), Ok(vec![0; 4]));
}

#[test]
fn a_client_that_vanishes_with_requests_in_flight_harms_nobody() {
    let (probe, server) = start();
    probe.hold(true);
    let mut c = server.client("a");
    for _ in 0..20 {
        c.request(CMD_READ, 0, 1, 0, 32_768);
    }
    probe.wait_for(20);
    drop(c);
    probe.hold(false);
    assert_alive(&mut server.client("a"));
}

#[test]
fn a_handshake_that_does_not_end_is_ended() {
    let handshake_timeout = Duration::from_millis(100);
    let options = ServerOptions::default().with_handshake_timeout(handshake_timeout);
    let server = TestServer::of_probe(&Probe::new(), options);
    let mut silent = support::connect(&server.socket());
    assert!(silent.ends_with(&GREETING));
    let mut half = server.raw();
    half.option_header(OPT_GO, 100);
    half.expect_end();
    let mut done = server.client("a");
    std::thread::sleep(handshake_timeout * 2);
    assert_alive(&mut done);
}

#[test]
fn at_most_128_requests_of_a_connection_are_in_flight() {
    let (probe, server) = start();
    probe.hold(true);
    let mut c = server.client("a");
    for cookie in 0..300 {
        c.request(CMD_READ, 0, cookie, 0, 1);
    }
    probe.wait_for(128);
    assert_alive(&mut server.client("b"));
    assert_eq!(probe.flight().most.0, 129, "128 held ones and that of the other client");
    probe.hold(false);
    for _ in 0..300 {
        assert_eq!(c.reply().error, 0);
        c.bytes(1);
    }
    assert!(probe.flight().most.0 <= 129);
}

#[test]
fn at_most_64_mib_of_a_connection_are_in_flight() {
    let (probe, server) = start_big(ServerOptions::default());
    probe.hold(true);
    let mut c = server.client("big");
    for cookie in 0..100 {
        c.request(CMD_READ, 0, cookie, 0, 1 << 20);
    }
    probe.wait_for(64);
    probe.hold(false);
    for _ in 0..100 {
        assert_eq!(c.reply().error, 0);
        c.bytes(1 << 20);
    }
    assert_eq!(probe.flight().most.1, 64 << 20);
}

#[test]
fn a_client_that_never_reads_its_replies_blocks_no_other_and_is_bounded() {
    let (probe, server) = start_big(ServerOptions::default());
    let mut deaf = server.client("big");
    let (offset, length) = (1, 1 << 20);
    let read = Request { style: ReplyStyle::Simple, flags: 0, command: CMD_READ, cookie: 0, offset, length };
    deaf.send(&read.encode().repeat(1000));
    probe.wait_for(64);
    let mut other = server.client("big");
    for _ in 0..100 {
        assert_alive(&mut other);
    }
    let reads = probe.calls().iter().filter(|call| call.ends_with(" 1048576")).count();
    // Replies that fit into the socket are sent and free memory; that is far less than one more read.
    assert!(reads <= 66, "{reads} reads were started for a client that takes nothing");
}

#[test]
fn memory_that_others_wait_for_is_taken_from_a_client_that_does_not_move() {
    let options = ServerOptions::default().with_shared_memory(40 << 20).with_stall_timeout(Duration::from_millis(50));
    let (probe, server) = start_big(options);
    let mut deaf = server.client("big");
    deaf.request(CMD_READ, 0, 1, 0, MAX_PAYLOAD);
    let mut half = server.client("big");
    half.request(CMD_WRITE, 0, 1, 0, 8 << 20);
    half.send(&[1; 100]);
    probe.wait_for(1);
    let mut other = server.client("big");
    assert_alive(&mut other);
    assert_eq!(other.read(0, MAX_PAYLOAD).map(|data| data.len()), Ok(MAX_PAYLOAD as usize));
    assert!(!half.try_send(&vec![1; 8 << 20]), "disconnected");
}

#[test]
fn connections_beyond_the_cap_are_refused_until_one_ends() {
    let options = ServerOptions::default().with_max_connections(2);
    let server = TestServer::of_probe(&Probe::new(), options);
    let (mut one, mut two) = (server.client("a"), server.client("b"));
    support::connect(&server.socket()).expect_end();
    assert_alive(&mut one);
    one.request(CMD_DISC, 0, 0, 0, 0);
    one.expect_end();
    assert_alive(&mut two);
    assert_alive(&mut server.client("a"));
}

#[test]
fn an_export_has_no_more_connections_than_it_may_and_others_have_theirs() {
    let options = ServerOptions::default().with_max_export_connections(2);
    let server = TestServer::of_probe(&Probe::new(), options);
    let (mut one, mut two) = (server.client("a"), server.client("a"));
    let mut third = server.raw();
    for _ in 0..2 {
        third.ask(OPT_GO, "a", &[]);
        assert_eq!(third.option_reply(OPT_GO).0, REP_ERROR + 2, "refused, and it may go on");
    }
    third.go("b");
    assert_alive(&mut third);
    one.request(CMD_DISC, 0, 0, 0, 0);
    one.expect_end();
    assert_alive(&mut two);
    assert_alive(&mut server.client("a"));
}

#[test]
fn bytes_that_are_no_request_end_the_session() {
    let (_, server) = start();
    let mut c = server.client("a");
    c.send(b"GET / HTTP/1.1\r\n\r\n");
    c.expect_end();
    assert_alive(&mut server.client("a"));
}

#[test]
fn flush_with_a_range_is_invalid() {
    let (_, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.call(CMD_FLUSH, 0, 1, 0), EINVAL);
    assert_eq!(c.call(CMD_FLUSH, 0, 0, 1), EINVAL);
    assert_alive(&mut c);
}

#[test]
fn random_bytes_at_any_stage_leave_the_server_alive() {
    let server = TestServer::start(ServerOptions::default(), |_| MemoryExports::new().with("a", 1 << 20, false));
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() };
    let request = (0u16..9, 0u16..4, 0u64..(1 << 21), 0u32..300_000);
    let stages = (0usize..3, vec(request, 0..10), vec(any::<u8>(), 0..2000));
    proptest!(config, |((stage, requests, tail) in stages)| {
        let mut c = support::connect(&server.socket());
        c.bytes(18);
        if stage > 0 {
            c.send(&3u32.to_be_bytes());
        }
        if stage > 1 {
            c.go("a");
            for (command, flags, offset, length) in requests {
                let style = ReplyStyle::Simple;
                let request = Request { style, flags, command, cookie: 1, offset, length: length.into() };
                if !c.try_send(&request.encode()) {
                    break;
                }
            }
        }
        c.try_send(&tail);
        drop(c);
        assert_alive(&mut server.client("a"));
    });
}
