//! RED against an oracle that tries every split (MFS §4.4.2, Appendix B step 1).

use laxity_policy::Time;
use laxity_policy::red::Red;
use proptest::prelude::*;

/// Returns `(RED, D^Lo, k*)` by the definition: tries every split and keeps the best.
fn oracle(deadlines: &[Time]) -> (Time, Time, usize) {
    let mut due: Vec<u128> =
        deadlines.iter().filter(|&&d| d != Time::NEVER).map(|d| u128::from(d.0)).collect();
    due.sort_unstable();
    let n = due.len();
    if n == 0 {
        return (Time::NEVER, Time::NEVER, 0);
    }
    if n == 1 {
        return (Time(due[0] as u64), Time(due[0] as u64), 0);
    }
    let gap = |k: usize| due[k] - due[k - 1];
    let k = (1..n)
        .find(|&k| (1..n).all(|other| gap(other) <= gap(k)))
        .expect("some gap is not exceeded");
    let (tight, loose) = (&due[..k], &due[k..]);
    // RED = loose − f · (loose − tight), rounded down: the paper's form, differently arranged.
    let (first_tight, first_loose) = (tight[0], loose[0]);
    let shift = (tight.len() as u128 * (first_loose - first_tight)).div_ceil(n as u128);
    (Time((first_loose - shift) as u64), Time(first_loose as u64), k)
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

fn sorted(mut deadlines: Vec<Time>) -> Vec<Time> {
    deadlines.sort_unstable();
    deadlines
}

proptest! {
    #[test]
    fn red_is_what_trying_every_split_gives(
        deadlines in proptest::collection::vec(deadline(), 0..12).prop_map(sorted)
    ) {
        let red = Red::of_sorted(&deadlines);
        prop_assert_eq!((red.score, red.loose, red.tight_count), oracle(&deadlines));
    }

    #[test]
    fn red_lies_between_the_two_deadlines_it_weighs(
        deadlines in proptest::collection::vec(deadline(), 1..12).prop_map(sorted)
    ) {
        let red = Red::of_sorted(&deadlines);
        prop_assert!(red.tight <= red.score && red.score <= red.loose);
        prop_assert!(deadlines.contains(&red.loose));
    }

    #[test]
    fn a_batch_that_slips_as_a_whole_takes_its_red_along(
        deadlines in proptest::collection::vec((0..1_u64 << 40).prop_map(Time), 1..12)
            .prop_map(sorted),
        delay in 0..1_u64 << 40,
    ) {
        let later: Vec<Time> = deadlines.iter().map(|d| Time(d.0 + delay)).collect();
        let (now, then) = (Red::of_sorted(&deadlines), Red::of_sorted(&later));
        prop_assert_eq!(then.score.0, now.score.0 + delay);
        prop_assert_eq!(then.tight_count, now.tight_count);
    }

    #[test]
    fn one_outlier_moves_a_batch_by_no_more_than_its_share(
        due in 1_000_000..2_000_000_u64,
        early in 0..1_000_000_u64,
        n in 2..64_usize,
    ) {
        let mut deadlines = vec![Time(early)];
        deadlines.resize(n, Time(due));
        let red = Red::of_sorted(&deadlines);
        prop_assert_eq!(red.loose, Time(due));
        prop_assert!(due - red.score.0 <= (due - early) / n as u64 + 1);
    }
}
