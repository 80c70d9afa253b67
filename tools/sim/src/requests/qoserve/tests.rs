//! The points of QoServe's figures, in short.

use std::num::NonZero;

use super::*;

#[test]
fn a_quick_reproduction_has_all_its_tables_and_claims_and_is_the_same_again() {
    let options = Options {
        seeds: vec![7],
        quick: true,
        jobs: NonZero::<usize>::MIN,
        data: None,
        progress: false,
    };
    let found = reproduce(&options).expect("needs no file");
    assert_eq!(found.sections.len(), 5);
    assert_eq!(found.claims.len(), 14, "seven under each calibration");
    for section in &found.sections {
        assert!(!section.rows.is_empty());
        for row in &section.rows {
            assert_eq!(row.len(), section.head.len(), "{}: {row:?}", section.title);
        }
    }
    assert_eq!(reproduce(&options).expect("as before"), found);
}
