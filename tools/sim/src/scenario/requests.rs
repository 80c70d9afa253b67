//! The request scheduler of a scenario. The default is omitted from the scenario's text, so that
//! older plans and kept results stay valid.

use serde::{Deserialize, Serialize};

/// The request scheduler of prefill units, a discipline of `laxity-requests`. Relegated requests
/// compute when a unit is otherwise idle, and their flows go to the scavenger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestOrder {
    #[default]
    Fcfs,
    Edf,
    Srpf,
    /// As `edf`, with relegation of requests that cannot meet their deadline any more.
    EdfRelegate,
    /// QoServe without its treatment of decodes: hybrid priority, eager relegation and selective
    /// preemption.
    Qoserve,
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
