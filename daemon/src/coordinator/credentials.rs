//! The PEM files of `[coordinator]`: read, and checked so far that an error can name the setting, the file and what is wrong
//! with it.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::CoordinatorConfig;

/// A bundle of all public CAs has a quarter of this.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The setting that names it.
    pub key: &'static str,
    /// Which file, what is wrong with it, and what to do.
    pub problem: String,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)
    }
}

fn wrong(key: &'static str, path: &Path, problem: &impl fmt::Display) -> Unusable {
    Unusable {
        key,
        problem: format!("{}: {problem}", path.display()),
    }
}

/// Whether the coordinator's certificate could be for it.
#[must_use]
pub fn is_server_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

/// The files as TLS wants them, for a coordinator that is reached as `host`.
///
/// # Errors
/// The first file that cannot be read, or not be used.
pub fn read(config: &CoordinatorConfig, host: &str) -> Result<ClientTlsConfig, Unusable> {
    let name = match config.server_name.as_str() {
        "" => host,
        name => name,
    };
    let ca = text("coordinator.ca", &config.ca)?;
    let mut roots = RootCertStore::empty();
    for authority in certificates("coordinator.ca", &config.ca, &ca)? {
        roots
            .add(authority)
            .map_err(|error| wrong("coordinator.ca", &config.ca, &error))?;
    }
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&ca))
        .domain_name(name);
    if config.cert.as_os_str().is_empty() {
        return Ok(tls);
    }
    let (cert, key) = (
        text("coordinator.cert", &config.cert)?,
        text("coordinator.key", &config.key)?,
    );
    let chain = certificates("coordinator.cert", &config.cert, &cert)?;
    let private = PrivateKeyDer::from_pem_slice(&key).map_err(|error| {
        let problem = format!("holds no private key in PEM that can be used ({error})");
        wrong("coordinator.key", &config.key, &problem)
    })?;
    // Tonic would do the same later, and could not say which file it is.
    ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_root_certificates(roots)
                .with_client_auth_cert(chain, private)
        })
        .map_err(|error| {
            let problem = format!(
                "cannot be used with coordinator.cert ({error}); the two must belong together"
            );
            wrong("coordinator.key", &config.key, &problem)
        })?;
    Ok(tls.identity(Identity::from_pem(cert, key)))
}

fn text(key: &'static str, path: &Path) -> Result<Vec<u8>, Unusable> {
    let fail = |problem: &dyn fmt::Display| wrong(key, path, &format!("cannot be read: {problem}"));
    let metadata = std::fs::metadata(path).map_err(|error| fail(&error))?;
    // Opening a pipe would wait for somebody to write.
    if !metadata.is_file() {
        return Err(fail(&"it is no file"));
    }
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text))
        .map_err(|error| fail(&error))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(fail(&"it is too large for a certificate"));
    }
    Ok(text)
}

fn certificates(
    key: &'static str,
    path: &Path,
    text: &[u8],
) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let read = read.map_err(|error| wrong(key, path, &format!("is no PEM: {error}")))?;
    if read.is_empty() {
        return Err(wrong(key, path, &"holds no certificate in PEM"));
    }
    Ok(read)
}
