//! Peers of this process's transfers, by the number that fits into a flow ([`Flow::peer`]).
//!
//! Numbers belong to the process and never change. A lane sends the address of a number to its
//! daemon before the first flow that uses it.
//!
//! The table has no lock, since a forked child could find it locked. An entry is taken by one
//! exchange, written, and then published. A search skips an entry that is being written. An address
//! may then get two numbers, which is harmless.
//!
//! [`Flow::peer`]: laxity_shm::record::Flow::peer

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::net::IpAddr;

/// Largest number of peers with a number. Further ones are unknown.
pub const PEERS_MAX: usize = 255;

const FREE: u8 = 0;
const WRITTEN: u8 = 1;
const SHOWN: u8 = 2;

#[derive(Debug)]
struct PeerEntry {
    state: AtomicU8,
    halves: [AtomicU64; 2],
}

static ENTRIES: [PeerEntry; PEERS_MAX] = [const {
    PeerEntry { state: AtomicU8::new(FREE), halves: [AtomicU64::new(0), AtomicU64::new(0)] }
}; PEERS_MAX];

impl PeerEntry {
    /// Returns the entry's address, if one is published.
    fn address(&self) -> Option<[u8; 16]> {
        // Acquire, since the halves were written before.
        if self.state.load(Ordering::Acquire) != SHOWN {
            return None;
        }
        let [low, high] = [0, 1].map(|half: usize| self.halves[half].load(Ordering::Relaxed));
        Some((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
    }

    /// Writes an address into a free entry. Returns false if another thread took it.
    fn take(&self, address: [u8; 16]) -> bool {
        let taken =
            self.state.compare_exchange(FREE, WRITTEN, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_err() {
            return false;
        }
        let whole = u128::from_le_bytes(address);
        self.halves[0].store(whole as u64, Ordering::Relaxed);
        self.halves[1].store((whole >> 64) as u64, Ordering::Relaxed);
        self.state.store(SHOWN, Ordering::Release);
        true
    }
}

/// Returns the number of the peer with this IP address. Returns 0, "unknown", for a name, which is
/// not looked up.
pub fn named(address: &str) -> u8 {
    match address.parse() {
        Ok(IpAddr::V4(v4)) => number(v4.to_ipv6_mapped().octets()),
        Ok(IpAddr::V6(v6)) => number(v6.octets()),
        Err(_) => 0,
    }
}

/// Returns the number of the peer with this address, which is IPv6, or IPv4 mapped into it (with
/// RoCE v2, the GID). Returns 0, "unknown", for the zero address and when the table is full.
pub fn number(address: [u8; 16]) -> u8 {
    if address == [0; 16] {
        return 0;
    }
    let is_it = |entry: &PeerEntry| entry.address() == Some(address) || entry.take(address);
    let found = ENTRIES.iter().position(is_it);
    found.map_or(0, |index| (index + 1) as u8)
}

/// Returns the address of a number.
pub fn address(number: u8) -> Option<[u8; 16]> {
    ENTRIES[usize::from(number).checked_sub(1)?].address()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is only one test, since the table belongs to the process.
    #[test]
    fn numbers_are_given_once_up_to_a_limit_and_lead_back() {
        let of = |last: u16| {
            let mut address = [0xfe; 16];
            address[14..].copy_from_slice(&last.to_be_bytes());
            address
        };
        assert_eq!((number([0; 16]), address(0)), (0, None));
        let threads = [0, 1, 2, 3].map(|_| {
            std::thread::spawn(move || (0..100).map(|n| number(of(n))).collect::<Vec<_>>())
        });
        for thread in threads {
            let numbers = thread.join().expect("no panic");
            for (n, given) in numbers.into_iter().enumerate() {
                assert_eq!(address(given), Some(of(n as u16)));
            }
        }
        let more: Vec<u8> = (0..300).map(|n| number(of(n))).collect();
        assert_eq!(more, (0..300).map(|n| number(of(n))).collect::<Vec<_>>());
        assert!(more[0] != 0 && more[299] == 0);
    }
}
