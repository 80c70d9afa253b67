//! The verdict on a repetition. Under Laxity the bulk must not delay the collective, and no
//! transfer may be late that could be in time.

use serde::{Deserialize, Serialize};

use super::Phase;
use super::outcome::{PhaseOutcome, Repetition};

/// Largest mean completion time under Laxity, as a multiple of that alone.
pub(super) const UNDER_LAXITY_MAX: f64 = 1.3;

/// Least mean completion time unscheduled, as a multiple of that alone. Less is no contention.
pub(super) const UNSCHEDULED_MIN: f64 = 2.0;

/// Largest ratio between the two phases in which the collective is alone. Above it the machine had
/// other work meanwhile.
const DRIFT_MAX: f64 = 1.15;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Holds,
    /// The expectations that failed.
    Fails(Vec<String>),
    /// The machine was too busy for a verdict, with the sign of that.
    Inconclusive(String),
}

impl Repetition {
    pub fn verdict(&self) -> Verdict {
        let phase = |phase| self.phases.get(&phase);
        let (Some(laxity), Some(control)) = (phase(Phase::Laxity), phase(Phase::BulkAlone)) else {
            return Verdict::Fails(vec!["a phase is missing".into()]);
        };
        let ratios = (
            self.slowdown(Phase::CollectiveAgain),
            self.slowdown(Phase::Unscheduled),
            self.slowdown(Phase::Laxity),
        );
        let (Some(again), Some(unscheduled), Some(scheduled)) = ratios else {
            return Verdict::Fails(vec!["the collective is missing from a phase".into()]);
        };
        if again.max(1.0 / again) > DRIFT_MAX {
            return Verdict::Inconclusive(format!(
                "alone the collective took {again:.2} × as long at last as at first"
            ));
        }
        let marked = self.slowdown(Phase::StaticMarks);
        if let Some(marked) = marked.filter(|marked| *marked > UNDER_LAXITY_MAX) {
            return Verdict::Inconclusive(format!(
                "with the network's highest class to itself the collective takes {marked:.2} × \
                 alone"
            ));
        }
        let mut wrong = Vec::new();
        if unscheduled < UNSCHEDULED_MIN {
            wrong.push(format!("no contention: unscheduled takes {unscheduled:.2} × alone"));
        }
        if scheduled > UNDER_LAXITY_MAX {
            wrong.push(format!("the collective takes {scheduled:.2} × alone under Laxity"));
        }
        for (name, of) in LOADS {
            let (missed, unavoidable) = (missed(laxity, of), missed(control, of));
            if missed > unavoidable {
                wrong.push(format!(
                    "{missed} {name} were late under Laxity, and {unavoidable} of them without the \
                     collective"
                ));
            }
        }
        let classes: Vec<u8> = laxity.bytes_by_dscp.keys().copied().collect();
        if classes.contains(&0) || classes.len() < 2 {
            wrong.push(format!("DSCPs on the wire under Laxity: {classes:?}"));
        }
        if laxity.library.deferred == 0 {
            wrong.push("nothing waited for a permit".into());
        }
        match wrong.is_empty() {
            true => Verdict::Holds,
            false => Verdict::Fails(wrong),
        }
    }
}

type Load = fn(&PhaseOutcome) -> Option<super::Deadlines>;

const LOADS: [(&str, Load); 2] =
    [("P2D transfers", |outcome| outcome.p2d), ("reads", |outcome| outcome.reads)];

fn missed(outcome: &PhaseOutcome, of: Load) -> u64 {
    of(outcome).map_or(0, |load| load.missed())
}

#[cfg(test)]
mod tests {
    use super::super::{Deadlines, Rounds};
    use super::*;
    use crate::vm::verbs::case::LibraryReport;

    fn phase(mean_us: Option<f64>, late: Option<u64>) -> PhaseOutcome {
        let load =
            late.map(|late| Deadlines { transfers: 10, met: 10 - late, ..Deadlines::default() });
        PhaseOutcome {
            collective: mean_us.map(|mean_us| Rounds { mean_us, ..Rounds::default() }),
            p2d: load,
            reads: load,
            bytes_by_dscp: [(10, 1000), (34, 1000)].into(),
            library: LibraryReport { deferred: 1, ..LibraryReport::default() },
            ..PhaseOutcome::default()
        }
    }

    fn good() -> Repetition {
        let phases = [
            (Phase::BulkAlone, phase(None, Some(0))),
            (Phase::CollectiveAlone, phase(Some(100.0), None)),
            (Phase::Unscheduled, phase(Some(300.0), Some(2))),
            (Phase::Laxity, phase(Some(120.0), Some(0))),
            (Phase::CollectiveAgain, phase(Some(104.0), None)),
        ];
        Repetition { seed: 1, phases: phases.into() }
    }

    #[track_caller]
    fn fails(change: impl FnOnce(&mut Repetition), why: &str) {
        let mut repetition = good();
        change(&mut repetition);
        match repetition.verdict() {
            Verdict::Fails(wrong) => {
                assert!(wrong.iter().any(|text| text.contains(why)), "{wrong:?}");
            }
            other => panic!("{other:?}"),
        }
    }

    fn of(repetition: &mut Repetition, at: Phase) -> &mut PhaseOutcome {
        repetition.phases.get_mut(&at).expect("it is there")
    }

    #[test]
    fn each_part_of_the_claim_can_fail() {
        assert_eq!(good().verdict(), Verdict::Holds);
        let set = |at, mean_us, late| {
            move |r: &mut Repetition| *of(r, at) = phase(Some(mean_us), Some(late))
        };
        fails(set(Phase::Unscheduled, 190.0, 0), "no contention");
        fails(set(Phase::Laxity, 140.0, 0), "under Laxity");
        fails(set(Phase::Laxity, 110.0, 1), "were late");
        fails(|r| of(r, Phase::Laxity).library.deferred = 0, "waited");
        let unmarked = |r: &mut Repetition| of(r, Phase::Laxity).bytes_by_dscp.extend([(0, 1)]);
        fails(unmarked, "DSCPs");
        fails(|r| drop(r.phases.remove(&Phase::Laxity)), "missing");
        let absent = |r: &mut Repetition| of(r, Phase::CollectiveAgain).collective = None;
        fails(absent, "missing");
    }

    #[test]
    fn what_is_late_anyway_is_not_held_against_laxity() {
        let mut repetition = good();
        *of(&mut repetition, Phase::BulkAlone) = phase(None, Some(1));
        *of(&mut repetition, Phase::Laxity) = phase(Some(110.0), Some(1));
        assert_eq!(repetition.verdict(), Verdict::Holds);
    }

    #[test]
    fn where_no_class_protects_the_collective_nothing_is_proved() {
        let mut repetition = good();
        let marked = phase(Some(140.0), Some(0));
        repetition.phases.insert(Phase::StaticMarks, marked);
        assert!(matches!(repetition.verdict(), Verdict::Inconclusive(_)));
    }

    #[test]
    fn a_machine_that_changes_meanwhile_proves_nothing() {
        let mut repetition = good();
        *of(&mut repetition, Phase::CollectiveAgain) = phase(Some(130.0), None);
        assert!(matches!(repetition.verdict(), Verdict::Inconclusive(_)));
    }
}
