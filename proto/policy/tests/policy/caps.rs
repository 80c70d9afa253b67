//! A port with more waiting batches and requests than its batch table can hold.

use crate::virtual_time::{CHUNK, at, flow, fluid};
use laxity_policy::link::{BATCHES_MAX, REQUESTS_MAX};
use laxity_policy::{Action, BatchId, Event, FlowSpec, Link, LinkConfig, RequestId, Stage, Time};

#[test]
fn more_waiting_batches_than_can_be_known_are_all_served() {
    let mut link = Link::new(LinkConfig { window_bytes: CHUNK, ..fluid() }).expect("valid");
    let total = REQUESTS_MAX as u64 + 5000;
    for id in 1..=total {
        let spec = FlowSpec {
            batch: BatchId(id),
            request: RequestId(id),
            bytes: CHUNK,
            deadline: at(1e9),
            ..flow(id, Stage::P2d, 0.0)
        };
        link.handle(Time(id), Event::FlowArrived(spec));
    }
    let snapshot = link.snapshot();
    let known = (snapshot.batches, snapshot.requests);
    assert_eq!(known, (BATCHES_MAX, REQUESTS_MAX));
    assert_eq!(link.waiting_flows() as u64, total);
    let mut permitted = 0;
    while let Some(action) = link.poll_action(Time(total)) {
        if let Action::Permit { flow, bytes, .. } = action {
            permitted += 1;
            link.handle(Time(total), Event::BytesCompleted { flow, bytes });
        }
    }
    assert_eq!(permitted, total);
    let snapshot = link.snapshot();
    assert_eq!((snapshot.batches, snapshot.requests), (0, 0));
}
