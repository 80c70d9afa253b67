//! The agreement of one end as a state machine without I/O.
//!
//! Both ends do the same. An end *seeks* until it gets an authentic message of its peer, so nothing
//! is made where the peer has no library. It then makes siblings and *offers* them. When it has the
//! peer's offer, made in answer to its own nonce, it connects its siblings and says so
//! (*connected*). When the peer says the same, the siblings may be used. Each end decides only
//! about its own use, so it doesn't matter which message is the last to arrive.

use super::message::{AgreementStep, BundleEnd, BundleMessage, BundleNonce, BundleOffer};

/// What an end has to do after a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeTask {
    Nothing,
    /// Make siblings, and call [`Handshake::offer`].
    Make,
    /// Connect the siblings to [`Handshake::peers_offer`], and call [`Handshake::connected`].
    Connect,
    /// Use the siblings from now on.
    Use,
}

#[derive(Debug)]
pub(crate) struct Handshake {
    own: BundleEnd,
    peer: BundleEnd,
    step: AgreementStep,
    nonce: BundleNonce,
    peers_nonce: BundleNonce,
    offer: BundleOffer,
    pub(crate) peers_offer: BundleOffer,
    is_used: bool,
}

impl Handshake {
    pub(crate) fn new(own: BundleEnd, peer: BundleEnd, nonce: BundleNonce) -> Self {
        Self {
            own,
            peer,
            step: AgreementStep::Seeks,
            nonce,
            peers_nonce: BundleNonce::default(),
            offer: BundleOffer::default(),
            peers_offer: BundleOffer::default(),
            is_used: false,
        }
    }

    /// Returns the message to send now.
    pub(crate) fn message(&self) -> BundleMessage {
        BundleMessage {
            step: self.step,
            sender: self.own,
            receiver: self.peer,
            nonce: self.nonce,
            receivers_nonce: self.peers_nonce,
            offer: self.offer.clone(),
        }
    }

    /// Handles a message with the right code.
    pub(crate) fn receive(&mut self, message: &BundleMessage) -> HandshakeTask {
        if (message.sender, message.receiver) != (self.peer, self.own) {
            return HandshakeTask::Nothing;
        }
        // Only an answer to this agreement's nonce is fresh. Before there is one, any nonce is
        // taken, and a recorded one is replaced as soon as the peer itself is heard.
        let is_fresh = message.receivers_nonce == self.nonce;
        match self.step {
            AgreementStep::Seeks => {
                self.peers_nonce = message.nonce;
                HandshakeTask::Make
            }
            AgreementStep::Offers => {
                if is_fresh || message.step == AgreementStep::Seeks {
                    self.peers_nonce = message.nonce;
                }
                if !is_fresh || message.step == AgreementStep::Seeks {
                    return HandshakeTask::Nothing;
                }
                self.peers_offer = message.offer.clone();
                HandshakeTask::Connect
            }
            AgreementStep::Connected => {
                let is_of_peer = is_fresh
                    && message.nonce == self.peers_nonce
                    && message.offer == self.peers_offer
                    && message.step == AgreementStep::Connected;
                if !is_of_peer || self.is_used {
                    return HandshakeTask::Nothing;
                }
                self.is_used = true;
                HandshakeTask::Use
            }
        }
    }

    /// Records that the siblings of `offer` were made.
    pub(crate) fn offer(&mut self, offer: BundleOffer) {
        self.offer = offer;
        self.step = AgreementStep::Offers;
    }

    /// Records that the siblings are connected.
    pub(crate) const fn connected(&mut self) {
        self.step = AgreementStep::Connected;
    }

    /// Reports whether both ends are connected, as far as this end knows.
    #[cfg(test)]
    const fn is_used(&self) -> bool {
        self.is_used
    }
}

#[cfg(test)]
mod tests {
    use super::super::PeerPage;
    use super::*;

    const ENDS: [BundleEnd; 2] =
        [BundleEnd { gid: [1; 16], number: 11 }, BundleEnd { gid: [2; 16], number: 22 }];

    fn handshake(index: usize, nonce: u8) -> Handshake {
        Handshake::new(ENDS[index], ENDS[1 - index], [nonce; 16])
    }

    fn offer(address: u64) -> BundleOffer {
        BundleOffer { page: PeerPage { address, rkey: 1 }, ..BundleOffer::default() }
    }

    fn deliver(to: &mut Handshake, address: u64, message: &BundleMessage) -> HandshakeTask {
        let task = to.receive(message);
        match task {
            HandshakeTask::Make => to.offer(offer(address)),
            HandshakeTask::Connect => to.connected(),
            HandshakeTask::Nothing | HandshakeTask::Use => {}
        }
        task
    }

    /// A pseudo-random sequence that is the same in each run.
    fn next(state: &mut u64) -> u64 {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 33
    }

    #[test]
    fn both_ends_agree_over_a_network_that_loses_repeats_and_reorders() {
        for seed in 0..500 {
            let mut random = seed;
            let mut ends = [handshake(0, 1), handshake(1, 2)];
            let mut flying: Vec<(usize, BundleMessage)> = Vec::new();
            let mut uses = [0; 2];
            for _ in 0..2000 {
                let sender = next(&mut random) as usize % 2;
                flying.push((1 - sender, ends[sender].message()));
                let at = next(&mut random) as usize % flying.len();
                let (to, message) = match next(&mut random) % 3 {
                    0 => flying[at].clone(),
                    _ => flying.swap_remove(at),
                };
                if next(&mut random).is_multiple_of(2)
                    && deliver(&mut ends[to], to as u64, &message) == HandshakeTask::Use
                {
                    uses[to] += 1;
                }
            }
            assert_eq!(uses, [1, 1], "seed {seed}");
            assert_eq!(
                [ends[0].peers_offer.page.address, ends[1].peers_offer.page.address],
                [1, 0]
            );
        }
    }

    #[test]
    fn nothing_recorded_in_an_earlier_agreement_connects_a_queue_pair() {
        let mut before = [handshake(0, 1), handshake(1, 2)];
        let mut recorded = Vec::new();
        for _ in 0..4 {
            for to in 0..2 {
                let message = before[1 - to].message();
                deliver(&mut before[to], 7, &message);
                recorded.push(message);
            }
        }
        let mut again = handshake(0, 3);
        let tasks: Vec<_> = recorded.iter().map(|old| deliver(&mut again, 8, old)).collect();
        assert!(!tasks.contains(&HandshakeTask::Connect), "{tasks:?}");
        // The peer's own messages still lead to an agreement.
        let mut peer = handshake(1, 4);
        for _ in 0..4 {
            let message = again.message();
            deliver(&mut peer, 9, &message);
            let message = peer.message();
            deliver(&mut again, 8, &message);
        }
        assert!(again.is_used() && peer.is_used());
    }

    #[test]
    fn messages_for_other_queue_pairs_are_ignored() {
        let mut end = handshake(0, 1);
        let mut message = handshake(1, 2).message();
        message.sender.number += 1;
        assert_eq!(end.receive(&message), HandshakeTask::Nothing);
    }
}
