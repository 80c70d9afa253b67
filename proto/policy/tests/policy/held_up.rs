//! P2D that collectives hold up has their level (`link/held_up.rs`).

use crate::virtual_time::{UNIT, at, batch, flow, fluid, layer_began};
use laxity_policy::link::LevelRule;
use laxity_policy::{FlowId, FlowSpec, Level, Link, LinkConfig, PeerId, Stage, Time};

const NOBODY: PeerId = PeerId(0);
const PIECE: u64 = UNIT / 1000;

/// Returns a port with a batch whose layers take a tick.
fn port() -> Link {
    let config = LinkConfig { chunk_bytes: UNIT / 10, window_bytes: UNIT / 5, ..fluid() };
    let mut link = Link::new(config).expect("a valid configuration");
    link.handle(at(0.0), batch(1, 32, 1.0));
    link.handle(at(0.0), layer_began(1, 0));
    link
}

fn p2d(deadline: Time) -> FlowSpec {
    FlowSpec { bytes: PIECE, deadline, ..flow(1, Stage::P2d, 1.0) }
}

/// Returns the level that P2D would have now, with seconds until its deadline.
fn level(link: &Link, now: Time) -> Level {
    link.peek_permit(now, &p2d(now + at(5000.0).since(at(0.0)))).expect("there is room").level
}

fn send(link: &mut Link, now: Time, spec: &FlowSpec) -> Level {
    let permit = link.peek_permit(now, spec).expect("there is room");
    link.commit_permit(now, spec, permit);
    permit.level
}

/// Sends collectives from tick `from` on for two ticks that take `share` of the port. A fabric
/// delivers them at once, and `delivered` bytes of P2D each half tick.
fn collectives(link: &mut Link, from: f64, share: f64, delivered: u64) {
    for step in 0..=40 {
        let now = at(from + f64::from(step) / 20.0);
        let ring = flow(2, Stage::Collective, share / 20.0);
        let permitted = send(link, now, &ring);
        link.remove_in_flight(now, NOBODY, permitted, ring.bytes);
        if step % 10 == 9 {
            let below = level(link, now);
            link.remove_in_flight(now, NOBODY, below, delivered);
        }
    }
}

/// Puts P2D in flight and returns its level.
fn pend(link: &mut Link, now: Time) -> Level {
    let low = send(link, now, &p2d(now + at(5000.0).since(at(0.0))));
    link.add_in_flight(now, Stage::P2d, NOBODY, low, 100 * PIECE);
    low
}

#[test]
fn p2d_below_a_ring_that_fills_the_port_gets_the_level_of_collectives() {
    let mut link = port();
    let (low, high) = (pend(&mut link, at(1.0)), link.credit_level(at(1.0)));
    assert!(low > high);
    collectives(&mut link, 1.0, 1.0, 0);
    assert_eq!(level(&link, at(4.0)), high);
    let undated = link.peek_permit(at(4.0), &p2d(Time::NEVER)).expect("there is room");
    assert!(undated.level > high, "nothing is known of its slack");
    assert_eq!(level(&link, at(16_380.0)), high);
    assert!(level(&link, at(16_390.0)) > high, "16384 layer times have passed");
    // The last measurement did not end, because nothing below was delivered.
    collectives(&mut link, 20_000.0, 1.0, 0);
    assert_eq!(level(&link, at(20_004.0)), high, "noticed within layers once more");
}

#[test]
fn collectives_on_credit_count() {
    let mut link = port();
    let high = link.credit_level(at(1.0));
    pend(&mut link, at(1.0));
    for step in 0..=40 {
        let now = at(1.0 + f64::from(step) / 20.0);
        link.add_in_flight(now, Stage::Collective, NOBODY, high, UNIT / 20);
        link.remove_in_flight(now, NOBODY, high, UNIT / 20);
    }
    assert_eq!(level(&link, at(4.0)), high);
}

#[test]
fn p2d_keeps_its_level_where_collectives_leave_room() {
    let stays_low = |share, delivered| {
        let mut link = port();
        let low = pend(&mut link, at(1.0));
        collectives(&mut link, 1.0, share, delivered);
        assert_eq!(level(&link, at(4.0)), low, "{share} {delivered}");
    };
    stays_low(0.85, 0);
    stays_low(1.0, PIECE);

    let mut link = port();
    let high = link.credit_level(at(1.0));
    collectives(&mut link, 1.0, 1.0, 0);
    assert!(level(&link, at(4.0)) > high, "no P2D was pending");

    let mut link =
        Link::new(LinkConfig { chunk_bytes: UNIT / 10, window_bytes: UNIT / 5, ..fluid() })
            .expect("a valid configuration");
    let low = pend(&mut link, at(1.0));
    collectives(&mut link, 1.0, 1.0, 0);
    assert_eq!(level(&link, at(4.0)), low, "nobody said how long a layer takes");
}

/// Two all-to-alls a layer take three quarters of the port, whenever a measurement begins.
#[test]
fn bursts_that_leave_a_quarter_do_not_fill_a_port() {
    for begin in [0.0, 0.1, 0.3, 0.45] {
        let mut link = port();
        let low = pend(&mut link, at(1.0));
        for burst in 0..20 {
            for piece in 0..4 {
                let now = at(1.0 + begin + f64::from(burst) / 2.0 + f64::from(piece) / 100.0);
                let sent = send(&mut link, now, &flow(2, Stage::Collective, 0.375 / 4.0));
                link.remove_in_flight(now, NOBODY, sent, UNIT * 375 / 4000);
            }
        }
        assert_eq!(level(&link, at(12.0)), low, "{begin}");
    }
}

/// P2D that was cancelled left a measurement open, in which collectives had little.
#[test]
fn a_pause_does_not_delay_the_next_notice() {
    let mut link = port();
    let low = pend(&mut link, at(1.0));
    collectives(&mut link, 1.0, 0.1, 0);
    link.write_off(at(3.0), NOBODY, low, 101 * PIECE);
    pend(&mut link, at(1000.0));
    collectives(&mut link, 1000.0, 1.0, 0);
    assert_eq!(level(&link, at(1003.0)), link.credit_level(at(1003.0)));
}

/// A slow port permits a window at once, and sends it in the time of many layers.
#[test]
fn permits_that_have_not_left_do_not_fill_a_port() {
    let config = LinkConfig { chunk_bytes: UNIT, window_bytes: 20 * UNIT, ..fluid() };
    let mut link = Link::new(config).expect("a valid configuration");
    link.handle(at(0.0), batch(1, 32, 1.0));
    link.handle(at(0.0), layer_began(1, 0));
    let (low, high) = (pend(&mut link, at(1.0)), link.credit_level(at(1.0)));
    // Half of the port's time, in bursts of ten layer times.
    for burst in 0..20 {
        for piece in 0..10 {
            let now = at(1.0 + f64::from(burst) * 20.0 + f64::from(piece));
            if piece == 0 {
                for _ in 0..10 {
                    send(&mut link, now, &flow(2, Stage::Collective, 1.0));
                }
            }
            send(&mut link, now, &flow(2, Stage::Collective, 0.000_001));
            link.remove_in_flight(now + at(1.0).since(at(0.0)), NOBODY, high, UNIT + 1);
        }
    }
    assert_eq!(level(&link, at(500.0)), low);
}

#[test]
fn work_that_may_wait_is_not_held_up() {
    let mut link = port();
    let high = link.credit_level(at(1.0));
    link.add_in_flight(at(1.0), Stage::P2d, NOBODY, Level::SCAVENGER, PIECE);
    collectives(&mut link, 1.0, 1.0, 0);
    assert!(level(&link, at(4.0)) > high);
}

#[test]
fn with_few_levels_p2d_gets_the_level_of_collectives_too() {
    for levels in [2, 3] {
        let config =
            LinkConfig { levels, chunk_bytes: UNIT / 10, window_bytes: UNIT / 5, ..fluid() };
        let mut link = Link::new(config).expect("a valid configuration");
        link.handle(at(0.0), batch(1, 32, 1.0));
        link.handle(at(0.0), layer_began(1, 0));
        let (low, high) = (pend(&mut link, at(1.0)), link.credit_level(at(1.0)));
        assert!(low > high);
        collectives(&mut link, 1.0, 1.0, 0);
        assert_eq!(level(&link, at(4.0)), high, "{levels} levels");
    }
}

#[test]
fn p2d_to_a_busy_peer_leaves_collectives_half_of_the_window() {
    let (window_bytes, busy) = (8 * PIECE, PeerId(7));
    let config =
        LinkConfig { chunk_bytes: PIECE, window_bytes, peer_window_bytes: window_bytes, ..fluid() };
    let mut link = Link::new(config).expect("a valid configuration");
    link.handle(at(0.0), batch(1, 32, 1.0));
    link.handle(at(0.0), layer_began(1, 0));
    let high = link.credit_level(at(1.0));
    link.add_in_flight(at(1.0), Stage::P2d, busy, Level(8), PIECE);
    for step in 0..=2000 {
        let now = at(1.0 + f64::from(step) / 1000.0);
        let sent = send(&mut link, now, &flow(2, Stage::Collective, 0.001));
        link.remove_in_flight(now, NOBODY, sent, PIECE);
    }
    let to_busy = FlowSpec { peer: busy, ..p2d(at(5000.0)) };
    for _ in 0..4 {
        assert_eq!(send(&mut link, at(4.0), &to_busy), high);
    }
    assert!(link.peek_permit(at(4.0), &to_busy).is_none(), "half of the window is its bound");
    assert_eq!(link.credit_allowance(), 4 * PIECE);
}

#[test]
fn p2d_that_waits_for_its_first_permit_is_held_up_too() {
    let mut port = crate::virtual_time::Port::new(fluid());
    port.tell(batch(1, 32, 1.0));
    port.tell(layer_began(1, 0));
    port.submit(flow(2, Stage::Collective, 20.0));
    port.submit(FlowSpec { deadline: at(5000.0), ..flow(1, Stage::P2d, 1.0) });
    port.run_until(at(5.0));
    let told = port.link.explain(port.now, FlowId(1)).expect("it waits");
    assert_eq!((told.rule, told.level), (LevelRule::Late, port.link.credit_level(port.now)));
    port.run_out();
    let collective = port.bytes_by_level.keys().min().expect("two flows");
    assert_eq!(port.bytes_by_level[collective], 21 * UNIT, "all went at that level");
    assert_eq!(port.finish(2), 20.0, "the port's own order is as before");
}
