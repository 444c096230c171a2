//! HTTP server for `GET /metrics` only.
//!
//! The part of HTTP/1.1 that Prometheus needs, on the runtime of the pool. A client can hold at
//! most one small buffer and one of a few connections, for a bounded time; the text is written
//! family by family, and other tasks run in between.

use std::cell::Cell;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, Result};
use forkdisk_uring::{Rt, Stream, TcpListener, UnixListener};

use crate::collect::Source;
use crate::prometheus;

/// Most connections at a time; more are closed at once.
const MAX_CONNECTIONS: usize = 16;
/// Most bytes of a request's head.
const MAX_HEAD_BYTES: usize = 8 << 10;
/// How long a request may take to arrive, and the client to receive each part of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of the answer sent at once.
const PART_BYTES: usize = 64 << 10;
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listener for metrics.
pub enum MetricsListener {
    /// A TCP port.
    Tcp(TcpListener),
    /// A unix socket that only its owner can connect to.
    Unix(UnixListener),
}

impl MetricsListener {
    /// Listens on a TCP address; the caller decides whether the address is safe.
    ///
    /// # Errors
    /// The address is in use, is not local, or needs rights.
    pub fn tcp(rt: &Rt, addr: SocketAddr) -> Result<MetricsListener> {
        TcpListener::bind(rt, addr).map(MetricsListener::Tcp)
    }

    /// Listens on a unix socket.
    ///
    /// # Errors
    /// Those of [`UnixListener::bind`].
    pub fn unix(rt: &Rt, path: &Path) -> Result<MetricsListener> {
        UnixListener::bind(rt, path).map(MetricsListener::Unix)
    }

    /// Returns the TCP address, with the real port.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            MetricsListener::Tcp(listener) => Some(listener.local_addr()),
            MetricsListener::Unix(_) => None,
        }
    }

    async fn accept(&self) -> io::Result<Stream> {
        match self {
            MetricsListener::Tcp(listener) => listener.accept().await,
            MetricsListener::Unix(listener) => listener.accept().await,
        }
    }
}

/// Serves the metrics of one source. Clones are the same server.
pub struct MetricsServer<S> {
    rt: Rt,
    source: Rc<S>,
    connected: Rc<Cell<usize>>,
}

/// Counts a connection until it is dropped.
struct Place(Rc<Cell<usize>>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl<S> Clone for MetricsServer<S> {
    fn clone(&self) -> MetricsServer<S> {
        let (rt, source, connected) = (self.rt.clone(), self.source.clone(), self.connected.clone());
        MetricsServer { rt, source, connected }
    }
}

impl<S: Source> MetricsServer<S> {
    /// Creates a server for the statistics of `source`.
    pub fn new(rt: &Rt, source: S) -> MetricsServer<S> {
        MetricsServer { rt: rt.clone(), source: Rc::new(source), connected: Rc::default() }
    }

    /// Serves all connections until this future is dropped.
    pub async fn serve(self, listener: MetricsListener) {
        loop {
            match listener.accept().await {
                Ok(stream) if self.connected.get() < MAX_CONNECTIONS => self.welcome(stream),
                Ok(_) => tracing::debug!("a scraper was refused: there are {MAX_CONNECTIONS} already"),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection for metrics");
                    self.rt.sleep_for(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn welcome(&self, stream: Stream) {
        self.connected.set(self.connected.get() + 1);
        let place = Place(self.connected.clone());
        let (rt, source) = (self.rt.clone(), self.source.clone());
        self.rt.spawn(async move {
            let _place = place;
            if let Err(error) = answer(&rt, &*source, &stream).await {
                tracing::debug!(%error, "a scraper was not answered");
            }
            // Fails if the client is gone already.
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}

async fn answer(rt: &Rt, source: &impl Source, stream: &Stream) -> io::Result<()> {
    let head = rt.timeout(PATIENCE, receive_head(stream)).await??;
    let reply = match parse(&head) {
        Ok(request) => request,
        Err(status) => return send(rt, stream, plain(status, true).into_bytes()).await,
    };
    if reply.path != "/metrics" {
        return send(rt, stream, plain("404 Not Found", !reply.head_only).into_bytes()).await;
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nConnection: close\r\nCache-Control: no-store\r\n{}\r\n",
        prometheus::CONTENT_TYPE,
        if reply.chunked { "Transfer-Encoding: chunked\r\n" } else { "" }
    );
    let mut out = head.into_bytes();
    if reply.head_only {
        return send(rt, stream, out).await;
    }
    let statistics = source.statistics();
    let mut text = String::new();
    for family in prometheus::families() {
        family(&statistics, &mut text);
        rt.yield_now().await;
        if text.len() >= PART_BYTES {
            append(&mut out, &mut text, reply.chunked);
            send(rt, stream, std::mem::take(&mut out)).await?;
        }
    }
    append(&mut out, &mut text, reply.chunked);
    if reply.chunked {
        out.extend_from_slice(b"0\r\n\r\n");
    }
    send(rt, stream, out).await
}

/// Moves `text` to the end of `out`.
fn append(out: &mut Vec<u8>, text: &mut String, chunked: bool) {
    if chunked && !text.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes());
    } else {
        out.extend_from_slice(text.as_bytes());
    }
    text.clear();
}

async fn send(rt: &Rt, stream: &Stream, bytes: Vec<u8>) -> io::Result<()> {
    rt.timeout(PATIENCE, stream.send_vectored(vec![bytes.into()])).await?.0
}

/// Receives everything up to the empty line; a head that is too long is cut off at the limit.
async fn receive_head(stream: &Stream) -> io::Result<Vec<u8>> {
    let (mut buf, mut len) = (Buf::zeroed(MAX_HEAD_BYTES), 0);
    while len < MAX_HEAD_BYTES && !is_whole(&buf[..len]) {
        let (result, back) = stream.recv(buf, len, MAX_HEAD_BYTES - len).await;
        buf = back;
        match result? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => len += n,
        }
    }
    Ok(buf[..len].to_vec())
}

fn is_whole(head: &[u8]) -> bool {
    head.windows(4).any(|w| w == b"\r\n\r\n") || head.windows(2).any(|w| w == b"\n\n")
}

#[derive(Debug, PartialEq, Eq)]
struct Request<'a> {
    path: &'a str,
    head_only: bool,
    /// HTTP/1.1: the answer is sent in chunks. With older versions it ends with the connection.
    chunked: bool,
}

/// Parses the request; fails with the status to answer.
fn parse(head: &[u8]) -> std::result::Result<Request<'_>, &'static str> {
    const BAD: &str = "400 Bad Request";
    if !is_whole(head) {
        return Err("431 Request Header Fields Too Large");
    }
    let line = head.split(|&b| b == b'\n').next().unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| BAD)?.trim_end_matches('\r');
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(BAD);
    };
    if !version.starts_with("HTTP/1.") {
        return Err(if version.starts_with("HTTP/") { "505 HTTP Version Not Supported" } else { BAD });
    }
    if !matches!(method, "GET" | "HEAD") {
        return Err("405 Method Not Allowed");
    }
    let path = target.split('?').next().unwrap_or_default();
    Ok(Request { path, head_only: method == "HEAD", chunked: version != "HTTP/1.0" })
}

/// Builds a complete answer with a status only.
fn plain(status: &str, with_body: bool) -> String {
    let body = format!("{status}; the metrics are at /metrics\n");
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\n{allow}Content-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if with_body { head + &body } else { head }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_with_and_without_a_query() {
        let request = |chunked, head_only| Ok(Request { path: "/metrics", head_only, chunked });
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), request(true, false));
        assert_eq!(parse(b"GET /metrics?name=a HTTP/1.0\r\n\r\n"), request(false, false));
        assert_eq!(parse(b"HEAD /metrics HTTP/1.1\n\n"), request(true, true));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let status = |head: &[u8]| parse(head).expect_err("refused").split(' ').next().expect("a number").to_owned();
        assert_eq!(status(b"POST /metrics HTTP/1.1\r\n\r\n"), "405");
        assert_eq!(status(b"GET /metrics HTTP/2.0\r\n\r\n"), "505");
        assert_eq!(status(b"GET /metrics HTTP/1.1 more\r\n\r\n"), "400");
        assert_eq!(status(b"\xff\xfe \r\n\r\n"), "400");
        assert_eq!(status(b"\r\n\r\n"), "400");
        assert_eq!(status(&[b'a'; MAX_HEAD_BYTES]), "431");
    }

    #[test]
    fn chunks_carry_their_length() {
        let (mut out, mut text) = (Vec::new(), "x".repeat(26));
        append(&mut out, &mut text, true);
        append(&mut out, &mut text, true);
        assert_eq!(out, format!("1a\r\n{}\r\n", "x".repeat(26)).into_bytes(), "an empty one would be the end");
    }
}
