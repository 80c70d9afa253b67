//! Tests of the sentences about a flow.

use crate::explain::{ExplainedFlow, FlowWait};
use crate::trace::{SubmitOutcome, TracedFlow};
use crate::{ClientStatus, ClusterStatus, PodStatus, PortStatus, Status};

const NOW_NS: u64 = 1_000_000_000;

fn status() -> Status {
    let pod = PodStatus {
        namespace: "serving".into(),
        name: "decode-0".into(),
        container: "main".into(),
        ..PodStatus::default()
    };
    let client = ClientStatus {
        id: 4,
        pid: 8123,
        uid: 1000,
        name: "decode".into(),
        owed_bytes: 1 << 20,
        pod: Some(pod),
        ..ClientStatus::default()
    };
    let port = PortStatus {
        nic: 1,
        name: "mlx5_0".into(),
        direction: "egress".into(),
        rate_in_force_bytes_per_s: 1_000_000_000,
        ..PortStatus::default()
    };
    Status {
        policy: "laxity".into(),
        clients: vec![client],
        ports: vec![port],
        ..Status::default()
    }
}

fn wait(obstacle: &str, rule: &str) -> FlowWait {
    FlowWait {
        obstacle: obstacle.into(),
        rule: rule.into(),
        level: 4,
        begin_by_ns: NOW_NS + 12_000_000,
        ahead_bytes: 12_000_000,
        ..FlowWait::default()
    }
}

fn flow(wait: Option<FlowWait>) -> ExplainedFlow {
    ExplainedFlow {
        flow: TracedFlow {
            flow: 77,
            pid: 8123,
            nic: 1,
            ingress: false,
            stage: "p2d".into(),
            layer: 12,
            batch: 3,
            request: 7,
            bytes: 16 << 20,
            deadline_ns: NOW_NS + 35_000_000,
            standing: SubmitOutcome::BehindOthers,
            permitted: 256 << 10,
            level: 0,
            in_flight_bytes: 256 << 10,
            window_bytes: 256 << 10,
            ahead: 3,
        },
        client: 4,
        trace_id: "0af7651916cd43dd8448eb211c80319c".into(),
        completed_bytes: 128 << 10,
        since_ns: NOW_NS - 812_000_000,
        wait,
    }
}

fn told(status: &Status, flow: &ExplainedFlow) -> String {
    super::sentences(status, status.clients.first(), NOW_NS, flow).join("\n")
}

#[test]
fn a_waiting_flow_is_told_in_sentences_from_its_owner_to_the_next_step() {
    let moved =
        FlowWait { moved_ns: NOW_NS - 40_000_000, moved_from: 5, ..wait("order", "laxity") };
    let expected = "\
16 MiB of p2d on mlx5_0 egress, request 7, batch 3, layer 12, \
trace 0af7651916cd43dd8448eb211c80319c.
It belongs to `decode` (client 4, process 8123, user 1000, serving/decode-0/main).
256 KiB are permitted and 128 KiB have completed. The last change was 812 ms ago.
It is due in 35 ms; its laxity is 12 ms.
It waits behind 3 flows (11.4 MiB). 256 KiB of a window of 256 KiB are in flight.
Policy laxity gives it P4, by its laxity: the time that is left beyond its work. \
Until 40 ms ago it had P5.
Next step: at the port's rate its last byte leaves in 28.5 ms; if it does not, \
run `laxity doctor`, and `laxity bypass on` to send all traffic unscheduled.";
    assert_eq!(told(&status(), &flow(Some(moved))), expected);
}

#[test]
fn each_obstacle_and_rule_has_its_next_step() {
    for (obstacle, rule, expected) in [
        ("held", "policy", "process 8123 completes nothing"),
        ("held", "policy", "it owes 1 MiB"),
        ("order", "pruned", "`tuning.drop_budget`"),
        ("order", "lost", "late in any case"),
        ("window", "undated", "what others leave"),
        ("peer", "laxity", "are in flight to it"),
        ("peer", "laxity", "none if the peer's port is busy"),
        ("turn", "laxity", "`laxity top`"),
        ("window", "mlu", "its last byte leaves in"),
        ("levitates", "by_magic", "its last byte leaves in"),
    ] {
        let text = told(&status(), &flow(Some(wait(obstacle, rule))));
        assert!(text.contains(expected), "{obstacle} {rule}: {text}");
    }
}

#[test]
fn a_flow_that_will_be_late_and_one_that_is_late_say_so() {
    let mut late = flow(Some(wait("order", "laxity")));
    late.flow.deadline_ns = NOW_NS + 20_000_000;
    late.wait.as_mut().expect("it waits").begin_by_ns = NOW_NS - 5_000_000;
    let text = told(&status(), &late);
    assert!(text.contains("its work had to begin 5 ms ago"), "{text}");
    assert!(text.contains("after its deadline; move load away"), "{text}");
    late.flow.deadline_ns = NOW_NS - 1_000_000;
    assert!(told(&status(), &late).contains("It was due 1 ms ago"));
}

#[test]
fn a_flow_with_all_permits_is_not_laxitys_any_more() {
    let mut sent = flow(None);
    (sent.flow.standing, sent.flow.level) = (SubmitOutcome::AtOnce, 4);
    let text = told(&status(), &sent);
    assert!(text.contains("all permits, at P4") && !text.contains("Next step"), "{text}");
    sent.flow.standing = SubmitOutcome::Observed;
    assert!(told(&status(), &sent).contains("mode observe"));
}

#[test]
fn the_wire_level_the_coordinator_and_starvation_are_named() {
    let mut status = status();
    status.cluster = Some(ClusterStatus { order: "cluster".into(), ..ClusterStatus::default() });
    let mut flow = flow(Some(FlowWait { starved: true, ..wait("window", "rli") }));
    flow.flow.level = 6;
    let text = told(&status, &flow);
    for expected in ["laxity cluster explain 3", "it keeps P6", "over a second"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    status.clients[0].distrusted = true;
    assert!(told(&status, &flow).contains("distrusted"));
    status.clients.clear();
    assert!(told(&status, &flow).contains("process 8123"), "a client that just left");
}
