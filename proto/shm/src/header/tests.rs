//! Tests of the header: numbers of NICs, DSCPs of levels and stages, marking.

use super::*;

#[test]
fn nics_are_found_by_name_and_by_default() {
    let nic = |h: &Header, name: &str| h.nic(name, || None);
    let h = Header::new();
    assert_eq!(nic(&h, "mlx5_0"), None);
    h.set_nics(["mlx5_0", "mlx5_bond_1_and_more"].into_iter());
    assert_eq!(nic(&h, "mlx5_0"), Some(0));
    assert_eq!(nic(&h, "mlx5_bond_1_and_more"), Some(1));
    assert_eq!(nic(&h, "mlx5"), None);
    assert_eq!(nic(&h, ""), None);
    h.set_nics(["rxe0", "default"].into_iter());
    assert_eq!((nic(&h, "rxe0"), nic(&h, "rxe1")), (Some(0), Some(1)));
    h.set_nics(["rxe0", "rxe1", "default"].into_iter());
    assert_eq!((nic(&h, "rxe1"), nic(&h, "rxe2")), (Some(1), Some(2)), "added while in use");
    let of = |name: &str, owner: &str| h.nic(name, || Some(owner.to_owned()));
    assert_eq!(
        (of("rxe1", "rxe0"), of("rxe9", "rxe0"), of("rxe9", "x")),
        (Some(1), Some(0), Some(2))
    );
}

#[test]
fn transfers_of_unknown_nic_take_turns_on_all_but_the_default() {
    let h = Header::new();
    let turns = |names: &[&str]| {
        h.set_nics(names.iter().copied());
        [0, 1, 2, 3, usize::MAX].map(|turn| h.nic_in_turn(turn))
    };
    assert_eq!(turns(&[]), [0; 5]);
    assert_eq!(turns(&["default"]), [0; 5]);
    assert_eq!(turns(&["default", "a"]), [1; 5]);
    assert_eq!(turns(&["a", "default", "b", "c"]), [0, 2, 3, 0, 0]);
    let named = |name: &str| h.nic_named(name, || None);
    assert_eq!(
        [named("b"), named("x"), named("default"), named("")],
        [Some(2), None, Some(1), None]
    );
}

#[test]
fn the_next_daemon_may_number_its_nics_otherwise() {
    let (before, next) = (Header::new(), Header::new());
    assert_eq!((next.nic_of(&before, 3), next.nic_of(&before, 200)), (3, 200), "no names");
    before.set_nics(["a", "b", "c"].into_iter());
    next.set_nics(["a", "c"].into_iter());
    let numbers = [0, 1, 2, 3, 255].map(|number| next.nic_of(&before, number));
    assert_eq!(numbers, [0, 255, 1, 3, 255]);
    next.set_nics(["a", "c", "default"].into_iter());
    assert_eq!(next.nic_of(&before, 1), 2);
}

#[test]
fn levels_have_their_own_dscp_and_unknown_levels_none() {
    let h = Header::new();
    h.set_dscp(&core::array::from_fn(|i| 40 + i as u8));
    assert_eq!(h.dscp(LEVEL_SCAVENGER), 40);
    assert_eq!((h.dscp(1), h.dscp(16)), (41, 56));
    assert_eq!((h.dscp(0), h.dscp(17), h.dscp(254)), (0, 0, 0));
}

#[test]
fn a_stage_has_the_dscp_that_the_daemon_says_and_none_before() {
    let h = Header::new();
    assert_eq!((h.dscp_of_stage(Stage::P2d), h.sl_of_stage(Stage::P2d)), (None, None));
    h.set_dscp_of_stages([0, 63, 18, 8, 9]);
    let said = Stage::ALL.map(|stage| h.dscp_of_stage(stage));
    assert_eq!(said, [0, 63, 18, 8, 9].map(Some));
}

#[test]
fn marking_is_what_the_daemon_says_and_none_under_an_older_one() {
    let h = Header::new();
    assert_eq!((h.marking(), h.treatments()), (None, Treatments::UNKNOWN));
    let treatments = Treatments::new(core::array::from_fn(|dscp| (dscp >> 3) as u8 + 1));
    h.set_marking(Marking::Levels, &treatments);
    assert_eq!((h.marking(), h.treatments()), (Some(Marking::Levels), treatments));
}
