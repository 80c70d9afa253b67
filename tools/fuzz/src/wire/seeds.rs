//! Inputs that reach much of the code between daemons and coordinator.

use laxity_wire::v1::{
    self, Ack, BatchArrived, Epoch, Event, FetchWanted, FromCoordinator, FromDaemon, Nack, Order,
    PortBytes, PortLoad, Rank, Report, RequestLoad, SnapshotPiece, event::Event as Kind,
    from_coordinator, from_daemon::Message,
};
use prost::Message as _;

use super::{HAPPEN, OPERATE, ORDER, READ, REPORT, SAY, TERM, WAIT, address, hello};
use crate::input::put_packet;

fn put(seed: &mut Vec<u8>, host: u8, what: u8, packet: &[u8]) {
    seed.push(host | what << 2);
    put_packet(seed, packet);
}

fn request(request: u64, ms: i64, bytes: u64) -> RequestLoad {
    RequestLoad {
        request,
        remaining_ns: Some(ms * 1_000_000),
        loads: vec![PortBytes { port: 0, bytes }],
    }
}

fn arrivals() -> Vec<(u8, Kind)> {
    let arrived = |batch, requests| {
        Kind::BatchArrived(BatchArrived {
            batch,
            compute_ns: 5_000_000,
            requests,
            queued_behind: Some(1),
            started: batch == 3,
            layers: 8,
        })
    };
    vec![
        (0, arrived(1, vec![request(11, 500, 1 << 20), request(12, 90, 1 << 30)])),
        (1, arrived(1, vec![request(11, 500, 1 << 10)])),
        (1, arrived(2, vec![request(21, 40, 1 << 20)])),
        (2, arrived(3, Vec::new())),
        (0, arrived(3, vec![request(12, 90, 7)])),
    ]
}

fn progress() -> Vec<(u8, Kind)> {
    let wanted = |fetch, request| {
        let victim_address = address("h0");
        Kind::FetchWanted(FetchWanted { fetch, batch: 1, request, victim_address, bytes: 4096 })
    };
    vec![
        (0, Kind::BatchStarted(v1::BatchStarted { batch: 1 })),
        (1, Kind::BatchProgress(v1::BatchProgress { batch: 1, layer: 3 })),
        (0, Kind::BytesCompleted(v1::BytesCompleted { request: 11, port: 0, bytes: 1000 })),
        (1, wanted(5, 11)),
        (1, wanted(6, 0)),
        (
            0,
            Kind::PortLoad(PortLoad {
                port: 0,
                rate_bytes_per_s: Some(1 << 20),
                queued_bytes: 9,
                load_permille: 900,
                queued_level_bytes: vec![1, 2],
                queued_stage_bytes: vec![3],
                completed_flows: 4,
                missed_flows: 1,
                foreign_bytes_per_s: 5,
            }),
        ),
        (1, Kind::FetchFinished(v1::FetchFinished { fetch: 5 })),
        (0, Kind::RequestEnded(v1::RequestEnded { request: 11 })),
        (0, Kind::BatchFinished(v1::BatchFinished { batch: 1 })),
    ]
}

pub fn seeds() -> Vec<Vec<u8>> {
    let wrapped = |kind: &Kind| Event { event: Some(kind.clone()) };
    let story = [arrivals(), progress()].concat();
    let mut all = Vec::new();
    let mut seeds = Vec::new();
    for (host, kind) in &story {
        let mut seed = Vec::new();
        put(&mut seed, *host, HAPPEN, &wrapped(kind).encode_to_vec());
        all.extend(&seed);
        put(&mut all, 0, WAIT, &5_u16.to_le_bytes());
        put(&mut all, *host, READ, &[]);
        seeds.push(seed);
    }
    for what in 0..8 {
        put(&mut all, 1, OPERATE, &[what]);
        put(&mut all, 1, WAIT, &50_u16.to_le_bytes());
    }
    seeds.push(all.clone());
    let events: Vec<Event> = story.iter().map(|(_, kind)| wrapped(kind)).collect();
    for piece in [SnapshotPiece::Unspecified, SnapshotPiece::Part, SnapshotPiece::End] {
        seeds.push(reports(piece, &events));
    }
    let mut seed = all;
    for message in messages() {
        let message = FromDaemon { message: Some(message) };
        put(&mut seed, 3, SAY, &message.encode_to_vec());
    }
    seeds.push(seed);
    seeds.push(orders());
    seeds
}

fn reports(piece: SnapshotPiece, events: &[Event]) -> Vec<u8> {
    let report = Report { sequence: 2, snapshot: piece as i32, events: events.to_vec() };
    let mut seed = Vec::new();
    put(&mut seed, 0, REPORT, &report.encode_to_vec());
    put(&mut seed, 1, REPORT, &report.encode_to_vec());
    put(&mut seed, 0, WAIT, &9_u16.to_le_bytes());
    put(&mut seed, 0, READ, &[]);
    seed
}

const fn epoch(sequence: u64) -> Epoch {
    Epoch { term: TERM, sequence }
}

fn messages() -> [Message; 5] {
    [
        Message::Hello(hello("h3")),
        Message::Ack(Ack { epoch: Some(epoch(1)) }),
        Message::Nack(Nack { epoch: Some(epoch(1)), reason: 2, detail: "no".into() }),
        Message::Resync(v1::Resync { applied: Some(epoch(3)) }),
        Message::Heartbeat(v1::Heartbeat {}),
    ]
}

fn orders() -> Vec<u8> {
    let order = |sequence, base, piece, last| Order {
        epoch: Some(epoch(sequence)),
        base,
        piece,
        last,
        ranks: vec![Rank { batch: sequence, sort_key: 9 }],
        unranked: vec![1],
        pruned: vec![v1::Pruned { request: 11, ..v1::Pruned::default() }],
        unpruned: vec![12],
        considered_report: 3,
    };
    let mut seed = Vec::new();
    let orders = [
        order(1, None, 0, false),
        order(1, None, 1, true),
        order(2, Some(epoch(1)), 0, true),
        order(2, Some(epoch(1)), 0, true),
        order(5, Some(epoch(3)), 0, true),
        order(6, None, 0, true),
    ];
    for order in orders {
        let message = FromCoordinator { message: Some(from_coordinator::Message::Order(order)) };
        put(&mut seed, 0, ORDER, &message.encode_to_vec());
    }
    seed
}
