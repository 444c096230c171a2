//! Features beyond simple replies: chunks, holes, errors with a place, metadata contexts and
//! extended headers.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use forkdisk_nbd::ServerOptions;
use forkdisk_nbd::codec::*;
use support::{Chunk, Client, Probe, TestServer};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOTSUP: u32 = 95;
const PAGE: usize = 4096;
const ALLOCATION: &str = "base:allocation";
const STYLES: [ReplyStyle; 2] = [ReplyStyle::Structured, ReplyStyle::Extended];

fn start() -> (Probe, TestServer) {
    let probe = Probe::new();
    let server = TestServer::of_probe(&probe, ServerOptions::default());
    (probe, server)
}

/// Receives the reply to a write, a flush and the like.
fn done(c: &mut Client, style: ReplyStyle) -> u32 {
    match style {
        ReplyStyle::Extended => match c.chunk() {
            Chunk { kind: CHUNK_NONE, last: true, .. } => 0,
            chunk => u32::from_be_bytes(chunk.data[..4].try_into().expect("an error")),
        },
        _ => c.reply().error,
    }
}

fn write(c: &mut Client, style: ReplyStyle, offset: u64, data: &[u8]) {
    let payload = if style == ReplyStyle::Extended { CMD_FLAG_PAYLOAD_LEN } else { 0 };
    c.request(CMD_WRITE, payload, 1, offset, data.len() as u32);
    c.send(data);
    assert_eq!(done(c, style), 0);
}

fn at(offset: u64) -> Vec<u8> {
    offset.to_be_bytes().to_vec()
}

fn hole(offset: u64, len: u32) -> (u16, Vec<u8>) {
    (CHUNK_OFFSET_HOLE, [at(offset), len.to_be_bytes().to_vec()].concat())
}

fn data(offset: u64, bytes: &[u8]) -> (u16, Vec<u8>) {
    (CHUNK_OFFSET_DATA, [&at(offset)[..], bytes].concat())
}

fn read(c: &mut Client, flags: u16, offset: u64, len: usize) -> Vec<(u16, Vec<u8>)> {
    c.request(CMD_READ, flags, 5, offset, len as u32);
    c.chunks().into_iter().map(|chunk| (chunk.kind, chunk.data)).collect()
}

#[test]
fn a_read_of_data_and_holes_is_answered_in_chunks_that_cover_it() {
    let (_, server) = start();
    for style in STYLES {
        let mut c = server.styled(style, "a", &[]);
        let (x, y) = (vec![1; PAGE], vec![2; 2 * PAGE]);
        write(&mut c, style, 0, &[0; 8 * PAGE]);
        write(&mut c, style, PAGE as u64, &x);
        write(&mut c, style, 5 * PAGE as u64, &y);
        let expected = [hole(0, 4096), data(4096, &x), hole(8192, 3 * 4096), data(5 * 4096, &y), hole(7 * 4096, 4096)];
        assert_eq!(read(&mut c, 0, 0, 8 * PAGE), expected);
        assert_eq!(read(&mut c, 0, 0, PAGE), [hole(0, 4096)]);
        assert_eq!(read(&mut c, 0, 4096, PAGE), [data(4096, &x)]);
    }
}

#[test]
fn with_df_or_below_a_page_a_read_is_one_piece() {
    let (_, server) = start();
    for style in STYLES {
        let mut c = server.styled(style, "a", &[]);
        write(&mut c, style, PAGE as u64, &[1; PAGE]);
        let bytes = [vec![0; PAGE], vec![1; PAGE]].concat();
        assert_eq!(read(&mut c, CMD_FLAG_DF, 0, 2 * PAGE), [data(0, &bytes)]);
        assert_eq!(read(&mut c, 0, 100, 512), [data(100, &[0; 512])]);
        assert_eq!(read(&mut c, 0, 100, 0), [(CHUNK_NONE, vec![])], "a chunk of data has data");
    }
}

#[test]
fn an_error_says_why_and_where() {
    let (probe, server) = start();
    for style in STYLES {
        let mut c = server.styled(style, "a", &[]);
        let size = 1u64 << 20;
        let failure = |chunks: Vec<(u16, Vec<u8>)>| {
            let (kind, data) = chunks.last().expect("a chunk").clone();
            let text = u16::from_be_bytes([data[4], data[5]]) as usize;
            assert!(std::str::from_utf8(&data[6..6 + text]).is_ok_and(|text| !text.is_empty()));
            let code = u32::from_be_bytes(data[..4].try_into().expect("4 bytes"));
            let place = data.get(6 + text..).filter(|rest| !rest.is_empty());
            (kind, code, place.map(|rest| u64::from_be_bytes(rest.try_into().expect("8 bytes"))))
        };
        let past = failure(read(&mut c, 0, size - 100, 512));
        assert_eq!(past, (CHUNK_ERROR_OFFSET, EINVAL, Some(size)), "the first byte that is not there");
        let flags = failure(read(&mut c, 1 << 9, 0, 512));
        assert_eq!(flags, (CHUNK_ERROR, EINVAL, None));
        for fault in [0, 4095, 4096, 77_777, 262_143] {
            probe.fault(Some(fault));
            let io = failure(read(&mut c, 0, 0, 262_144));
            assert_eq!(io, (CHUNK_ERROR_OFFSET, EIO, Some(fault / 4096 * 4096)));
        }
        probe.fault(Some(8200));
        let second_page = failure(read(&mut c, 0, 8000, 300));
        assert_eq!(second_page, (CHUNK_ERROR_OFFSET, EIO, Some(8192)), "a short read that ends in the bad page");
        let inside = failure(read(&mut c, 0, 8198, 4));
        assert_eq!(inside, (CHUNK_ERROR_OFFSET, EIO, Some(8198)), "not before the request");
        probe.fault(None);
    }
}

#[test]
fn the_df_flag_is_announced_with_structured_replies_only() {
    let (_, server) = start();
    assert_eq!(server.raw().go("a").1 & FLAG_SEND_DF, 0);
    let mut c = server.client("a");
    assert_eq!(c.call(CMD_READ, CMD_FLAG_DF, 0, 512), EINVAL);
    for style in STYLES {
        let mut c = server.raw();
        c.negotiate(style);
        assert_ne!(c.go("a").1 & FLAG_SEND_DF, 0);
    }
}

#[test]
fn structured_replies_are_chosen_once_and_not_after_extended_headers() {
    let (_, server) = start();
    let mut c = server.raw();
    c.option(OPT_STRUCTURED_REPLY, b"data");
    assert_eq!(c.option_reply(OPT_STRUCTURED_REPLY).0, REP_ERROR + 3);
    c.negotiate(ReplyStyle::Structured);
    c.option(OPT_STRUCTURED_REPLY, &[]);
    assert_eq!(c.option_reply(OPT_STRUCTURED_REPLY).0, REP_ERROR + 3);
    c.negotiate(ReplyStyle::Extended);
    c.option(OPT_STRUCTURED_REPLY, &[]);
    assert_eq!(c.option_reply(OPT_STRUCTURED_REPLY).0, REP_ERROR + 10);
    c.option(OPT_EXTENDED_HEADERS, &[]);
    assert_eq!(c.option_reply(OPT_EXTENDED_HEADERS).0, REP_ERROR + 3);
    c.go("a");
    write(&mut c, ReplyStyle::Extended, 0, b"still understood");
}

#[test]
fn contexts_are_listed_and_chosen() {
    let (_, server) = start();
    let mut c = server.raw();
    for option in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        assert_eq!(c.contexts(option, "a", &[ALLOCATION]), Err(REP_ERROR + 3), "without structured replies");
    }
    c.negotiate(ReplyStyle::Structured);
    let all = vec![(0, ALLOCATION.to_owned())];
    for queries in [&[][..], &["base:"], &[ALLOCATION, "other:thing"]] {
        assert_eq!(c.contexts(OPT_LIST_META_CONTEXT, "a", queries), Ok(all.clone()));
    }
    assert_eq!(c.contexts(OPT_LIST_META_CONTEXT, "a", &["qemu:"]), Ok(vec![]));
    assert_eq!(c.contexts(OPT_LIST_META_CONTEXT, "nothing", &[]), Err(REP_ERROR + 6));
    assert_eq!(c.contexts(OPT_SET_META_CONTEXT, "nothing", &[]), Err(REP_ERROR + 6));
    let twice = [ALLOCATION, "base:", ALLOCATION];
    assert_eq!(c.contexts(OPT_SET_META_CONTEXT, "a", &twice), Ok(vec![(1, ALLOCATION.to_owned())]));
    c.go("a");
    assert!(c.status(0, 0, 512).is_ok());
}

#[test]
fn contexts_count_for_the_export_they_were_chosen_for_and_the_last_choice_counts() {
    let (_, server) = start();
    for (choices, entered) in [(&["b"][..], "a"), (&["a", "b"], "a"), (&["b", "nothing"], "b")] {
        let mut c = server.raw();
        c.negotiate(ReplyStyle::Structured);
        for name in choices {
            let _ = c.contexts(OPT_SET_META_CONTEXT, name, &[ALLOCATION]);
        }
        c.go(entered);
        assert_eq!(c.status(0, 0, 512), Err(EINVAL), "{choices:?}");
    }
    let mut c = server.raw();
    c.negotiate(ReplyStyle::Structured);
    assert!(c.contexts(OPT_SET_META_CONTEXT, "a", &[ALLOCATION]).is_ok());
    assert!(c.contexts(OPT_SET_META_CONTEXT, "a", &[]).is_ok());
    c.go("a");
    assert_eq!(c.status(0, 0, 512), Err(EINVAL), "none was chosen in the end");
}

#[test]
fn block_status_tells_data_from_holes() {
    let (_, server) = start();
    for style in STYLES {
        let mut c = server.styled(style, "a", &[ALLOCATION]);
        write(&mut c, style, 0, &[0; 8 * PAGE]);
        write(&mut c, style, 2 * PAGE as u64, &[1; 3 * PAGE]);
        let extents = vec![(2 * 4096, 3), (3 * 4096, 0), (3 * 4096, 3)];
        assert_eq!(c.status(0, 0, 8 * 4096), Ok(vec![(1, extents)]));
        assert_eq!(c.status(CMD_FLAG_REQ_ONE, 4096, 7 * 4096), Ok(vec![(1, vec![(4096, 3)])]));
        assert_eq!(c.status(CMD_FLAG_REQ_ONE, 3 * 4096, 4096), Ok(vec![(1, vec![(4096, 0)])]));
        assert_eq!(c.status(0, 1 << 20, 1), Err(EINVAL), "past the end");
        assert_eq!(c.status(0, 0, 0), Err(EINVAL), "nothing");
    }
}

#[test]
fn the_extents_of_a_reply_are_bounded_and_the_client_asks_again() {
    let server = TestServer::start(ServerOptions::default(), |_| {
        forkdisk_nbd::memory::MemoryExports::new().with("striped", 16 << 20, false)
    });
    let mut c = server.styled(ReplyStyle::Structured, "striped", &[ALLOCATION]);
    let stripes = [vec![1; PAGE], vec![0; PAGE]].concat().repeat(2048);
    write(&mut c, ReplyStyle::Structured, 0, &stripes);
    let mut at = 0;
    let mut replies = 0;
    while at < 16 << 20 {
        let extents = c.status(0, at, (16 << 20) - at as u32).expect("a status").remove(0).1;
        assert!(!extents.is_empty() && extents.len() <= 1024);
        for (len, flags) in extents {
            assert_eq!((len, flags), (4096, if at % 8192 == 0 { 0 } else { 3 }));
            at += len;
        }
        replies += 1;
    }
    assert_eq!(replies, 4);
}

#[test]
fn zeroing_that_is_no_faster_than_writing_is_refused_when_it_must_be_fast() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_FAST_ZERO, 4096, 4096), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_FAST_ZERO, 100, 100), ENOTSUP);
    assert_eq!(c.call(CMD_WRITE_ZEROES, 0, 100, 100), 0);
    assert_eq!(probe.calls(), ["zero 4096 4096", "zero 100 100"]);
}

#[test]
fn cache_is_passed_on_and_needs_no_right_to_write() {
    let (probe, server) = start();
    let mut c = server.client("frozen");
    assert_eq!(c.call(CMD_CACHE, 0, 4096, 65_536), 0);
    assert_eq!(c.call(CMD_CACHE, 0, 4096, 0), 0);
    assert_eq!(c.call(CMD_CACHE, 0, 1 << 20, 1), EINVAL);
    assert_eq!(probe.calls(), ["cache 4096 65536"]);
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_FAST_ZERO, 0, 512), EPERM);
}

#[test]
fn a_connection_sees_a_new_size_at_once() {
    let (probe, server) = start();
    let mut c = server.client("a");
    assert_eq!(c.call(CMD_TRIM, 0, (1 << 20) - 512, 1024), EINVAL);
    probe.resize((1 << 20) + 512);
    assert_eq!(c.call(CMD_CACHE, 0, (1 << 20) - 512, 1024), 0);
    probe.resize(4096);
    assert_eq!(c.read(4096, 1), Err(EINVAL));
    assert_eq!(c.read(0, 4096).map(|data| data.len()), Ok(4096));
}

#[test]
fn extended_headers_carry_64_bit_lengths_and_repeat_the_offset() {
    let probe = Probe::new();
    let of = probe.clone();
    let server =
        TestServer::start(ServerOptions::default(), move |rt| support::ProbeExports::new(rt, &of).with_vast(1 << 50));
    let mut c = server.styled(ReplyStyle::Extended, "vast", &[]);
    let style = ReplyStyle::Extended;
    let long = |command, flags| Request { style, flags, command, cookie: 3, offset: 1 << 40, length: 1 << 45 };
    c.send_request(long(CMD_TRIM, 0));
    let head = [&EXTENDED_REPLY_MAGIC.to_be_bytes()[..], &[0, 1, 0, 0], &3u64.to_be_bytes(), &at(1 << 40), &[0; 8]];
    assert_eq!(c.bytes(32), head.concat());
    c.send_request(long(CMD_WRITE_ZEROES, 0));
    assert_eq!(done(&mut c, style), 0);
    assert_eq!(probe.calls(), ["trim 1099511627776 35184372088832", "zero 1099511627776 35184372088832"]);
    c.send_request(long(CMD_READ, 0));
    assert_eq!(done(&mut c, style), EINVAL, "more than 32 MiB of data");
    c.send_request(long(CMD_WRITE, CMD_FLAG_PAYLOAD_LEN));
    c.expect_end();
}
