//! What arrives, and whether it is what was sent: a flow's chunks have to come contiguously, with
//! the bytes that its sender's pattern has, each exactly once; anything else is counted.

use std::collections::{HashMap, HashSet};
use std::io;

use crate::frame::{self, HEAD_BYTES, Head, Kind};
use crate::message::Traffic;

/// What the traffic report calls a flow's stage.
#[must_use]
pub const fn stage_name(kind: Kind) -> &'static str {
    match kind {
        Kind::KvReuse => "kv_reuse",
        Kind::Dispatch | Kind::Combine => "collective",
        Kind::P2d => "p2d",
    }
}

/// What arrived: bytes of a flow, and whether they were its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Head of the frame whose payload is complete.
    pub head: Head,
    /// The flow is complete.
    pub complete: bool,
}

/// Checks that every byte of every flow arrives once and in order.
#[derive(Debug, Default)]
pub struct DeliveryCheck {
    /// Next offset of flows that are under way.
    next: HashMap<u64, u64>,
    done: HashSet<u64>,
    traffic: Traffic,
}

impl DeliveryCheck {
    /// Takes note of a frame. `None` if its bytes had all been here before.
    fn frame(&mut self, head: &Head) -> Option<Arrival> {
        let len = u64::from(head.len);
        if self.done.contains(&head.flow) {
            self.traffic.duplicated += len;
            return None;
        }
        let next = self.next.entry(head.flow).or_default();
        let end = head.offset + len;
        let again = next.saturating_sub(head.offset).min(len);
        self.traffic.duplicated += again;
        self.traffic.missing += head.offset.saturating_sub(*next);
        let stage = stage_name(head.kind).to_owned();
        *self.traffic.received.entry(stage).or_default() += len - again;
        *next = (*next).max(end);
        let complete = *next >= head.total;
        if complete {
            self.next.remove(&head.flow);
            self.done.insert(head.flow);
        }
        Some(Arrival {
            head: *head,
            complete,
        })
    }

    /// What arrived so far. Of flows that never end, what did not come is the difference to what
    /// was sent.
    #[must_use]
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }
}

/// Finds frames in a stream of bytes, and compares their payload with what it has to be.
#[derive(Debug)]
pub struct Reassembly {
    head: [u8; HEAD_BYTES],
    head_filled: usize,
    /// The frame whose payload is being read, and how much of it is still to come.
    frame: Option<(Head, usize)>,
}

impl Default for Reassembly {
    fn default() -> Self {
        Self {
            head: [0; HEAD_BYTES],
            head_filled: 0,
            frame: None,
        }
    }
}

impl Reassembly {
    /// Takes the next bytes of the stream and appends the frames that became complete.
    ///
    /// # Errors
    /// What ought to be a head is none: nothing that follows can be trusted.
    pub fn take(
        &mut self,
        mut bytes: &[u8],
        ledger: &mut DeliveryCheck,
        arrivals: &mut Vec<Arrival>,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            if let Some((head, left)) = self.frame.as_mut() {
                let (part, rest) = bytes.split_at(bytes.len().min(*left));
                let offset = head.offset + (head.len as usize - *left) as u64;
                if frame::payload(head.flow, offset, part.len()) != part {
                    ledger.traffic.corrupted += part.len() as u64;
                }
                bytes = rest;
                *left -= part.len();
                if *left == 0 {
                    let head = *head;
                    self.frame = None;
                    arrivals.extend(ledger.frame(&head));
                }
            } else {
                let wanted = HEAD_BYTES - self.head_filled;
                let (part, rest) = bytes.split_at(bytes.len().min(wanted));
                self.head[self.head_filled..][..part.len()].copy_from_slice(part);
                self.head_filled += part.len();
                bytes = rest;
                if self.head_filled == HEAD_BYTES {
                    self.head_filled = 0;
                    let head = Head::decode(&self.head).ok_or_else(|| {
                        io::Error::new(
                            io::ErrorKind::InvalidData,
                            "a data connection lost its framing",
                        )
                    })?;
                    self.frame = Some((head, head.len as usize));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(flow: u64, offset: u64, len: u32, total: u64) -> Head {
        Head {
            flow,
            offset,
            total,
            len,
            kind: Kind::P2d,
            layer: 0,
            batch: 1,
            request: 1,
            from: 0,
        }
    }

    #[test]
    fn every_byte_counts_once_and_whatever_else_is_noticed() {
        let mut ledger = DeliveryCheck::default();
        assert!(!ledger.frame(&head(1, 0, 100, 300)).unwrap().complete);
        assert!(!ledger.frame(&head(1, 50, 100, 300)).unwrap().complete);
        assert_eq!(ledger.traffic.duplicated, 50);
        assert!(ledger.frame(&head(1, 200, 100, 300)).unwrap().complete);
        assert_eq!(ledger.traffic.missing, 50);
        assert_eq!(
            ledger.frame(&head(1, 0, 300, 300)),
            None,
            "a replay of the whole flow"
        );
        assert_eq!(ledger.traffic.duplicated, 350);
        assert_eq!(ledger.traffic.received["p2d"], 250);
    }

    proptest! {
        #[test]
        fn frames_are_found_however_tcp_cuts_the_stream(cuts in prop::collection::vec(1..5000_usize, 1..60)) {
            let mut stream = Vec::new();
            for (offset, len) in [(0_u64, 30_000_u32), (30_000, 1), (30_001, 9_999)] {
                let head = head(7, offset, len, 40_000);
                stream.extend_from_slice(&head.encode());
                stream.extend_from_slice(frame::payload(7, offset, len as usize));
            }
            let mut stream_so_far = Reassembly::default();
            let (mut ledger, mut arrivals) = (DeliveryCheck::default(), Vec::new());
            let mut rest = &stream[..];
            for cut in cuts.into_iter().cycle() {
                let (part, behind) = rest.split_at(cut.min(rest.len()));
                stream_so_far.take(part, &mut ledger, &mut arrivals).unwrap();
                rest = behind;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(arrivals.len(), 3);
            prop_assert!(arrivals[2].complete);
            prop_assert_eq!(ledger.traffic.corrupted, 0);
            prop_assert_eq!(ledger.traffic.received["p2d"], 40_000);
        }
    }
}
