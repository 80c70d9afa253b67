//! The datagrams by which two libraries agree on a bundle. Each has a code (HMAC-SHA256, RFC 2104)
//! that only a holder of the job's secret can compute. It covers both ends' addresses, queue pairs
//! and nonces, so a recorded datagram is worth nothing in another agreement.

use laxity_job::BundleSecret;
use sha2::{Digest as _, Sha256};
use smallvec::SmallVec;

use super::{PeerPage, SIBLINGS_MAX};

const MAGIC: [u8; 8] = *b"LAXBNDL1";
const CODE: usize = 32;
const BLOCK: usize = 64;
/// Largest datagram, in bytes.
pub(crate) const BYTES_MAX: usize = 256;

/// How far an end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AgreementStep {
    /// It looks for the peer's library, and has made nothing.
    Seeks = 1,
    /// It has siblings and names them.
    Offers = 2,
    /// Its siblings are connected to the peer's.
    Connected = 3,
}

/// One end of a connection: the address of its port, and its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BundleEnd {
    pub(crate) gid: [u8; 16],
    pub(crate) number: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OfferedSibling {
    pub(crate) class: u8,
    pub(crate) number: u32,
    pub(crate) first_packet: u32,
}

/// What an end offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BundleOffer {
    pub(crate) page: PeerPage,
    pub(crate) siblings: SmallVec<[OfferedSibling; SIBLINGS_MAX]>,
}

/// A random number of one end in one agreement.
pub(crate) type BundleNonce = [u8; 16];

/// What one library says to the other in one datagram, before its authentication code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BundleMessage {
    pub(crate) step: AgreementStep,
    pub(crate) sender: BundleEnd,
    pub(crate) receiver: BundleEnd,
    pub(crate) nonce: BundleNonce,
    /// The receiver's nonce, or zeros if the sender doesn't know it.
    pub(crate) receivers_nonce: BundleNonce,
    pub(crate) offer: BundleOffer,
}

impl BundleMessage {
    pub(crate) fn encode(&self, secret: &BundleSecret) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES_MAX);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(self.step as u8);
        for end in [&self.sender, &self.receiver] {
            bytes.extend_from_slice(&end.gid);
            bytes.extend_from_slice(&end.number.to_be_bytes());
        }
        bytes.extend_from_slice(&self.nonce);
        bytes.extend_from_slice(&self.receivers_nonce);
        bytes.extend_from_slice(&self.offer.page.address.to_be_bytes());
        bytes.extend_from_slice(&self.offer.page.rkey.to_be_bytes());
        bytes.push(self.offer.siblings.len() as u8);
        for sibling in &self.offer.siblings {
            bytes.push(sibling.class);
            bytes.extend_from_slice(&sibling.number.to_be_bytes());
            bytes.extend_from_slice(&sibling.first_packet.to_be_bytes());
        }
        let code = code(secret, &bytes);
        bytes.extend_from_slice(&code);
        bytes
    }

    /// Returns the message in a datagram, or `None` if it isn't one with the right code.
    pub(crate) fn decode(secret: &BundleSecret, datagram: &[u8]) -> Option<Self> {
        let (bytes, theirs) = datagram.split_last_chunk::<CODE>()?;
        if !is_equal(&code(secret, bytes), theirs) {
            return None;
        }
        let mut at = BundleFields(bytes);
        if at.take::<8>()? != MAGIC {
            return None;
        }
        let step = match at.take::<1>()? {
            [1] => AgreementStep::Seeks,
            [2] => AgreementStep::Offers,
            [3] => AgreementStep::Connected,
            _ => return None,
        };
        let (sender, receiver) = (at.end()?, at.end()?);
        let (nonce, receivers_nonce) = (at.take()?, at.take()?);
        let page = PeerPage {
            address: u64::from_be_bytes(at.take()?),
            rkey: u32::from_be_bytes(at.take()?),
        };
        let [count] = at.take()?;
        if usize::from(count) > SIBLINGS_MAX {
            return None;
        }
        let mut siblings = SmallVec::new();
        for _ in 0..count {
            let [class] = at.take()?;
            let number = u32::from_be_bytes(at.take()?);
            let first_packet = u32::from_be_bytes(at.take()?);
            siblings.push(OfferedSibling { class, number, first_packet });
        }
        let offer = BundleOffer { page, siblings };
        let message = Self { step, sender, receiver, nonce, receivers_nonce, offer };
        at.0.is_empty().then_some(message)
    }
}

/// The rest of a datagram.
struct BundleFields<'a>(&'a [u8]);

impl BundleFields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn end(&mut self) -> Option<BundleEnd> {
        Some(BundleEnd { gid: self.take()?, number: u32::from_be_bytes(self.take()?) })
    }
}

/// Returns HMAC-SHA256 of `bytes`.
fn code(secret: &BundleSecret, bytes: &[u8]) -> [u8; CODE] {
    let mut key = [0; BLOCK];
    let long;
    let given = if secret.bytes().len() > BLOCK {
        long = Sha256::digest(secret.bytes());
        &long[..]
    } else {
        secret.bytes()
    };
    key[..given.len()].copy_from_slice(given);
    let mut inner = Sha256::new();
    inner.update(key.map(|byte| byte ^ 0x36));
    inner.update(bytes);
    let mut outer = Sha256::new();
    outer.update(key.map(|byte| byte ^ 0x5c));
    outer.update(inner.finalize());
    outer.finalize().into()
}

/// Compares codes in a time that doesn't tell where they differ.
fn is_equal(own: &[u8; CODE], theirs: &[u8; CODE]) -> bool {
    own.iter().zip(theirs).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> BundleMessage {
        let end = |last| BundleEnd { gid: [last; 16], number: u32::from(last) };
        let sibling = OfferedSibling { class: 104, number: 77, first_packet: 0x00ab_cdef };
        BundleMessage {
            step: AgreementStep::Offers,
            sender: end(1),
            receiver: end(2),
            nonce: [3; 16],
            receivers_nonce: [4; 16],
            offer: BundleOffer {
                page: PeerPage { address: 1 << 40, rkey: 9 },
                siblings: SmallVec::from_slice(&[sibling; SIBLINGS_MAX]),
            },
        }
    }

    #[test]
    fn the_code_is_that_of_rfc_4231() {
        let hex = |code: [u8; CODE]| code.map(|byte| format!("{byte:02x}")).concat();
        let of = |key: &[u8], data: &[u8]| hex(code(&BundleSecret::new(key), data));
        assert_eq!(
            of(b"Jefe", b"what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            of(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    #[test]
    fn only_an_unchanged_datagram_with_the_jobs_secret_is_a_message() {
        let secret = BundleSecret::new(*b"0123456789abcdef");
        let datagram = message().encode(&secret);
        assert!(datagram.len() <= BYTES_MAX);
        assert_eq!(BundleMessage::decode(&secret, &datagram), Some(message()));
        let other = BundleSecret::new(*b"0123456789abcdeg");
        assert_eq!(BundleMessage::decode(&other, &datagram), None);
        for at in 0..datagram.len() {
            let mut changed = datagram.clone();
            changed[at] ^= 1;
            assert_eq!(BundleMessage::decode(&secret, &changed), None, "byte {at}");
            assert_eq!(BundleMessage::decode(&secret, &datagram[..at]), None, "length {at}");
        }
    }

    #[test]
    fn a_datagram_with_the_right_code_and_wrong_lengths_is_no_message() {
        let secret = BundleSecret::new(*b"0123456789abcdef");
        let whole = message().encode(&secret);
        let body = &whole[..whole.len() - CODE];
        for at in 0..body.len() {
            let mut short = body[..at].to_vec();
            short.extend_from_slice(&code(&secret, &body[..at]));
            assert_eq!(BundleMessage::decode(&secret, &short), None, "length {at}");
        }
        let mut long = body.to_vec();
        long.push(0);
        let own = code(&secret, &long);
        long.extend_from_slice(&own);
        assert_eq!(BundleMessage::decode(&secret, &long), None);
    }
}
