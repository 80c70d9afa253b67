//! P2D that collectives hold up has their level (`link/held_up.rs`).

use crate::virtual_time::{UNIT, at, batch, flow, fluid, layer_began};
use laxity_policy::{BatchId, FlowSpec, Level, Link, LinkConfig, PeerId, PolicyKind, Stage, Time};

const NOBODY: PeerId = PeerId(0);
const PIECE: u64 = UNIT / 1000;

/// Returns a port of `policy` with a batch whose layers take a tick.
fn port(policy: PolicyKind) -> Link {
    let config = LinkConfig { policy, chunk_bytes: UNIT, window_bytes: 1 << 40, ..fluid() };
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

/// Sends collectives of `batch` for two ticks that take `share` of the port, in step with a fabric
/// that delivers them at once. Each half tick it delivers `delivered` bytes of P2D.
fn collectives(link: &mut Link, batch: u64, share: f64, delivered: u64) {
    for step in 0..=40 {
        let now = at(1.0 + f64::from(step) / 20.0);
        let ring = FlowSpec { batch: BatchId(batch), ..flow(2, Stage::Collective, share / 20.0) };
        let permitted = send(link, now, &ring);
        link.remove_in_flight(now, NOBODY, permitted, ring.bytes);
        if step % 10 == 9 && delivered > 0 {
            let below = level(link, now);
            link.remove_in_flight(now, NOBODY, below, delivered);
        }
    }
}

/// Puts P2D in flight and returns its level.
fn pend(link: &mut Link) -> Level {
    let low = send(link, at(1.0), &p2d(at(5000.0)));
    link.add_in_flight(at(1.0), Stage::P2d, NOBODY, low, 100 * PIECE);
    low
}

#[test]
fn p2d_below_a_ring_that_fills_the_port_gets_the_level_of_collectives() {
    let mut link = port(PolicyKind::Laxity);
    let (low, high) = (pend(&mut link), link.credit_level(at(1.0)));
    assert!(low > high);
    collectives(&mut link, 1, 1.0, 0);
    assert_eq!(level(&link, at(3.0)), high);
    let undated = link.peek_permit(at(3.0), &p2d(Time::NEVER)).expect("there is room");
    assert!(undated.level > high, "nothing is known of its slack");
    assert_eq!(level(&link, at(16_380.0)), high);
    assert!(level(&link, at(16_390.0)) > high, "16384 layer times have passed");
}

#[test]
fn p2d_keeps_its_level_where_collectives_leave_room() {
    let stays_low = |batch, share, delivered| {
        let mut link = port(PolicyKind::Laxity);
        let low = pend(&mut link);
        collectives(&mut link, batch, share, delivered);
        assert_eq!(level(&link, at(3.0)), low, "{batch} {share} {delivered}");
    };
    stays_low(1, 0.8, 0);
    stays_low(1, 1.0, PIECE);
    // Nobody knows how long a layer of this batch takes.
    stays_low(9, 1.0, 0);

    let mut link = port(PolicyKind::Laxity);
    let high = link.credit_level(at(1.0));
    collectives(&mut link, 1, 1.0, 0);
    assert!(level(&link, at(3.0)) > high, "no P2D was pending");
}

#[test]
fn p2d_that_waits_for_its_first_permit_is_held_up_too() {
    let config = LinkConfig { policy: PolicyKind::Laxity, ..fluid() };
    let mut port = crate::virtual_time::Port::new(config);
    port.tell(batch(1, 32, 1.0));
    port.tell(layer_began(1, 0));
    port.submit(FlowSpec { batch: BatchId(1), ..flow(2, Stage::Collective, 20.0) });
    port.submit(FlowSpec { deadline: at(5000.0), ..flow(1, Stage::P2d, 1.0) });
    port.run_out();
    let collective = port.bytes_by_level.keys().min().expect("two flows");
    assert_eq!(port.bytes_by_level[collective], 21 * UNIT, "all went at that level");
    assert_eq!(port.finish(2), 20.0, "the port's own order is as before");
}
