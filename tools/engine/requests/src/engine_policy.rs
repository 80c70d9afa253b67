//! Which policy an engine runs, by the name that configurations have for it: those of the engine
//! itself and those of the lab, which writes engines' configurations.

use core::fmt;

use serde::{Deserialize, Serialize};

/// Who decides what an iteration computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Whoever came first.
    #[default]
    Fcfs,
    /// The earliest deadline.
    Edf,
    /// The shortest remaining prompt.
    Srpf,
    /// QoServe: chunks as large as slack allows, hybrid priority, relegation.
    Qoserve,
    /// H-MAS: a pool of orders, exchanged while requests run, under a fence.
    Hmas,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Fcfs, Self::Edf, Self::Srpf, Self::Qoserve, Self::Hmas];

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Edf => "edf",
            Self::Srpf => "srpf",
            Self::Qoserve => "qoserve",
            Self::Hmas => "hmas",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_name_a_policy_as_it_calls_itself() {
        for policy in Policy::ALL {
            let named = serde_json::to_value(policy).expect("a name");
            assert_eq!(named, policy.name());
        }
    }
}
