//! Plays one input against a server of its own.

use std::rc::Rc;

use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryStream;
use forkdisk_nbd::server::ALLOCATION;
use forkdisk_nbd::{Server, ServerOptions};
use forkdisk_uring::{ByteStream, JoinHandle, Rt};

use super::Target;
use super::disk::{self, Disks, Nature};
use super::negotiation::negotiate;
use super::script::{Script, Then, info, option, queries};
use super::session::{Ask, Session};
use super::wire::{Wire, number};

/// Turns of the executor in which a connection must be gone after its end.
const TURNS: usize = 1000;

pub async fn play(rt: &Rt, target: Target, input: &[u8]) {
    let nature = Rc::new(Nature::default());
    let mut script = Script::new(input);
    let setup = script.byte();
    let capacity = match setup & 15 {
        0 => 7,
        1 => 100,
        2 => 4096,
        _ => 1 << 20,
    };
    nature.pauses.set(u32::from(setup >> 4).wrapping_mul(0x9e37_79b1));
    let server = Server::new(rt, Disks::new(rt, &nature), ServerOptions::default());
    let (client, theirs) = MemoryStream::pair(capacity);
    server.welcome(theirs);
    match target {
        Target::Handshake => all_at_once(rt, &client, script.rest()).await,
        Target::Options => all_at_once(rt, &client, &script.options()).await,
        Target::Transmission => in_batches(rt, &client, &nature, script).await,
    }
    drop(client);
    for _ in 0..TURNS {
        if server.handle().connections() == 0 {
            return;
        }
        rt.yield_now().await;
    }
    panic!("the connection has ended and is still there");
}

/// Sends in the background; `last`: nothing more will be sent. The server may have gone.
fn send(rt: &Rt, client: &MemoryStream, bytes: Vec<u8>, last: bool) -> JoinHandle<()> {
    let client = client.clone();
    rt.spawn(async move {
        drop(client.send_vectored(vec![bytes.into()]).await);
        if last {
            drop(client.shutdown(std::net::Shutdown::Write));
        }
    })
}

async fn all_at_once(rt: &Rt, client: &MemoryStream, input: &[u8]) {
    let mut wire = Wire::new(client.clone());
    let sent = send(rt, client, input.to_vec(), true);
    if let Some((mut session, rest)) = negotiate(input, &mut wire).await {
        let asks = requests(session.style, rest);
        let mut cookies: Vec<u64> = asks.iter().map(|ask| ask.cookie).collect();
        cookies.sort_unstable();
        if cookies.windows(2).all(|pair| pair[0] != pair[1]) {
            session.exchange(&mut wire, &asks).await;
        } else {
            // Which reply is whose cannot be told.
            wire.skip_to_end().await;
        }
    }
    wire.expect_end().await;
    sent.await;
}

/// The requests in what a client sent, up to the first that has no answer.
fn requests(style: ReplyStyle, mut rest: &[u8]) -> Vec<Ask> {
    let is_extended = style == ReplyStyle::Extended;
    let (magic, header) = if is_extended { (EXTENDED_REQUEST_MAGIC, 32) } else { (REQUEST_MAGIC, 28) };
    let mut asks = Vec::new();
    while let Some((head, behind)) = rest.split_at_checked(header) {
        let field = |at: usize, len: usize| number(&head[at..at + len]);
        let (flags, command) = (field(4, 2) as u16, field(6, 2) as u16);
        let length = field(24, header - 24);
        let payload = Session::payload(style, command, flags, length);
        if field(0, 4) != u64::from(magic) || command == CMD_DISC || payload > behind.len() as u64 {
            break;
        }
        let (payload, behind) = behind.split_at(payload as usize);
        let (cookie, offset) = (field(8, 8), field(16, 8));
        asks.push(Ask { command, flags, cookie, offset, length, payload: payload.to_vec() });
        rest = behind;
    }
    asks
}

async fn in_batches(rt: &Rt, client: &MemoryStream, nature: &Nature, mut script: Script<'_>) {
    let mut wire = Wire::new(client.clone());
    let traits = script.byte();
    let hello = hello(traits);
    let sent = send(rt, client, hello.clone(), false);
    let (mut session, _) = negotiate(&hello, &mut wire).await.expect("this leads there");
    sent.await;
    let bad = (traits & 8 != 0 && session.is_writable).then_some(disk::BAD);
    let style = session.style;
    while !script.is_over() {
        nature.is_bad.set(bad.is_some());
        session.bad = bad.clone();
        let batch = script.batch(style);
        let mut bytes: Vec<u8> = batch.asks.iter().flat_map(|ask| ask.encode(style)).collect();
        let is_end = matches!(batch.then, Then::End(_));
        if let Then::End(last) = &batch.then {
            bytes.extend(last);
        }
        let sent = send(rt, client, bytes, is_end);
        session.exchange(&mut wire, &batch.asks).await;
        sent.await;
        match batch.then {
            Then::End(_) => return wire.expect_end().await,
            Then::Resize(size) if session.is_writable => {
                nature.size.set(size);
                session.size = size;
            }
            _ => {}
        }
        nature.is_bad.set(false);
        session.bad = None;
        remove_doubt(rt, client, nature, &mut session, &mut wire).await;
    }
    send(rt, client, vec![], true).await;
    wire.expect_end().await;
}

/// Where changes met, only a look tells which was last.
async fn remove_doubt(rt: &Rt, client: &MemoryStream, nature: &Nature, session: &mut Session, wire: &mut Wire) {
    let Some(doubt) = session.contents.settle() else { return };
    let size = session.size;
    session.size = disk::SIZE;
    if session.is_writable {
        nature.size.set(disk::SIZE);
    }
    let (offset, length) = (doubt.start as u64, doubt.len() as u64);
    let look = Ask { command: CMD_READ, flags: 0, cookie: u64::MAX, offset, length, payload: vec![] };
    session.contents.watch(doubt);
    let sent = send(rt, client, look.encode(session.style), false);
    session.exchange(wire, &[look]).await;
    sent.await;
    session.contents.adopt();
    session.size = size;
    if session.is_writable {
        nature.size.set(size);
    }
}

/// A whole handshake, to an export and in a style of choice.
fn hello(traits: u8) -> Vec<u8> {
    let name = if traits >> 4 == 15 { disk::READ_ONLY } else { disk::WRITABLE };
    let mut out = 3u32.to_be_bytes().to_vec();
    match traits % 3 {
        0 => {}
        1 => out.extend(option(OPT_STRUCTURED_REPLY, &[])),
        _ => out.extend(option(OPT_EXTENDED_HEADERS, &[])),
    }
    if !traits.is_multiple_of(3) && traits & 4 != 0 {
        out.extend(option(OPT_SET_META_CONTEXT, &queries(name.as_bytes(), &[disk::STRIPES, ALLOCATION])));
    }
    out.extend(option(OPT_GO, &info(name.as_bytes(), &[])));
    out
}
