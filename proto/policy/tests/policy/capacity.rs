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
fn who_can_be_in_time_follows_from_the_configured_rate_not_from_the_rate_in_force() {
    // 40 kB due at 100 µs go before 8 kB due at 200 µs if the rate is 1 byte per ns. If a quarter
    // of it is configured they can't be in time, and go behind.
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
    changed.set_capacity(rate, window);
    assert_eq!((changed.config().rate, changed.config().window_bytes), (rate, window));
    assert_eq!(land(filled(fast)), [1, 2]);
    assert_eq!(land(filled(slow)), [2, 1]);
    assert_eq!(land(changed), [1, 2], "others' bytes make nobody hopeless");
}

#[test]
fn the_window_in_force_bounds_what_is_in_flight() {
    let config = LinkConfig { overcommit: 1, ..config(PolicyKind::Laxity) };
    let rate = config.rate;
    let mut link = Link::new(config).expect("valid");
    for flow in 1..=4 {
        link.handle(NOW, Event::FlowArrived(last_stage(flow, WINDOW, 1_000_000_000)));
    }
    for (rate, window) in [(rate / 4, WINDOW / 2), (rate, WINDOW)] {
        link.set_capacity(rate, window);
        while let Some(action) = link.poll_action(NOW) {
            assert!(matches!(action, Action::Permit { .. }), "{action:?}");
        }
        assert!((window - CHUNK + 1..=window).contains(&link.in_flight_bytes()), "{window}");
    }
}

#[test]
fn no_capacity_is_too_small_to_send() {
    for policy in PolicyKind::ALL {
        let mut link = Link::new(config(policy)).expect("valid");
        link.set_capacity(0, 0);
        assert_eq!((link.config().rate, link.config().window_bytes), (1, CHUNK), "{policy}");
        for flow in 1..20 {
            let spec = FlowSpec::anonymous(FlowId(flow), Stage::KvReuse, 3 * CHUNK);
            link.handle(Time::ZERO, Event::FlowArrived(spec));
        }
        let now = Time::ZERO + Span::from_millis(1);
        assert_eq!(order(link, now).len(), 19, "{policy}");
    }
}
