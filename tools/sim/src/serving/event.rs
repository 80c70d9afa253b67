//! The events of a run.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Happening {
    Arrival,
    /// A unit's step ends. The event is void if the unit has scheduled another step since.
    Step {
        unit: u32,
        step: u32,
    },
    /// A host's link must be polled.
    Wake {
        host: u32,
    },
    Order,
    Delivered {
        flow: u32,
    },
    /// Traffic that no daemon sees comes to a port.
    Burst {
        port: u32,
    },
    /// A server reads the counters of its ports.
    Reading {
        server: u32,
    },
}
