//! The wire of a virtual port.

use laxity_client::Direction;

/// Time from the end of the wire to the application.
const ARRIVAL_NS: u64 = 5_000;

/// The wire of a port, both ways.
#[derive(Debug)]
pub(super) struct VirtualPort {
    pub(super) bytes_per_s: u64,
    /// When the last byte that was posted has left, by direction.
    pub(super) free_ns: [u64; 2],
    /// When the latest stall ends.
    stalled_ns: u64,
}

impl VirtualPort {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, free_ns: [0; 2], stalled_ns: 0 }
    }

    /// Carries nothing for a time. Returns the part of it in which it had not stalled already.
    pub(super) fn stall(&mut self, now_ns: u64, for_ns: u64) -> Option<(u64, u64)> {
        let (begin, end) = (now_ns.max(self.stalled_ns), now_ns + for_ns);
        self.stalled_ns = self.stalled_ns.max(end);
        for free_ns in &mut self.free_ns {
            *free_ns = (*free_ns).max(end);
        }
        (begin < end).then_some((begin, end))
    }

    /// Posts bytes, and returns when they arrive.
    pub(super) fn post(&mut self, now_ns: u64, direction: Direction, bytes: u64) -> u64 {
        let free = &mut self.free_ns[direction as usize];
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        *free = now_ns.max(*free) + takes as u64;
        *free + ARRIVAL_NS
    }
}
