//! Parsing of the addresses on which a server listens besides its unix socket.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// The registered port of NBD.
const NBD_PORT: u16 = 10809;
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), NBD_PORT);

/// Address of `--tcp` without a value.
pub const USUAL: &str = "127.0.0.1:10809";

/// Address of a metrics server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsPlace {
    /// An HTTP server.
    Tcp(SocketAddr),
    /// The same on a unix socket.
    Unix(PathBuf),
}

/// Parses TCP addresses, separated by commas.
pub fn parse_addresses(text: &str) -> Result<Vec<SocketAddr>> {
    text.split(',').filter(|word| !word.is_empty()).map(parse_tcp).collect()
}

/// Parses addresses of metrics servers, separated by commas.
pub fn parse_places(text: &str) -> Result<Vec<MetricsPlace>> {
    text.split(',').filter(|word| !word.is_empty()).map(parse_metrics).collect()
}

/// Parses `ADDR:PORT`, or one of both alone: an address, `localhost`, or `:PORT`.
fn parse_tcp(text: &str) -> Result<SocketAddr> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, NBD_PORT));
    }
    if let Some(port) = text.strip_prefix(':') {
        let port = port.parse().with_context(|| format!("'{port}' is not a port"))?;
        return Ok(SocketAddr::new(LOOPBACK.ip(), port));
    }
    if text == "localhost" {
        return Ok(LOOPBACK);
    }
    resolve(text).with_context(|| format!("'{text}' is no address to listen on, such as 127.0.0.1:10809"))
}

fn parse_metrics(text: &str) -> Result<MetricsPlace> {
    match text.strip_prefix("unix:") {
        Some("") => bail!("unix: needs the path of a socket"),
        Some(path) => Ok(MetricsPlace::Unix(PathBuf::from(path))),
        None => {
            let addr = resolve(text).with_context(|| format!("'{text}' is neither ADDR:PORT nor unix:PATH"))?;
            Ok(MetricsPlace::Tcp(addr))
        }
    }
}

/// Parses a numeric address or `localhost`; never asks a name server.
fn resolve(text: &str) -> Option<SocketAddr> {
    if let Ok(addr) = text.parse() {
        return Some(addr);
    }
    let port = text.strip_prefix("localhost:")?;
    (Ipv4Addr::LOCALHOST, port.parse::<u16>().ok()?).to_socket_addrs().ok()?.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_leave_out_what_is_usual() {
        let of = |text| parse_tcp(text).expect(text).to_string();
        assert_eq!(of("127.0.0.1:10809"), "127.0.0.1:10809");
        assert_eq!(of("localhost"), "127.0.0.1:10809");
        assert_eq!(of("localhost:7"), "127.0.0.1:7");
        assert_eq!(of(":0"), "127.0.0.1:0");
        assert_eq!(of("0.0.0.0"), "0.0.0.0:10809");
        assert_eq!(of("[::1]:5"), "[::1]:5");
        assert_eq!(of("::1"), "[::1]:10809");
        for bad in ["", "pool.img", "1.2.3", ":x", "example.org:1"] {
            assert!(parse_tcp(bad).is_err(), "{bad}");
        }
        assert!(parse_metrics("unix:").is_err());
        assert!(parse_metrics("9000").is_err());
    }
}
