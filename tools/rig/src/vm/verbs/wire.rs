//! Traffic that crossed the router, from a capture of its ports. So what a program sent is known
//! without Laxity's library.
//!
//! `tcpdump` records the headers of all RoCEv2 packets (UDP port 4791) as they leave the router. A
//! work request of a connected queue pair is one message. It ends with a packet whose opcode has
//! "last" or "only", or it is one READ or atomic request (InfiniBand architecture 1.6, vol. 1,
//! §9.2). Packet sequence numbers rise by one per packet in a flow, and for a READ by the packets
//! of the response (§9.4.4, §9.7.3). The queues keep the order, so a number below the next expected
//! one is a retransmission and is not counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::error::LabError;
use crate::vm::guest::Guest;
use crate::vm::network::ROUTER;
use crate::vm::task::{PATIENCE, Running};

const FILE: &str = scratch!("roce.pcap");
/// Captured bytes of a packet: header of `any` (16), IPv4 (20), UDP (8), BTH (12), RETH or
/// AtomicETH (28), and spare bytes.
const SNAP: &str = "112";
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);
/// Time without new packets after which the capture counts as complete.
const QUIET: Duration = Duration::from_millis(60);
const QUIET_WITHIN: Duration = Duration::from_secs(5);
const MANAGEMENT: u32 = 1;
const MTU: u32 = 4096;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Crossed {
    pub(super) messages: u64,
    /// Payload bytes of messages and of responses to READs, and 8 for each atomic.
    pub(super) bytes: u64,
    pub(super) repeats: u64,
    pub(super) connected: BTreeSet<u8>,
    pub(super) datagram: BTreeSet<u8>,
}

#[derive(Debug)]
pub(super) struct Capture {
    running: Running,
    read: u64,
}

impl Capture {
    /// Starts a capture and returns when it listens.
    pub(super) fn start(guest: &Guest) -> Result<Self, LabError> {
        let args = "netns exec ROUTER tcpdump -n -i any -Q out -y LINUX_SLL -s SNAP -B 32768 \
                    --immediate-mode -U -w FILE udp dst port 4791";
        let args = args.split_whitespace().map(|word| match word {
            "ROUTER" => ROUTER,
            "SNAP" => SNAP,
            "FILE" => FILE,
            word => word,
        });
        let argv = ["ip"].into_iter().chain(args);
        let mut running = guest.task(argv, FOR_EVER).start()?;
        running
            .wait_for("listening on", PATIENCE)
            .map_err(LabError::from)
            .map_err(LabError::step("capturing in the router; run `tools/setup.sh verbs`"))?;
        Ok(Self { running, read: 24 })
    }

    pub(super) fn take(&mut self) -> Result<Crossed, LabError> {
        let mut file = File::open(FILE).map_err(LabError::file("reading", FILE))?;
        let give_up = Instant::now() + QUIET_WITHIN;
        let mut length = file.metadata().map_err(LabError::file("reading", FILE))?.len();
        loop {
            std::thread::sleep(QUIET);
            let now = file.metadata().map_err(LabError::file("reading", FILE))?.len();
            if now == length || Instant::now() > give_up {
                break;
            }
            length = now;
        }
        if length <= self.read {
            return Ok(Crossed::default());
        }
        let mut bytes = vec![0; (length - self.read) as usize];
        file.seek(SeekFrom::Start(self.read)).map_err(LabError::file("reading", FILE))?;
        file.read_exact(&mut bytes).map_err(LabError::file("reading", FILE))?;
        let (crossed, taken) = account(&bytes)?;
        self.read += taken as u64;
        Ok(crossed)
    }

    pub(super) fn finish(self) -> u64 {
        self.running.signal(Signal::SIGINT);
        let report = self.running.wait();
        report
            .stderr
            .lines()
            .find(|line| line.contains("dropped by kernel"))
            .and_then(|line| line.split_whitespace().next()?.parse().ok())
            .unwrap_or(0)
    }
}

/// Reports whether a packet is new. If so, advances the number that its flow expects `next`.
fn is_new(next: &mut Option<u32>, number: u32, step: u32) -> bool {
    const HALF: u32 = 1 << 23;
    let new = next.is_none_or(|next| number.wrapping_sub(next) & 0xff_ffff < HALF);
    if new {
        *next = Some(number.wrapping_add(step) & 0xff_ffff);
    }
    new
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Accounts for the records of a capture. Also returns how many bytes were complete records.
fn account(bytes: &[u8]) -> Result<(Crossed, usize), LabError> {
    let mut crossed = Crossed::default();
    let mut flows = BTreeMap::new();
    let mut at = 0;
    while let Some(head) = bytes.get(at..at + 16) {
        let length = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]) as usize;
        if length > 65_535 {
            return Err(LabError::unreadable("the capture", format!("damaged at byte {at}")));
        }
        let Some(packet) = bytes.get(at + 16..at + 16 + length) else { break };
        // A truncated packet or one of another kind is not counted.
        let _ = count(packet, &mut flows, &mut crossed);
        at += 16 + length;
    }
    Ok((crossed, at))
}

/// Counts one packet, which begins with the header of Linux's cooked capture.
fn count(
    packet: &[u8],
    flows: &mut BTreeMap<(u32, u32, bool), Option<u32>>,
    crossed: &mut Crossed,
) -> Option<()> {
    let ip = packet.get(16..)?;
    let dscp = ip.get(1)? >> 2;
    let total = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
    let destination = be32(ip, 16)?;
    let head = usize::from(ip.first()? & 15) * 4;
    let bth = ip.get(head + 8..)?;
    let opcode = *bth.first()?;
    let pad = usize::from(bth.get(1)? >> 4 & 3);
    let queue_pair = be32(bth, 4)? & 0xff_ffff;
    let number = be32(bth, 8)? & 0xff_ffff;
    if queue_pair == MANAGEMENT {
        return Some(());
    }
    let (transport, operation) = (opcode >> 5, opcode & 31);
    if transport == 3 {
        crossed.datagram.insert(dscp);
        return Some(());
    }
    crossed.connected.insert(dscp);
    // Extended headers by operation, the same for RC (0) and UC (1).
    let (extended, last) = match operation {
        0 | 1 | 7 => (0, false),          // SEND first, middle; WRITE middle
        2 | 4 | 8 => (0, true),           // SEND last, only; WRITE last
        3 | 5 | 9 | 22 | 23 => (4, true), // the same with an immediate or a key to invalidate
        6 => (16, false),                 // WRITE first
        10 => (16, true),                 // WRITE only
        11 => (20, true),                 // WRITE only with an immediate
        12 => (16, true),                 // READ request
        13 | 15 | 16 => (4, false),       // READ response first, last, only
        14 => (0, false),                 // READ response middle
        19 | 20 => (28, true),            // atomics
        _ => return Some(()),             // acknowledgements
    };
    let step = match operation {
        12 => be32(bth, 12 + 12)?.div_ceil(MTU).max(1),
        _ => 1,
    };
    let response = (13..=16).contains(&operation);
    let next = flows.entry((destination, queue_pair, response)).or_default();
    if !is_new(next, number, step) {
        crossed.repeats += 1;
    } else {
        crossed.messages += u64::from(last);
        // Headers are IPv4, UDP, BTH, the extended header, padding, and the checksum at the end.
        let heads = head + 8 + 12 + extended + pad + 4;
        crossed.bytes += match operation {
            19 | 20 => 8,
            _ => total.saturating_sub(heads) as u64,
        };
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(dscp: u8, queue_pair: u32, opcode: u8, number: u32, rest: usize) -> Vec<u8> {
        let total = (20 + 8 + 12 + rest + 4) as u16;
        let mut packet = vec![0; 16];
        packet.extend([0x45, dscp << 2 | 2]);
        packet.extend(total.to_be_bytes());
        packet.extend([0; 12]);
        packet.extend([10, 77, 1, 1]);
        packet.extend([0; 8]);
        packet.extend([opcode, 0, 0xff, 0xff]);
        packet.extend(queue_pair.to_be_bytes());
        packet.extend(number.to_be_bytes());
        packet.extend(vec![0; rest]);
        let mut record = vec![0; 8];
        record.extend((packet.len() as u32).to_ne_bytes());
        record.extend((packet.len() as u32).to_ne_bytes());
        record.extend(packet);
        record
    }

    #[test]
    fn messages_are_counted_once_and_management_not_at_all() {
        let bytes = [
            record(10, 17, 6, 0xff_ffff, 16 + 4096), // WRITE first, the last number there is
            record(10, 17, 8, 0, 100),               // WRITE last
            record(10, 17, 8, 0, 100),               // again
            record(10, 17, 10, 1, 16 + 64),          // WRITE only
            record(10, 18, 17, 1, 4),                // an acknowledgement
            record(0, 1, 0x64, 1, 8 + 256),          // connection management
            record(26, 19, 0x64, 7, 8 + 256),        // a datagram
            record(10, 20, 42, 7, 16 + 8),           // UC WRITE only
        ]
        .concat();
        let (crossed, taken) = account(&bytes).expect("whole records");
        assert_eq!(taken, bytes.len());
        let expected = Crossed {
            messages: 3,
            bytes: 4096 + 100 + 64 + 8,
            repeats: 1,
            connected: [10].into(),
            datagram: [26].into(),
        };
        assert_eq!(crossed, expected);
        let (_, taken) = account(&bytes[..bytes.len() - 1]).expect("a record is cut");
        assert_eq!(taken, bytes.len() - record(10, 20, 42, 7, 24).len());
    }

    #[test]
    fn a_read_is_one_message_and_its_data_are_the_response() {
        let mut request = record(10, 17, 12, 5, 16);
        let length = request.len() - 4 - 4;
        // The DMA length is in the last four of the sixteen bytes of the RETH.
        request[length + 4..].copy_from_slice(&8192_u32.to_be_bytes());
        let bytes = [
            request.clone(),
            record(10, 18, 13, 5, 4 + 4096),
            record(10, 18, 15, 6, 4 + 4096),
            request,
            record(10, 18, 13, 5, 4 + 4096),
            record(10, 17, 4, 7, 0),
        ]
        .concat();
        let (crossed, _) = account(&bytes).expect("whole records");
        assert_eq!((crossed.messages, crossed.bytes), (2, 8192));
    }
}
