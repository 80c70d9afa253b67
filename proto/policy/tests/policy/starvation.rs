//! No flow waits for ever, and a deadline counts whatever else is known of its flow.
//!
//! Every kind of flow (stage; batch and request unknown, named or announced; deadline absent, met
//! with ease or past; layer) runs beside every kind of permanent load, in virtual time, under `mfs`
//! and `laxity`. The baselines starve some flows by definition: `edf` those without a deadline,
//! `edf_low` those with one, `sjf` the large, `karuna` the large without a deadline, `two_class`
//! and `tent_edf` those of the last class.

use std::collections::VecDeque;

use crate::virtual_time::{Port, UNIT, batch, flow, request_ended};
use laxity_policy::link::{STARVED_AFTER, STARVED_PERMILLE};
use laxity_policy::{
    Action, BatchId, Event, FlowId, FlowSpec, Layer, LinkConfig, PeerId, PolicyKind, RequestId,
    Span, Stage, Time,
};

const POLICIES: [PolicyKind; 2] = [PolicyKind::Laxity, PolicyKind::Mfs];
const CHUNK: u64 = 1000;
const WINDOW: u64 = 2 * CHUNK;
/// Rate of the port in chunks per second.
const SPEED: u64 = 200;
const RATE: u64 = CHUNK * SPEED;
const SECOND: u64 = 1_000_000_000;
/// Number of chunks of the load that wait or are in flight at any time.
const BACKLOG: u64 = 6;
const SUBJECT: u64 = 1_000_000_000;
/// Size of the tested flow in chunks.
const SIZE: u64 = 2;
const PERIOD: Span = Span::from_millis(1);

fn config(policy: PolicyKind) -> LinkConfig {
    LinkConfig {
        policy,
        rate: RATE,
        chunk_bytes: CHUNK,
        window_bytes: WINDOW,
        promotion_period: PERIOD,
        ..LinkConfig::default()
    }
}

/// How a flow names its batch or request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    Named,
    Hinted,
}

const KNOWN: [Known; 3] = [Known::Nothing, Known::Named, Known::Hinted];

#[derive(Clone, Copy, Debug)]
struct Kind {
    stage: Stage,
    batch: Known,
    request: Known,
    /// Deadline in seconds after the flow's arrival, negative for one that has passed.
    deadline_s: Option<i64>,
    layer: u16,
}

impl Kind {
    /// A flow of which nothing else is known.
    const fn lone(stage: Stage, deadline_s: Option<i64>, layer: u16) -> Self {
        Self { stage, batch: Known::Nothing, request: Known::Nothing, deadline_s, layer }
    }
}

/// Returns every kind of flow with these deadlines.
fn kinds(deadlines: &[Option<i64>]) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for stage in Stage::ALL {
        for batch in KNOWN {
            for request in KNOWN {
                for &deadline_s in deadlines {
                    for layer in [0, 7] {
                        kinds.push(Kind { stage, batch, request, deadline_s, layer });
                    }
                }
            }
        }
    }
    kinds
}

/// Returns the kinds of permanent load: flows without a deadline, flows that are in time, and flows
/// that name a batch and a request.
fn loads() -> Vec<Kind> {
    let mut loads = Vec::new();
    for stage in [Stage::KvReuse, Stage::Collective, Stage::P2d] {
        for (batch, request, deadline_s) in [
            (Known::Nothing, Known::Nothing, None),
            (Known::Nothing, Known::Nothing, Some(1)),
            (Known::Named, Known::Nothing, Some(1)),
            (Known::Hinted, Known::Hinted, Some(1)),
        ] {
            loads.push(Kind { stage, batch, request, deadline_s, layer: 0 });
        }
    }
    loads
}

fn deadline(now: Time, deadline_s: Option<i64>) -> Time {
    match deadline_s {
        None => Time::NEVER,
        Some(s) if s < 0 => now - Span(s.unsigned_abs() * SECOND),
        Some(s) => now + Span(s.unsigned_abs() * SECOND),
    }
}

/// Submits a flow of `kind`, whose batch and request have the id `name`.
fn submit(port: &mut Port, kind: Kind, id: u64, name: u64, bytes: u64) {
    let due = deadline(port.now, kind.deadline_s);
    let (batch_id, request) = (BatchId(name), RequestId(id));
    if kind.batch == Known::Hinted {
        port.tell(batch(name, 8, 0.0));
    }
    if kind.request == Known::Hinted {
        port.tell(Event::RequestJoined { batch: batch_id, request, deadline: due, bytes: 0 });
    }
    let unless_unknown = |known, id| if known == Known::Nothing { 0 } else { id };
    port.submit(FlowSpec {
        flow: FlowId(id),
        stage: kind.stage,
        batch: BatchId(unless_unknown(kind.batch, name)),
        request: RequestId(unless_unknown(kind.request, id)),
        layer: Layer(kind.layer),
        bytes,
        deadline: due,
        whole: bytes > WINDOW,
        peer: PeerId(0),
    });
}

/// Returns when a flow of `kind` finishes, in seconds after its arrival, beside `load` in flows of
/// `bytes`. Returns `None` if it waits longer than `limit_s`.
fn finishes_after(
    policy: PolicyKind,
    kind: Kind,
    (load, bytes): (Kind, u64),
    limit_s: f64,
) -> Option<f64> {
    let mut port = Port::new(config(policy));
    // A deadline in the past must not be before the origin of the clock.
    port.now = Time(10 * SECOND);
    let mut id = 0;
    let mut more = |port: &mut Port| {
        id += 1;
        submit(port, load, id, 1 + id % 3, bytes);
    };
    for _ in 0..(BACKLOG * CHUNK / bytes).max(3) {
        more(&mut port);
    }
    port.run_until(port.now);
    let (subject, start) = (FlowId(SUBJECT), port.now);
    submit(&mut port, kind, SUBJECT, 77, SIZE * CHUNK);
    let until = start + Span((limit_s * SECOND as f64) as u64);
    while port.step(until) {
        if port.latest == Some(subject) {
            return Some(port.now.since(start).0 as f64 / SECOND as f64);
        }
        if let Some(done) = port.latest {
            port.tell(request_ended(done.0));
        }
        more(&mut port);
    }
    None
}

/// Returns the bound that `link/starved.rs` documents for one starved flow. The scavenger's share
/// is smaller.
fn bound_s(policy: PolicyKind) -> f64 {
    let starved = STARVED_AFTER.0 as f64 / SECOND as f64;
    let chunks = (SIZE + 2) as f64;
    let permille = config(policy).scavenger_permille.min(STARVED_PERMILLE);
    starved + chunks / (SPEED as f64 * f64::from(permille) / 1000.0)
}

#[test]
fn every_flow_finishes_within_a_bound_under_load_that_never_lets_up() {
    for policy in POLICIES {
        let limit_s = bound_s(policy);
        for load in loads() {
            for kind in kinds(&[None, Some(3), Some(-1)]) {
                let done = finishes_after(policy, kind, (load, CHUNK), limit_s);
                assert!(done.is_some(), "{policy}: {kind:?} starves beside {load:?}");
            }
        }
    }
}

/// Small pieces take up the space of each completion before a chunk fits into it.
#[test]
fn small_pieces_of_others_do_not_keep_a_chunk_out_for_ever() {
    for policy in POLICIES {
        let limit_s = bound_s(policy);
        for load in loads() {
            for stage in Stage::ALL {
                let kind = Kind::lone(stage, None, 7);
                let done = finishes_after(policy, kind, (load, CHUNK / 8), limit_s);
                assert!(done.is_some(), "{policy}: {kind:?} starves beside {load:?}");
            }
        }
    }
}

/// Such pieces follow one another at the port's pace, so the window is never free.
#[test]
fn pieces_that_exceed_the_window_do_not_keep_others_out_for_ever() {
    for policy in POLICIES {
        for load in loads() {
            for kind in kinds(&[None]) {
                let piece = 4 * WINDOW;
                let limit_s = bound_s(policy) + (piece / CHUNK) as f64 / SPEED as f64;
                let done = finishes_after(policy, kind, (load, piece), limit_s);
                assert!(done.is_some(), "{policy}: {kind:?} starves beside {load:?}");
            }
        }
    }
}

/// Bytes on credit need no permit, and would take up the space of each completion.
#[test]
fn collectives_on_credit_do_not_keep_others_out_for_ever() {
    for policy in POLICIES {
        for stage in Stage::ALL {
            let mut port = Port::new(config(policy));
            let (mut wire, step) = (VecDeque::new(), Span::transfer(CHUNK, RATE));
            let level = port.link.credit_level(port.now);
            let until = port.now + Span((bound_s(policy) * SECOND as f64) as u64);
            let mut left = SIZE * CHUNK;
            port.submit(flow(SUBJECT, stage, left as f64 / UNIT as f64));
            while left > 0 {
                assert!(port.now < until, "{policy}: {stage} starves beside credit");
                while port.link.credit_allowance() >= CHUNK {
                    port.link.add_in_flight(port.now, Stage::Collective, PeerId(0), level, CHUNK);
                    wire.push_back(None);
                }
                while let Some(action) = port.link.poll_action(port.now) {
                    if let Action::Permit { flow, bytes, .. } = action {
                        wire.push_back(Some((flow, bytes)));
                    }
                }
                port.now = port.now + step;
                match wire.pop_front() {
                    None => {}
                    Some(None) => port.link.remove_in_flight(port.now, PeerId(0), level, CHUNK),
                    Some(Some((flow, bytes))) => {
                        left -= bytes;
                        let done = Event::BytesCompleted { flow, bytes };
                        port.link.handle(port.now, done);
                    }
                }
            }
        }
    }
}

/// `laxity` orders KV reuse and the last stage by deadline, and collectives among each other. A
/// deadline before those of all others is met, whatever else is known of its flow.
#[test]
fn a_feasible_deadline_is_met_whatever_else_is_known_of_the_flow() {
    for load in loads() {
        // The load's deadlines are later, so serving the tested flow first is feasible.
        let load = Kind { deadline_s: load.deadline_s.map(|_| 20), ..load };
        for kind in kinds(&[Some(1)]) {
            let collectives = [load, kind].map(|kind| kind.stage == Stage::Collective);
            let scavenged = kind.stage.is_scavenged();
            if collectives == [true, false] || scavenged {
                continue; // Collectives come first, scavenged work last, by definition.
            }
            let policy = PolicyKind::Laxity;
            let done = finishes_after(policy, kind, (load, CHUNK), 1.0);
            assert!(done.is_some(), "{kind:?} is late beside {load:?}");
        }
    }
}

/// The example of `laxity.h`: KV reuse with only a deadline, beside a last stage that is in time.
#[test]
fn kv_reuse_with_a_deadline_and_no_batch_is_in_time_beside_the_last_stage() {
    let reuse = Kind::lone(Stage::KvReuse, Some(1), 3);
    let last = Kind::lone(Stage::P2d, Some(2), 3);
    let done = finishes_after(PolicyKind::Laxity, reuse, (last, CHUNK), 1.0);
    assert!(done.is_some_and(|s| s < 0.1), "{done:?}");
}

/// A flow's deadline counts for its batch, even if another flow of the batch has none or a past
/// one, or the batch's requests can't make theirs.
#[test]
fn the_deadline_of_one_flow_counts_for_its_batch_whatever_the_others_have() {
    for others in [None, Some(-1)] {
        for member in [Known::Nothing, Known::Hinted] {
            let mut port = Port::new(config(PolicyKind::Laxity));
            port.now = Time(10 * SECOND);
            let of = |stage, request, deadline_s, layer| Kind {
                stage,
                batch: Known::Named,
                request,
                deadline_s,
                layer,
            };
            for id in 1..=100 {
                let load = of(Stage::P2d, Known::Nothing, Some(5), 0);
                submit(&mut port, load, id, id, CHUNK);
            }
            let other = of(Stage::KvReuse, member, others, 0);
            submit(&mut port, other, 200, 1000, CHUNK);
            let urgent = of(Stage::KvReuse, Known::Nothing, Some(1), 1);
            submit(&mut port, urgent, 201, 1000, CHUNK);
            port.run_out();
            let start = Time(10 * SECOND);
            let seconds = |id| port.finished[&FlowId(id)].since(start).0 as f64 / SECOND as f64;
            let [other, urgent] = [200, 201].map(seconds);
            assert!(urgent < 0.1 && other <= urgent, "{other} {urgent} {others:?} {member:?}");
        }
    }
}

/// Of flows without a deadline and without a known batch the smallest is first, and a larger one
/// waits for those that arrive within 32 times its own time.
#[test]
fn kv_reuse_and_the_last_stage_without_a_deadline_go_by_size_within_a_bound() {
    let of = |stage| Kind::lone(stage, None, 5);
    for (subject, load) in [(Stage::P2d, Stage::KvReuse), (Stage::KvReuse, Stage::P2d)] {
        let after = |bytes| {
            let done = finishes_after(PolicyKind::Laxity, of(subject), (of(load), bytes), 1.0);
            done.unwrap_or_else(|| panic!("{subject} waits for {load}"))
        };
        // The load is smaller. The flow's own time is `SIZE` chunks.
        let overtaken_s = 32.0 * SIZE as f64 / SPEED as f64;
        let smaller = after(CHUNK / 8);
        assert!((0.9 * overtaken_s..1.1 * overtaken_s).contains(&smaller), "{subject}: {smaller}");
        // The flows of the load are larger. Only those that were permitted before go first.
        let larger = after(2 * SIZE * CHUNK);
        assert!(larger < 0.06, "{subject}: {larger}");
    }
}
