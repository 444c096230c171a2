//! TLS for NBD: certificates, encrypted streams, and access of clients to exports.
//!
//! [`Tls`] is the server's side: its certificate and key, the authority whose certificates clients
//! must present, and the access table. [`TlsStream`] carries bytes over any
//! [`ByteStream`](forkdisk_uring::ByteStream); NBD's STARTTLS inserts it below a negotiation that
//! started unencrypted. The library performs the handshake; the records are encrypted here, so that a session can go to
//! another process ([`PassedTls`]). Private keys are read once, and no key is ever logged.

mod access;
mod handshake;
mod identity;
mod keys;
mod records;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkdisk::{Error, ErrorKind, Result};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

pub use access::{AccessEntry, AccessTable, Grants, Permission};
pub use identity::Identity;
pub(crate) use stream::Leaving;
pub use stream::{PassedTls, TlsStream};

/// PEM files with the server's certificates.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by intermediate certificates.
    pub certificate: PathBuf,
    /// Its private key (PKCS#8, PKCS#1 or SEC 1).
    pub key: PathBuf,
    /// Authorities whose certificates clients must present; `None`: clients present none.
    pub client_ca: Option<PathBuf>,
}

/// TLS configuration of a server. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    access: Arc<AccessTable>,
    asks_clients: bool,
}

impl Tls {
    /// Reads certificates and key; `access` restricts clients, [`AccessTable::open`]
    /// allows all of them every export.
    ///
    /// Refuses a restricted table without a client authority: clients would be unauthenticated.
    ///
    /// # Errors
    /// A file cannot be read or is no certificate or key, the key does not fit, or clients would be
    /// unauthenticated.
    pub fn load(files: &TlsFiles, access: AccessTable) -> Result<Tls> {
        if files.client_ca.is_none() && access.is_restricted() {
            let text = "a table of clients needs a client CA: without one clients present no certificate";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let chain = certificates(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| unreadable(&files.key, "private key", e))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|e| refused("the TLS library", &e))?;
        let builder = match &files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(authorities(path)?.into(), provider)
                    .build()
                    .map_err(|e| refused(&path.display().to_string(), &e))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|e| {
            let text = format!("{} and {} do not fit together: {e}", files.certificate.display(), files.key.display());
            Error::new(ErrorKind::Invalid, text)
        })?;
        // Disks stay connected: session resumption saves nothing, and stored sessions could leak.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Tls { config: Arc::new(config), access: Arc::new(access), asks_clients: files.client_ca.is_some() })
    }

    /// Returns whether clients must present a certificate.
    pub fn asks_clients(&self) -> bool {
        self.asks_clients
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }

    /// Returns what a client with `identity`, or without a certificate, may open.
    pub(crate) fn grants(&self, identity: Option<&Identity>) -> Grants {
        self.access.grants(identity)
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let list = read.map_err(|e| unreadable(path, "certificate", e))?;
    if list.is_empty() { Err(unreadable(path, "certificate", pem::Error::NoItemsFound)) } else { Ok(list) }
}

fn authorities(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|e| refused(&path.display().to_string(), &e))?;
    }
    Ok(roots)
}

fn unreadable(path: &Path, what: &str, error: pem::Error) -> Error {
    match error {
        pem::Error::Io(e) => Error::io(format!("cannot read the {what} {}", path.display()), e),
        pem::Error::NoItemsFound => {
            Error::new(ErrorKind::Invalid, format!("{} holds no {what} in PEM form", path.display()))
        }
        other => Error::new(ErrorKind::Invalid, format!("{} is no {what} in PEM form: {other}", path.display())),
    }
}

fn refused(what: &str, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format!("{what}: {error}"))
}
