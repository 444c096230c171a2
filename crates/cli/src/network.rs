//! Which doors a server opens besides its unix socket: TCP, TLS, metrics.
//!
//! What others beyond this machine could reach needs TLS that cannot be left out, or `--insecure`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use forkdisk_monitor::{MetricsListener, MetricsServer, Source};
use forkdisk_nbd::tls::{AccessEntry, AccessTable, Tls, TlsFiles};
use forkdisk_nbd::{Exports, Security, Server};
use forkdisk_uring::{JoinHandle, Rt, TcpListener};
use serde::Deserialize;

/// The port that NBD has.
const NBD_PORT: u16 = 10809;
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), NBD_PORT);

/// Options for serving beyond the unix socket.
#[derive(Args)]
pub struct NetworkArgs {
    /// Serve over TCP, too; again for several addresses. Beyond this machine only with TLS
    /// or --insecure [default address: 127.0.0.1:10809]
    #[arg(long, value_name = "ADDR:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:10809",
          env = "FORKDISK_TCP", value_delimiter = ',', value_parser = parse_tcp)]
    tcp: Vec<SocketAddr>,

    /// The server's certificate for TLS over TCP: a PEM file, with those between it and the root behind it
    #[arg(long, value_name = "FILE", env = "FORKDISK_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// The private key of the certificate: a PEM file
    #[arg(long, value_name = "FILE", env = "FORKDISK_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Clients must show a certificate of one of the authorities in this PEM file
    #[arg(long, value_name = "FILE", env = "FORKDISK_TLS_CLIENT_CA", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,

    /// Which certificate may open which export: a TOML file (docs/tls.md)
    #[arg(long, value_name = "FILE", env = "FORKDISK_TLS_CLIENTS", requires = "tls_client_ca")]
    tls_clients: Option<PathBuf>,

    /// Whether TCP clients use TLS [default: required with --tls-cert, else off]
    #[arg(long, value_enum, value_name = "MODE", env = "FORKDISK_TLS")]
    tls: Option<TlsMode>,

    /// Answer HTTP requests for /metrics in the format of Prometheus; again for several places
    #[arg(long, value_name = "ADDR:PORT|unix:PATH", env = "FORKDISK_METRICS", value_delimiter = ',',
          value_parser = parse_metrics)]
    metrics: Vec<MetricsPlace>,

    /// Let others beyond this machine connect without TLS
    #[arg(long, env = "FORKDISK_INSECURE")]
    insecure: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TlsMode {
    /// Nobody can use it
    Off,
    /// Clients may use it
    Allowed,
    /// Clients must use it
    Required,
}

/// Where metrics are to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MetricsPlace {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// The table of clients, as its file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientsFile {
    client: Vec<AccessEntry>,
}

/// All doors, open.
pub struct Doors {
    /// NBD over TCP.
    pub tcp: Vec<TcpListener>,
    /// How clients that come by TCP are protected.
    pub security: Security,
    /// For scrapers.
    pub metrics: Vec<MetricsListener>,
    /// Where those are, for people.
    pub metrics_places: Vec<String>,
}

impl NetworkArgs {
    /// Refuses what contradicts itself or is not safe; reads certificates. Nothing is opened yet.
    pub fn security(&self) -> Result<Security> {
        let mode = self.mode()?;
        let beyond: Vec<SocketAddr> = self.tcp.iter().copied().filter(|addr| !addr.ip().is_loopback()).collect();
        if let Some(addr) = beyond.first()
            && !self.insecure
        {
            let without = "others could reach the disks without TLS";
            match mode {
                TlsMode::Required => {}
                TlsMode::Off => bail!("--tcp {addr}: {without}; give --tls-cert and --tls-key, or --insecure"),
                TlsMode::Allowed => bail!("--tcp {addr}: {without}; leave out --tls allowed, or give --insecure"),
            }
        }
        for place in &self.metrics {
            if let MetricsPlace::Tcp(addr) = place {
                let is_safe = addr.ip().is_loopback() || self.insecure;
                ensure!(
                    is_safe,
                    "--metrics {addr}: others could read the names and use of all volumes; use a \
                                  loopback address or unix:PATH, or give --insecure"
                );
            }
        }
        Ok(match (mode, self.load_tls()?) {
            (TlsMode::Allowed, Some(tls)) => Security::Offered(tls),
            (TlsMode::Required, Some(tls)) => Security::Required(tls),
            _ => Security::Clear,
        })
    }

    fn mode(&self) -> Result<TlsMode> {
        match (self.tls, &self.tls_cert) {
            (None, Some(_)) => Ok(TlsMode::Required),
            (None, None) => Ok(TlsMode::Off),
            (Some(TlsMode::Allowed | TlsMode::Required), None) => bail!("--tls needs --tls-cert and --tls-key"),
            (Some(mode), _) => Ok(mode),
        }
    }

    fn load_tls(&self) -> Result<Option<Tls>> {
        let (Some(certificate), Some(key)) = (self.tls_cert.clone(), self.tls_key.clone()) else {
            return Ok(None);
        };
        let access = match &self.tls_clients {
            None => AccessTable::open(),
            Some(path) => read_clients(path)?,
        };
        let files = TlsFiles { certificate, key, client_ca: self.tls_client_ca.clone() };
        Ok(Some(Tls::load(&files, access)?))
    }

    /// Opens all doors.
    pub fn open(&self, rt: &Rt, security: Security) -> Result<Doors> {
        let tcp = self.tcp.iter().map(|&addr| Ok(TcpListener::bind(rt, addr)?)).collect::<Result<_>>()?;
        let metrics = self.metrics.iter().map(|place| place.open(rt)).collect::<Result<Vec<_>>>()?;
        let metrics_places = self.metrics.iter().zip(&metrics).map(|(place, listener)| match place {
            MetricsPlace::Unix(path) => format!("unix:{}", path.display()),
            MetricsPlace::Tcp(addr) => format!("http://{}/metrics", listener.local_addr().unwrap_or(*addr)),
        });
        Ok(Doors { tcp, security, metrics_places: metrics_places.collect(), metrics })
    }
}

impl Doors {
    /// Serves whoever comes: the tasks that serve disks, which end with `server`, and those that
    /// answer scrapers of `source`, which have to be cancelled.
    pub fn serve<X: Exports>(
        self,
        rt: &Rt,
        server: &Server<X>,
        source: impl Source,
    ) -> (Vec<JoinHandle<()>>, Vec<JoinHandle<()>>) {
        let serve = |listener| {
            let (server, security) = (server.clone(), self.security.clone());
            rt.spawn(async move { server.serve_as(listener, security).await })
        };
        let metrics = MetricsServer::new(rt, source);
        let answer = |listener| rt.spawn(metrics.clone().serve(listener));
        (self.tcp.into_iter().map(serve).collect(), self.metrics.into_iter().map(answer).collect())
    }

    /// The URI prefix for each TCP address; an export's name follows.
    pub fn uris(&self) -> Vec<String> {
        let scheme = if matches!(self.security, Security::Required(_)) { "nbds" } else { "nbd" };
        self.tcp.iter().map(|listener| format!("{scheme}://{}/", listener.local_addr())).collect()
    }
}

impl MetricsPlace {
    fn open(&self, rt: &Rt) -> Result<MetricsListener> {
        Ok(match self {
            MetricsPlace::Tcp(addr) => MetricsListener::tcp(rt, *addr)?,
            // A daemon leaves its folder, and removes the socket when it ends.
            MetricsPlace::Unix(path) => MetricsListener::unix(rt, &std::path::absolute(path)?)?,
        })
    }
}

fn read_clients(path: &Path) -> Result<AccessTable> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let file: ClientsFile =
        toml::from_str(&text).with_context(|| format!("{}: not a table of clients", path.display()))?;
    AccessTable::new(file.client).with_context(|| path.display().to_string())
}

/// `ADDR:PORT`, or one of them alone: an address, `localhost`, or `:PORT`.
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

/// Only what is written as an address, or `localhost`: no look-up that could ask others.
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
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        network: NetworkArgs,
    }

    fn security(line: &str) -> Result<Security> {
        Command::try_parse_from(line.split(' '))?.network.security()
    }

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

    #[test]
    fn beyond_this_machine_nothing_is_served_without_tls_unless_it_is_asked_for() {
        let refused = |line| security(line).err().expect(line).to_string();
        assert!(refused("serve --tcp 0.0.0.0").contains("--tls-cert"));
        assert!(refused("serve --tcp 127.0.0.1 --tcp [::]:1").contains("--insecure"));
        assert!(refused("serve --metrics 192.0.2.1:9").contains("--insecure"));
        assert!(refused("serve --tls required --tcp").contains("--tls-cert"));
        for allowed in ["serve --tcp", "serve --tcp 0.0.0.0 --insecure", "serve --metrics 127.0.0.1:9 --tcp ::1"] {
            assert!(matches!(security(allowed), Ok(Security::Clear)), "{allowed}");
        }
    }
}
