//! Fuzzes the shared memory of a client with arbitrary words, as records at the daemon's next slot
//! and at any other place.
//!
//! The results are processed as in the daemon. Permits go back into the lane, hints go into the
//! state for reports, and reports go to a coordinator. The coordinator must not refuse any,
//! whatever the client wrote.

use std::fs::File;
use std::os::unix::fs::FileExt;

use laxity_coordinator::cluster::{Cluster, ClusterPolicy, ClusterSettings, Taken};
use laxity_daemon::coordinator::reports::ReportState;
use laxity_policy::{Span, Time};
use laxity_shm::consumer::Wake;
use laxity_shm::layout::{CREDIT_PORTS, Geometry, LINE_BYTES};
use laxity_shm::permit::published;
use laxity_shm::record::{Descriptor, Flow, Hint, Record, Stage, WORDS};
use laxity_shm::served::RegionConsumer;
use laxity_wire::v1::{RefusalReason, Report, from_coordinator::Message};

use crate::Input;
use crate::wire::hello;

const GEOMETRY: Geometry = Geometry { lanes: 2, slots: 16, colour: 0 };
const STEPS_MAX: usize = 256;
const CREDIT: u64 = 1 << 20;
const OPCODES: [u64; 14] = [1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 23];

struct Client {
    served: RegionConsumer,
    file: File,
    slot: u16,
    sequence: u64,
}

impl Client {
    fn new() -> Self {
        let mut served = RegionConsumer::new(GEOMETRY, false).expect("memory");
        let memfd = served.region().memfd().try_clone_to_owned();
        served.header().set_claimed(0, true);
        served.refresh();
        let consumer = served.consumer(0).expect("claimed");
        consumer.give_credit(0, CREDIT);
        Self { file: File::from(memfd.expect("descriptors")), served, slot: 0, sequence: 1 }
    }

    fn publish(&mut self, words: [u64; WORDS]) {
        let mut bytes = Vec::with_capacity(LINE_BYTES);
        for word in words.iter().chain(&[0, published(self.sequence)]) {
            bytes.extend(word.to_le_bytes());
        }
        self.file.write_all_at(&bytes, place(self.slot)).expect("writes");
    }

    fn drain(&mut self, grant: bool) -> Vec<Record> {
        let (mut records, mut flows) = (Vec::new(), Vec::new());
        let file = &self.file;
        let (mut slot, mut sequence) = (self.slot, self.sequence);
        self.served.sweep(64, |lane, consumer, incoming| {
            let Ok(incoming) = incoming else {
                assert!(consumer.refused().is_some());
                return;
            };
            let again = Record::decode(&incoming.record.encode());
            assert_eq!(again, Ok(incoming.record), "what is read can be written");
            if lane == 0 {
                sequence = incoming.at.tag + 1;
                slot = next_of(file, incoming.at.slot);
            }
            if let Record::Submit(_) = incoming.record {
                assert!(consumer.is_waiting(incoming.at));
                flows.push((lane, incoming.at));
            }
            records.push(incoming.record);
        });
        (self.slot, self.sequence) = (slot, sequence);
        for (lane, at) in flows {
            let consumer = self.served.consumer(lane).expect("seen");
            if grant
                && consumer.is_waiting(at)
                && consumer.permit(at, 4096, 1, true) == Ok(Wake::Needed)
            {
                consumer.wake();
            }
        }
        for (_, consumer) in self.served.consumers() {
            for port in 0..CREDIT_PORTS {
                let (permitted, spent) = consumer.credit(port);
                assert!(spent <= permitted, "credit is never overdrawn");
            }
        }
        assert!(self.served.claimed_lanes() <= usize::from(GEOMETRY.lanes));
        records
    }
}

/// Returns the place of a slot of lane 0 in the file.
fn place(slot: u16) -> u64 {
    let header = laxity_shm::layout::LANE_HEADER_LINES * LINE_BYTES;
    (GEOMETRY.lane_offset(0) + header + usize::from(slot) * LINE_BYTES) as u64
}

fn next_of(file: &File, slot: u16) -> u16 {
    let mut bytes = [0; 2];
    file.read_exact_at(&mut bytes, place(slot) + 40).expect("reads");
    u16::from_le_bytes(bytes) % GEOMETRY.slots
}

struct Told {
    ledger: ReportState,
    cluster: Cluster,
    id: laxity_coordinator::cluster::HostId,
    stream: u64,
    sequence: u64,
    now: Time,
}

impl Told {
    fn new() -> Self {
        let now = Time(1 << 40);
        let settings = ClusterSettings::default();
        let mut cluster =
            Cluster::new(now, settings, ClusterPolicy::default(), 1).expect("defaults are valid");
        let (id, stream) = cluster.attend(now, &hello("a")).expect("let in");
        let mut ledger = ReportState::new(0);
        ledger.attend();
        Self { ledger, cluster, id, stream, sequence: 0, now }
    }

    fn note(&mut self, record: Record) {
        let due = |ns| if ns == 0 { Time::NEVER } else { Time(ns) };
        match record {
            Record::Hint(hint) => match hint {
                Hint::BatchBegin { batch, layers, layer_time_ns } => {
                    self.ledger.batch_began(batch, layers, Span(layer_time_ns));
                }
                Hint::RequestJoin { batch, request, deadline_ns, bytes } => {
                    self.ledger.joined(batch, request, due(deadline_ns), bytes);
                }
                Hint::RequestEnd { request } => self.ledger.ended(request),
                Hint::BatchQueued { batch, ahead } => self.ledger.queued(batch, ahead),
                Hint::LayerBegin { batch, layer } => self.ledger.layer(self.now, batch, layer),
                Hint::BatchEnd { batch } => self.ledger.batch_ended(batch),
                Hint::ComputeEnd { .. } | Hint::RequestTrace { .. } => {}
            },
            Record::SubmitOnCredit { flow, .. } => {
                self.ledger.completed(flow.request, 0, flow.bytes);
            }
            _ => {}
        }
    }

    fn tell(&mut self) {
        while let Some(dispatch) = self.ledger.next_report(self.now, 16) {
            self.sequence += 1;
            let report = Report {
                sequence: self.sequence,
                snapshot: dispatch.piece as i32,
                events: dispatch.events,
            };
            let taken = self.cluster.report(self.now, self.id, self.stream, report);
            assert_eq!(taken, Ok(()));
        }
        self.now = self.now + Span::from_millis(5);
        while self.cluster.next_deadline().is_some_and(|at| at <= self.now) {
            self.cluster.poll(self.now);
        }
        let Taken::Frames(frames) = self.cluster.take(self.id, self.stream) else {
            panic!("nobody replaced it");
        };
        for frame in frames {
            if let Some(Message::Refusal(refusal)) = frame.message {
                assert_eq!(refusal.reason(), RefusalReason::Limit, "{}", refusal.detail);
            }
        }
    }
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut client = Client::new();
    let mut told = Told::new();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let step = input.byte();
        if step & 7 == 0 {
            let at = u64::from(input.short()) * 8 % (client.served.region().bytes() as u64 - 8);
            client.file.write_all_at(&input.word().to_le_bytes(), at).expect("writes");
        } else {
            let mut words = [0; WORDS];
            // Small numbers are more often equal ids.
            let small = step & 8 != 0;
            for word in &mut words {
                *word = if small { u64::from(input.byte()) } else { input.word() };
            }
            if step & 7 != 1 {
                // A valid opcode and next slot let more inputs through.
                let next = u64::from(input.byte()) % u64::from(GEOMETRY.slots);
                let opcode = OPCODES[usize::from(step >> 4) % OPCODES.len()];
                words[WORDS - 1] = opcode << 16 | next;
            }
            if let Ok(record) = Record::decode(&Descriptor(words)) {
                assert_eq!(record.encode(), Descriptor(words).with_next(0));
            }
            client.publish(words);
        }
        for record in client.drain(step & 0x80 == 0) {
            told.note(record);
        }
        told.tell();
    }
    assert_eq!(told.cluster.audit(), Ok(()));
    told.ledger.restate();
    told.tell();
}

pub fn seeds() -> Vec<Vec<u8>> {
    let flow =
        Flow { stage: Stage::Collective, bytes: 4096, batch: 1, request: 11, ..Flow::default() };
    let join = |request| {
        Record::Hint(Hint::RequestJoin {
            batch: 1,
            request,
            deadline_ns: (1 << 40) + 500_000_000,
            bytes: 1 << 20,
        })
    };
    let story = [
        Record::Hint(Hint::BatchBegin { batch: 1, layers: 8, layer_time_ns: 1_000_000 }),
        join(11),
        join(12),
        Record::Hint(Hint::BatchBegin { batch: 2, layers: 8, layer_time_ns: 0 }),
        Record::Hint(Hint::BatchQueued { batch: 2, ahead: 1 }),
        Record::Hint(Hint::LayerBegin { batch: 1, layer: 4 }),
        Record::SubmitOnCredit { flow, observed: false },
        Record::Submit(flow),
        Record::Cancelled { tag: 8, permitted: 9 },
        Record::Completed { tag: 7, bytes: 64 },
        Record::Hint(Hint::RequestEnd { request: 11 }),
        Record::Hint(Hint::ComputeEnd { batch: 1 }),
        Record::Hint(Hint::BatchEnd { batch: 1 }),
        Record::LaneReset,
    ];
    let written = |records: &[Record]| -> Vec<u8> {
        let mut seed = Vec::new();
        for (index, record) in records.iter().enumerate() {
            seed.push(1);
            let next = (index + 1) % usize::from(GEOMETRY.slots);
            for word in record.encode().with_next(next as u16).0 {
                seed.extend(word.to_le_bytes());
            }
        }
        seed
    };
    let mut seeds: Vec<Vec<u8>> = story.iter().map(|record| written(&[*record])).collect();
    seeds.push(written(&story));
    seeds.push(written(&[story, story].concat()));
    let mut scribbled = written(&story[..4]);
    scribbled.extend([0, 8, 2, 255, 255, 255, 255, 0, 0, 0, 0]);
    scribbled.extend(written(&story[4..]));
    seeds.push(scribbled);
    seeds
}
