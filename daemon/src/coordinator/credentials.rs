//! The PEM files of `[coordinator]`, read for each connection. Errors name the setting, the file
//! and the problem. For `--check-config`, [`check`] also makes the checks of the coordinator.

use std::sync::Arc;

use laxity_credentials::{Certificates, Side, Unusable, private_key, unusable};
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{ServerName, UnixTime};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::CoordinatorConfig;

pub fn is_server_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

/// Reads the TLS configuration for a coordinator that is reached as `host`.
pub fn read(config: &CoordinatorConfig, host: &str) -> Result<ClientTlsConfig, Unusable> {
    let name = match config.server_name.as_str() {
        "" => host,
        name => name,
    };
    let ca = Certificates::read("coordinator.ca", &config.ca)?;
    let roots = ca.roots()?;
    let tls =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca.pem)).domain_name(name);
    if config.cert.as_os_str().is_empty() {
        return Ok(tls);
    }
    let cert = Certificates::read("coordinator.cert", &config.cert)?;
    let key = laxity_credentials::read("coordinator.key", &config.key)?;
    let private = private_key("coordinator.key", &config.key, &key)?;
    // Tonic would check this later, without naming the file.
    ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder.with_root_certificates(roots).with_client_auth_cert(cert.all, private)
        })
        .map_err(|error| {
            let problem = format!(
                "cannot be used with coordinator.cert ({error}); the two must belong together"
            );
            unusable("coordinator.key", &config.key, &problem)
        })?;
    Ok(tls.identity(Identity::from_pem(cert.pem, key)))
}

/// Checks that the coordinator at `host` will accept this host, called `own`, with these files.
pub fn check(config: &CoordinatorConfig, host: &str, own: &str) -> Result<(), Unusable> {
    read(config, host)?;
    if config.cert.as_os_str().is_empty() {
        return Ok(());
    }
    let ca = Certificates::read("coordinator.ca", &config.ca)?;
    let cert = Certificates::read("coordinator.cert", &config.cert)?;
    let uri = format!("laxity://daemon/{own}");
    let side = Side::Client { uri: &uri };
    laxity_credentials::check(&cert, &ca, side, UnixTime::now())
}
