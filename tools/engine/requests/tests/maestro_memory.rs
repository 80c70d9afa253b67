//! Tests of Algorithm 2 on a node (Maestro §III-C). Weights that sleep take time to leave. A stage
//! that may use their memory waits until they have left, or stops their transfer.

use laxity_requests::maestro::memory::Action;
use laxity_requests::maestro::node::{Ask, Node};
use laxity_requests::workflow::{Class, ModelId, ModelSpec, NodeSpec, Readiness, StageId};
use laxity_requests::{Span, Time};

const GB: u64 = 1_000_000_000;
const S: u64 = 1_000_000_000;
const LARGE: ModelId = ModelId(0);
const SMALL: ModelId = ModelId(1);

fn table() -> Vec<ModelSpec> {
    [25, 5]
        .map(|weights| ModelSpec {
            weights: weights * GB,
            context: GB / 4,
            kv_per_token: 1,
            context_start: S,
            ..ModelSpec::default()
        })
        .to_vec()
}

fn ask(stage: u64, model: ModelId, class: Class, gigabytes: u64) -> Ask {
    Ask {
        stage: StageId(stage),
        model,
        class,
        kv: gigabytes * GB,
        execution: Span(S),
        highest: match class {
            Class::Interactive => Action::SwapOut,
            Class::Batch => Action::Evict,
        },
        interrupt: 0,
    }
}

/// Returns a node on which a stage of each of these models runs, with 1 GB.
fn loaded(spec: NodeSpec, table: Vec<ModelSpec>, models: &[ModelId]) -> Node {
    let mut node = Node::new(spec, table.into());
    for (stage, model) in (1..).zip(models) {
        let now = Time(stage * 20 * S);
        node.place(&ask(stage, *model, Class::Interactive, 1), now).expect("there is room");
        node.activated(*model);
        assert_eq!(node.start(now), Some((StageId(stage), GB)));
    }
    node
}

/// Returns a node with 40 GB, of which two models use 30.5 GB. A stage of the small one runs, with
/// 1 GB.
fn node() -> Node {
    let spec = NodeSpec {
        gpu: 40 * GB,
        host: 100 * GB,
        disk: 100 * GB,
        host_rate: 25 * GB,
        disk_rate: 5 * GB,
        remote_rate: GB,
        slots: 8,
        ..NodeSpec::default()
    };
    let mut node = loaded(spec, table(), &[LARGE, SMALL]);
    node.remove(StageId(1));
    assert_eq!(node.headroom(), 8 * GB + GB / 2);
    node
}

const NOW: Time = Time(100 * S);

#[test]
fn who_is_promised_memory_of_weights_that_leave_starts_when_they_have_left() {
    let mut node = node();
    let estimate = node.estimate(&ask(3, SMALL, Class::Batch, 10), NOW);
    assert_eq!(estimate.expect("possible").activation, Span(S));
    let done = node.place(&ask(3, SMALL, Class::Batch, 10), NOW).expect("the large one can sleep");
    assert_eq!(done.moves, [(LARGE, Readiness::Sleeping)]);
    assert_eq!(done.leaving, [(LARGE, Span(S))]);
    assert_eq!(node.start(NOW), None);
    assert!(node.is_safe());
    // An event of an earlier transition has no effect.
    node.slept(LARGE, Time(NOW.0 + S / 2));
    assert_eq!(node.start(NOW), None);
    node.slept(LARGE, Time(NOW.0 + S));
    let started = node.start(Time(NOW.0 + S));
    assert_eq!(started, Some((StageId(3), 10 * GB)));
    assert!(node.is_safe());
}

#[test]
fn an_interactive_stage_stops_a_transition_that_it_would_have_to_wait_for_and_a_batch_stage_waits()
{
    let mut node = node();
    node.place(&ask(3, SMALL, Class::Batch, 10), NOW).expect("the large one can sleep");
    // Without the large model 33.5 GB are free later. The stage may use 10 GB of them, so 23.5 GB
    // are left.
    assert_eq!(node.headroom(), 0);
    let batch = ask(4, SMALL, Class::Batch, 12);
    assert!(node.estimate(&batch, NOW).is_none());
    let urgent = ask(5, SMALL, Class::Interactive, 12);
    let estimate = node.estimate(&urgent, NOW).expect("possible");
    // The cost is a restore from disk (5 s) with a new context (1 s). No stage is interrupted.
    assert_eq!(estimate.degradation, S + 6 * S);
    let done = node.place(&urgent, NOW).expect("possible");
    assert_eq!(done.stopped, [LARGE]);
    assert_eq!(done.moves.last(), Some(&(LARGE, Readiness::Disk)));
    assert!(done.swapped.is_empty() && done.aborted.is_empty());
    // The memory is free at once for both stages.
    assert_eq!(node.start(NOW), Some((StageId(3), 10 * GB)));
    assert_eq!(node.start(NOW), Some((StageId(5), 12 * GB)));
    assert!(node.is_safe());
}

#[test]
fn a_stage_that_grows_into_memory_of_weights_that_leave_goes_on_when_they_have_left() {
    let mut node = node();
    let (kv, done) = node.grow(StageId(2), (15 * GB, 15 * GB), 0, NOW);
    assert_eq!((kv, done.later), (15 * GB, true));
    assert_eq!(done.leaving, [(LARGE, Span(S))]);
    assert!(node.is_safe() && node.grown().is_empty());
    node.slept(LARGE, Time(NOW.0 + S));
    assert_eq!(node.grown(), [(StageId(2), 15 * GB)]);
    assert!(node.grown().is_empty());
}

#[test]
fn a_model_that_is_wanted_again_while_it_leaves_is_counted_once() {
    let mut node = node();
    node.place(&ask(3, SMALL, Class::Batch, 10), NOW).expect("the large one can sleep");
    node.remove(StageId(3));
    let done = node.place(&ask(6, LARGE, Class::Interactive, 1), NOW).expect("there is room again");
    assert!(done.activate.is_some());
    assert!(node.is_safe());
    // The announced end of the transition has no effect.
    node.slept(LARGE, Time(NOW.0 + S));
    assert!(node.is_safe());
    assert_eq!(node.headroom(), 7 * GB + GB / 2);
}

/// Weights that leave for a stage go behind those that already leave, and the wait counts once.
#[test]
fn an_estimate_says_when_what_has_to_leave_has_left() {
    const MIDDLE: ModelId = ModelId(2);
    let (mut table, spec) = (table(), node().spec);
    table.push(ModelSpec { weights: 6 * GB, ..table[1] });
    let mut node = loaded(spec, table, &[LARGE, MIDDLE, SMALL]);
    node.remove(StageId(1));
    node.remove(StageId(2));
    // 40 GB less 36 GB of weights, 0.75 GB of contexts and 1 GB of KV are left. The middle model
    // leaves for the first stage, the large one for the second.
    for (stage, gigabytes, model, takes) in [(4, 4, MIDDLE, S * 6 / 25), (5, 10, LARGE, S)] {
        let asked = ask(stage, SMALL, Class::Batch, gigabytes);
        let estimate = node.estimate(&asked, NOW).expect("possible");
        let done = node.place(&asked, NOW).expect("possible");
        let [(left, after)] = done.leaving[..] else {
            panic!("one leaves: {done:?}");
        };
        assert_eq!((left, estimate.activation), (model, after));
        assert!(after >= Span(takes));
    }
}
