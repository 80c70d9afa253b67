//! The policies that an engine can run, by their names in configurations. The engine and the lab,
//! which writes engines' configurations, share these names.

use core::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    #[default]
    Fcfs,
    Edf,
    /// The shortest remaining prompt is served first.
    Srpf,
    /// QoServe: chunks as large as slack permits, hybrid priority, relegation.
    Qoserve,
    /// H-MAS: one of several orders by predicted costs, with a memory limit.
    Hmas,
}

impl Policy {
    pub const ALL: [Self; 5] = [Self::Fcfs, Self::Edf, Self::Srpf, Self::Qoserve, Self::Hmas];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
