//! Network listeners of a server besides its unix socket: TCP, TLS, metrics.
//!
//! A listener that other machines could reach needs mandatory TLS or `--insecure`.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, bail};
use forkdisk_monitor::{MetricsListener, MetricsServer, Source};
use forkdisk_nbd::tls::{AccessEntry, AccessTable, Tls, TlsFiles};
use forkdisk_nbd::{Exports, Security, Server};
use forkdisk_uring::{JoinHandle, Rt, TcpListener};
use serde::Deserialize;

use crate::config::{Settings, key};
use crate::listen_address::{MetricsPlace, parse_addresses, parse_places};

/// The table of clients, as stored in its file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientsFile {
    client: Vec<AccessEntry>,
}

/// All listeners, open.
pub struct Listeners {
    /// NBD over TCP.
    pub tcp: Vec<TcpListener>,
    /// Protection of TCP clients.
    pub security: Security,
    /// HTTP servers for metrics.
    pub metrics: Vec<MetricsListener>,
    /// Their addresses, for people.
    pub metrics_places: Vec<String>,
}

/// Listeners that were checked for safety and are not open yet.
pub struct Network {
    tcp: Vec<SocketAddr>,
    metrics: Vec<MetricsPlace>,
    security: Security,
}

impl Network {
    /// Reads the listeners from the configuration. Refuses contradictions and unsafe listeners, and
    /// reads certificates; opens nothing.
    pub fn from_settings(config: &Settings) -> Result<Network> {
        let tcp = parse_addresses(config.word(&key::TCP).unwrap_or_default())?;
        let metrics = parse_places(config.word(&key::METRICS).unwrap_or_default())?;
        let tls = load_tls(config)?;
        let mode = config.word(&key::TLS).unwrap_or(if tls.is_some() { "required" } else { "off" });
        let security = match (mode, tls) {
            ("off", _) => Security::Clear,
            (_, None) => bail!("--tls {mode} needs --tls-cert and --tls-key"),
            ("allowed", Some(tls)) => Security::Offered(tls),
            (_, Some(tls)) => Security::Required(tls),
        };
        if !config.switch(&key::INSECURE)? {
            refuse_unsafe(&tcp, &metrics, &security)?;
        }
        Ok(Network { tcp, metrics, security })
    }

    /// Opens all listeners.
    pub fn open(&self, rt: &Rt) -> Result<Listeners> {
        if let Some(warning) = open_to_users(&self.tcp, &self.security) {
            tracing::warn!("{warning}");
        }
        let tcp = self.tcp.iter().map(|&addr| Ok(TcpListener::bind(rt, addr)?)).collect::<Result<_>>()?;
        let metrics = self.metrics.iter().map(|place| place.open(rt)).collect::<Result<Vec<_>>>()?;
        let metrics_places = self.metrics.iter().zip(&metrics).map(|(place, listener)| match place {
            MetricsPlace::Unix(path) => format!("unix:{}", path.display()),
            MetricsPlace::Tcp(addr) => format!("http://{}/metrics", listener.local_addr().unwrap_or(*addr)),
        });
        let (security, metrics_places) = (self.security.clone(), metrics_places.collect());
        Ok(Listeners { tcp, security, metrics_places, metrics })
    }
}

/// Returns a warning about an address to which every user of this machine can connect.
fn open_to_users(tcp: &[SocketAddr], security: &Security) -> Option<String> {
    let addr = tcp.iter().find(|addr| addr.ip().is_loopback())?;
    let clear = !matches!(security, Security::Required(_));
    clear.then(|| {
        format!(
            "tcp {addr} is served without TLS: every user of this machine can open every disk; the data socket has a \
             mode and a group (socket_mode, socket_group), TLS certificates (docs/tls.md)"
        )
    })
}

fn refuse_unsafe(tcp: &[SocketAddr], metrics: &[MetricsPlace], security: &Security) -> Result<()> {
    if let Some(addr) = tcp.iter().find(|addr| !addr.ip().is_loopback()) {
        let without = "others could reach the disks without TLS";
        match security {
            Security::Required(_) => {}
            Security::Clear | Security::Only(_) => {
                bail!("--tcp {addr}: {without}; give --tls-cert and --tls-key, or --insecure")
            }
            Security::Offered(_) => bail!("--tcp {addr}: {without}; leave out --tls allowed, or give --insecure"),
        }
    }
    for place in metrics {
        if let MetricsPlace::Tcp(addr) = place
            && !addr.ip().is_loopback()
        {
            bail!(
                "--metrics {addr}: others could read the names and use of all volumes; use a loopback address or \
                 unix:PATH, or give --insecure"
            );
        }
    }
    Ok(())
}

fn load_tls(config: &Settings) -> Result<Option<Tls>> {
    let [certificate, key, client_ca, clients] =
        [&key::TLS_CERT, &key::TLS_KEY, &key::TLS_CLIENT_CA, &key::TLS_CLIENTS].map(|key| config.path(key));
    let (certificate, key) = match (certificate, key) {
        (Some(certificate), Some(key)) => (certificate, key),
        (None, None) if client_ca.is_none() && clients.is_none() => return Ok(None),
        _ => bail!("TLS needs both --tls-cert and --tls-key"),
    };
    let access = match &clients {
        None => AccessTable::open(),
        Some(path) => read_clients(path)?,
    };
    Ok(Some(Tls::load(&TlsFiles { certificate, key, client_ca }, access)?))
}

impl Listeners {
    /// Starts to serve all listeners. Returns the tasks that serve disks, which end with `server`,
    /// and those that answer metrics requests from `source`, which have to be cancelled.
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

    /// Returns the URI prefix of each TCP address; an export's name follows it.
    pub fn uris(&self) -> Vec<String> {
        let scheme = if matches!(self.security, Security::Required(_)) { "nbds" } else { "nbd" };
        self.tcp.iter().map(|listener| format!("{scheme}://{}/", listener.local_addr())).collect()
    }
}

impl MetricsPlace {
    fn open(&self, rt: &Rt) -> Result<MetricsListener> {
        Ok(match self {
            MetricsPlace::Tcp(addr) => MetricsListener::tcp(rt, *addr)?,
            // Absolute, since a daemon changes its folder and removes the socket when it ends.
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, Command, FromArgMatches};

    use crate::config::Given;

    fn network(line: &str) -> Result<Network> {
        let command = Given::<true>::augment_args(Command::new("serve"));
        let given = Given::from_arg_matches(&command.try_get_matches_from(line.split(' '))?)?;
        Network::from_settings(&Settings::load(Given::default(), given, None)?)
    }

    #[test]
    fn tcp_on_this_machine_without_tls_is_warned_of() {
        let warning = |line| network(line).map(|found| open_to_users(&found.tcp, &found.security)).unwrap();
        assert!(warning("serve --tcp").unwrap().contains("every user"));
        assert!(warning("serve --tcp 0.0.0.0 --tcp ::1 --insecure").unwrap().contains("[::1]:10809"));
        for silent in ["serve --tcp 0.0.0.0 --insecure", "serve --metrics 127.0.0.1:9"] {
            assert_eq!(warning(silent), None, "{silent}");
        }
    }

    #[test]
    fn beyond_this_machine_nothing_is_served_without_tls_unless_it_is_asked_for() {
        let refused = |line| network(line).err().expect(line).to_string();
        assert!(refused("serve --tcp 0.0.0.0").contains("--tls-cert"));
        assert!(refused("serve --tcp 127.0.0.1 --tcp [::]:1").contains("--insecure"));
        assert!(refused("serve --metrics 192.0.2.1:9").contains("--insecure"));
        assert!(refused("serve --tls required --tcp").contains("--tls-cert"));
        for allowed in ["serve --tcp", "serve --tcp 0.0.0.0 --insecure", "serve --metrics 127.0.0.1:9 --tcp ::1"] {
            assert!(network(allowed).is_ok(), "{allowed}");
        }
    }
}
