//! Connections that go to another server, as to another process: at every byte of a conversation its replies stay the
//! same.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forkdisk::Buf;
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryExports;
use forkdisk_nbd::{PassedClient, Security, Server, ServerOptions};
use forkdisk_uring::{Config, Rt, Stream, block_on};

const DISK_BYTES: usize = 1 << 20;
const TURN: Duration = Duration::from_millis(1);

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [&IHAVEOPT.to_be_bytes()[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), rest].concat()
}

fn request(style: ReplyStyle, command: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let has_payload = style == ReplyStyle::Extended && command == CMD_WRITE;
    let flags = if has_payload { CMD_FLAG_PAYLOAD_LEN } else { 0 };
    Request { style, flags, command, cookie, offset, length }.encode()
}

/// Everything that a client sends: options, then requests with and without data. It waits for the replies behind each.
fn script(style: ReplyStyle) -> Vec<Vec<u8>> {
    let context = b"base:allocation";
    let queries = [&1u32.to_be_bytes()[..], &(context.len() as u32).to_be_bytes(), context].concat();
    let mut all = vec![3u32.to_be_bytes().to_vec()];
    match style {
        ReplyStyle::Simple => all.push(option(OPT_LIST, b"not allowed here")),
        ReplyStyle::Structured => all.push(option(OPT_STRUCTURED_REPLY, &[])),
        ReplyStyle::Extended => all.push(option(OPT_EXTENDED_HEADERS, &[])),
    }
    if style.has_chunks() {
        all.push(option(OPT_SET_META_CONTEXT, &named("a", &queries)));
    }
    all.push(option(OPT_GO, &named("a", &0u16.to_be_bytes())));
    let data: Vec<u8> = (0..40_000usize).map(|n| (n % 249) as u8 + 1).collect();
    all.push([request(style, CMD_WRITE, 1, 8192, data.len() as u64), data].concat());
    all.push([request(style, CMD_WRITE, 2, 512, 700), vec![7; 700]].concat());
    // Refused, with data that is dropped.
    all.push([request(style, CMD_WRITE, 3, DISK_BYTES as u64, 600), vec![8; 600]].concat());
    all.push(request(style, CMD_READ, 4, 0, 60_000));
    if style.has_chunks() {
        all.push(request(style, CMD_BLOCK_STATUS, 5, 0, 100_000));
    }
    all.push(request(style, CMD_FLUSH, 6, 0, 0));
    all.push(request(style, CMD_DISC, 7, 0, 0));
    all
}

/// Passes a client on as text and descriptor, which is how another process gets it.
fn over_text(passed: PassedClient) -> PassedClient {
    let mut sockets = Vec::new();
    let text = serde_json::to_string(&passed.map(|socket| sockets.push(socket))).unwrap();
    let passed: PassedClient<()> = serde_json::from_str(&text).unwrap();
    passed.map(|()| sockets.pop().unwrap())
}

/// Plays a script to a server that is replaced after `cuts` bytes; returns the replies. Fetches none before the end.
async fn play(rt: &Rt, script: &[Vec<u8>], cuts: &[usize]) -> Vec<u8> {
    let exports = MemoryExports::new().with("a", DISK_BYTES, false);
    let server = || Server::new(rt, exports.clone(), ServerOptions::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let client = Stream::from_fd(rt, OwnedFd::from(theirs));
    let mut serving = server();
    serving.welcome(Stream::from_fd(rt, OwnedFd::from(ours)));
    let ends = script.iter().scan(0, |end, part| {
        *end += part.len();
        Some((*end, false))
    });
    let mut places: Vec<(usize, bool)> = cuts.iter().map(|&cut| (cut, true)).chain(ends).collect();
    places.sort_unstable();
    let (all, mut at) = (script.concat(), 0);
    for (place, is_cut) in places {
        client.send_vectored(vec![all[at..place].to_vec().into()]).await.0.unwrap();
        at = place;
        rt.sleep_for(TURN).await;
        if !is_cut {
            continue;
        }
        let mut passed = serving.pass_on().await;
        assert_eq!((passed.len(), serving.handle().connections()), (1, 0), "after {place} bytes");
        serving = server();
        serving.resume(over_text(passed.pop().unwrap()), Security::Clear);
    }
    let (mut replies, mut buf) = (Vec::new(), Buf::zeroed(64 << 10));
    loop {
        let (result, back) = client.recv(buf, 0, 64 << 10).await;
        buf = back;
        match result.unwrap() {
            0 => return replies,
            count => replies.extend_from_slice(&buf[..count]),
        }
    }
}

fn in_runtime<T>(work: impl AsyncFnOnce(Rt) -> T) -> T {
    block_on(Config::default(), |rt| async move { work(rt).await }).unwrap()
}

#[test]
fn a_conversation_is_the_same_wherever_it_is_passed_on() {
    for style in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
        let script = script(style);
        in_runtime(async |rt| {
            let wanted = play(&rt, &script, &[]).await;
            assert!(wanted.len() > 40_000, "{style:?}: {} bytes", wanted.len());
            // Every byte of the options and of the first request, some of the data and of the last requests.
            let len = script.concat().len();
            let places = (0..180).chain((180..len).step_by(2999)).chain((len - 170..len).step_by(3));
            for cut in places {
                let found = play(&rt, &script, &[cut]).await;
                assert!(found == wanted, "{style:?}, after {cut} bytes: {} of {}", found.len(), wanted.len());
            }
            let often: Vec<usize> = (1..30).map(|n| n * len / 31).collect();
            assert!(play(&rt, &script, &often).await == wanted, "{style:?}, often");
        });
    }
}

#[test]
fn replies_that_a_client_does_not_fetch_go_with_it() {
    in_runtime(async |rt| {
        let style = ReplyStyle::Simple;
        let mut parts = vec![3u32.to_be_bytes().to_vec(), option(OPT_GO, &named("a", &0u16.to_be_bytes()))];
        parts.extend((0..24).map(|n| request(style, CMD_READ, n, 0, DISK_BYTES as u64)));
        parts.push(request(style, CMD_DISC, 99, 0, 0));
        let (script, len) = ([parts.concat()], parts.concat().len());
        let wanted = play(&rt, &script, &[]).await;
        assert!(wanted.len() > 24 * DISK_BYTES);
        for cuts in [&[len - 28][..], &[len - 28 * 10, len - 28 * 5, len - 28], &[len - 20]] {
            assert!(play(&rt, &script, cuts).await == wanted, "{cuts:?}");
        }
    });
}
