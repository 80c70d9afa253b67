//! This host's fetches from other hosts, whose daemons do not see them (architecture §5).
//!
//! A *fetch* is what one request reads from one peer: all incoming flows that name both. Reports
//! list fetches ([`ReportState`](crate::coordinator::reports::ReportState)), and the coordinator
//! holds some of them while other readers of the same port go first. A fetch does not ask in
//! advance. It proceeds until it is held. This saves everybody a round trip and costs other readers
//! only the bytes in flight. A held fetch proceeds once its order is no longer in force, or after
//! [`Fetches::set_wait_max`].

use std::collections::{BTreeMap, BTreeSet, HashMap};

use laxity_policy::{FlowId, Span, Time};

use crate::coordinator::order::OrderContent;

/// Most fetches that are reported. A flow of another fetch counts as if its peer were unknown.
pub const FETCHES_MAX: usize = 1024;
/// How long a fetch lives without flows. Its flows may come one after the other.
const LINGER: Span = Span::from_millis(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// The id of the request's batch.
    pub batch: u64,
    pub request: u64,
    /// The address of the peer.
    pub peer: [u8; 16],
}

/// A flow that has to be held or released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The index of the flow's port.
    pub port: u16,
    pub flow: FlowId,
    pub hold: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchCounters {
    pub fetches: u64,
    pub held: u64,
    /// Times that a held fetch proceeded because its wait was over.
    pub ahead: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchState {
    /// The flow belongs to no fetch.
    None,
    Proceeds,
    Waits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HoldState {
    Goes,
    /// The fetch is held since this time.
    Waits(Time),
    /// The longest wait is over. The fetch proceeds until an order has released it.
    Ahead,
}

#[derive(Debug)]
struct Fetch {
    name: Name,
    /// The flows of the fetch that are not completed, and their ports.
    flows: HashMap<FlowId, u16>,
    state: HoldState,
    /// When the last flow ended.
    ended: Time,
}

/// The fetches of this host and the time limits of held ones.
#[derive(Debug)]
pub struct Fetches {
    open: BTreeMap<u64, Fetch>,
    names: HashMap<Name, u64>,
    of_flow: HashMap<FlowId, u64>,
    last: u64,
    waiting: usize,
    wait_max: Span,
    /// Times to look at a fetch, with its number.
    timers: BTreeSet<(Time, u64)>,
    moves: Vec<Move>,
    counters: FetchCounters,
}

impl Fetches {
    /// Makes a state without fetches.
    pub fn new(wait_max: Span) -> Self {
        Self {
            open: BTreeMap::new(),
            names: HashMap::new(),
            of_flow: HashMap::new(),
            last: 0,
            waiting: 0,
            wait_max,
            timers: BTreeSet::new(),
            moves: Vec::new(),
            counters: FetchCounters::default(),
        }
    }

    /// Sets how long a fetch is held at most.
    pub fn set_wait_max(&mut self, wait_max: Span) {
        self.wait_max = wait_max;
        for (&number, fetch) in &self.open {
            if let HoldState::Waits(since) = fetch.state {
                self.timers.insert((since + wait_max, number));
            }
        }
    }

    /// Adds a flow to the fetch of this name. Returns the fetch's number and whether it is held, or
    /// `None` if there are too many fetches.
    pub fn joined(&mut self, name: Name, flow: FlowId, port: u16) -> Option<(u64, bool)> {
        let number = match self.names.get(&name) {
            Some(&number) => number,
            None if self.open.len() >= FETCHES_MAX => return None,
            None => self.begin(name),
        };
        let fetch = self.open.get_mut(&number)?;
        fetch.flows.insert(flow, port);
        self.of_flow.insert(flow, number);
        let holds = matches!(fetch.state, HoldState::Waits(_));
        Some((number, holds))
    }

    fn begin(&mut self, name: Name) -> u64 {
        self.last += 1;
        self.counters.fetches += 1;
        let fetch =
            Fetch { name, flows: HashMap::new(), state: HoldState::Goes, ended: Time::NEVER };
        self.open.insert(self.last, fetch);
        self.names.insert(name, self.last);
        self.last
    }

    /// Removes a flow that is completed or gone.
    pub fn left(&mut self, now: Time, flow: FlowId) {
        let Some(number) = self.of_flow.remove(&flow) else {
            return;
        };
        if let Some(fetch) = self.open.get_mut(&number) {
            fetch.flows.remove(&flow);
            if fetch.flows.is_empty() {
                fetch.ended = now;
                self.timers.insert((now + LINGER, number));
            }
        }
    }

    /// Applies an order's held fetches. `None` means that no cluster order is in force.
    pub fn apply_order(&mut self, now: Time, order: Option<&OrderContent>) {
        let Self { open, moves, timers, counters, waiting, wait_max, .. } = self;
        for (&number, fetch) in open {
            let holds = order.is_some_and(|order| order.holds(number));
            let before = fetch.state;
            fetch.state = match (before, holds) {
                (HoldState::Goes, true) => HoldState::Waits(now),
                (_, false) => HoldState::Goes,
                (same, true) => same,
            };
            let (waited, waits) =
                [before, fetch.state].map(|state| matches!(state, HoldState::Waits(_))).into();
            if waits && !waited {
                counters.held += 1;
                *waiting += 1;
                timers.insert((now + *wait_max, number));
            }
            if waited && !waits {
                *waiting -= 1;
            }
            if waits != waited {
                tell(moves, fetch, waits);
            }
        }
    }

    /// Ends holds that took too long, and old fetches without flows. Returns the latter's numbers.
    pub fn poll(&mut self, now: Time) -> Vec<u64> {
        let mut ended = Vec::new();
        while let Some(&(at, number)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            let Some(fetch) = self.open.get_mut(&number) else {
                continue;
            };
            if let HoldState::Waits(since) = fetch.state
                && since + self.wait_max <= now
            {
                fetch.state = HoldState::Ahead;
                self.waiting -= 1;
                self.counters.ahead += 1;
                tell(&mut self.moves, fetch, false);
            }
            if fetch.flows.is_empty() && fetch.ended + LINGER <= now {
                let waits = matches!(fetch.state, HoldState::Waits(_));
                self.waiting -= usize::from(waits);
                self.names.remove(&fetch.name);
                self.open.remove(&number);
                ended.push(number);
            }
        }
        ended
    }

    /// Returns when [`Fetches::poll`] has something to do.
    pub fn due(&self) -> Time {
        self.timers.first().map_or(Time::NEVER, |&(at, _)| at)
    }

    /// Returns the flows to hold or release since the last call, in this order.
    pub fn take_moves(&mut self) -> Vec<Move> {
        core::mem::take(&mut self.moves)
    }

    /// Reports whether this flow is part of a held fetch.
    pub fn holds_flow(&self, flow: FlowId) -> bool {
        let number = self.of_flow.get(&flow);
        let fetch = number.and_then(|number| self.open.get(number));
        fetch.is_some_and(|fetch| matches!(fetch.state, HoldState::Waits(_)))
    }

    /// Reports whether any fetch is held.
    pub const fn holds(&self) -> bool {
        self.waiting > 0
    }

    pub const fn counters(&self) -> FetchCounters {
        self.counters
    }
}

fn tell(moves: &mut Vec<Move>, fetch: &Fetch, hold: bool) {
    let of = |(&flow, &port)| Move { port, flow, hold };
    let first = moves.len();
    moves.extend(fetch.flows.iter().map(of));
    // Sorting makes equal inputs give equal schedules.
    moves[first..].sort_unstable_by_key(|moved| moved.flow);
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Span = Span::from_millis(500);

    fn name(request: u64) -> Name {
        Name { batch: 1, request, peer: [7; 16] }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn held(numbers: &[u64]) -> OrderContent {
        OrderContent::new([].into_iter(), [].into_iter()).with_held(numbers.iter().copied())
    }

    fn moved(fetches: &mut Fetches) -> Vec<(u64, bool)> {
        let moves = fetches.take_moves();
        moves.iter().map(|one| (one.flow.0, one.hold)).collect()
    }

    #[test]
    fn a_fetch_goes_until_it_is_told_to_wait_and_again_when_released() {
        let mut fetches = Fetches::new(WAIT);
        assert_eq!(fetches.joined(name(1), FlowId(10), 1), Some((1, false)));
        assert_eq!(fetches.joined(name(1), FlowId(11), 1), Some((1, false)));
        assert_eq!(fetches.joined(name(2), FlowId(20), 1), Some((2, false)));
        fetches.apply_order(at(1), Some(&held(&[1])));
        assert_eq!(moved(&mut fetches), [(10, true), (11, true)]);
        // A flow that joins a held fetch is held, too.
        assert_eq!(fetches.joined(name(1), FlowId(12), 1), Some((1, true)));
        assert!(fetches.holds());
        fetches.apply_order(at(2), Some(&held(&[1])));
        assert_eq!(moved(&mut fetches), []);
        fetches.apply_order(at(3), Some(&held(&[2])));
        let all = [(10, false), (11, false), (12, false), (20, true)];
        assert_eq!(moved(&mut fetches), all);
        fetches.apply_order(at(4), None);
        assert_eq!(moved(&mut fetches), [(20, false)]);
        assert!(!fetches.holds());
    }

    #[test]
    fn nobody_waits_for_longer_than_is_configured() {
        let mut fetches = Fetches::new(WAIT);
        fetches.joined(name(1), FlowId(10), 1);
        fetches.apply_order(at(1), Some(&held(&[1])));
        assert_eq!(fetches.due(), at(501));
        fetches.poll(at(500));
        assert_eq!(moved(&mut fetches), [(10, true)]);
        fetches.poll(at(501));
        assert_eq!(moved(&mut fetches), [(10, false)]);
        assert_eq!(fetches.joined(name(1), FlowId(11), 1), Some((1, false)));
        // The same order does not hold the fetch again. A later order may.
        fetches.apply_order(at(502), Some(&held(&[1])));
        assert_eq!(moved(&mut fetches), []);
        fetches.apply_order(at(503), Some(&held(&[])));
        fetches.apply_order(at(504), Some(&held(&[1])));
        assert_eq!(moved(&mut fetches), [(10, true), (11, true)]);
        let counters = FetchCounters { fetches: 1, held: 2, ahead: 1 };
        assert_eq!(fetches.counters(), counters);
        // The longest wait may change while a fetch is held.
        fetches.set_wait_max(Span::from_millis(5000));
        fetches.poll(at(1004));
        assert_eq!(moved(&mut fetches), []);
        fetches.poll(at(5504));
        assert_eq!(moved(&mut fetches), [(10, false), (11, false)]);
    }

    #[test]
    fn a_fetch_ends_a_while_after_its_last_flow_and_leaves_nothing() {
        let mut fetches = Fetches::new(WAIT);
        fetches.joined(name(1), FlowId(10), 1);
        fetches.apply_order(at(0), Some(&held(&[1])));
        fetches.left(at(1), FlowId(10));
        assert_eq!(fetches.joined(name(1), FlowId(11), 1), Some((1, true)));
        assert!(fetches.poll(at(20)).is_empty(), "it went on meanwhile");
        fetches.left(at(21), FlowId(11));
        assert!(fetches.poll(at(23)).is_empty());
        assert_eq!(fetches.poll(at(24)), [1]);
        assert!(!fetches.holds() && fetches.names.is_empty() && fetches.of_flow.is_empty());
        fetches.poll(at(600));
        assert_eq!((fetches.due(), fetches.counters().ahead), (Time::NEVER, 0));
        assert_eq!(fetches.joined(name(1), FlowId(12), 1), Some((2, false)));
    }

    #[test]
    fn beyond_the_limit_nothing_is_known() {
        let mut fetches = Fetches::new(WAIT);
        for request in 0..FETCHES_MAX as u64 {
            fetches.joined(name(request), FlowId(request), 1);
        }
        let beyond = fetches.joined(name(u64::MAX), FlowId(u64::MAX), 1);
        assert_eq!(beyond, None);
        fetches.left(at(0), FlowId(u64::MAX));
        assert_eq!(fetches.open.len(), FETCHES_MAX);
    }
}
