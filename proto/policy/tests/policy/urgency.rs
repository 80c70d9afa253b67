//! The three measures of urgency against their literal definitions: thresholds (MFS §4.3) by
//! counting, the crossing by bisection, RLI (§4.4.1) by walking layer by layer.

use laxity_policy::link::{FOLLOWERS_MAX, Link};
use laxity_policy::mlu::{self, RHO_MAX};
use laxity_policy::rmlq::Ladder;
use laxity_policy::{
    BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, LinkConfig, PeerId, PolicyKind,
    Span, Stage, Time,
};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_level_is_one_more_than_the_thresholds_that_are_not_reached(
        levels in 2u8..=16,
        scale in 0.01f64..8.0,
        base in 1.01f64..10.0,
        exponent in -40.0f64..8.0,
    ) {
        let urgency = exponent.exp2();
        let ladder = Ladder::new(levels, scale, base);
        let q = |i: u8| scale * base.powi(-i32::from(i));
        let near = (1..levels).any(|i| (urgency / q(i) - 1.0).abs() < 1e-9);
        prop_assume!(!near); // the last bits of a power are anybody's
        let above = (1..levels).filter(|&i| urgency < q(i)).count() as u8;
        prop_assert_eq!(ladder.level_of(urgency), Level(1 + above));
        for i in 1..levels {
            let threshold = ladder.threshold(i).expect("in range");
            prop_assert!((threshold / q(i) - 1.0).abs() < 1e-12);
            prop_assert_eq!(ladder.leaves_at(Level(i + 1)), Some(threshold));
        }
    }

    #[test]
    fn the_crossing_is_where_bisection_finds_it(
        size in 1u64..1 << 40,
        deadline in 1u64..1 << 50,
        rate in 1_000_000u64..100_000_000_000,
        rho in 0.0f64..1.2,
        exponent in -30.0f64..1.0,
    ) {
        let threshold = exponent.exp2();
        let reached = |t: u64| {
            let urgency = mlu::mlu(size, Time(deadline), Time(t), rate, rho);
            urgency.is_none_or(|urgency| urgency >= threshold)
        };
        // The bisection finds the first instant at which the threshold is reached.
        let (mut before, mut after) = (0, deadline);
        while before < after {
            let middle = before + (after - before) / 2;
            if reached(middle) { after = middle } else { before = middle + 1 }
        }
        let crossing = mlu::crossing(size, Time(deadline), rate, rho, threshold);
        let crossing = crossing.expect("it has bytes and a deadline").0;
        // Both results are rounded: to a nanosecond, and to the precision of the time that is left.
        let grain = 2 + (deadline - after) / (1 << 48);
        prop_assert!(crossing.abs_diff(after) <= grain, "{crossing} {after}");
    }

    #[test]
    fn mlu_grows_with_time_bytes_and_load(
        size in 1u64..1 << 40, left in 2u64..1 << 50, rho in 0.0f64..1.0, part in 0.0f64..1.0,
    ) {
        let deadline = Time(1 << 51);
        let at = |size, left, rho| mlu::mlu(size, deadline, deadline - Span(left), 1 << 30, rho);
        let base = at(size, left, rho).expect("time is left");
        let (less, sooner) = ((size as f64 * part) as u64, (left as f64 * part) as u64);
        prop_assert!(at(less, left, rho).expect("time is left") <= base);
        prop_assert!(at(size, sooner, rho).is_none_or(|urgency| urgency >= base));
        prop_assert!(at(size, left, rho * part).expect("time is left") <= base);
        let full = at(size, left, 1.0).expect("time is left");
        prop_assert!((full * (1.0 - RHO_MAX) / at(size, left, 0.0).unwrap() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_look_is_on_the_way_and_a_promotion_at_most_a_period_late(
        now in 0u64..1 << 40, left in 0u64..1 << 40, period in 1u64..1 << 30,
    ) {
        let (crossing, mut at, mut looks) = (Time(now + left), Time(now), 0);
        while at < crossing {
            let next = mlu::look_again(at, crossing, Span(period));
            prop_assert!(next.0 >= at.0 + period);
            (at, looks) = (next, looks + 1);
        }
        prop_assert!(at.since(crossing).0 <= period);
        prop_assert!(looks <= 1 + (1 + left / period).ilog2() / 2 + 2, "{looks} looks");
    }

    #[test]
    fn a_flow_of_a_queued_batch_is_as_far_off_as_the_layers_before_it_take(
        layers in prop::collection::vec(1u16..7, 1..6),
        // The batch that moves on. Waiting batches do not: a unit computes one batch at a time.
        boundaries in 0usize..24,
        target in 0u16..7,
    ) {
        let config = LinkConfig { policy: PolicyKind::Mfs, levels: 16, ..LinkConfig::default() };
        let mut link = Link::new(config.clone()).expect("valid");
        let now = Time(1);
        for (id, &layers) in (1u64..).zip(&layers) {
            let batch = BatchId(id);
            let spec = BatchSpec { batch, layers, layer_time: Span(10) };
            link.handle(now, Event::BatchBegan(spec));
            let ahead = BatchId(id - 1);
            link.handle(now, Event::BatchQueued { batch, ahead });
        }
        const { assert!(FOLLOWERS_MAX >= 6) };
        // The unit's schedule, one entry for each layer that it has to compute.
        let schedule: Vec<(u64, u16)> = (1u64..)
            .zip(&layers)
            .flat_map(|(id, &layers)| (0..layers).map(move |layer| (id, layer)))
            .collect();
        let position = boundaries % schedule.len();
        for &(id, layer) in &schedule[..=position] {
            if layer == 0 && id > 1 {
                link.handle(now, Event::ComputeFinished { batch: BatchId(id - 1) });
            }
            let (batch, layer) = (BatchId(id), Layer(layer));
            link.handle(now, Event::LayerBegan { batch, layer });
        }
        // A flow that fills the window makes later flows wait.
        let reuse = |id, batch, layer| FlowSpec {
            batch: BatchId(batch),
            layer: Layer(layer),
            ..FlowSpec::anonymous(FlowId(id), Stage::KvReuse, 1)
        };
        let level = link.credit_level(now);
        link.add_in_flight(now, Stage::Collective, PeerId(0), level, config.window_bytes);
        for (id, &layers) in (1u64..).zip(&layers) {
            let layer = target % layers;
            let Some(due) = schedule.iter().position(|&entry| entry == (id, layer)) else {
                unreachable!("every layer is in the schedule")
            };
            let rli = due.saturating_sub(position) as u8;
            let before = link.snapshot().waiting_by_level;
            link.handle(now, Event::FlowArrived(reuse(1 + id, id, layer)));
            let after = link.snapshot().waiting_by_level;
            let at = (1..=16).find(|&l| after[Level(l).row()].flows > before[Level(l).row()].flows);
            prop_assert_eq!(at, Some((2 + rli).min(16)), "batch {} layer {}", id, layer);
        }
    }
}
