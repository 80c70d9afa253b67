//! Certificates of the server: read, checked, and read again while it runs.
//!
//! Peers must show a certificate that `client_ca` signed; what it allows is decided in
//! `server/access.rs`. A reload holds for connections that come after it: those that are open keep
//! what they proved.
//!
//! A start takes whatever rustls can serve with, so that a clock that is not set yet keeps no
//! coordinator from running; `--check` and a reload ask more: what daemons would refuse is not
//! taken in place of what they accept.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use laxity_credentials::{Certificates, Side, Unusable, private_key};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ServerConfig};

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
    /// A file cannot be read, holds nothing of the kind, or peers would refuse it. Fix it, or make
    /// one with `laxity certs`.
    #[error("{0}; fix the file, or make one with `laxity certs`")]
    File(Unusable),
    /// The files do not go together.
    #[error("tls: {0}; `cert` and `key` must belong together")]
    Pair(#[from] rustls::Error),
}

impl From<Unusable> for TlsError {
    fn from(unusable: Unusable) -> Self {
        // Not as a source: the text says it.
        Self::File(unusable)
    }
}

impl TlsConfig {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let cert = Certificates::read("tls.cert", &self.cert)?;
        let key = laxity_credentials::read("tls.key", &self.key)?;
        let key = private_key("tls.key", &self.key, &key)?;
        let clients = Certificates::read("tls.client_ca", &self.client_ca)?;
        let provider = Arc::new(default_provider());
        let roots = Arc::new(clients.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| clients.unusable(&error))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(cert.all, key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// Checks the files as daemons will that reach this coordinator by `names`.
    ///
    /// # Errors
    /// [`TlsError`]: they would refuse it, or cannot be let in.
    pub fn check(&self, names: &[&str]) -> Result<(), TlsError> {
        self.load()?;
        let cert = Certificates::read("tls.cert", &self.cert)?;
        let clients = Certificates::read("tls.client_ca", &self.client_ca)?;
        let side = Side::Server { names };
        Ok(laxity_credentials::check(
            &cert,
            &clients,
            side,
            UnixTime::now(),
        )?)
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
    pub(crate) fn reload(&self, config: &TlsConfig, names: &[&str]) -> Result<(), TlsError> {
        config.check(names)?;
        let read = config.load()?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }
}
