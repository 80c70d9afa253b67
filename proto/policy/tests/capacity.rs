//! A port whose rate and window change while flows wait.

mod random_events;

use laxity_policy::{
    Action, Event, FlowId, FlowSpec, Link, LinkConfig, PolicyKind, RequestId, Span, Stage, Time,
};
use random_events::{CHUNK, WINDOW, config};

fn last_stage(flow: u64, bytes: u64, deadline: u64) -> FlowSpec {
    FlowSpec {
        request: RequestId(flow),
        deadline: Time(deadline),
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
fn a_lower_rate_changes_who_is_urgent_among_flows_that_wait() {
    // 40 kB due at 280 µs have to begin after 8 kB due at 200 µs if the rate is 1 byte per ns, and
    // before them if it is a quarter.
    let flows = [last_stage(1, 8_000, 200_000), last_stage(2, 40_000, 280_000)];
    let filled = |config: LinkConfig| {
        let mut link = Link::new(config).expect("valid");
        let blocker = FlowSpec::anonymous(FlowId(9), Stage::Collective, WINDOW);
        link.add_in_flight(
            Time::ZERO,
            blocker.stage,
            blocker.peer,
            link.credit_level(Time::ZERO),
            WINDOW,
        );
        for spec in flows {
            link.handle(Time::ZERO, Event::FlowArrived(spec));
        }
        link
    };
    let fast = LinkConfig { overcommit: 1, ..config(PolicyKind::Laxity) };
    let (rate, window) = (fast.rate / 4, WINDOW / 2);
    let slow = LinkConfig { rate, window_bytes: window, ..fast.clone() };
    let land = |mut link: Link| {
        let level = link.credit_level(Time::ZERO);
        link.remove_in_flight(Time::ZERO, laxity_policy::PeerId(0), level, WINDOW);
        order(link, Time::ZERO)
    };
    let mut changed = filled(fast.clone());
    changed.set_capacity(Time::ZERO, rate, window);
    assert_eq!((changed.config().rate, changed.config().window_bytes), (rate, window));
    assert_eq!(land(filled(fast.clone())), [1, 2]);
    assert_eq!(land(filled(slow)), [2, 1]);
    assert_eq!(land(changed), [2, 1], "as if the port had always been that slow");
    let mut back = filled(fast);
    back.set_capacity(Time::ZERO, rate, window);
    back.set_capacity(Time::ZERO, 1_000_000_000, WINDOW);
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
