//! What crosses the network between instances: each has a port of so many bytes per second in each direction, and
//! transfers take their turn at both ends. Coarser than [`crate::network`], which shares rates flow by flow.

use std::collections::HashMap;

use laxity_requests::request::InstanceId;
use laxity_requests::{Span, Time};

/// Ports of all instances.
#[derive(Clone, Debug)]
pub struct Link {
    bytes_per_second: u64,
    latency: Span,
    sends: HashMap<InstanceId, Time>,
    receives: HashMap<InstanceId, Time>,
}

impl Link {
    /// Ports of such a rate; each transfer takes `latency` beside its bytes.
    #[must_use]
    pub fn new(bytes_per_second: u64, latency: Span) -> Self {
        Self {
            bytes_per_second,
            latency,
            sends: HashMap::new(),
            receives: HashMap::new(),
        }
    }

    /// When a transfer that is asked for now has landed.
    pub fn transfer(&mut self, now: Time, from: InstanceId, to: InstanceId, bytes: u64) -> Time {
        let sends = self.sends.entry(from).or_default();
        let receives = self.receives.entry(to).or_default();
        let begins = now.max(*sends).max(*receives);
        let ends = begins + Span::transfer(bytes, self.bytes_per_second);
        *sends = ends;
        *receives = ends;
        ends + self.latency
    }
}
