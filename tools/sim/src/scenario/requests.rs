//! What of a scenario says how requests and flows are scheduled together. All of it is off by
//! default, and left out of a scenario's text then: plans and kept results of before stay what they
//! are.

use serde::{Deserialize, Serialize};

/// In which order a prefill unit takes requests into batches, and whom it gives up: a discipline of
/// `laxity-requests`. Requests that are given up compute when nothing else is to do, and their
/// flows go to the scavenger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestOrder {
    /// In the order of arrival.
    #[default]
    Fcfs,
    /// The earliest deadline first.
    Edf,
    /// The fewest prompt tokens left first.
    Srpf,
    /// `edf`, and whoever can't be in time any more is given up.
    EdfRelegate,
    /// QoServe without what is for decodes: hybrid priority, eager relegation, selective
    /// preemption.
    Qoserve,
}

impl RequestOrder {
    /// All, in the order in which tables show them.
    pub const ALL: [Self; 5] = [
        Self::Fcfs,
        Self::Srpf,
        Self::Edf,
        Self::EdfRelegate,
        Self::Qoserve,
    ];

    /// As it is written in a plan.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Edf => "edf",
            Self::Srpf => "srpf",
            Self::EdfRelegate => "edf_relegate",
            Self::Qoserve => "qoserve",
        }
    }
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
