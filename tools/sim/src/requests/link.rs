//! The network between instances. Each instance has a port with a rate per direction, and transfers
//! wait for their turn at both ends. [`crate::network`] is more detailed and shares rates by flow.

use std::collections::HashMap;

use laxity_requests::request::InstanceId;
use laxity_requests::{Span, Time};

#[derive(Clone, Debug)]
pub struct Link {
    bytes_per_second: u64,
    latency: Span,
    sends: HashMap<InstanceId, Time>,
    receives: HashMap<InstanceId, Time>,
}

impl Link {
    /// Creates ports with this rate. Each transfer takes `latency` in addition to its bytes.
    pub fn new(bytes_per_second: u64, latency: Span) -> Self {
        Self { bytes_per_second, latency, sends: HashMap::new(), receives: HashMap::new() }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_waits_for_its_ports() {
        let (a, b, c) = (InstanceId(1), InstanceId(2), InstanceId(3));
        let mut link = Link::new(1_000_000_000, Span::ZERO);
        assert_eq!(link.transfer(Time(0), a, b, 100), Time(100));
        assert_eq!(link.transfer(Time(0), a, c, 1_000), Time(1_100));
        assert_eq!(link.transfer(Time(2_000), a, b, 100), Time(2_100));
    }
}
