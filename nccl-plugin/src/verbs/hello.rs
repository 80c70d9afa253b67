//! The messages that both ends exchange over TCP before they are connected by RDMA.
//!
//! ```text
//! sender ── hello: its address, a queue pair per class, where its fifo is ──▶ receiver
//!        ◀── welcome: its address, its queue pairs, where its table of sizes is, or a refusal ──
//!        ── ready: its queue pairs are connected ──▶
//! ```
//!
//! All messages are untrusted, and sizes and numbers are checked here. A peer without the
//! listener's random number is dropped without an answer. All numbers are little-endian.
//!
//! | bytes | head |
//! |---|---|
//! | 0–7 | `LAXVERBS` |
//! | 8–9 | version, that of the handle |
//! | 10 | 1 hello, 2 welcome, 3 refusal, 4 ready |
//! | 11 | number of classes |
//! | 12–15 | bytes that follow |
//! | 16–23 | the listener's random number |
//!
//! | bytes | body of hello and welcome |
//! |---|---|
//! | 0–15 | GID |
//! | 16–17 | LID |
//! | 18 | MTU, as `IBV_MTU_*` |
//! | 19 | link layer |
//! | 20–23 | key of the memory |
//! | 24–31 | address of the memory: the sender's fifo, the receiver's table |
//! | 32–33 | number of buffers in the memory |
//! | 34–35 | entries of the memory per buffer |
//! | 40 … | 12 for each class: DSCP, service level, 2 zeros, number of the queue pair, its first packet's number |

use smallvec::SmallVec;
use thiserror::Error;

use super::cts::{DEPTH, STRIDE};
use crate::handle::{VERSION, word};

const MAGIC: [u8; 8] = *b"LAXVERBS";
pub(super) const HEAD_BYTES: usize = 24;
const END_BYTES: usize = 40;
const LANE_BYTES: usize = 12;
/// Largest number of classes, which is more than there are levels.
pub(super) const LANES_MAX: usize = 32;
const REASON_BYTES_MAX: usize = 1024;
const BODY_BYTES_MAX: usize = {
    let end = END_BYTES + LANES_MAX * LANE_BYTES;
    if end > REASON_BYTES_MAX { end } else { REASON_BYTES_MAX }
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClassQueuePair {
    /// The class as a DSCP, 0 to 63.
    pub(super) dscp: u8,
    /// InfiniBand's service level, 0 to 15. 0 if the sender's operator names none.
    pub(super) service_level: u8,
    /// Number of the queue pair, 24 bits.
    pub(super) number: u32,
    /// Number of the first packet that the queue pair sends, 24 bits.
    pub(super) first_packet: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct End {
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    /// The MTU, as `IBV_MTU_*`.
    pub(super) mtu: u32,
    /// The link layer, as `IBV_LINK_LAYER_*`.
    pub(super) link: u8,
    /// Key of the memory that the other end writes.
    pub(super) rkey: u32,
    pub(super) address: u64,
    /// The queue pairs, in the order of the connection's classes.
    pub(super) lanes: SmallVec<[ClassQueuePair; 8]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlMessage {
    /// The sender's description.
    Hello(End),
    /// The receiver's description.
    Welcome(End),
    /// The end of the handshake without a connection, with the reason.
    Refusal(String),
    Ready,
}

/// The reason why bytes are no message of this protocol. The peer is dropped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum Garbled {
    /// The peer uses another protocol.
    #[error("it is not Laxity's plugin")]
    Stranger,
    /// The peer has another version.
    #[error(
        "it speaks version {0}, this one version {VERSION}: install the same release of Laxity on \
         all nodes"
    )]
    Version(u16),
    /// The message is for another listener, which used the port before.
    #[error("it does not have this listener's number: it is of another job, or comes too late")]
    Nonce,
    #[error("it sent an impossible value ({0})")]
    Nonsense(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HelloHead {
    kind: u8,
    lanes: usize,
    pub(super) body: usize,
}

impl HelloHead {
    /// Decodes the head of a message to or from the listener with the random number `nonce`.
    pub(super) fn decode(head: &[u8; HEAD_BYTES], nonce: u64) -> Result<Self, Garbled> {
        if word(head, 0) != MAGIC {
            return Err(Garbled::Stranger);
        }
        let version = u16::from_le_bytes(word(head, 8));
        if version != VERSION {
            return Err(Garbled::Version(version));
        }
        if u64::from_le_bytes(word(head, 16)) != nonce {
            return Err(Garbled::Nonce);
        }
        let lanes = usize::from(head[11]);
        let body = u32::from_le_bytes(word(head, 12)) as usize;
        let right = match head[10] {
            1 | 2 => (1..=LANES_MAX).contains(&lanes) && body == END_BYTES + lanes * LANE_BYTES,
            3 => body <= REASON_BYTES_MAX,
            4 => body == 0,
            _ => return Err(Garbled::Nonsense("kind")),
        };
        if !right || body > BODY_BYTES_MAX {
            return Err(Garbled::Nonsense("length"));
        }
        Ok(Self { kind: head[10], lanes, body })
    }
}

impl End {
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.gid);
        into.extend(self.lid.to_le_bytes());
        into.push(self.mtu as u8);
        into.push(self.link);
        into.extend(self.rkey.to_le_bytes());
        into.extend(self.address.to_le_bytes());
        into.extend((DEPTH as u16).to_le_bytes());
        into.extend((STRIDE as u16).to_le_bytes());
        into.extend([0; 4]);
        for lane in &self.lanes {
            into.extend([lane.dscp, lane.service_level, 0, 0]);
            into.extend(lane.number.to_le_bytes());
            into.extend(lane.first_packet.to_le_bytes());
        }
    }

    /// Decodes a description with that many queue pairs.
    pub(super) fn decode(body: &[u8], lanes: usize) -> Result<Self, Garbled> {
        if body.len() != END_BYTES + lanes * LANE_BYTES {
            return Err(Garbled::Nonsense("length"));
        }
        let depth = u16::from_le_bytes(word(body, 32));
        let group = u16::from_le_bytes(word(body, 34));
        if (usize::from(depth), usize::from(group)) != (DEPTH, STRIDE) {
            return Err(Garbled::Nonsense("room for receives"));
        }
        let mtu = u32::from(body[18]);
        if !(1..=5).contains(&mtu) {
            return Err(Garbled::Nonsense("MTU"));
        }
        let lane = |at: usize| {
            let at = END_BYTES + at * LANE_BYTES;
            let lane = ClassQueuePair {
                dscp: body[at],
                service_level: body[at + 1] & 15,
                number: u32::from_le_bytes(word(body, at + 4)),
                first_packet: u32::from_le_bytes(word(body, at + 8)),
            };
            if lane.dscp > 63 || lane.number >> 24 != 0 || lane.first_packet >> 24 != 0 {
                return Err(Garbled::Nonsense("queue pair"));
            }
            Ok(lane)
        };
        Ok(Self {
            gid: word(body, 0),
            lid: u16::from_le_bytes(word(body, 16)),
            mtu,
            link: body[19],
            rkey: u32::from_le_bytes(word(body, 20)),
            address: u64::from_le_bytes(word(body, 24)),
            lanes: (0..lanes).map(lane).collect::<Result<_, _>>()?,
        })
    }
}

impl ControlMessage {
    /// Returns the message's bytes on the wire.
    pub(super) fn encode(&self, nonce: u64) -> Vec<u8> {
        let mut body = Vec::new();
        let (kind, lanes) = match self {
            Self::Hello(end) => {
                end.encode(&mut body);
                (1, end.lanes.len())
            }
            Self::Welcome(end) => {
                end.encode(&mut body);
                (2, end.lanes.len())
            }
            Self::Refusal(why) => {
                body.extend(why.bytes().take(REASON_BYTES_MAX));
                (3, 0)
            }
            Self::Ready => (4, 0),
        };
        let mut all = Vec::with_capacity(HEAD_BYTES + body.len());
        all.extend(MAGIC);
        all.extend(VERSION.to_le_bytes());
        all.extend([kind, lanes as u8]);
        all.extend((body.len() as u32).to_le_bytes());
        all.extend(nonce.to_le_bytes());
        all.extend(body);
        all
    }

    /// Decodes a message from its head and the bytes that follow.
    pub(super) fn decode(head: HelloHead, body: &[u8]) -> Result<Self, Garbled> {
        if body.len() != head.body {
            return Err(Garbled::Nonsense("length"));
        }
        Ok(match head.kind {
            1 => Self::Hello(End::decode(body, head.lanes)?),
            2 => Self::Welcome(End::decode(body, head.lanes)?),
            // A person reads the text, so control characters of a terminal are removed.
            3 => Self::Refusal(
                String::from_utf8_lossy(body)
                    .chars()
                    .map(|c| if c.is_control() { ' ' } else { c })
                    .collect(),
            ),
            _ => Self::Ready,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONCE: u64 = 0x0123_4567_89ab_cdef;

    fn any_end() -> impl Strategy<Value = End> {
        let lane = (0..64_u8, 0..1_u32 << 24, 0..1_u32 << 24);
        let lane = lane.prop_map(|(dscp, number, first_packet)| ClassQueuePair {
            dscp,
            service_level: dscp & 15,
            number,
            first_packet,
        });
        let lanes = prop::collection::vec(lane, 1..=LANES_MAX);
        (any::<[u8; 16]>(), any::<u16>(), 1..=5_u32, any::<u8>(), any::<u32>(), any::<u64>(), lanes)
            .prop_map(|(gid, lid, mtu, link, rkey, address, lanes)| End {
                gid,
                lid,
                mtu,
                link,
                rkey,
                address,
                lanes: lanes.into(),
            })
    }

    fn any_word() -> impl Strategy<Value = ControlMessage> {
        prop_oneof![
            any_end().prop_map(ControlMessage::Hello),
            any_end().prop_map(ControlMessage::Welcome),
            "[ -~]{0,200}".prop_map(ControlMessage::Refusal),
            Just(ControlMessage::Ready),
        ]
    }

    fn decode(bytes: &[u8], nonce: u64) -> Result<ControlMessage, Garbled> {
        let head = bytes.first_chunk::<HEAD_BYTES>().expect("a head");
        let head = HelloHead::decode(head, nonce)?;
        ControlMessage::decode(head, &bytes[HEAD_BYTES..])
    }

    proptest! {
        #[test]
        fn a_word_comes_back_as_it_was(word in any_word(), nonce in any::<u64>()) {
            prop_assert_eq!(decode(&word.encode(nonce), nonce), Ok(word));
        }

        #[test]
        fn whatever_a_stranger_says_is_refused_before_anything_is_made_of_it(
            head in prop::array::uniform24(any::<u8>()), nonce in any::<u64>(),
        ) {
            prop_assert_eq!(HelloHead::decode(&head, nonce), Err(Garbled::Stranger));
        }

        #[test]
        fn whoever_knows_the_number_can_say_nothing_that_is_taken_beyond_its_bounds(
            word in any_word(), at in 8..200_usize, bits in 1..=255_u8,
        ) {
            let mut bytes = word.encode(NONCE);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= bits;
            }
            let decoded = decode(&bytes, NONCE);
            if let Ok(ControlMessage::Hello(end) | ControlMessage::Welcome(end)) = decoded {
                prop_assert!((1..=LANES_MAX).contains(&end.lanes.len()));
                prop_assert!((1..=5).contains(&end.mtu));
                prop_assert!(end.lanes.iter().all(|lane| lane.dscp < 64 && lane.number < 1 << 24));
            }
        }

        #[test]
        fn a_body_of_garbage_is_no_end(
            body in prop::collection::vec(any::<u8>(), 0..600), kind in any::<u8>(),
            lanes in any::<u8>(),
        ) {
            let mut bytes = ControlMessage::Ready.encode(NONCE);
            bytes[10] = kind;
            bytes[11] = lanes;
            bytes[12..16].copy_from_slice(&(body.len() as u32).to_le_bytes());
            bytes.extend(body);
            let decoded = decode(&bytes, NONCE);
            if let Ok(ControlMessage::Hello(end) | ControlMessage::Welcome(end)) = decoded {
                prop_assert_eq!(end.lanes.len(), usize::from(lanes));
            }
        }
    }

    #[test]
    fn another_version_and_another_listener_are_told_apart_from_strangers() {
        let mut bytes = ControlMessage::Ready.encode(NONCE);
        assert_eq!(decode(&bytes, NONCE + 1), Err(Garbled::Nonce));
        bytes[8] ^= 0x10;
        assert_eq!(decode(&bytes, NONCE), Err(Garbled::Version(VERSION ^ 0x10)));
        let text = Garbled::Version(9).to_string();
        assert!(text.contains("same release"), "{text}");
    }

    #[test]
    fn a_refusal_is_shown_without_control_characters() {
        let word = ControlMessage::Refusal("no\u{1b}[2J room".into());
        assert_eq!(
            decode(&word.encode(NONCE), NONCE),
            Ok(ControlMessage::Refusal("no [2J room".into()))
        );
    }
}
