//! Certificates made for a test, in the files that clients expect.

use std::fs;
use std::path::{Path, PathBuf};

use forkdisk_nbd::tls::TlsFiles;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// A certificate authority with its own folder, laid out as qemu and libnbd expect it.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

impl Authority {
    /// Creates an authority, a certificate of the server `localhost`, and the folder `dir` for both.
    pub fn make(dir: &Path) -> Authority {
        fs::create_dir_all(dir).expect("a folder");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "an authority for tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("an authority");
        fs::write(dir.join("ca-cert.pem"), issuer.pem()).expect("written");
        let authority = Authority { issuer, dir: dir.to_path_buf() };
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        authority.issue(names, "localhost", ExtendedKeyUsagePurpose::ServerAuth, dir, "server");
        authority
    }

    /// Returns the files of the server.
    pub fn server(&self, ask_clients: bool) -> TlsFiles {
        TlsFiles {
            certificate: self.dir.join("server-cert.pem"),
            key: self.dir.join("server-key.pem"),
            client_ca: ask_clients.then(|| self.dir.join("ca-cert.pem")),
        }
    }

    /// Creates a certificate for the client `name`; returns the folder for the client.
    pub fn client(&self, name: &str) -> PathBuf {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).expect("a folder");
        self.issue(vec![], name, ExtendedKeyUsagePurpose::ClientAuth, &dir, "client");
        fs::copy(self.dir.join("ca-cert.pem"), dir.join("ca-cert.pem")).expect("copied");
        dir
    }

    fn issue(&self, names: Vec<String>, common: &str, usage: ExtendedKeyUsagePurpose, dir: &Path, role: &str) {
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, common);
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        fs::write(dir.join(format!("{role}-cert.pem")), certificate.pem()).expect("written");
        fs::write(dir.join(format!("{role}-key.pem")), key.serialize_pem()).expect("written");
    }
}
