//! Numbers of peers, the same for all clients: a link bounds bytes in flight by peer.
//!
//! A number belongs to one address for as long as the daemon runs. The first 255 addresses get one.
//! Flows to others count as flows whose peer is unknown, so if a client names many addresses, other
//! clients lose the bound by peer and nothing else.

use std::collections::HashMap;

use laxity_policy::PeerId;

#[derive(Debug, Default)]
pub struct PeerNumbers(HashMap<[u8; 16], u8>);

impl PeerNumbers {
    /// Returns the number of an address, 0 if it is no address or there are too many.
    pub fn number(&mut self, address: [u8; 16]) -> PeerId {
        if address == [0; 16] {
            return PeerId(0);
        }
        let next = u8::try_from(self.0.len() + 1);
        let number = match (self.0.get(&address), next) {
            (Some(&number), _) => number,
            (None, Ok(next)) => *self.0.entry(address).or_insert(next),
            (None, Err(_)) => 0,
        };
        PeerId(u16::from(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_number_and_the_256th_has_none() {
        let mut peers = PeerNumbers::default();
        let address = |n: u16| {
            let mut address = [0xfd; 16];
            address[14..].copy_from_slice(&n.to_be_bytes());
            address
        };
        for n in 0..255 {
            assert_eq!(peers.number(address(n)), PeerId(n + 1));
        }
        assert_eq!(peers.number(address(255)), PeerId(0));
        assert_eq!(peers.number(address(0)), PeerId(1));
        assert_eq!(peers.number([0; 16]), PeerId(0), "no address");
    }
}
