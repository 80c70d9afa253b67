//! A port whose rate and window change while flows wait.

use crate::random_events::{CHUNK, WINDOW, config};
use laxity_policy::{
    Action, Event, FlowId, FlowSpec, Link, LinkConfig, PolicyKind, RequestId, Span, Stage, Time,
};

/// When the flows of a test arrive.
const NOW: Time = Time(1_000_000);

fn last_stage(flow: u64, bytes: u64, due_in: u64) -> FlowSpec {
    FlowSpec {
        request: RequestId(flow),
        deadline: NOW + Span(due_in),
        ..FlowSpec::anonymous(FlowId(flow), Stage::P2d, bytes)
    }
}

/// Returns the flows in the order of their first permits.
fn order(mut link: Link, now: Time) -> Vec<u64> {
    let mut seen = Vec::new();
    while link.waiting_flows() > 0 {
        let Some(action) = link.poll_action(now) else { panic!("idle with work waiting") };
        if let Action::Permit { flow, bytes, .. } = action {
            link.handle(now, Event::BytesCompleted { flow, bytes });
            if !seen.contains(&flow.0) {
                seen.push(flow.0);
            }
        }
    }
    seen
}

#[test]
fn a_lower_rate_changes_who_can_be_in_time_among_flows_that_wait() {
    // 40 kB due at 100 µs go before 8 kB due at 200 µs if the rate is 1 byte per ns. At a quarter
    // of it they can't be in time, and go behind.
    let flows = [last_stage(1, 40_000, 100_000), last_stage(2, 8_000, 200_000)];
    let filled = |config: LinkConfig| {
        let mut link = Link::new(config).expect("valid");
        let blocker = FlowSpec::anonymous(FlowId(9), Stage::Collective, WINDOW);
        link.add_in_flight(NOW, blocker.stage, blocker.peer, link.credit_level(NOW), WINDOW);
        for spec in flows {
            link.handle(NOW, Event::FlowArrived(spec));
        }
        link
    };
    let fast = LinkConfig { overcommit: 1, ..config(PolicyKind::Laxity) };
    let (rate, window) = (fast.rate / 4, WINDOW / 2);
    let slow = LinkConfig { rate, window_bytes: window, ..fast.clone() };
    let land = |mut link: Link| {
        let level = link.credit_level(NOW);
        link.remove_in_flight(NOW, laxity_policy::PeerId(0), level, WINDOW);
        order(link, NOW)
    };
    let mut changed = filled(fast.clone());
    changed.set_capacity(NOW, rate, window);
    assert_eq!((changed.config().rate, changed.config().window_bytes), (rate, window));
    assert_eq!(land(filled(fast.clone())), [1, 2]);
    assert_eq!(land(filled(slow)), [2, 1]);
    assert_eq!(land(changed), [2, 1], "as if the port had always been that slow");
    let mut back = filled(fast);
    back.set_capacity(NOW, rate, window);
    back.set_capacity(NOW, 1_000_000_000, WINDOW);
    assert_eq!(land(back), [1, 2]);
}

#[test]
fn no_capacity_is_too_small_to_send() {
    for policy in PolicyKind::ALL {
        let mut link = Link::new(config(policy)).expect("valid");
        link.set_capacity(Time::ZERO, 0, 0);
        assert_eq!((link.config().rate, link.config().window_bytes), (1, CHUNK), "{policy}");
        for flow in 1..20 {
            let spec = FlowSpec::anonymous(FlowId(flow), Stage::KvReuse, 3 * CHUNK);
            link.handle(Time::ZERO, Event::FlowArrived(spec));
        }
        let now = Time::ZERO + Span::from_millis(1);
        assert_eq!(order(link, now).len(), 19, "{policy}");
    }
}
