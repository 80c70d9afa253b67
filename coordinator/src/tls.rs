//! Certificates of the server, which can be reloaded while it runs.
//!
//! Peers must show a certificate that `client_ca` signed. `server/access.rs` decides what it
//! allows. A reload applies to new connections only.
//!
//! A start accepts everything that rustls can serve with, so that a wrong clock does not prevent
//! it. `--check` and a reload are stricter: they refuse what daemons would refuse.

use std::path::PathBuf;
use std::sync::Arc;

use laxity_credentials::{Certificates, Side, Unusable, private_key};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ServerConfig};

/// The section `[tls]` of the configuration: paths of PEM files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// The CA that signs certificates of daemons, viewers and operators.
    pub client_ca: PathBuf,
}

/// An error with the certificates. If there are old ones, they stay in use.
#[derive(Debug, Error)]
pub enum TlsError {
    #[error("{0}; fix the file, or make one with `laxity certs`")]
    File(Unusable),
    #[error("tls: {0}; `cert` and `key` must belong together")]
    Pair(#[from] rustls::Error),
}

impl From<Unusable> for TlsError {
    fn from(unusable: Unusable) -> Self {
        // Not a source, since the text already includes it.
        Self::File(unusable)
    }
}

impl TlsConfig {
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

    /// Checks the files as daemons that reach this coordinator by `names` do.
    pub fn check(&self, names: &[&str]) -> Result<(), TlsError> {
        self.load()?;
        let cert = Certificates::read("tls.cert", &self.cert)?;
        let clients = Certificates::read("tls.client_ca", &self.client_ca)?;
        let side = Side::Server { names };
        Ok(laxity_credentials::check(&cert, &clients, side, UnixTime::now())?)
    }
}

/// The TLS configuration for new connections, which a reload replaces.
#[derive(Debug)]
pub(crate) struct ServerTls(RwLock<Arc<ServerConfig>>);

impl ServerTls {
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, TlsError> {
        Ok(Self(RwLock::new(config.load()?)))
    }

    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.read())
    }

    /// Reads the files again. If they cannot be used, the old ones stay in use.
    pub(crate) fn reload(&self, config: &TlsConfig, names: &[&str]) -> Result<(), TlsError> {
        config.check(names)?;
        *self.0.write() = config.load()?;
        Ok(())
    }
}
