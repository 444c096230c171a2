//! Keys of an encrypted connection: one [`Half`] for each direction.
//!
//! What a half is made from is a [`Secret`], which another process can continue with. Secrets are zeroed when they
//! are dropped, and never printed.

use std::fmt;

use ring::aead::{self, LessSafeKey, UnboundKey};
use ring::hkdf;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

/// Length of a nonce, and of the value from which nonces are made.
pub(super) const NONCE_BYTES: usize = 12;
/// Records that one key of AES-GCM may encrypt (RFC 8446, section 5.5).
const GCM_RECORDS_COUNT: u64 = 1 << 24;
/// Records after which the number of a record could overflow.
const NUMBERS_COUNT: u64 = u64::MAX - (1 << 16);

/// Version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Version {
    Tls12,
    Tls13,
}

/// Encryption of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Cipher {
    Aes128Gcm,
    Aes256Gcm,
    Chacha20Poly1305,
}

/// What was agreed upon for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Suite {
    pub(super) version: Version,
    pub(super) cipher: Cipher,
}

/// A key, or what keys are made from.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Secret(#[serde(with = "crate::hex")] Vec<u8>);

/// One direction, for another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PassedHalf {
    /// TLS 1.3: the traffic secret. TLS 1.2: the key, and the value from which nonces are made.
    pub(super) secret: Secret,
    /// Number of the next record.
    pub(super) sequence: u64,
}

/// One direction.
pub(super) struct Half {
    pub(super) suite: Suite,
    pub(super) key: LessSafeKey,
    iv: [u8; NONCE_BYTES],
    pub(super) passed: PassedHalf,
}

/// A state that no session with this cipher suite can have.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the keys do not fit to their cipher suite")]
pub(super) struct Unfit;

impl Secret {
    /// Joins two parts.
    pub(super) fn of(parts: [&[u8]; 2]) -> Secret {
        Secret(parts.concat())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<&[u8]> for Secret {
    fn from(bytes: &[u8]) -> Secret {
        Secret::of([bytes, &[]])
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Cipher {
    fn algorithm(self) -> &'static aead::Algorithm {
        match self {
            Cipher::Aes128Gcm => &aead::AES_128_GCM,
            Cipher::Aes256Gcm => &aead::AES_256_GCM,
            Cipher::Chacha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }

    /// Returns the hash from which TLS 1.3 makes keys.
    fn hash(self) -> hkdf::Algorithm {
        match self {
            Cipher::Aes128Gcm | Cipher::Chacha20Poly1305 => hkdf::HKDF_SHA256,
            Cipher::Aes256Gcm => hkdf::HKDF_SHA384,
        }
    }

    pub(super) fn is_gcm(self) -> bool {
        self != Cipher::Chacha20Poly1305
    }

    /// Returns how many records one key may encrypt.
    pub(super) fn limit(self) -> u64 {
        if self.is_gcm() { GCM_RECORDS_COUNT } else { NUMBERS_COUNT }
    }
}

impl Suite {
    /// Returns the key and the start of nonces that belong to `secret`.
    pub(super) fn material(self, secret: &Secret) -> Result<(Secret, [u8; NONCE_BYTES]), Unfit> {
        let (mut iv, key_len) = ([0; NONCE_BYTES], self.cipher.algorithm().key_len());
        match self.version {
            Version::Tls12 => {
                let (key, rest) = secret.0.split_at_checked(key_len).ok_or(Unfit)?;
                iv = rest.try_into().map_err(|_| Unfit)?;
                Ok((key.into(), iv))
            }
            Version::Tls13 => {
                let hash = self.hash_of(secret)?;
                let mut key = Secret(vec![0; key_len]);
                expand(&hash, b"key", &mut key.0);
                expand(&hash, b"iv", &mut iv);
                Ok((key, iv))
            }
        }
    }

    /// Returns the traffic secret that follows `secret` in TLS 1.3.
    fn successor(self, secret: &Secret) -> Result<Secret, Unfit> {
        let mut next = Secret(vec![0; secret.0.len()]);
        expand(&self.hash_of(secret)?, b"traffic upd", &mut next.0);
        Ok(next)
    }

    fn hash_of(self, secret: &Secret) -> Result<hkdf::Prk, Unfit> {
        let hash = self.cipher.hash();
        let len = hash.hmac_algorithm().digest_algorithm().output_len();
        if secret.0.len() != len {
            return Err(Unfit);
        }
        Ok(hkdf::Prk::new_less_safe(hash, &secret.0))
    }
}

impl Half {
    /// Creates the state of one direction.
    pub(super) fn new(suite: Suite, passed: PassedHalf) -> Result<Half, Unfit> {
        // One more can follow the last record: an alert.
        if passed.sequence > NUMBERS_COUNT {
            return Err(Unfit);
        }
        let (key, iv) = suite.material(&passed.secret)?;
        let key = UnboundKey::new(suite.cipher.algorithm(), key.bytes()).map_err(|_| Unfit)?;
        Ok(Half { suite, key: LessSafeKey::new(key), iv, passed })
    }

    /// Replaces the key by the one that follows in TLS 1.3.
    pub(super) fn advance(&mut self) -> Result<(), Unfit> {
        let secret = self.suite.successor(&self.passed.secret)?;
        *self = Half::new(self.suite, PassedHalf { secret, sequence: 0 })?;
        Ok(())
    }

    /// Returns the nonce of the next record that this side makes.
    pub(super) fn nonce(&self) -> [u8; NONCE_BYTES] {
        let mut nonce = self.iv;
        let counted = nonce.iter_mut().rev().zip(self.passed.sequence.to_le_bytes());
        counted.for_each(|(byte, number)| *byte ^= number);
        nonce
    }
}

/// Length of a key, for the library.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// Fills `out` from a secret, for the purpose `label` (`HKDF-Expand-Label` of RFC 8446).
fn expand(secret: &hkdf::Prk, label: &[u8], out: &mut [u8]) {
    const PREFIX: &[u8] = b"tls13 ";
    let len = (out.len() as u16).to_be_bytes();
    let label_len = [(PREFIX.len() + label.len()) as u8];
    let info: [&[u8]; 5] = [&len, &label_len, PREFIX, label, &[0]];
    let filled = secret.expand(&info, Length(out.len())).and_then(|key| key.fill(out));
    filled.expect("a key is shorter than 255 hashes");
}

#[cfg(test)]
mod tests {
    use rustls::SupportedCipherSuite;

    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let passed = PassedHalf { secret: Secret::from(&[0xab; 32][..]), sequence: 7 };
        assert_eq!(format!("{passed:?}"), "PassedHalf { secret: Secret, sequence: 7 }");
    }

    #[test]
    fn secrets_of_another_length_are_refused() {
        for version in [Version::Tls12, Version::Tls13] {
            for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Chacha20Poly1305] {
                let suite = Suite { version, cipher };
                let right = match version {
                    Version::Tls12 => cipher.algorithm().key_len() + NONCE_BYTES,
                    Version::Tls13 => cipher.hash().hmac_algorithm().digest_algorithm().output_len(),
                };
                let half =
                    |len: usize| Half::new(suite, PassedHalf { secret: Secret::from(&vec![1; len][..]), sequence: 0 });
                assert!(half(right).is_ok());
                assert!([0, right - 1, right + 1].into_iter().all(|len| half(len).is_err()), "{suite:?}");
            }
        }
    }

    #[test]
    fn keys_encrypt_as_many_records_as_the_library_allows() {
        for suite in rustls::crypto::ring::ALL_CIPHER_SUITES {
            let name = format!("{:?}", suite.suite());
            let cipher = match () {
                () if name.contains("AES_128_GCM") => Cipher::Aes128Gcm,
                () if name.contains("AES_256_GCM") => Cipher::Aes256Gcm,
                () => Cipher::Chacha20Poly1305,
            };
            let limit = match suite {
                SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit,
                SupportedCipherSuite::Tls13(suite) => suite.common.confidentiality_limit,
            };
            assert_eq!(cipher.limit(), limit.min(NUMBERS_COUNT), "{name}");
        }
    }
}
