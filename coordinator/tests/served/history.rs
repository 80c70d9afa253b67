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

/// An operation, with the content of its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    Sees(State),
    /// Writes a value if `expected` is the current revision, or 0. `revision`: the answer.
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
    /// Returns the state after this operation, or `None` if its answer contradicts `at`.
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

/// When an operation was called, when it was answered if its outcome is known, and the operation.
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

/// Searches for a linear order of `entries`, which are sorted by their answers. The search places a
/// read as soon as it agrees with the state. It places an operation of unknown outcome only if the
/// next operation contradicts the state without it.
fn search(entries: &[Entry]) -> Result<(), String> {
    // The operations that happened, the state after them, and the state before the last one with an
    // unknown outcome.
    let start = (vec![0_u64; entries.len().div_ceil(64)], State::default(), None);
    let (mut seen, mut stack) = (HashSet::from([start.clone()]), vec![start]);
    let (mut furthest, mut problem) = (0, (State::default(), Vec::new()));
    while let Some((happened, state, before)) = stack.pop() {
        let open = |nth: &usize| happened[nth / 64] & 1 << (nth % 64) == 0;
        let open: Vec<usize> = (0..entries.len()).filter(open).collect();
        // What happens next was called before the first answer that is still to come.
        let first = open.first().and_then(|&nth| Some((nth, entries[nth].1?)));
        let Some((first, limit)) = first else { return Ok(()) };
        let answered = open.iter().map(|&nth| entries[nth]).filter(|entry| entry.1.is_some());
        let revision_max = answered.map(|entry| entry.2.revision_max()).min();
        let callable: Vec<usize> =
            open.into_iter().filter(|&nth| entries[nth].0 <= limit).collect();
        let (mut next, mut unknown) = (Vec::new(), Vec::new());
        for &nth in &callable {
            let (_, answered, operation) = entries[nth];
            let Some(after) = operation.step(state) else { continue };
            let mut node = (happened.clone(), after, None);
            node.0[nth / 64] |= 1 << (nth % 64);
            if answered.is_none() {
                let grows = before.is_none() || after.0 > state.0;
                if grows && Some(after.0) <= revision_max && !unknown.contains(&operation) {
                    unknown.push(operation);
                    node.2 = before.or(Some(state));
                    next.push(node);
                }
            } else if before.is_none_or(|before| operation.step(before).is_none()) {
                if after == state {
                    next = vec![node];
                    break;
                }
                next.push(node);
            }
        }
        if first >= furthest {
            (furthest, problem) = (first, (state, callable));
        }
        next.retain(|node| seen.insert(node.clone()));
        stack.extend(next.into_iter().rev());
    }
    let before = &entries[furthest.saturating_sub(8)..furthest];
    let after: Vec<Entry> = problem.1.into_iter().map(|nth| entries[nth]).collect();
    Err(format!("is not linearizable: {before:#?}, then {:?}, then none of {after:#?}", problem.0))
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
