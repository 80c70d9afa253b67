//! The daemon against clients that write any bytes anywhere in their region.

#![cfg(not(loom))]

use std::fs::File;
use std::os::unix::fs::FileExt;

use laxity_shm::consumer::{Consumer, Wake};
use laxity_shm::lane::LaneMemory;
use laxity_shm::layout::{CREDIT_PORTS, Geometry};
use laxity_shm::permit::published;
use laxity_shm::producer::{Producer, SlotRef};
use laxity_shm::record::{Descriptor, Direction, Flow, Garbage, Hint, Record, Stage};
use laxity_shm::served::RegionConsumer;
use proptest::prelude::*;

const SMALL: Geometry = Geometry { lanes: 3, slots: 16, colour: 2 };

/// Returns a served client and the file of its region, for writing anywhere.
fn served() -> (RegionConsumer, File) {
    let mut served = RegionConsumer::new(SMALL, false).expect("served");
    let file = File::from(served.region().memfd().try_clone_to_owned().expect("dup"));
    served.header().set_claimed(0, true);
    served.refresh();
    (served, file)
}

/// Writes a slot as a client would, with any words.
fn publish(file: &File, slot: u16, seq: u64, words: [u64; 6]) {
    let at = SMALL.lane_offset(0) as u64 + 256 + u64::from(slot) * 64;
    for (i, word) in words.iter().chain(&[0, published(seq)]).enumerate() {
        file.write_all_at(&word.to_le_bytes(), at + i as u64 * 8).expect("writes");
    }
}

fn first(served: &mut RegionConsumer) -> Option<Result<Record, Garbage>> {
    let mut result = None;
    served.scan(1, |_, _, incoming| {
        result = Some(incoming.map(|i| i.record));
    });
    result
}

/// Returns both halves of a lane of 16 slots.
fn lane() -> (Producer, Consumer) {
    let memory = LaneMemory::heap(16);
    (Producer::new(memory.clone()), Consumer::new(memory, false))
}

fn submit(bytes: u64) -> Descriptor {
    Record::Submit(Flow { bytes, stage: Stage::P2d, ..Flow::default() }).encode()
}

proptest! {
    #[test]
    fn any_descriptor_is_a_record_or_garbage_and_records_read_back(words: [u64; 6]) {
        if let Ok(record) = Record::decode(&Descriptor(words)) {
            prop_assert_eq!(record.encode(), Descriptor(words).with_next(0));
        }
    }

    /// Random words hardly ever have a known opcode, so this test takes one of those.
    #[test]
    fn near_records_are_records_or_garbage(
        opcode in 0_u16..25, stage in 0_u8..8, flags in 0_u8..4, rest: u32,
        words: [u64; 4], small: bool,
    ) {
        let head = u64::from(stage) | u64::from(flags) << 8
            | u64::from(rest) << 16 & 0x0000_ffff_03ff_0000;
        let mask = if small { 0xff } else { u64::MAX };
        let [a, b, c, d] = words.map(|w| w & mask);
        let descriptor = Descriptor([head, a, b, c, d, u64::from(opcode) << 16]);
        if let Ok(record) = Record::decode(&descriptor) {
            prop_assert_eq!(record.encode(), descriptor.with_next(0));
        }
    }

    #[test]
    fn every_flow_reads_back(
        stage in 1_u8..=5, nic: u8, layer: u16, bytes in 0_u64..1 << 52, ids: [u64; 3],
        ingress: bool, whole: bool, peer: u8, observed: bool,
    ) {
        let direction = if ingress {
            laxity_shm::record::Direction::Ingress
        } else {
            laxity_shm::record::Direction::Egress
        };
        let flow = Flow {
            stage: Stage::from_number(stage).expect("1 to 5"),
            direction, nic, layer, bytes, batch: ids[0], request: ids[1], deadline_ns: ids[2],
            whole, peer, ..Flow::default()
        };
        for record in [Record::Submit(flow), Record::SubmitOnCredit { flow, observed }] {
            prop_assert_eq!(Record::decode(&record.encode().with_next(9)), Ok(record));
        }
    }

    #[test]
    fn every_message_reads_back(a: u64, b: u64, c: u64, d: u64, n: u16) {
        for record in [
            Record::Completed { tag: a, bytes: b },
            Record::Cancelled { tag: a, permitted: b },
            Record::LaneReset,
            Record::Hint(Hint::BatchBegin { batch: a, layers: n, layer_time_ns: b }),
            Record::Hint(Hint::RequestJoin { batch: a, request: b, deadline_ns: c, bytes: d }),
            Record::Hint(Hint::RequestEnd { request: a }),
            Record::Hint(Hint::RequestTrace { request: a, trace: [b, c], span: d }),
            Record::Hint(Hint::BatchQueued { batch: a, ahead: b }),
            Record::Hint(Hint::LayerBegin { batch: a, layer: n }),
            Record::Hint(Hint::ComputeEnd { batch: a }),
            Record::Hint(Hint::BatchEnd { batch: a }),
            Record::Peer {
                peer: n as u8,
                address: (u128::from(a) << 64 | u128::from(b)).to_be_bytes(),
            },
        ] {
            prop_assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
    }

    /// Whatever the client writes anywhere, at any time, the daemon continues, and writes permits
    /// only into slots with a living flow.
    #[test]
    fn a_region_full_of_noise_neither_crashes_nor_derails_the_daemon(
        seed: u64,
        writes in prop::collection::vec((any::<u32>(), any::<u64>(), 0_u8..4), 1..200),
    ) {
        let (mut served, file) = served();
        let bytes = served.region().bytes() as u64;
        let mut seq = 1;
        let mut noise = seed;
        for (offset, value, kind) in writes {
            match kind {
                // Write anywhere, including the header.
                0 => {
                    let at = u64::from(offset) % (bytes - 8);
                    file.write_all_at(&value.to_le_bytes(), at).expect("writes");
                }
                // Write a plausible record with an odd field, where the daemon may read.
                _ => {
                    noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let next = if kind == 3 { value as u16 } else { ((noise >> 40) % 16) as u16 };
                    let words = submit(value & 0xffff).with_next(next).0;
                    publish(&file, (offset % 16) as u16, seq, words);
                }
            }
            let mut flows = Vec::new();
            served.sweep(64, |lane, consumer, incoming| {
                if let Ok(incoming) = incoming {
                    if lane == 0 {
                        seq = incoming.at.tag + 1;
                    }
                    if let Record::Submit(flow) = incoming.record {
                        assert!(consumer.is_waiting(incoming.at));
                        flows.push((lane, incoming.at, flow));
                    }
                }
            });
            for (lane, at, flow) in flows {
                let consumer = served.consumer(lane).expect("seen");
                if consumer.is_waiting(at)
                    && consumer.permit(at, flow.bytes, 1, value & 1 == 0) == Ok(Wake::Needed)
                {
                    consumer.wake();
                }
            }
            prop_assert!(served.claimed_lanes() <= 3);
        }
    }
}

#[test]
fn garbage_kills_the_lane_and_only_the_lane() {
    let (mut served, file) = served();
    publish(&file, 0, 1, [0, 0, 0, 0, 0, 99 << 16]);
    assert_eq!(first(&mut served), Some(Err(Garbage::Opcode(99))));
    publish(&file, 0, 1, Record::LaneReset.encode().with_next(1).0);
    assert_eq!(first(&mut served), None, "dead");
    let other = LaneMemory::mapped(served.region(), 1).expect("lane");
    Producer::new(other).publish(&Record::LaneReset).expect("room");
    served.header().set_claimed(1, true);
    served.refresh();
    assert_eq!(first(&mut served), Some(Ok(Record::LaneReset)));
}

#[test]
fn a_chain_that_leaves_the_lane_or_bites_itself_is_garbage() {
    for next in [0, 16, 1000, u16::MAX] {
        let (mut served, file) = served();
        publish(&file, 0, 1, Record::LaneReset.encode().with_next(next).0);
        assert_eq!(first(&mut served), Some(Err(Garbage::Next(next))));
    }
    let (mut served, file) = served();
    publish(&file, 0, 1, submit(5).with_next(1).0);
    assert_eq!(first(&mut served).map(|r| r.is_ok()), Some(true));
    publish(&file, 1, 2, Record::LaneReset.encode().with_next(2).0);
    assert_eq!(first(&mut served).map(|r| r.is_ok()), Some(true), "a reset ends the flow");
    publish(&file, 2, 3, submit(5).with_next(3).0);
    assert_eq!(first(&mut served).map(|r| r.is_ok()), Some(true));
    publish(&file, 3, 4, submit(5).with_next(2).0);
    assert_eq!(first(&mut served), Some(Err(Garbage::Next(2))), "slot 2 waits for a permit");
}

#[test]
fn credit_of_a_record_that_is_refused_is_not_spent() {
    let (mut served, file) = served();
    served.consumer(0).expect("seen").give_credit(0, 100);
    let record = Record::SubmitOnCredit {
        flow: Flow { bytes: 60, stage: Stage::Collective, ..Flow::default() },
        observed: false,
    };
    publish(&file, 0, 1, record.encode().with_next(0).0);
    assert_eq!(first(&mut served), Some(Err(Garbage::Next(0))));
    // Credit that is not spent goes back to the port when the client is released.
    assert_eq!(served.consumer(0).expect("seen").credit(0), (100, 0));
}

#[test]
fn a_sweep_that_its_budget_stops_leaves_the_bell_ringing() {
    let (mut served, _file) = served();
    let mut producer = Producer::new(LaneMemory::mapped(served.region(), 0).expect("lane"));
    served.set_doorbell(true);
    assert_eq!(served.scan(4, |_, _, _| {}), 0, "the bell is answered");
    // The producer has not seen the flag yet, so it increments no doorbell.
    for _ in 0..10 {
        producer.publish(&Record::LaneReset).expect("room");
    }
    assert_eq!(served.sweep(4, |_, _, incoming| assert!(incoming.is_ok())), 4);
    let mut came = 4;
    for _ in 0..4 {
        came += served.scan(4, |_, _, incoming| assert!(incoming.is_ok()));
    }
    assert_eq!(came, 10);
}

#[test]
fn credit_of_each_port_is_its_own() {
    let (mut served, _file) = served();
    let mut producer = Producer::new(LaneMemory::mapped(served.region(), 0).expect("lane"));
    for port in 0..CREDIT_PORTS {
        let permitted = 10 + port as u64;
        served.consumer(0).expect("seen").give_credit(port, permitted);
        assert_eq!(producer.credit(port), permitted);
        let direction = if port % 2 == 0 { Direction::Egress } else { Direction::Ingress };
        let flow = Flow {
            bytes: permitted,
            nic: (port / 2) as u8,
            direction,
            stage: Stage::Collective,
            ..Flow::default()
        };
        let record = Record::SubmitOnCredit { flow, observed: false };
        producer.publish(&record).expect("room");
        assert_eq!(first(&mut served), Some(Ok(record)));
        let consumer = served.consumer(0).expect("seen");
        assert_eq!(consumer.credit(port), (permitted, permitted));
    }
}

#[test]
fn credit_cannot_be_overdrawn() {
    let (mut served, _file) = served();
    let mut producer = Producer::new(LaneMemory::mapped(served.region(), 0).expect("lane"));
    let flow = |bytes, nic| Flow { bytes, nic, stage: Stage::Collective, ..Flow::default() };
    served.consumer(0).expect("seen").give_credit(0, 100);
    assert_eq!(producer.credit(0), 100);
    let on_credit = |flow| Record::SubmitOnCredit { flow, observed: false };
    producer.publish(&on_credit(flow(100, 0))).expect("room");
    assert!(matches!(first(&mut served), Some(Ok(_))));
    assert_eq!(served.consumer(0).expect("seen").credit(0), (100, 100));
    producer
        .publish(&Record::SubmitOnCredit { flow: flow(500, 99), observed: true })
        .expect("room");
    assert!(matches!(first(&mut served), Some(Ok(_))), "observed flows use none");
    producer.publish(&on_credit(flow(1, 0))).expect("room");
    assert_eq!(first(&mut served), Some(Err(Garbage::Overdraft(1))));

    let (mut producer, mut consumer) = lane();
    producer.publish(&on_credit(flow(7, CREDIT_PORTS as u8))).expect("room");
    assert_eq!(consumer.poll(), Some(Err(Garbage::Overdraft(7))), "no counter, no credit");
}

#[test]
fn a_permit_for_a_flow_that_is_not_there_writes_nothing() {
    let (mut producer, mut consumer) = lane();
    let at = producer.publish_gated(&Record::Submit(Flow { bytes: 9, ..Flow::default() }));
    let at = at.expect("room");
    let word = producer.word(at.slot);
    for wrong in [
        at,
        SlotRef { tag: 0, ..at },
        SlotRef { tag: 2, ..at },
        SlotRef { slot: 5, ..at },
        SlotRef { slot: u16::MAX, ..at },
    ] {
        consumer.permit(wrong, 9, 1, true).expect_err("not consumed, or not there");
        assert!(!consumer.is_waiting(wrong));
    }
    assert_eq!(producer.word(at.slot), word);
    consumer.poll().expect("there").expect("no garbage");
    assert!(consumer.is_waiting(at));
    assert_eq!(consumer.permit(at, 9, 1, true), Ok(Wake::NotNeeded));
    consumer.permit(at, 9, 1, true).expect_err("had its last");
}

#[test]
fn slots_come_back_in_any_order_and_a_full_lane_says_so() {
    let (mut producer, mut consumer) = lane();
    let submit = Record::Submit(Flow { bytes: 1, ..Flow::default() });
    let mut flows = Vec::new();
    while let Ok(at) = producer.publish_gated(&submit) {
        flows.push(at);
    }
    assert_eq!(flows.len(), 13, "one slot reserved, two kept for other messages");
    producer.publish(&Record::LaneReset).expect("kept for this");
    producer.publish(&Record::LaneReset).expect("kept for this");
    producer.publish(&Record::LaneReset).expect_err("full");
    assert_eq!(producer.backlog(), 15);
    for _ in 0..15 {
        consumer.poll().expect("there").expect("no garbage");
    }
    assert!(!consumer.is_waiting(flows[0]), "the resets withdrew them");
    consumer.flush();
    for at in flows.drain(..) {
        producer.release(at);
    }
    while let Ok(at) = producer.publish_gated(&submit) {
        flows.push(at);
    }
    assert_eq!(flows.len(), 13);
    for _ in 0..13 {
        consumer.poll().expect("there").expect("no garbage");
    }
    // A deferred flow in front blocks no later flow.
    for at in flows.iter().rev() {
        let _ = consumer.permit(*at, 1, 1, true).expect("waits");
        producer.release(*at);
    }
    for _ in 0..1000 {
        let at = producer.publish_gated(&submit).expect("room");
        while let Some(incoming) = consumer.poll() {
            let incoming = incoming.expect("no garbage");
            if incoming.at == at {
                let _ = consumer.permit(at, 1, 1, true).expect("waits");
            }
        }
        consumer.flush();
        producer.release(at);
    }
}
