//! Certificates of daemons, coordinators and operators: PEM files that are read, a check that
//! asks what the peer will ask ([`check`]), and errors of TLS in words ([`explain`]).
//!
//! Daemon, coordinator and command line share it, so that all three say the same of the same file.
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

/// A file that cannot be used. Fix the file, or name another one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key}: {problem}")]
pub struct Unusable {
    /// The setting that names the file.
    pub key: &'static str,
    /// Which file, what is wrong with it, and what to do.
    pub problem: String,
}

/// The error about the file at `path`, which the setting `key` names.
#[must_use]
pub fn unusable(key: &'static str, path: &Path, problem: &dyn fmt::Display) -> Unusable {
    Unusable {
        key,
        problem: format!("{}: {problem}", path.display()),
    }
}

/// Reads a file, without waiting for anybody and up to [`CONFIG_BYTES_MAX`].
///
/// # Errors
/// It cannot be read, is no regular file, or is too long.
pub fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, Unusable> {
    laxity_files::read(path, CONFIG_BYTES_MAX)
        .map_err(|error| unusable(key, path, &format!("cannot be read: {error}")))
}

/// A PEM file with certificates: its text, and what it holds.
#[derive(Clone, Debug)]
pub struct Certificates<'a> {
    /// The setting that names the file.
    pub key: &'static str,
    /// Path of the file that the error is about.
    pub path: &'a Path,
    /// As it was read.
    pub pem: Vec<u8>,
    /// At least one, in the file's order.
    pub all: Vec<CertificateDer<'static>>,
}

impl<'a> Certificates<'a> {
    /// Reads a file.
    ///
    /// # Errors
    /// As [`read`]; also if the file holds no certificate in PEM.
    pub fn read(key: &'static str, path: &'a Path) -> Result<Self, Unusable> {
        let pem = read(key, path)?;
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let all = all.map_err(|error| unusable(key, path, &format!("is no PEM: {error}")))?;
        if all.is_empty() {
            return Err(unusable(key, path, &"holds no certificate in PEM"));
        }
        Ok(Self {
            key,
            path,
            pem,
            all,
        })
    }

    /// These as the authorities that a peer's certificate must come from.
    ///
    /// # Errors
    /// One of them is broken.
    pub fn roots(&self) -> Result<RootCertStore, Unusable> {
        let mut roots = RootCertStore::empty();
        for authority in &self.all {
            roots
                .add(authority.clone())
                .map_err(|error| self.unusable(&error))?;
        }
        Ok(roots)
    }

    /// The error about this file.
    #[must_use]
    pub fn unusable(&self, problem: &dyn fmt::Display) -> Unusable {
        unusable(self.key, self.path, problem)
    }
}

/// Takes a private key out of a PEM file's text.
///
/// # Errors
/// It holds none that can be used.
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
