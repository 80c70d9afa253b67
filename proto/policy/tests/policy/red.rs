//! RED against an oracle that tries every split (MFS §4.4.2, Appendix B step 1).

use laxity_policy::Time;
use laxity_policy::red::Red;
use proptest::prelude::*;

/// Returns `(RED, D^Lo, k*)` and `n` by the definition: tries every split and keeps the best.
fn oracle(deadlines: &[Time]) -> (Time, Time, usize, usize) {
    let mut due: Vec<u128> =
        deadlines.iter().filter(|&&d| d != Time::NEVER).map(|d| u128::from(d.0)).collect();
    due.sort_unstable();
    let n = due.len();
    if n == 0 {
        return (Time::NEVER, Time::NEVER, 0, 0);
    }
    if n == 1 {
        return (Time(due[0] as u64), Time(due[0] as u64), 0, 1);
    }
    let gap = |k: usize| due[k] - due[k - 1];
    let k = (1..n)
        .find(|&k| (1..n).all(|other| gap(other) <= gap(k)))
        .expect("some gap is not exceeded");
    let (tight, loose) = (&due[..k], &due[k..]);
    // RED = loose − f · (loose − tight), rounded down: the paper's form, differently arranged.
    let (first_tight, first_loose) = (tight[0], loose[0]);
    let shift = (tight.len() as u128 * (first_loose - first_tight)).div_ceil(n as u128);
    (Time((first_loose - shift) as u64), Time(first_loose as u64), k, n)
}

fn deadline() -> impl Strategy<Value = Time> {
    prop_oneof![
        4 => (0..50_u64).prop_map(Time),
        4 => (0..1_000_000_000_000_u64).prop_map(Time),
        1 => (0..20_u64).prop_map(|back| Time(u64::MAX - back)),
        1 => any::<u64>().prop_map(Time),
        1 => Just(Time::NEVER),
    ]
}

/// Generates deadlines in order, any of them, or a few of which many gaps are equal.
fn deadlines() -> impl Strategy<Value = Vec<Time>> {
    let any = proptest::collection::vec(deadline(), 0..12);
    let near = proptest::collection::vec((0..12_u64).prop_map(Time), 0..6);
    prop_oneof![any, near].prop_map(|mut deadlines| {
        deadlines.sort_unstable();
        deadlines
    })
}

proptest! {
    #[test]
    fn red_is_what_trying_every_split_gives(
        deadlines in deadlines()
    ) {
        let red = Red::of_sorted(&deadlines);
        prop_assert_eq!((red.score, red.loose, red.tight_count, red.count), oracle(&deadlines));
    }
}
