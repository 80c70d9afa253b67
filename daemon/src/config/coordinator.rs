//! The configuration of the connection to the coordinator.

use std::path::PathBuf;

use laxity_quantity::Nanos;
use serde::{Deserialize, Serialize};

/// The section `[coordinator]` (docs/coordinator.md). `dist/laxityd.toml` says what each key means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CoordinatorConfig {
    /// The coordinator's URL. If it is empty, the daemon schedules without a coordinator.
    pub endpoint: String,
    pub insecure: bool,
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Empty: the name in the endpoint.
    pub server_name: String,
    /// Empty: the kernel's host name.
    pub host: String,
    pub order_age_limit: Nanos,
    pub backoff_min: Nanos,
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
