//! Certificates of daemons, coordinators and operators: reading PEM files, checking them as the
//! peer does ([`check`]), and explaining TLS errors ([`explain`]).
//!
//! All three programs share this crate, so that they report the same about a file.
#![forbid(unsafe_code)]

mod check;
pub mod explain;

use std::fmt;
use std::path::Path;

use laxity_files::CONFIG_BYTES_MAX;
use thiserror::Error;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub use self::check::{Side, check, uris};

/// A file that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key}: {problem}")]
pub struct Unusable {
    /// The name of the setting that names the file.
    pub key: &'static str,
    /// The file, the problem and its remedy.
    pub problem: String,
}

/// Makes an error about the file at `path`, which the setting `key` names.
pub fn unusable(key: &'static str, path: &Path, problem: &dyn fmt::Display) -> Unusable {
    Unusable { key, problem: format!("{}: {problem}", path.display()) }
}

/// Reads a file of up to [`CONFIG_BYTES_MAX`] without blocking on a writer.
///
/// # Errors
/// The file can't be read, is no regular file, or is too long.
pub fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, Unusable> {
    laxity_files::read(path, CONFIG_BYTES_MAX)
        .map_err(|error| unusable(key, path, &format!("cannot be read: {error}")))
}

/// A PEM file with certificates: its text and the certificates.
#[derive(Clone, Debug)]
pub struct Certificates<'a> {
    /// The setting that names the file.
    pub key: &'static str,
    /// The path of the file.
    pub path: &'a Path,
    /// The text of the file.
    pub pem: Vec<u8>,
    /// The certificates in the file's order, at least one.
    pub all: Vec<CertificateDer<'static>>,
}

impl<'a> Certificates<'a> {
    /// Reads the certificates of a PEM file.
    ///
    /// # Errors
    /// Returns the errors of [`read`], and one if the file holds no certificate in PEM.
    pub fn read(key: &'static str, path: &'a Path) -> Result<Self, Unusable> {
        let pem = read(key, path)?;
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let all = all.map_err(|error| unusable(key, path, &format!("is no PEM: {error}")))?;
        if all.is_empty() {
            return Err(unusable(key, path, &"holds no certificate in PEM"));
        }
        Ok(Self { key, path, pem, all })
    }

    /// Returns the certificates as authorities that a peer's certificate must come from.
    pub fn roots(&self) -> Result<RootCertStore, Unusable> {
        let mut roots = RootCertStore::empty();
        for authority in &self.all {
            roots.add(authority.clone()).map_err(|error| self.unusable(&error))?;
        }
        Ok(roots)
    }

    /// Makes an error about this file.
    #[must_use]
    pub fn unusable(&self, problem: &dyn fmt::Display) -> Unusable {
        unusable(self.key, self.path, problem)
    }
}

/// Reads a private key from the text of a PEM file.
pub fn private_key(
    key: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<PrivateKeyDer<'static>, Unusable> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| {
        let problem = format!("holds no private key in PEM that can be used ({error})");
        unusable(key, path, &problem)
    })
}
