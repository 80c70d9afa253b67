//! The configuration of the connection to the coordinator.

use std::path::PathBuf;

use laxity_quantity::Nanos;
use serde::{Deserialize, Serialize};

/// The connection to the coordinator (docs/coordinator.md). Without a coordinator, or while it
/// can't be reached, a daemon orders the batches of its own host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CoordinatorConfig {
    /// The URL of the coordinator, such as `https://coordinator.example:7471`. Empty: no
    /// coordinator. `http://` is for a coordinator on this host.
    pub endpoint: String,
    /// Whether to connect to another host without TLS. Anyone on the way may then read reports and
    /// change orders.
    pub insecure: bool,
    /// PEM file of the CA that signed the coordinator's certificate. Only for `https://`, otherwise
    /// empty. This file, `cert` and `key` are read again for each connection.
    pub ca: PathBuf,
    /// PEM file of this host's certificate, with the URI `laxity://daemon/HOST`, and of the chain
    /// to its CA.
    pub cert: PathBuf,
    /// PEM file of the certificate's key.
    pub key: PathBuf,
    /// The name in the coordinator's certificate. Empty: the name in the endpoint.
    pub server_name: String,
    /// The name of this host in the cluster, different on each host. Empty: the kernel's host name.
    pub host: String,
    /// How long the last cluster order stays in force without news. The coordinator may choose a
    /// shorter time.
    pub order_age_limit: Nanos,
    /// The first wait after the stream failed. The wait doubles with each failure.
    pub backoff_min: Nanos,
    /// The longest wait after the stream failed.
    pub backoff_max: Nanos,
}

impl Default for CoordinatorConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            insecure: false,
            ca: PathBuf::new(),
            cert: PathBuf::new(),
            key: PathBuf::new(),
            server_name: String::new(),
            host: String::new(),
            order_age_limit: Nanos(5_000_000_000),
            backoff_min: Nanos(100_000_000),
            backoff_max: Nanos(10_000_000_000),
        }
    }
}
