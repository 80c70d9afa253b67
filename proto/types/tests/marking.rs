//! The decision on traffic classes against the promises that an operator gets.

use laxity_types::marking::{Marking, Treatments, Verdict, decide};
use proptest::prelude::*;

/// Tables of few treatments, so that DSCPs are often alike, often not, and sometimes unknown.
fn treatments() -> impl Strategy<Value = Treatments> {
    proptest::collection::vec(0_u8..4, Treatments::COUNT)
        .prop_map(|numbers| Treatments::new(numbers.try_into().expect("64 numbers")))
}

/// The default of NICs: eight DSCPs per priority, of which priority 3 is lossless.
fn stock() -> Treatments {
    Treatments::new(core::array::from_fn(|dscp| if dscp >> 3 == 3 { 2 } else { 1 }))
}

#[test]
fn a_lossless_class_that_an_operator_pinned_is_kept_except_where_levels_are_forced() {
    let decide = |marking, is_chosen| decide(marking, &stock(), 106, is_chosen, 34);
    assert_eq!(decide(Some(Marking::Preserve), true), Verdict::Chosen);
    assert_eq!(decide(Some(Marking::Preserve), false), Verdict::Unlike, "UCX's own 106");
    assert_eq!(decide(Some(Marking::Levels), true), Verdict::Change(138));
    assert_eq!(decide(Some(Marking::Off), false), Verdict::Off);
}

#[test]
fn unmarked_traffic_is_marked_where_the_priorities_are_treated_alike() {
    let decide =
        |treatments: &Treatments, dscp| decide(Some(Marking::Preserve), treatments, 0, false, dscp);
    assert_eq!(decide(&stock(), 34), Verdict::Change(136));
    assert_eq!(decide(&stock(), 26), Verdict::Unlike, "it would share the lossless priority");
    assert_eq!(decide(&Treatments::UNKNOWN, 34), Verdict::Unknown);
    assert_eq!(decide(&Treatments::UNKNOWN, 0), Verdict::Change(0), "nothing changes");
    assert_eq!(decide(&Treatments::ALL_ALIKE, 26), Verdict::Change(104));
}

#[test]
fn under_a_daemon_of_an_older_release_pins_stay_and_all_else_is_marked() {
    assert_eq!(Marking::from_number(0), None);
    let decide = |is_chosen| decide(None, &Treatments::UNKNOWN, 106, is_chosen, 34);
    assert_eq!((decide(true), decide(false)), (Verdict::Chosen, Verdict::Change(138)));
}

#[test]
fn names_and_numbers_of_the_modes_are_their_own() {
    for marking in Marking::ALL {
        assert_eq!(Marking::from_name(marking.name()), Some(marking));
        assert_eq!(Marking::from_number(marking as u8), Some(marking));
    }
    assert_eq!(Marking::from_name("Preserve"), None);
    assert_eq!(Marking::from_number(4), None);
}

proptest! {
    #[test]
    fn preserve_changes_no_chosen_class_and_never_the_treatment(
        treatments in treatments(), class: u8, is_chosen: bool, dscp in 0_u8..64,
    ) {
        let verdict = decide(Some(Marking::Preserve), &treatments, class, is_chosen, dscp);
        let after = verdict.class(class);
        if is_chosen {
            prop_assert_eq!(after, class);
        }
        if after != class {
            let of = |class: u8| treatments.by_dscp()[usize::from(class >> 2)];
            prop_assert!(of(class) != 0 && of(class) == of(after), "{:?}", verdict);
            prop_assert_eq!(after >> 2, dscp);
        }
        prop_assert_eq!(after & 3, class & 3, "ECN is the network's");
    }

    #[test]
    fn no_mode_sets_a_class_that_nobody_wants(
        marking in (0_u8..4).prop_map(Marking::from_number), treatments in treatments(), class: u8,
        is_chosen: bool, dscp in 0_u8..64,
    ) {
        let after = decide(marking, &treatments, class, is_chosen, dscp).class(class);
        prop_assert!(after == class || after == dscp << 2 | class & 3);
        if marking == Some(Marking::Off) {
            prop_assert_eq!(after, class);
        }
        if marking == Some(Marking::Levels) {
            prop_assert_eq!(after >> 2, dscp);
        }
        if is_chosen && marking != Some(Marking::Levels) {
            prop_assert_eq!(after, class);
        }
    }

    #[test]
    fn behind_two_nics_dscps_are_alike_exactly_if_both_treat_them_alike(
        one in treatments(), other in treatments(), a in 0_u8..64, b in 0_u8..64,
    ) {
        let both = one.and(&other).alike(a, b);
        prop_assert_eq!(both == Some(true), one.alike(a, b) == Some(true)
            && other.alike(a, b) == Some(true));
        prop_assert_eq!(one.and(&other).alike(a, b), other.and(&one).alike(a, b));
        prop_assert_eq!(one.and(&Treatments::ALL_ALIKE).alike(a, b), one.alike(a, b));
    }
}
