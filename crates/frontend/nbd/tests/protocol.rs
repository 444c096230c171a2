//! Behaviour of the server with clients that follow the protocol, one behaviour per test.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use forkdisk::ErrorKind;
use forkdisk_nbd::ServerOptions;
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryExports;
use support::{Probe, Reply, TestServer};

fn start() -> (Probe, TestServer) {
    let probe = Probe::new();
    let server = TestServer::of_probe(&probe, ServerOptions::default());
    (probe, server)
}

#[test]
fn export_name_enters_transmission_behind_124_zeroes() {
    let (_, server) = start();
    let mut c = support::connect(&server.socket());
    c.bytes(18);
    c.send(&1u32.to_be_bytes());
    c.option(OPT_EXPORT_NAME, b"a");
    assert_eq!(c.u64(), 1 << 20);
    assert_eq!(c.bytes(2), [0x0d, 0x6d]);
    assert_eq!(c.bytes(124), [0; 124]);
    assert_eq!(c.flush(), 0);
}

#[test]
fn export_name_leaves_the_zeroes_out_when_that_was_negotiated() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_EXPORT_NAME, b"a");
    assert_eq!(c.bytes(10), [0, 0, 0, 0, 0, 0x10, 0, 0, 0x0d, 0x6d]);
    assert_eq!(c.flush(), 0);
}

#[test]
fn export_name_of_an_unknown_export_ends_the_session() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_EXPORT_NAME, b"nothing");
    c.expect_end();
}

#[test]
fn list_names_every_export() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_LIST, &[]);
    for name in ["a", "b", "frozen"] {
        let (kind, data) = c.option_reply(OPT_LIST);
        assert_eq!(kind, REP_SERVER);
        let expected = [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), b"memory"].concat();
        assert_eq!(data, expected);
    }
    assert_eq!(c.option_reply(OPT_LIST), (REP_ACK, vec![]));
    c.go("b");
}

#[test]
fn a_list_longer_than_one_send_arrives_whole() {
    let server = TestServer::start(ServerOptions::default(), |_| {
        (0..3000).fold(MemoryExports::new(), |e, i| e.with(&format!("{i:060}"), 0, false))
    });
    let mut c = server.raw();
    c.option(OPT_LIST, &[]);
    let names = (0..).take_while(|_| c.option_reply(OPT_LIST).0 == REP_SERVER).count();
    assert_eq!(names, 3000);
}

#[test]
fn info_describes_and_the_negotiation_goes_on() {
    let (_, server) = start();
    let mut c = server.raw();
    c.ask(OPT_INFO, "frozen", &[INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE, 77]);
    let mut items = Vec::new();
    loop {
        match c.option_reply(OPT_INFO) {
            (REP_INFO, data) => items.push(data),
            (kind, _) => break assert_eq!(kind, REP_ACK),
        }
    }
    let expected: [&[u8]; 4] = [
        &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0x05, 0x0f],
        b"\0\x01frozen",
        b"\0\x02memory",
        &[0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0],
    ];
    assert_eq!(items, expected);
    assert_eq!(c.go("a").0, 1 << 20);
}

#[test]
fn go_for_an_unknown_export_is_refused_and_another_one_possible() {
    let (_, server) = start();
    let mut c = server.raw();
    c.ask(OPT_GO, "nothing", &[]);
    assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 6);
    c.go("a");
}

#[test]
fn the_default_export_is_the_only_one_or_refused() {
    let (_, several) = start();
    let mut c = several.raw();
    c.ask(OPT_INFO, "", &[]);
    assert_eq!(c.option_reply(OPT_INFO).0, REP_ERROR + 6);
    let one = TestServer::start(ServerOptions::default(), |_| MemoryExports::new().with("x", 4096, false));
    assert_eq!(one.raw().go("").0, 4096);
}

#[test]
fn unknown_options_are_unsupported_and_the_next_one_is_understood() {
    let (_, server) = start();
    let mut c = server.raw();
    for option in [0, 4, 12, 0xdead_beef] {
        c.option(option, b"with data");
        assert_eq!(c.option_reply(option).0, REP_ERROR + 1, "option {option}");
    }
    c.go("a");
}

#[test]
fn abort_is_acknowledged_and_ends_the_session() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_ABORT, &[]);
    assert_eq!(c.option_reply(OPT_ABORT), (REP_ACK, vec![]));
    c.expect_end();
}

#[test]
fn flush_fua_trim_zeroes_cache_and_multi_conn_are_announced() {
    let (_, server) = start();
    let expected = FLAG_HAS_FLAGS
        | FLAG_SEND_FLUSH
        | FLAG_SEND_FUA
        | FLAG_SEND_TRIM
        | FLAG_SEND_WRITE_ZEROES
        | FLAG_SEND_FAST_ZERO
        | FLAG_SEND_CACHE
        | FLAG_CAN_MULTI_CONN;
    assert_eq!(server.raw().go("a").1, expected);
    assert_ne!(server.raw().go("frozen").1 & FLAG_READ_ONLY, 0);
}

#[test]
fn what_was_written_is_read_by_another_connection() {
    let (_, server) = start();
    let data: Vec<u8> = (0..5000u32).map(|i| i as u8).collect();
    let (mut one, mut two) = (server.client("a"), server.client("a"));
    assert_eq!(one.write(0, 777, &data), 0);
    assert_eq!(two.read(777, 5000), Ok(data));
    assert_eq!(two.read(0, 777), Ok(vec![0; 777]));
    assert_eq!(server.client("b").read(777, 10), Ok(vec![0; 10]), "another disk");
}

#[test]
fn trim_and_zeroes_reach_the_export_with_their_flags() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.write(0, 0, &[7; 8192]), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_NO_HOLE, 100, 50), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 4096, 4096), 0);
    assert_eq!(c.call(CMD_TRIM, 0, 0, 100), 0);
    let calls = ["write 0 8192", "zero 100 50 no-hole", "zero 4096 4096", "trim 0 100"];
    assert_eq!(probe.calls(), calls);
    let expected = [&[0; 150][..], &[7; 3946], &[0; 4096]].concat();
    assert_eq!(c.read(0, 8192), Ok(expected));
}

#[test]
fn fua_is_taken_on_every_command_and_reaches_those_that_write() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.write(CMD_FLAG_FUA, 0, &[1; 512]), 0);
    assert_eq!(c.call(CMD_TRIM, CMD_FLAG_FUA, 1, 2), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_FUA, 3, 4), 0);
    assert_eq!(c.call(CMD_FLUSH, CMD_FLAG_FUA, 0, 0), 0);
    assert_eq!(c.call(CMD_READ, CMD_FLAG_FUA, 5, 1), 0);
    assert_eq!(c.bytes(1), [0]);
    let calls = ["write 0 512 fua", "trim 1 2 fua", "zero 3 4 fua", "flush", "read 5 1"];
    assert_eq!(probe.calls(), calls);
}

#[test]
fn a_slow_request_does_not_hold_up_a_later_one() {
    let (probe, server) = start();
    let mut c = server.client("a");
    probe.hold(true);
    c.request(CMD_READ, 0, 1, 0, 4);
    c.request(CMD_READ, 0, 2, 4096, 4);
    assert_eq!(c.reply(), Reply { error: 0, cookie: 2 });
    c.bytes(4);
    probe.hold(false);
    assert_eq!(c.reply(), Reply { error: 0, cookie: 1 });
    c.bytes(4);
}

#[test]
fn an_export_is_told_of_a_write_when_it_is_announced_and_of_more_behind_it() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.write(0, 4096, b"one"), 0);
    assert_eq!(probe.hints(), ["coming: 4096 3", "more: false"], "it waited for the answer");
    probe.hold(true);
    c.request(CMD_WRITE, 0, 1, 0, 3);
    c.send(b"two");
    probe.wait_for(2);
    c.request(CMD_WRITE, 0, 2, 8192, 5);
    c.send(b"three");
    assert_eq!(c.reply(), Reply { error: 0, cookie: 2 });
    assert_eq!(probe.hints()[4..], ["coming: 8192 5", "more: true"], "the one before is not answered");
    probe.hold(false);
    assert_eq!(c.reply(), Reply { error: 0, cookie: 1 });
}

#[test]
fn disconnect_lets_outstanding_requests_end() {
    let (probe, server) = start();
    let mut c = server.client("a");
    probe.hold(true);
    c.request(CMD_WRITE, 0, 1, 0, 3);
    c.send(b"end");
    c.request(CMD_DISC, 0, 2, 0, 0);
    probe.wait_for(1);
    probe.hold(false);
    assert_eq!(c.reply(), Reply { error: 0, cookie: 1 });
    c.expect_end();
    assert_eq!(server.client("a").read(0, 3), Ok(b"end".to_vec()));
}

#[test]
fn a_client_that_has_finished_sending_still_gets_its_replies() {
    let (_, server) = start();
    let mut c = server.client("a");
    for cookie in 0..50 {
        c.request(CMD_READ, 0, cookie, cookie, 1);
    }
    c.finish();
    for _ in 0..50 {
        assert_eq!(c.reply().error, 0);
        c.bytes(1);
    }
    c.expect_end();
}

#[test]
fn failures_are_answered_with_the_errors_of_the_protocol() {
    let (probe, server) = start();
    let mut c = server.client("a");
    let pairs = [
        (ErrorKind::Io, 5),
        (ErrorKind::Corrupt, 5),
        (ErrorKind::Failed, 5),
        (ErrorKind::NoSpace, 28),
        (ErrorKind::ReadOnly, 1),
        (ErrorKind::Invalid, 22),
    ];
    for (kind, number) in pairs {
        probe.fail(Some(kind));
        assert_eq!(c.read(0, 512), Err(number));
        assert_eq!(c.write(0, 0, &[1; 512]), number);
        assert_eq!(c.flush(), number);
        assert_eq!(c.call(CMD_TRIM, 0, 0, 1), number);
        assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 0, 1), number);
    }
    probe.fail(None);
    assert_eq!(c.read(0, 4), Ok(vec![0; 4]), "nothing was written, and the stream is in step");
}

#[test]
fn requests_of_no_length_are_answered_and_do_nothing() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.read(1 << 20, 0), Ok(vec![]));
    assert_eq!(c.write(0, 5, &[]), 0);
    assert_eq!(c.call(CMD_TRIM, 0, 0, 0), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 0, 0), 0);
    assert_eq!(probe.calls(), [""; 0]);
}

#[test]
fn payloads_up_to_32_mib_of_any_length_pass() {
    let size = 40 << 20;
    let server = TestServer::start(ServerOptions::default(), move |_| MemoryExports::new().with("big", size, false));
    let mut c = server.client("big");
    let most = MAX_PAYLOAD as usize;
    for len in [1, 4096, 16_383, 16_384, 131_043, 131_044, 131_072, 1 << 20, most - 1, most] {
        let data: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
        assert_eq!(c.write(0, 12_345, &data), 0);
        assert!(c.read(12_345, len as u32) == Ok(data), "{len} bytes");
    }
}

#[test]
fn pipelined_requests_survive_any_fragmentation() {
    let (_, server) = start();
    for step in [1, 7, 28, 29, 4096, 4124, 5000, 100_000] {
        let mut c = server.client("a");
        let mut bytes = Vec::new();
        let count = if step == 1 { 4 } else { 100 };
        for i in 0..count {
            let (offset, length) = (i * 5000, 4096);
            let write = Request { style: ReplyStyle::Simple, flags: 0, command: CMD_WRITE, cookie: i, offset, length };
            bytes.extend_from_slice(&write.encode());
            bytes.extend_from_slice(&[i as u8 + 1; 4096]);
        }
        for part in bytes.chunks(step) {
            c.send(part);
        }
        let mut cookies: Vec<u64> = (0..count).map(|_| c.reply().cookie).collect();
        cookies.sort();
        assert!(cookies.into_iter().eq(0..count));
        for i in 0..count {
            assert_eq!(c.read(i * 5000, 4096), Ok(vec![i as u8 + 1; 4096]));
        }
    }
}

#[test]
fn small_and_large_writes_take_turns() {
    let (_, server) = start();
    let mut c = server.client("a");
    for round in 0..20u8 {
        let large = vec![round; 300_000];
        assert_eq!(c.write(0, 8192, &large), 0);
        for i in 0..30u64 {
            c.request(CMD_WRITE, 0, i, i * 16, 16);
            c.send(&[round ^ i as u8; 16]);
        }
        (0..30).for_each(|_| assert_eq!(c.reply().error, 0));
        assert!(c.read(8192, 300_000) == Ok(large));
        assert_eq!(c.read(29 * 16, 16), Ok(vec![round ^ 29; 16]));
    }
}

#[test]
fn stopping_answers_requests_in_flight_and_closes() {
    let (probe, mut server) = start();
    let mut c = server.client("a");
    let idle_in_handshake = server.raw();
    probe.hold(true);
    c.request(CMD_WRITE, 0, 1, 0, 4);
    c.send(b"last");
    probe.wait_for(1);
    server.begin_stop();
    while std::os::unix::net::UnixStream::connect(server.socket()).is_ok() {
        std::thread::yield_now();
    }
    probe.hold(false);
    assert_eq!(c.reply(), Reply { error: 0, cookie: 1 });
    c.expect_end();
    drop(idle_in_handshake);
    server.join();
}

#[test]
fn stopping_does_not_wait_for_ever_for_a_request_that_hangs() {
    let probe = Probe::new();
    let drain_timeout = std::time::Duration::from_millis(50);
    let options = ServerOptions::default().with_drain_timeout(drain_timeout);
    let mut server = TestServer::of_probe(&probe, options);
    let mut c = server.client("a");
    probe.hold(true);
    c.request(CMD_READ, 0, 1, 0, 4);
    probe.wait_for(1);
    server.join();
    c.expect_end();
}
