//! Certificates of the server: read, checked, and read again while it runs.
//!
//! Peers must show a certificate that `client_ca` signed; what it allows is decided in `server/access.rs`. A reload
//! holds for connections that come after it: those that are open keep what they proved.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};

/// `[tls]` of the configuration: PEM files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// The server's certificate, and what leads from it to its CA.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Who signs the certificates of daemons, viewers and operators.
    pub client_ca: PathBuf,
}

/// Files that cannot be used. The old ones hold where there are any.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read, or holds nothing of the kind. Fix it, or make one with `laxity certs`.
    #[error("{key} = {path}: {problem}; fix the file, or make one with `laxity certs`", path = .path.display())]
    File {
        /// Which setting names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The files do not go together.
    #[error("tls: {0}; `cert` and `key` must belong together")]
    Pair(#[from] rustls::Error),
}

fn wrong(key: &'static str, path: &Path, problem: &impl ToString) -> TlsError {
    TlsError::File {
        key,
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| wrong(key, path, &error))?;
    let read: Result<Vec<_>, _> = read.collect();
    let read = read.map_err(|error| wrong(key, path, &error))?;
    if read.is_empty() {
        return Err(wrong(key, path, &"holds no certificate"));
    }
    Ok(read)
}

impl TlsConfig {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let cert = certificates("tls.cert", &self.cert)?;
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|error| wrong("tls.key", &self.key, &error))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("tls.client_ca", &self.client_ca)? {
            roots
                .add(authority)
                .map_err(|error| wrong("tls.client_ca", &self.client_ca, &error))?;
        }
        let provider = Arc::new(default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
            .build()
            .map_err(|error| wrong("tls.client_ca", &self.client_ca, &error))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(cert, key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

/// What new connections are greeted with.
#[derive(Debug)]
pub(crate) struct ServerTls(RwLock<Arc<ServerConfig>>);

impl ServerTls {
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, TlsError> {
        Ok(Self(RwLock::new(config.load()?)))
    }

    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the files again; if they cannot be used, the old ones hold.
    pub(crate) fn reload(&self, config: &TlsConfig) -> Result<(), TlsError> {
        let read = config.load()?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }
}
