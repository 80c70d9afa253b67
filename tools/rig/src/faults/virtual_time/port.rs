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
}

impl VirtualPort {
    /// Posts bytes, and returns when they arrive.
    pub(super) fn post(&mut self, now_ns: u64, direction: Direction, bytes: u64) -> u64 {
        let free = &mut self.free_ns[direction as usize];
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        *free = now_ns.max(*free) + takes as u64;
        *free + ARRIVAL_NS
    }
}
