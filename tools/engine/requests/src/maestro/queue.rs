//! The global queue, which orders waiting stages (Maestro §III-D), and the orders of baselines.
//!
//! Keys don't change while a stage waits, so the queue is two sorted maps, one per class. Aging
//! lowers a stage's remaining time by a share of its wait: `key = T_rem + share · (time it was
//! queued)`, compared at `now` as `key − share · now`. The paper ages "long-waiting background
//! jobs" and gives no pace. Here a background job gains 1 s per 100 s. With 1 s per 10 s, a wait of
//! minutes exceeds the spread of remaining times, and the order is that of arrival
//! (`docs/requests/maestro.md`).

use std::collections::{BTreeMap, HashMap};

use crate::workflow::{Class, StageId};
use crate::{Span, Time};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StageOrder {
    /// Least remaining time of the workflow first (eq. 7), with aging in ns of priority per ns of
    /// wait, of batch stages and of interactive ones.
    Remaining {
        aging: f64,
        aging_interactive: f64,
    },
    Fcfs,
    Edf,
    /// Interactive before batch, then the earliest deadline: the other reading of §IV-A's EDF.
    EdfByClass,
    /// The job with the least execution time so far.
    LeastAttained,
    /// Interactive before batch, then the job that arrived first.
    InteractiveFirst,
    /// Interactive before batch, then the least remaining time.
    InteractiveRemaining,
}

#[derive(Clone, Copy, Debug)]
pub struct StageProperties {
    pub class: Class,
    pub arrival: Time,
    pub deadline: Time,
    /// Remaining time of the job, `T_rem`.
    pub remaining: Span,
    /// Execution time that the job has had.
    pub attained: Span,
}

type StageKey = (i64, Time, StageId);

pub struct Queue {
    order: StageOrder,
    lanes: [BTreeMap<StageKey, ()>; 2],
    keys: HashMap<StageId, (usize, StageKey)>,
}

const fn lane(class: Class) -> usize {
    match class {
        Class::Interactive => 0,
        Class::Batch => 1,
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

impl Queue {
    pub fn new(order: StageOrder) -> Self {
        Self { order, lanes: [BTreeMap::new(), BTreeMap::new()], keys: HashMap::new() }
    }

    /// Returns the priority that a stage gains by a wait from time 0 to `at`, in ns.
    pub fn aged(&self, class: Class, at: Time) -> u64 {
        let lane = lane(class);
        let pace = match self.order {
            StageOrder::Remaining { aging_interactive, .. } if lane == 0 => aging_interactive,
            StageOrder::Remaining { aging, .. } => aging,
            _ => 0.0,
        };
        (at.0 as f64 * pace) as u64
    }

    /// Adds a stage, or moves it if it already waits.
    pub fn push(&mut self, stage: StageId, rank: &StageProperties, now: Time) {
        let lane = lane(rank.class);
        let by = match self.order {
            StageOrder::Remaining { .. } | StageOrder::InteractiveRemaining => {
                signed(rank.remaining.0.saturating_add(self.aged(rank.class, now)))
            }
            StageOrder::Fcfs | StageOrder::InteractiveFirst => signed(rank.arrival.0),
            StageOrder::Edf | StageOrder::EdfByClass => signed(rank.deadline.0),
            StageOrder::LeastAttained => signed(rank.attained.0),
        };
        let key = (by, rank.arrival, stage);
        if let Some((other, old)) = self.keys.insert(stage, (lane, key)) {
            self.lanes[other].remove(&old);
        }
        self.lanes[lane].insert(key, ());
    }

    pub fn remove(&mut self, stage: StageId) -> bool {
        let Some((lane, key)) = self.keys.remove(&stage) else { return false };
        self.lanes[lane].remove(&key);
        true
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn first_interactive(&self) -> Option<StageId> {
        self.lanes[0].keys().next().map(|key| key.2)
    }

    /// Stores the first `most` stages in `into`, in order.
    pub fn first(&self, most: usize, now: Time, into: &mut Vec<StageId>) {
        into.clear();
        let aged = [Class::Interactive, Class::Batch].map(|class| signed(self.aged(class, now)));
        let by_class = matches!(
            self.order,
            StageOrder::EdfByClass
                | StageOrder::InteractiveFirst
                | StageOrder::InteractiveRemaining
        );
        let mut fast = self.lanes[0].keys().peekable();
        let mut slow = self.lanes[1].keys().peekable();
        while into.len() < most {
            let next = match (fast.peek(), slow.peek()) {
                (None, None) => return,
                (Some(_), None) => fast.next(),
                (None, Some(_)) => slow.next(),
                (Some(a), Some(b)) => {
                    let a = (a.0.saturating_sub(aged[0]), a.1, a.2);
                    let b = (b.0.saturating_sub(aged[1]), b.1, b.2);
                    if by_class || a <= b { fast.next() } else { slow.next() }
                }
            };
            into.extend(next.map(|key| key.2));
        }
    }
}

/// The rule for a job's turn when one of its stages ended and the next is ready.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Boundary {
    /// The job keeps its turn before jobs that have not begun ("w/o Preempt").
    Hold,
    /// A batch job loses its turn if another gains enough. Hysteresis allows for wrong estimates,
    /// and a cooldown prevents repeated changes (§III-D). The paper has no numbers. Here they are
    /// 20 %, 1 s and 10 s.
    Preempt {
        /// Whether only interactive stages take turns ("preemption for latency-critical work").
        interactive_only: bool,
    },
    /// Every next stage is queued again.
    Requeue,
}

impl Boundary {
    pub const MAESTRO: Self = Self::Preempt { interactive_only: false };

    /// Least gain for a turn, as a share of the remaining time of the job that loses it.
    const SHARE: f64 = 0.2;
    /// Least gain for a turn.
    const LEAST: Span = Span::from_millis(1_000);
    /// Time for which a job that lost its turn keeps the next ones.
    pub const COOLDOWN: Span = Span::from_millis(10_000);

    /// Reports whether a stage with `waits` to go takes the turn of a batch job with `holds` to go.
    pub fn is_preempted(&self, holds: Span, waits: Span) -> bool {
        match self {
            Self::Hold => false,
            Self::Requeue => true,
            Self::Preempt { .. } => {
                let gain = holds.0.saturating_sub(waits.0);
                gain > Self::LEAST.0 && gain as f64 > holds.0 as f64 * Self::SHARE
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const BATCH_AGES: StageOrder = StageOrder::Remaining { aging: 0.1, aging_interactive: 0.0 };

    fn rank(class: Class, remaining: u64) -> StageProperties {
        StageProperties {
            class,
            arrival: Time::ZERO,
            deadline: Time(100 * S - remaining),
            remaining: Span(remaining),
            attained: Span::ZERO,
        }
    }

    fn order(queue: &Queue, now: u64) -> Vec<u64> {
        let mut first = Vec::new();
        queue.first(10, Time(now), &mut first);
        first.into_iter().map(|stage| stage.0).collect()
    }

    #[test]
    fn the_least_remaining_time_goes_first_whatever_its_class() {
        let mut queue = Queue::new(BATCH_AGES);
        queue.push(StageId(1), &rank(Class::Interactive, 5 * S), Time::ZERO);
        queue.push(StageId(2), &rank(Class::Batch, 3 * S), Time::ZERO);
        queue.push(StageId(3), &rank(Class::Batch, 9 * S), Time::ZERO);
        assert_eq!(order(&queue, 0), [2, 1, 3]);
    }

    #[test]
    fn a_batch_stage_gains_a_second_for_each_ten_that_it_waits() {
        let mut queue = Queue::new(BATCH_AGES);
        queue.push(StageId(1), &rank(Class::Batch, 20 * S), Time::ZERO);
        queue.push(StageId(2), &rank(Class::Interactive, 5 * S), Time(140 * S));
        assert_eq!(order(&queue, 140 * S), [2, 1]);
        assert_eq!(order(&queue, 160 * S), [1, 2]);
    }

    #[test]
    fn by_class_an_interactive_stage_is_first_however_late_the_others_are() {
        for by in [StageOrder::EdfByClass, StageOrder::InteractiveFirst] {
            let mut queue = Queue::new(by);
            queue.push(StageId(1), &rank(Class::Batch, 90 * S), Time::ZERO);
            queue.push(StageId(2), &rank(Class::Interactive, S), Time::ZERO);
            assert_eq!(order(&queue, 0), [2, 1]);
        }
        let mut queue = Queue::new(StageOrder::Edf);
        queue.push(StageId(1), &rank(Class::Batch, 90 * S), Time::ZERO);
        queue.push(StageId(2), &rank(Class::Interactive, S), Time::ZERO);
        assert_eq!(order(&queue, 0), [1, 2]);
    }

    #[test]
    fn a_stage_that_is_pushed_again_waits_once() {
        let mut queue = Queue::new(StageOrder::Fcfs);
        queue.push(StageId(1), &rank(Class::Batch, S), Time::ZERO);
        queue.push(StageId(1), &rank(Class::Interactive, S), Time::ZERO);
        assert_eq!(queue.len(), 1);
        assert!(queue.remove(StageId(1)));
        assert!(queue.len() == 0 && order(&queue, 0).is_empty());
    }

    #[test]
    fn a_turn_is_lost_for_a_gain_of_a_fifth_and_a_second() {
        let rule = Boundary::MAESTRO;
        assert!(rule.is_preempted(Span(10 * S), Span(7 * S)));
        assert!(!rule.is_preempted(Span(10 * S), Span(9 * S)));
        assert!(!rule.is_preempted(Span(S), Span(S / 10)));
        assert!(!Boundary::Hold.is_preempted(Span(10 * S), Span(0)));
    }
}
