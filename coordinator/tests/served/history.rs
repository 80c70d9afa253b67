//! A history of concurrent operations, and whether it is linearizable: whether each operation can
//! have happened at an instant between its call and its answer, all in one order.
//!
//! The search is that of Wing and Gong (Testing and Verifying Concurrent Objects, 1993), with the
//! memory of Lowe (Testing for Linearizability, 2017): a set of operations with a state is tried
//! once. Linearizability is local, so each object is checked by itself. An operation without an
//! answer may have happened at any time after its call, or never.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

/// The state of the policy (revision, value), or of a host (0, value of its drain or 0).
pub(crate) type State = (u64, u64);

/// An operation with what its answer said.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Sees(State),
    /// Writes a value if the revision is `expected` or that is 0. `revision`: the answer.
    Set {
        value: u64,
        expected: u64,
        revision: Option<u64>,
    },
    /// Was refused since the revision is another.
    Stale(u64),
    Drain(u64),
    Undrain,
    /// Was refused since the host is not drained.
    NotDrained,
}

impl Operation {
    /// Returns the state after it, or `None` if its answer contradicts the state before it.
    fn step(self, at: State) -> Option<State> {
        let (fits, after) = match self {
            Self::Sees(seen) => (at == seen, at),
            Self::Set { value, expected, revision } => {
                let next = at.0 + 1;
                let is_expected = expected == 0 || expected == at.0;
                (is_expected && revision.is_none_or(|it| it == next), (next, value))
            }
            Self::Stale(expected) => (at.0 != expected, at),
            Self::Drain(value) => (true, (0, value)),
            Self::Undrain => (at.1 != 0, (0, 0)),
            Self::NotDrained => (at.1 == 0, at),
        };
        fits.then_some(after)
    }

    /// Returns the largest revision before it. Revisions only grow, so this prunes the search.
    fn revision_max(self) -> u64 {
        match self {
            Self::Sees((revision, _)) => revision,
            Self::Set { revision: Some(revision), .. } => revision - 1,
            _ => u64::MAX,
        }
    }
}

/// When an operation was called, when it was answered if its outcome is known, and what it was.
type Entry = (Instant, Option<Instant>, Operation);

/// The operations on each object. The first state is (0, 0).
#[derive(Default)]
pub(crate) struct History(BTreeMap<String, Vec<Entry>>);

impl History {
    pub(crate) fn add(
        &mut self,
        object: &str,
        called: Instant,
        answered: Option<Instant>,
        operation: Operation,
    ) {
        self.0.entry(object.to_owned()).or_default().push((called, answered, operation));
    }

    /// Checks every object. Returns the number of operations.
    ///
    /// # Errors
    /// Returns the object, and where the longest order of its operations ends.
    pub(crate) fn check(&mut self) -> Result<usize, String> {
        for (object, entries) in &mut self.0 {
            entries.sort_by_key(|&(_, answered, _)| (answered.is_none(), answered));
            search(entries).map_err(|problem| format!("{object} {problem}"))?;
        }
        Ok(self.0.values().map(Vec::len).sum())
    }
}

/// Searches for an order of `entries`, which are sorted by their answers.
fn search(entries: &[Entry]) -> Result<(), String> {
    let start = (vec![0_u64; entries.len().div_ceil(64)], State::default());
    let (mut seen, mut stack) = (HashSet::from([start.clone()]), vec![start]);
    let mut furthest = (0, String::new());
    while let Some((happened, state)) = stack.pop() {
        let has = |nth: &usize| happened[nth / 64] & 1 << (nth % 64) != 0;
        let mut open = (0..entries.len()).filter(|nth| !has(nth)).peekable();
        // What happens next was called before the first answer that is still to come.
        let first = open.peek().and_then(|&nth| Some((nth, entries[nth].1?)));
        let Some((first, limit)) = first else {
            return Ok(());
        };
        let next: Vec<usize> = open.filter(|&nth| entries[nth].0 <= limit).collect();
        if first >= furthest.0 {
            let after: Vec<&Entry> = next.iter().map(|&nth| &entries[nth]).collect();
            let before = &entries[first.saturating_sub(8)..first];
            furthest = (first, format!("{before:#?}, then {state:?}, then none of {after:#?}"));
        }
        let revision_max = entries[first].2.revision_max();
        for nth in next.into_iter().rev() {
            let after = entries[nth].2.step(state);
            if let Some(after) = after.filter(|at| nth == first || at.0 <= revision_max) {
                let mut node = (happened.clone(), after);
                node.0[nth / 64] |= 1 << (nth % 64);
                if seen.insert(node.clone()) {
                    stack.push(node);
                }
            }
        }
    }
    Err(format!("is not linearizable: {}", furthest.1))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Operation::{Drain, NotDrained, Sees, Stale, Undrain};
    use super::*;

    /// Checks operations with the times of their calls and answers. 0: no answer.
    fn check(said: &[(u64, u64, Operation)]) -> Result<usize, String> {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut history = History::default();
        for &(called, answered, operation) in said {
            history.add("it", at(called), (answered > 0).then(|| at(answered)), operation);
        }
        history.check()
    }

    fn set(value: u64, revision: u64) -> Operation {
        Operation::Set { value, expected: 0, revision: (revision > 0).then_some(revision) }
    }

    #[test]
    fn what_fits_in_an_order_is_linearizable() {
        let (one, two) = (Sees((2, 1)), Sees((1, 2)));
        for said in [
            [(0, 9, set(1, 2)), (1, 8, set(2, 1)), (2, 3, two), (4, 7, one)],
            // One of unknown outcome happens late, the other one never.
            [(0, 0, set(1, 0)), (1, 0, set(9, 0)), (2, 3, set(2, 1)), (4, 5, one)],
            [(0, 1, NotDrained), (1, 0, Drain(3)), (2, 3, Undrain), (4, 5, NotDrained)],
        ] {
            assert_eq!(check(&said), Ok(4));
        }
    }

    #[test]
    fn what_contradicts_every_order_is_not_linearizable() {
        let (one, two) = (Sees((1, 1)), Sees((1, 2)));
        let undone = [(0, 0, set(1, 0)), (1, 2, set(2, 1)), (3, 4, two), (5, 6, one)];
        let problem = check(&undone).expect_err("a save that undoes a later one");
        assert!(problem.contains("not linearizable") && problem.contains("Sees"), "{problem}");
        let vanished = [(0, 0, set(1, 0)), (1, 2, one), (3, 4, Sees((0, 0)))];
        assert!(check(&vanished).is_err(), "it was in force before it was saved");
        assert!(check(&[(0, 1, one), (2, 3, set(1, 1))]).is_err(), "it is seen before its call");
        assert!(check(&[(0, 1, set(1, 1)), (2, 3, Stale(1))]).is_err(), "it is not stale");
        assert!(check(&[(0, 1, Undrain)]).is_err(), "it was never drained");
    }
}
