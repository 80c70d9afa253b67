//! The section `[etcd]` of the configuration, and its check.

use std::path::Path;
use std::time::Duration;

use laxity_credentials::{Certificates, Unusable, private_key};
use laxity_quantity::Nanos;
use serde::{Deserialize, Serialize};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The section `[etcd]` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    pub endpoints: Vec<String>,
    #[serde(default = "prefix_default")]
    pub prefix: String,
    /// Time after the last keep-alive of a leader after which another coordinator may lead.
    #[serde(default = "ttl_default")]
    pub ttl: Nanos,
    pub advertise: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ca: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cert: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key: String,
}

fn prefix_default() -> String {
    "/laxity/coordinator".into()
}

fn ttl_default() -> Nanos {
    Nanos(5_000_000_000)
}

impl EtcdConfig {
    /// Returns the key and the problem of the first invalid value, if there is one.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.endpoints.is_empty() {
            return Err(("etcd.endpoints", "names none; write [\"http://127.0.0.1:2379\"]".into()));
        }
        let odd = |url: &&String| !(url.starts_with("http://") || url.starts_with("https://"));
        if let Some(url) = self.endpoints.iter().find(odd) {
            return Err(("etcd.endpoints", format!("`{url}` is no http:// or https:// address")));
        }
        if self.advertise.is_empty() {
            return Err(("etcd.advertise", "is empty; write the address that daemons use".into()));
        }
        if !(2_000_000_000..=60_000_000_000).contains(&self.ttl.0) {
            return Err(("etcd.ttl", format!("{} is not in 2s..=60s", self.ttl)));
        }
        if self.cert.is_empty() != self.key.is_empty() {
            return Err(("etcd.cert", "and etcd.key come together".into()));
        }
        Ok(())
    }

    pub(crate) fn check_files(&self) -> Result<(), Unusable> {
        self.tls().map(|_| ())
    }

    /// Returns the host of `advertise`: a name, or an address without brackets.
    pub(crate) fn advertised_host(&self) -> Option<&str> {
        let authority = self.advertise.rsplit("://").next()?;
        let (host, _) = authority.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        (!host.is_empty()).then_some(host)
    }

    pub(super) fn tls(&self) -> Result<ClientTlsConfig, Unusable> {
        let mut tls = ClientTlsConfig::new();
        if !self.ca.is_empty() {
            let ca = Certificates::read("etcd.ca", Path::new(&self.ca))?;
            tls = tls.ca_certificate(Certificate::from_pem(ca.pem));
        }
        if !self.cert.is_empty() {
            let cert = Certificates::read("etcd.cert", Path::new(&self.cert))?;
            let path = Path::new(&self.key);
            let key = laxity_credentials::read("etcd.key", path)?;
            private_key("etcd.key", path, &key)?;
            tls = tls.identity(Identity::from_pem(cert.pem, key));
        }
        Ok(tls)
    }

    pub(super) fn ttl_s(&self) -> i64 {
        i64::try_from(self.ttl.0.div_ceil(1_000_000_000)).unwrap_or(60)
    }

    /// Returns the longest duration of a call. Three calls fit between a keep-alive and the lease's
    /// end.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_nanos(self.ttl.0) / 5
    }

    #[cfg(test)]
    pub(super) fn test(endpoint: &str) -> Self {
        Self {
            endpoints: vec![endpoint.to_owned()],
            prefix: prefix_default(),
            ttl: ttl_default(),
            advertise: "a:1".into(),
            ca: String::new(),
            cert: String::new(),
            key: String::new(),
        }
    }
}
