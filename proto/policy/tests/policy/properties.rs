//! Properties of every policy under random events, compared with a shadow model that only keeps
//! sums of bytes.

use crate::random_events::{CHUNK, Op, Shadowed, config, op, op_or_reload};
use laxity_policy::{Action, Granularity, LinkConfig, PolicyKind};
use proptest::prelude::*;

fn variants() -> Vec<LinkConfig> {
    let mut all: Vec<LinkConfig> = PolicyKind::ALL.map(config).to_vec();
    for granularity in [Granularity::Flow, Granularity::Coflow] {
        for policy in [PolicyKind::Fair, PolicyKind::Sjf, PolicyKind::Edf, PolicyKind::EdfLow] {
            all.push(LinkConfig { granularity, ..config(policy) });
        }
    }
    for levels in [2, 3, 4, 16] {
        for policy in PolicyKind::ALL {
            all.push(LinkConfig { levels, scavenger_permille: 300, ..config(policy) });
        }
    }
    for peer_window_bytes in [CHUNK, 2 * CHUNK] {
        for policy in [PolicyKind::Laxity, PolicyKind::Mfs] {
            all.push(LinkConfig { peer_window_bytes, ..config(policy) });
        }
    }
    all
}

fn permits(actions: &[Action]) -> Vec<Action> {
    actions.iter().copied().filter(|action| matches!(action, Action::Permit { .. })).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_byte_is_permitted_once_within_the_window_and_no_port_idles(
        ops in prop::collection::vec(op(), 1..120)
    ) {
        for config in variants() {
            let mut port = Shadowed::new(config);
            for op in &ops {
                port.apply(op);
            }
            port.run_out();
            for (id, account) in &port.accounts {
                let whole = account.permitted == account.spec.bytes && account.last;
                prop_assert!(account.cancelled || whole, "{id:?}: {account:?}");
            }
        }
    }

    #[test]
    fn the_same_holds_across_changes_of_the_policy(
        ops in prop::collection::vec(op_or_reload(), 1..200)
    ) {
        let mut port = Shadowed::new(config(PolicyKind::Laxity));
        for op in &ops {
            port.apply(op);
        }
        port.run_out();
        for account in port.accounts.values() {
            prop_assert!(account.cancelled || account.permitted == account.spec.bytes);
        }
    }

    #[test]
    fn the_same_events_give_the_same_actions(ops in prop::collection::vec(op(), 1..120)) {
        for config in variants() {
            let mut runs = [Shadowed::new(config.clone()), Shadowed::new(config)];
            for run in &mut runs {
                for op in &ops {
                    run.apply(op);
                }
                run.run_out();
            }
            prop_assert_eq!(&runs[0].actions, &runs[1].actions);
        }
    }

    #[test]
    fn the_fast_path_permits_what_the_slow_path_would(
        ops in prop::collection::vec(mostly_completions(), 1..120)
    ) {
        for config in variants() {
            let policy = config.policy;
            let mut slow = Shadowed::new(config.clone());
            let mut fast = Shadowed::new(config);
            fast.fast = true;
            for op in &ops {
                slow.apply(op);
                fast.apply(op);
            }
            slow.run_out();
            fast.run_out();
            prop_assert_eq!(permits(&slow.actions), permits(&fast.actions), "{}", policy);
        }
    }
}

/// Generates a light load, so that the fast path is taken often.
fn mostly_completions() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => op(),
        1 => any::<usize>().prop_map(|which| Op::Complete { which, bytes: 10_000 }),
    ]
}
