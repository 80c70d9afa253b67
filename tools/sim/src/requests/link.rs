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
    /// Every n-th transfer of weights fails. None fails if zero.
    weights_fail_every: u64,
    weights: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    pub at: Time,
}

impl Link {
    /// Creates ports with this rate. Each transfer takes `latency` in addition to its bytes.
    pub fn new(bytes_per_second: u64, latency: Span) -> Self {
        Self {
            bytes_per_second,
            latency,
            sends: HashMap::new(),
            receives: HashMap::new(),
            weights_fail_every: 0,
            weights: 0,
        }
    }

    /// Makes every `n`th transfer of weights fail, for tests. None fails if zero.
    pub const fn with_weights_failing(mut self, n: u64) -> Self {
        self.weights_fail_every = n;
        self
    }

    /// Starts a transfer of weights and returns the time of its end. Weights share ports with KV
    /// cache.
    /// Returns an error if the transfer fails, after half of its time.
    pub fn weights(
        &mut self,
        now: Time,
        from: InstanceId,
        to: InstanceId,
        bytes: u64,
    ) -> Result<Time, Failed> {
        self.weights += 1;
        if self.weights_fail_every > 0 && self.weights.is_multiple_of(self.weights_fail_every) {
            let at = self.transfer(now, from, to, bytes / 2);
            return Err(Failed { at });
        }
        Ok(self.transfer(now, from, to, bytes))
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
    fn weights_share_ports_with_kv_and_every_nth_fails_half_way() {
        let (a, b, c) = (InstanceId(1), InstanceId(2), InstanceId(3));
        let mut link = Link::new(1_000_000_000, Span::ZERO).with_weights_failing(2);
        assert_eq!(link.transfer(Time(0), a, b, 100), Time(100));
        assert_eq!(link.weights(Time(0), a, c, 1_000), Ok(Time(1_100)));
        assert_eq!(link.weights(Time(2_000), a, c, 1_000), Err(Failed { at: Time(2_500) }));
        assert_eq!(link.transfer(Time(2_000), a, b, 100), Time(2_600));
    }
}
