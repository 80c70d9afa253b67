//! Short tests of the points of QoServe's figures.

use super::*;

#[test]
fn a_quick_reproduction_has_all_its_tables_and_claims_and_is_the_same_again() {
    let options = Options::quick(7);
    let found = reproduce(&options).expect("needs no file");
    assert_eq!(found.sections.len(), 7);
    assert_eq!(found.claims.len(), 20, "ten under each calibration");
    found.assert_whole();
    assert_eq!(reproduce(&options).expect("as before"), found);
}

#[test]
fn under_overload_hints_keep_important_requests_in_time_at_the_cost_of_the_others() {
    let setting = Calibration::new(CALIBRATIONS[0]).expect("built in");
    // Interactive requests only, at 1.5 times the replica's capacity.
    let mut recipe = recipe(&Lengths::like_azure_code(), &[(300, 4.0)], 0.3);
    recipe.classes.truncate(1);
    let asked = recipe.requests(7);
    let late = |hints| {
        let options = laxity_requests::qoserve::QoServeOptions { hints, ..Default::default() };
        let outcome = one(&setting, ReplicaPolicy::QoServe(options), &asked);
        [Importance::Important, Importance::Low]
            .map(|importance| violations(&outcome, |r| r.spec.importance == importance))
    };
    let (with, without) = (late(Some(0.25)), late(None));
    assert!(without[0] > 2.0, "no overload: {without:?}");
    // Most late requests then have long prompts, which wait for shorter ones.
    assert!(with[0] + 1.0 < without[0], "{with:?} against {without:?}");
    assert!(with[1] > without[1] + 5.0, "{with:?} against {without:?}");
}
