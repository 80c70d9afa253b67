//! The edge cases of a port: queued batches, layer boundaries, credit, unknown ids, and unlimited
//! hints.

use crate::virtual_time::{
    CHUNK, Port, TICK, at, batch, batch_ended, cancelled, completed, compute_finished, flow, fluid,
    held, layer_began, queued, released, request_ended,
};
use laxity_policy::link::{BATCHES_MAX, FOLLOWERS_MAX, REQUESTS_MAX};
use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, Link, LinkConfig, PeerId,
    PolicyKind, RequestId, Span, Stage, Time,
};

fn ms(n: u64) -> Time {
    Time(n * 1_000_000)
}

/// Takes all actions. Returns the flow, the bytes and the last flag of each permit.
fn permits(link: &mut Link, now: Time) -> Vec<(u64, u64, bool)> {
    std::iter::from_fn(|| link.poll_action(now))
        .filter_map(|action| match action {
            Action::Permit { flow, bytes, last, .. } => Some((flow.0, bytes, last)),
            Action::Moved { .. } => None,
        })
        .collect()
}

fn permitted(link: &mut Link, now: Time) -> Vec<u64> {
    permits(link, now).into_iter().map(|(flow, ..)| flow).collect()
}

fn mfs() -> Port {
    let mut port = crate::virtual_time::port(PolicyKind::Mfs);
    // A chunk in flight fills the window, so that later flows wait.
    port.submit(flow(1000, Stage::Collective, 100.0));
    port.poll();
    port
}

fn reuse(id: u64, batch: u64, layer: u16) -> FlowSpec {
    FlowSpec { batch: BatchId(batch), layer: Layer(layer), ..flow(id, Stage::KvReuse, 1.0) }
}

/// Returns the levels of the waiting stage-1 flows, highest first.
fn levels(port: &Port) -> Vec<u8> {
    let snapshot = port.link.snapshot();
    let mut levels = Vec::new();
    for level in 1..=Level::COUNT_MAX {
        let mut flows = snapshot.waiting_by_level[Level(level).row()].flows;
        if level == 2 {
            flows -= 1; // the collective that keeps the wire busy
        }
        levels.extend(core::iter::repeat_n(level, flows as usize));
    }
    levels
}

#[test]
fn stage_1_climbs_at_layer_boundaries_as_its_layer_draws_near() {
    let mut port = mfs();
    port.tell(batch(1, 32, 1.0));
    for (id, layer) in [(1, 0), (2, 1), (3, 4), (4, 30)] {
        port.submit(reuse(id, 1, layer));
    }
    assert_eq!(levels(&port), [2, 3, 6, 8]);
    port.tell(layer_began(1, 3));
    assert_eq!(levels(&port), [2, 2, 3, 8]);
    assert_eq!(port.link.snapshot().promotions, 2);
    port.tell(layer_began(1, 1)); // a boundary that was overtaken changes nothing
    assert_eq!(levels(&port), [2, 2, 3, 8]);
    port.tell(layer_began(1, 29));
    assert_eq!(levels(&port), [2, 2, 2, 3]);
}

#[test]
fn a_batch_that_is_put_behind_another_late_lowers_nothing() {
    let mut port = mfs();
    port.tell(batch(1, 8, 1.0));
    port.tell(batch(2, 8, 1.0));
    port.submit(reuse(1, 2, 1));
    assert_eq!(levels(&port), [3]);
    port.tell(queued(2, 1));
    assert_eq!(levels(&port), [3]);
}

#[test]
fn batches_queued_in_a_ring_or_behind_themselves_are_survived() {
    let mut port = mfs();
    for id in 1..=4 {
        port.tell(batch(id, 8, 1.0));
        port.submit(reuse(id, id, 2));
    }
    for (b, ahead) in [(1, 2), (2, 3), (3, 1), (4, 4), (3, 4), (4, 1)] {
        port.tell(queued(b, ahead));
        port.tell(layer_began(b, 1));
        port.poll();
    }
    port.run_out();
}

/// Returns a last-stage flow that needs `Q_1` of the port from `crossing` on.
fn urgent_from(id: u64, batch: u64, crossing: f64) -> FlowSpec {
    // size / (left · B) = 1/8: one unit needs eight ticks.
    FlowSpec {
        batch: BatchId(batch),
        request: RequestId(id),
        deadline: at(crossing + 8.0),
        ..flow(id, Stage::P2d, 1.0)
    }
}

fn moved(port: &Port, id: u64) -> Vec<(f64, u8)> {
    port.actions
        .iter()
        .filter_map(|(time, action)| match *action {
            Action::Moved { flow, to, .. } if flow == FlowId(id) => {
                Some((time.0 as f64 / TICK as f64, to.0))
            }
            _ => None,
        })
        .collect()
}

#[test]
fn the_last_stage_is_promoted_periodically_once_its_batch_has_computed() {
    let mut port = mfs();
    port.tell(batch(1, 8, 3.0));
    port.tell(layer_began(1, 7));
    port.submit(urgent_from(1, 1, 4.5));
    port.run_until(at(2.0));
    port.tell(compute_finished(1));
    port.run_until(at(6.0));
    let moves = moved(&port, 1);
    assert_eq!(moves.len(), 1);
    assert!((4.5..4.502).contains(&moves[0].0) && moves[0].1 == 1, "{moves:?}");
}

#[test]
fn a_batch_whose_boundaries_stop_coming_is_promoted_nevertheless() {
    let mut port = mfs();
    port.tell(batch(1, 8, 0.5)); // patience: 16 layers of half a tick
    port.tell(layer_began(1, 0));
    port.submit(urgent_from(1, 1, 4.5));
    port.run_until(at(7.9));
    assert!(moved(&port, 1).is_empty());
    port.run_until(at(8.1));
    assert_eq!(moved(&port, 1).len(), 1);
}

#[test]
fn a_batch_that_hangs_is_looked_at_seldom_and_promoted_within_a_period() {
    let mut port = mfs(); // on the wire is a collective that never completes
    port.tell(batch(1, 8, 0.5)); // patience: 16 layers of half a tick
    port.tell(layer_began(1, 0));
    port.submit(urgent_from(1, 1, 100.0)); // Q_2 at 76, Q_1 at 100
    let (mut looks, mut moves) = (0, Vec::new());
    while moves.len() < 2 {
        let now = port.link.next_deadline().expect("it is to be promoted");
        looks += 1;
        while let Some(action) = port.link.poll_action(now) {
            if let Action::Moved { to, .. } = action {
                moves.push((now.0 as f64 / TICK as f64, to.0));
            }
        }
    }
    assert!(
        (76.0..76.002).contains(&moves[0].0) && (100.0..100.002).contains(&moves[1].0),
        "{moves:?}"
    );
    assert_eq!((moves[0].1, moves[1].1), (2, 1));
    // Each check waits for three quarters of the time left, down to the period of a thousandth:
    // log_4 of 68 000 and of 24 000.
    assert!(looks <= 20, "{looks} looks");
}

#[test]
fn p2d_does_not_pass_collectives_under_laxity_even_when_its_slack_is_gone() {
    let mut port = Port::new(LinkConfig { policy: PolicyKind::Laxity, ..fluid() });
    port.submit(flow(9, Stage::Collective, 20.0));
    port.submit(FlowSpec { deadline: at(6.0), ..flow(1, Stage::P2d, 1.0) });
    port.run_out();
    assert!(port.finish(1) > 20.0, "{}", port.finish(1));
}

#[test]
fn credit_is_what_is_left_of_the_window_unless_something_waits_at_or_above() {
    for policy in PolicyKind::ALL {
        let config = LinkConfig { policy, window_bytes: 10 * CHUNK, ..fluid() };
        let mut link = Link::new(config).expect("valid");
        let now = Time(1);
        assert_eq!(link.credit_allowance(), 10 * CHUNK);
        let level = link.credit_level(now);
        link.add_in_flight(now, Stage::Collective, PeerId(0), level, 3 * CHUNK);
        assert_eq!(link.credit_allowance(), 7 * CHUNK, "{policy}");
        assert_eq!(link.in_flight_bytes(), 3 * CHUNK);
        link.handle(now, Event::FlowArrived(flow(2, Stage::Collective, 1.0)));
        assert_eq!(link.credit_allowance(), 0, "{policy}: a collective waits");
        link.handle(now, cancelled(2));
        link.remove_in_flight(now, PeerId(0), level, 3 * CHUNK);
        assert_eq!(link.credit_allowance(), 10 * CHUNK, "{policy}");
        // Credit above the window must be accepted, because the bytes are on the wire already.
        let far_more = flow(3, Stage::Collective, 5.0).bytes;
        link.add_in_flight(now, Stage::Collective, PeerId(0), level, far_more);
        assert_eq!(link.credit_allowance(), 0);
        assert_eq!(link.peek_permit(now, &flow(4, Stage::Collective, 5.0)), None);
    }
}

#[test]
fn a_name_that_is_taken_and_names_that_mean_nothing_are_ignored() {
    for policy in PolicyKind::ALL {
        let mut port = crate::virtual_time::port(policy);
        port.submit(flow(1, Stage::KvReuse, 1.0));
        port.poll();
        port.link.handle(port.now, Event::FlowArrived(flow(1, Stage::P2d, 9.0)));
        assert_eq!(port.link.waiting_flows(), 1);
        let nobody = BatchId(77);
        for event in [
            completed(99, 5),
            cancelled(99),
            request_ended(99),
            Event::BatchQueued { batch: nobody, ahead: BatchId(78) },
            Event::LayerBegan { batch: nobody, layer: Layer(u16::MAX) },
            layer_began(0, 3),
            Event::ComputeFinished { batch: nobody },
            compute_finished(0),
            Event::BatchEnded { batch: nobody },
            batch_ended(0),
            Event::BatchBegan(BatchSpec {
                batch: BatchId(0),
                layers: u16::MAX,
                layer_time: Span(u64::MAX),
            }),
        ] {
            port.tell(event);
        }
        let snapshot = port.link.snapshot();
        assert_eq!((snapshot.batches, snapshot.requests), (0, 0), "{policy}");
        port.run_out();
    }
}

#[test]
fn extreme_numbers_are_survived() {
    for policy in PolicyKind::ALL {
        let mut link = Link::new(LinkConfig { policy, rate: 1, ..fluid() }).expect("valid");
        let far = Time(u64::MAX - 1);
        link.handle(
            Time(0),
            Event::BatchBegan(BatchSpec {
                batch: BatchId(u64::MAX),
                layers: u16::MAX,
                layer_time: Span(u64::MAX),
            }),
        );
        for (id, now) in [(1, Time(0)), (2, far), (3, Time(5)), (4, Time::NEVER)] {
            for (stage, nth) in Stage::ALL.into_iter().zip(0..) {
                link.handle(
                    now,
                    Event::FlowArrived(FlowSpec {
                        flow: FlowId(id * 10 + nth),
                        stage,
                        batch: BatchId(u64::MAX),
                        request: RequestId(u64::MAX),
                        layer: Layer(u16::MAX),
                        bytes: u64::MAX,
                        deadline: [Time(0), Time(1), far, Time::NEVER][id as usize % 4],
                        whole: false,
                        peer: PeerId(u16::MAX),
                    }),
                );
            }
            for _ in 0..50 {
                if link.poll_action(now).is_none() {
                    break;
                }
            }
            let _ = (link.snapshot(), link.next_deadline(), link.credit_allowance());
        }
    }
}

#[test]
fn hints_without_end_are_forgotten_oldest_first() {
    let mut link = Link::new(LinkConfig::default()).expect("valid");
    let waits = FlowSpec { batch: BatchId(1), request: RequestId(1), ..flow(1, Stage::P2d, 1e4) };
    link.handle(Time(0), Event::FlowArrived(waits));
    let total = REQUESTS_MAX as u64 + 5000;
    for id in 1..=total {
        let batch = BatchId(id);
        let spec = BatchSpec { batch, layers: 1, layer_time: Span::ZERO };
        link.handle(Time(id), Event::BatchBegan(spec));
        let request = RequestId(id);
        let deadline = Time(id + 1);
        link.handle(Time(id), Event::RequestJoined { batch, request, deadline, bytes: 0 });
        link.handle(Time(id), Event::BatchQueued { batch, ahead: BatchId(1) });
    }
    let snapshot = link.snapshot();
    assert_eq!(snapshot.batches, BATCHES_MAX);
    assert!(snapshot.requests <= REQUESTS_MAX);
    assert!(snapshot.requests >= BATCHES_MAX);
    assert_eq!(link.waiting_flows(), 1, "what waits is never forgotten");
    const { assert!(FOLLOWERS_MAX < 1000) };
    for id in 1..=total {
        link.handle(Time(total), batch_ended(id));
    }
    let snapshot = link.snapshot();
    assert_eq!((snapshot.batches, snapshot.requests), (1, 1), "the one that waits");
    link.handle(Time(total), cancelled(1));
    let snapshot = link.snapshot();
    assert_eq!((snapshot.batches, snapshot.requests), (0, 0));
}

#[test]
fn without_hints_what_flows_name_is_known_only_while_they_wait() {
    let mut link = Link::new(LinkConfig { window_bytes: CHUNK, ..fluid() }).expect("valid");
    for id in 0..10_000 {
        let spec = FlowSpec {
            batch: BatchId(id + 1),
            request: RequestId(id + 1),
            bytes: CHUNK,
            deadline: at(50.0),
            ..flow(id, Stage::KvReuse, 0.0)
        };
        link.handle(Time(id), Event::FlowArrived(spec));
        while link.poll_action(Time(id)).is_some() {}
        link.handle(Time(id), completed(id, CHUNK));
    }
    let snapshot = link.snapshot();
    assert_eq!((snapshot.batches, snapshot.requests), (0, 0));
    assert_eq!((link.waiting_flows(), link.in_flight_bytes()), (0, 0));
}

#[test]
fn bytes_stuck_in_a_lower_class_do_not_hold_up_a_collective() {
    for policy in [PolicyKind::Mfs, PolicyKind::Laxity, PolicyKind::TwoClass] {
        let mut link = Link::new(LinkConfig {
            policy,
            chunk_bytes: CHUNK,
            window_bytes: 4 * CHUNK,
            ..LinkConfig::default()
        })
        .unwrap();
        let spec = |id, stage, bytes| FlowSpec::anonymous(FlowId(id), stage, bytes);
        // A transfer to a busy receiver fills the window, and none of it completes.
        link.handle(Time(1), Event::FlowArrived(spec(1, Stage::P2d, 100 * CHUNK)));
        while link.poll_action(Time(1)).is_some() {}
        assert_eq!(link.in_flight_bytes(), 4 * CHUNK, "{policy}");
        // A collective to an idle receiver is sent anyway, within a window of its own.
        link.handle(Time(2), Event::FlowArrived(spec(2, Stage::Collective, 100 * CHUNK)));
        assert_eq!(permits(&mut link, Time(2)), [(2, CHUNK, false); 4], "{policy}");
        // The lower class gets no more permits until the bytes above it have completed.
        link.handle(Time(3), completed(1, CHUNK));
        assert_eq!(link.poll_action(Time(3)), None, "{policy}");
    }
}

#[test]
fn bytes_stuck_before_a_receiver_do_not_idle_the_port() {
    let config = LinkConfig {
        policy: PolicyKind::Laxity,
        rate: CHUNK * 1000, // a chunk takes a millisecond
        chunk_bytes: CHUNK,
        window_bytes: 2 * CHUNK,
        overcommit: 3,
        ..LinkConfig::default()
    };
    let permitted_by = |link: &mut Link, now| {
        while link.poll_action(now).is_some() {}
        link.in_flight_bytes() / CHUNK
    };
    let waits = |overcommit| {
        let config = LinkConfig { overcommit, ..config.clone() };
        let mut link = Link::new(config).unwrap();
        let spec = FlowSpec { bytes: 100 * CHUNK, ..flow(1, Stage::P2d, 0.0) };
        link.handle(ms(10), Event::FlowArrived(spec));
        link
    };
    // No byte completes. One window is permitted at once, then a chunk in the time of a chunk, up
    // to three windows.
    let mut link = waits(3);
    assert_eq!(permitted_by(&mut link, ms(10)), 2);
    assert_eq!(link.next_deadline(), Some(ms(11)));
    assert_eq!(permitted_by(&mut link, ms(11)), 3);
    assert_eq!(permitted_by(&mut link, ms(12)), 4);
    assert_eq!(permitted_by(&mut link, ms(20)), 6);
    assert_eq!(link.next_deadline(), None, "there is nothing to wait for but completions");
    // With an overcommit of one window, no more is permitted.
    let mut link = waits(1);
    assert_eq!(permitted_by(&mut link, ms(20)), 2);
    assert_eq!(link.next_deadline(), None);
}

/// Returns KV reuse of 1000 bytes, and the level that it would have under `laxity`.
fn reuse_level(link: &Link, now: Time, batch: u64, layer: u16) -> Level {
    link.level_alone(now, &FlowSpec { bytes: 1000, ..reuse(1, batch, layer) })
}

/// Returns a port under `laxity` whose batch 1 computes layer 10 of 64, 1 ms each.
fn at_layer_ten(config: &LinkConfig, now: Time) -> Link {
    let config = LinkConfig { policy: PolicyKind::Laxity, ..config.clone() };
    let mut link = Link::new(config).expect("a valid configuration");
    link.handle(now, batch(1, 64, 1.0));
    link.handle(now, layer_began(1, 10));
    link
}

#[test]
fn kv_reuse_is_below_collectives_and_above_the_last_stage_unless_it_blocks_its_batch() {
    let now = Time(1);
    for levels in 4..=Level::COUNT_MAX {
        let link = at_layer_ten(&LinkConfig { levels, ..LinkConfig::default() }, now);
        let collective = link.credit_level(now);
        let near = Level(collective.0 + 1);
        assert_eq!(reuse_level(&link, now, 1, 9), collective, "its layer computes");
        assert_eq!(reuse_level(&link, now, 1, 11), collective, "its layer is the next");
        assert_eq!(reuse_level(&link, now, 1, 12), near);
        assert_eq!(reuse_level(&link, now, 1, 18), near);
        assert!(reuse_level(&link, now, 1, 19) > near);
        assert!(reuse_level(&link, now, 2, 0) > near, "of an unknown batch nothing is known");
        // A deadline that can just be met gives the last stage its highest level below `P_1`.
        let last =
            FlowSpec { deadline: Time(1000), ..FlowSpec::anonymous(FlowId(9), Stage::P2d, 1) };
        assert!(link.level_alone(now, &last) > near);
    }
}

#[test]
fn kv_reuse_that_stays_in_flight_raises_later_kv_reuse_to_the_level_of_collectives() {
    // A byte takes a nanosecond. The window never matters.
    let config = LinkConfig {
        rate: 1_000_000_000,
        chunk_bytes: 1 << 20,
        window_bytes: 1 << 30,
        ..LinkConfig::default()
    };
    let us = |n: u64| Time(n * 1000);
    // It is late by the configured rate, whatever part of that foreign traffic leaves.
    for in_force in [config.rate, config.rate / 10] {
        let mut link = at_layer_ten(&config, us(0));
        link.set_capacity(in_force, config.window_bytes);
        let collective = link.credit_level(us(0));
        let near = Level(collective.0 + 1);
        let send = |link: &mut Link, now, layer| {
            let spec = FlowSpec { bytes: 100_000, ..reuse(7, 1, layer) };
            let permit = link.peek_permit(now, &spec).expect("there is room");
            link.commit_permit(now, &spec, permit);
            permit.level
        };
        // Alone the flow takes 100 µs, but its completion never comes.
        assert_eq!(send(&mut link, us(0), 14), near);
        // What is needed in four layers has four milliseconds. It is late after a quarter of them.
        assert_eq!(send(&mut link, us(1_050), 14), near);
        assert_eq!(reuse_level(&link, us(1_050), 1, 14), near);
        assert_eq!(send(&mut link, us(2_300), 14), near, "the level of one does not change");
        assert_eq!(reuse_level(&link, us(2_300), 1, 14), collective, "that of the next does");
        assert!(reuse_level(&link, us(2_300), 1, 30) > near, "this one has time");
        // All complete. The port remembers that for 64 layer times.
        for _ in 0..3 {
            link.remove_in_flight(us(2_400), PeerId(0), near, 100_000);
        }
        assert_eq!(send(&mut link, us(60_000), 14), collective);
        link.remove_in_flight(us(60_100), PeerId(0), collective, 100_000);
        assert_eq!(reuse_level(&link, us(67_000), 1, 14), near);
    }
}

#[test]
fn kv_reuse_that_is_late_beside_collectives_raises_later_kv_reuse_above_them() {
    let config = LinkConfig { window_bytes: 1 << 30, ..LinkConfig::default() };
    let mut link = at_layer_ten(&config, ms(0));
    let collective = link.credit_level(ms(0));
    let send = |link: &mut Link, now| {
        let spec = FlowSpec { bytes: 1000, ..reuse(7, 1, 14) };
        let permit = link.peek_permit(now, &spec).expect("there is room");
        link.commit_permit(now, &spec, permit);
        permit.level
    };
    // What is needed in four layers has four milliseconds, and nothing completes.
    send(&mut link, ms(0));
    send(&mut link, ms(2));
    for now in [5, 8] {
        assert_eq!(send(&mut link, ms(now)), collective, "sharing has not lasted for 8 layers");
    }
    let late = |link: &mut Link, now| {
        send(link, now);
        reuse_level(link, now, 1, 14)
    };
    assert_eq!(late(&mut link, ms(10)), collective, "this is late, but by less than a half");
    assert_eq!(send(&mut link, ms(13)), collective, "the level of one does not change");
    assert_eq!(reuse_level(&link, ms(13), 1, 14), Level::HIGHEST, "that of the next does");
    assert_eq!(reuse_level(&link, ms(13), 1, 11), Level::HIGHEST, "the batch waits for this one");
    assert!(reuse_level(&link, ms(13), 1, 30) > collective, "this one has time");
    assert_eq!(reuse_level(&link, ms(4108), 1, 14), Level::HIGHEST);
    assert!(reuse_level(&link, ms(4110), 1, 14) > collective, "4096 layer times have passed");
}

#[test]
fn the_last_stage_that_stays_in_flight_does_not_make_kv_reuse_late() {
    let config = LinkConfig { window_bytes: 1 << 30, ..LinkConfig::default() };
    let mut link = at_layer_ten(&config, ms(0));
    let near = Level(link.credit_level(ms(0)).0 + 1);
    link.add_in_flight(ms(0), Stage::P2d, PeerId(0), Level(near.0 + 1), 1000);
    let spec = FlowSpec { bytes: 1000, ..reuse(7, 1, 14) };
    let permit = link.peek_permit(ms(50), &spec).expect("there is room");
    link.commit_permit(ms(50), &spec, permit);
    assert_eq!(reuse_level(&link, ms(50), 1, 14), near);
}

#[test]
fn what_cannot_be_cut_goes_in_one_piece_when_a_chunk_would_fit() {
    let config =
        LinkConfig { chunk_bytes: CHUNK, window_bytes: 4 * CHUNK, ..LinkConfig::default() };
    let mut link = Link::new(config).unwrap();
    let spec =
        |id, bytes, whole| FlowSpec { whole, ..FlowSpec::anonymous(FlowId(id), Stage::P2d, bytes) };
    // The flow is larger than the window but permitted, because nothing is in flight.
    link.handle(Time(1), Event::FlowArrived(spec(1, 10 * CHUNK, true)));
    link.handle(Time(1), Event::FlowArrived(spec(2, 10 * CHUNK, true)));
    assert_eq!(permits(&mut link, Time(1)), [(1, 10 * CHUNK, true)]);
    assert_eq!(link.idle_allowance(), 0, "something waits");
    link.handle(Time(2), completed(1, 6 * CHUNK));
    assert_eq!(permits(&mut link, Time(2)), [], "the window is full");
    link.handle(Time(3), completed(1, CHUNK));
    assert_eq!(permits(&mut link, Time(3)), [(2, 10 * CHUNK, true)]);
    link.handle(Time(4), completed(1, 3 * CHUNK));
    link.handle(Time(4), completed(2, 7 * CHUNK));
    assert_eq!(link.idle_allowance(), CHUNK);
    // The fast path, where no flow waits, gives the same permit.
    let piece = link.peek_permit(Time(5), &spec(3, 2 * CHUNK, true));
    assert_eq!(piece.map(|p| (p.bytes, p.last)), Some((2 * CHUNK, true)));
    let chunk = link.peek_permit(Time(5), &spec(3, 2 * CHUNK, false));
    assert_eq!(chunk.map(|p| (p.bytes, p.last)), Some((CHUNK, false)));
}

#[test]
fn a_piece_that_exceeds_the_window_is_not_joined_by_one_with_less_slack() {
    let rate = 1 << 30;
    let config =
        LinkConfig { chunk_bytes: CHUNK, window_bytes: 4 * CHUNK, rate, ..LinkConfig::default() };
    assert_eq!(config.policy, PolicyKind::Laxity);
    let mut link = Link::new(config).unwrap();
    let piece = |id: u64, spans: u64| FlowSpec {
        whole: true,
        deadline: Time(1) + Span::transfer(spans * 10 * CHUNK, rate),
        ..FlowSpec::anonymous(FlowId(id), Stage::P2d, 10 * CHUNK)
    };
    link.handle(Time(1), Event::FlowArrived(piece(1, 1000)));
    assert_eq!(permitted(&mut link, Time(1)), [1]);
    link.handle(Time(2), Event::FlowArrived(piece(2, 2)));
    assert_eq!(link.poll_action(Time(2)), None);
    link.handle(Time(3), completed(1, 10 * CHUNK));
    assert_eq!(permitted(&mut link, Time(3)), [2]);
}

/// Returns a port at which flows wait that cannot be cut. They come in this order, with these sizes
/// in chunks. The window has four chunks, and the port sends one in a millisecond.
fn port_of_pieces(sizes: &[u64]) -> Link {
    let config = LinkConfig {
        chunk_bytes: CHUNK,
        window_bytes: 4 * CHUNK,
        rate: 1000 * CHUNK,
        policy: PolicyKind::TwoClass,
        ..LinkConfig::default()
    };
    let mut link = Link::new(config).expect("a valid configuration");
    for (id, chunks) in (1..).zip(sizes) {
        let piece = FlowSpec::anonymous(FlowId(id), Stage::P2d, chunks * CHUNK);
        link.handle(ms(0), Event::FlowArrived(FlowSpec { whole: true, ..piece }));
    }
    link
}

#[test]
fn behind_a_piece_that_exceeds_the_window_others_go_at_the_pace_of_the_port() {
    let mut link = port_of_pieces(&[10; 7]);
    let done = |flow| completed(flow, 10 * CHUNK);
    assert_eq!(permitted(&mut link, ms(0)), [1]);
    // The first reports no completion, but at the rate of the port all of it except a chunk has
    // left. The same holds for the next ones.
    for (id, at) in [(2, 9), (3, 19), (4, 29)] {
        assert_eq!(link.next_deadline(), Some(ms(at)));
        assert_eq!(permitted(&mut link, ms(at) - Span(1)), [0; 0]);
        assert_eq!(permitted(&mut link, ms(at)), [id]);
    }
    // Four of them are all, however long none completes.
    assert_eq!(permitted(&mut link, ms(500)), [0; 0]);
    assert_eq!(link.next_deadline(), None);
    link.handle(ms(500), done(1));
    assert_eq!(permitted(&mut link, ms(500)), [5]);
    // Completions put an end to it: then the window counts again.
    for id in 2..=5 {
        link.handle(ms(501), done(id));
    }
    assert_eq!(permitted(&mut link, ms(501)), [6]);
}

#[test]
fn pieces_that_share_the_port_fairly_are_joined_by_no_other() {
    let mut link = port_of_pieces(&[100, 10, 10]);
    assert_eq!(permitted(&mut link, ms(0)), [1]);
    assert_eq!(permitted(&mut link, ms(99)), [2]);
    // At the pace of the port the third may go at 109 ms. The second has half of the port, so it
    // ends after 20 ms.
    assert_eq!(link.next_deadline(), Some(ms(118)));
    assert_eq!(permitted(&mut link, ms(118) - Span(1)), [0; 0]);
    assert_eq!(permitted(&mut link, ms(118)), [3]);
}

#[test]
fn a_piece_that_exceeded_the_window_leaves_no_room_behind() {
    let config =
        LinkConfig { chunk_bytes: CHUNK, window_bytes: 4 * CHUNK, ..LinkConfig::default() };
    let mut link = Link::new(config).unwrap();
    let piece = FlowSpec::anonymous(FlowId(1), Stage::P2d, 100 * CHUNK);
    link.handle(Time(1), Event::FlowArrived(FlowSpec { whole: true, ..piece }));
    assert!(link.poll_action(Time(1)).is_some());
    // More than the window is in flight on credit when the piece completes.
    for _ in 0..2 {
        link.add_in_flight(Time(1), Stage::P2d, PeerId(0), Level(1), 3 * CHUNK);
    }
    link.handle(Time(2), completed(1, 100 * CHUNK));
    link.handle(Time(2), Event::FlowArrived(FlowSpec { flow: FlowId(2), ..piece }));
    let paced = Time(2) + Span::transfer(200 * CHUNK, link.config().rate);
    assert_eq!(permitted(&mut link, paced), [0; 0]);
}

/// Returns a port on which every new flow waits.
fn busy() -> Port {
    let mut port = crate::virtual_time::port(PolicyKind::Laxity);
    port.submit(flow(1000, Stage::Collective, 100.0));
    port.poll();
    port
}

fn of_request(id: u64, request: u64) -> FlowSpec {
    FlowSpec { request: RequestId(request), ..reuse(id, 1, 1) }
}

#[test]
fn a_held_flow_has_no_part_in_arbitration_until_it_is_released() {
    let mut port = busy();
    port.submit(of_request(1, 1));
    port.submit(of_request(2, 2));
    port.tell(held(1));
    port.tell(held(1));
    let snapshot = port.link.snapshot();
    assert_eq!((snapshot.held.flows, snapshot.held.bytes > 0), (1, true));
    assert_eq!(port.link.waiting_flows(), 2);
    port.run_until(at(1e5));
    // All other flows are done. Only the held flow is left, though the port is idle.
    assert_eq!((port.link.waiting_flows(), port.link.in_flight_bytes()), (0, 0));
    assert_eq!(port.link.snapshot().held.flows, 1);
    assert_eq!(port.link.next_deadline(), None);
    port.tell(released(1));
    port.tell(released(2));
    assert_eq!(port.link.snapshot().held.flows, 0);
    port.run_out();
    assert!(port.finish(1) > port.finish(2));
}

#[test]
fn a_held_flow_can_be_cancelled_and_keeps_nothing() {
    let mut port = busy();
    port.submit(of_request(1, 1));
    port.tell(held(1));
    port.tell(cancelled(1));
    port.tell(released(1));
    let snapshot = port.link.snapshot();
    assert_eq!((snapshot.held.flows, snapshot.held.bytes), (0, 0));
    // Only the collective is left.
    assert_eq!((snapshot.requests, port.link.waiting_flows()), (0, 1));
}

#[test]
fn a_flow_whose_request_cannot_be_known_again_has_no_neighbours() {
    let mut port = busy();
    for id in 1..=3 {
        port.submit(of_request(id, 1));
    }
    port.tell(held(2));
    for id in [1, 3] {
        port.tell(cancelled(id));
    }
    // Other requests reuse the slots of their records.
    for id in [4, 5, 6] {
        port.submit(of_request(id, 2));
    }
    // The table is full, and a flow of each request waits.
    for id in 100..100 + REQUESTS_MAX as u64 {
        port.submit(of_request(id, id));
    }
    port.tell(released(2));
    port.tell(cancelled(2));
    // Request 2 is removed with its last flow.
    let before = port.link.snapshot().requests;
    for id in [4, 5, 6] {
        port.tell(cancelled(id));
    }
    assert_eq!(port.link.snapshot().requests, before - 1);
}
