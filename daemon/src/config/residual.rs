//! The configuration of residual capacity (architecture §4.6).

use serde::{Deserialize, Serialize};

/// What the daemon does about foreign traffic on its NICs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidualMode {
    /// Nothing: no counter is read.
    Off,
    /// Measures the traffic and reports it.
    #[default]
    Measure,
    /// Also lowers the rate and the window of a port by the foreign traffic there.
    Follow,
}

/// The section `[residual]`, about foreign traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResidualConfig {
    pub mode: ResidualMode,
    pub assured_permille: u16,
}

impl Default for ResidualConfig {
    fn default() -> Self {
        Self { mode: ResidualMode::default(), assured_permille: 250 }
    }
}
