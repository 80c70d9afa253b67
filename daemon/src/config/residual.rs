//! The configuration of residual capacity (architecture §4.6).

use serde::{Deserialize, Serialize};

/// What the daemon does about traffic on its NICs that it did not permit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidualMode {
    /// Nothing: no counter is read.
    Off,
    /// It measures the traffic and reports it.
    #[default]
    Measure,
    /// It lowers the rate and the window of a port by what others send there.
    Follow,
}

/// Traffic that the daemon does not permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResidualConfig {
    /// `off`, `measure` (report what others send) or `follow` (leave them room).
    pub mode: ResidualMode,
    /// The share of a port's rate that scheduled traffic keeps, whatever others send, in
    /// thousandths.
    pub assured_permille: u16,
}

impl Default for ResidualConfig {
    fn default() -> Self {
        Self { mode: ResidualMode::default(), assured_permille: 250 }
    }
}
