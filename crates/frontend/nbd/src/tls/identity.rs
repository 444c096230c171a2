//! Identity of a client, by its certificate.

use std::fmt;
use std::fmt::Write;

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The names in a valid certificate, and its fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Common names of the subject, then DNS names, mail addresses and URIs of the subject's
    /// alternative names.
    pub names: Vec<String>,
    /// SHA-256 of the whole certificate (DER).
    pub fingerprint: [u8; 32],
}

impl Identity {
    /// Reads a certificate. One that cannot be parsed has no names and matches by its fingerprint only.
    pub fn of(certificate: &CertificateDer<'_>) -> Identity {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(digest.as_ref());
        let names = X509Certificate::from_der(certificate).map(|(_, c)| names(&c)).unwrap_or_default();
        Identity { names, fingerprint }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.first() {
            Some(name) => write!(f, "{name:?}"),
            None => f.write_str(&hex(&self.fingerprint)),
        }
    }
}

fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut names: Vec<String> = common.map(str::to_owned).collect();
    if let Ok(Some(alternative)) = certificate.subject_alternative_name() {
        names.extend(alternative.value.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(text) | GeneralName::RFC822Name(text) | GeneralName::URI(text) => {
                Some((*text).to_owned())
            }
            _ => None,
        }));
    }
    names
}

/// Formats bytes as lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a String takes everything");
    }
    text
}

/// Parses a fingerprint: 64 hexadecimal digits, with or without colons between pairs.
pub(super) fn parse_fingerprint(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text.bytes().filter(|&b| b != b':').collect();
    let mut fingerprint = [0; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in fingerprint.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |b: u8| char::from(b).to_digit(16);
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(fingerprint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    #[test]
    fn names_are_the_common_name_and_the_alternative_names() {
        let mut params = CertificateParams::new(vec!["host.example".to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, "backup");
        params.subject_alt_names.push(SanType::Rfc822Name("op@example".try_into().expect("ASCII")));
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        let identity = Identity::of(certificate.der());
        assert_eq!(identity.names, ["backup", "host.example", "op@example"]);
        assert_eq!(parse_fingerprint(&hex(&identity.fingerprint)), Some(identity.fingerprint));
    }

    #[test]
    fn fingerprints_are_64_digits_with_or_without_colons() {
        let colons = ["0A"; 32].join(":");
        assert_eq!(parse_fingerprint(&colons), Some([10; 32]));
        assert_eq!(parse_fingerprint(&colons.replace(':', "").to_lowercase()), Some([10; 32]));
        assert_eq!(parse_fingerprint(&colons[1..]), None);
        assert_eq!(parse_fingerprint(&colons.replacen('A', "G", 1)), None);
        assert_eq!(parse_fingerprint(&"\u{e9}".repeat(32)), None, "bytes are not digits");
    }

    #[test]
    fn what_is_no_certificate_has_no_names() {
        assert!(Identity::of(&CertificateDer::from(vec![1, 2, 3])).names.is_empty());
    }
}
