//! This host's fetches from other hosts, whose daemons do not see them (architecture §5).
//!
//! A *fetch* is what one request reads from one peer: all incoming flows that name both. Reports
//! ([`ReportState`](crate::coordinator::reports::ReportState)) list fetches, so that the
//! coordinator counts their bytes on the port that they leave.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use laxity_policy::{FlowId, Span, Time};

/// Maximum number of fetches at a time. A flow of a further fetch is not reported.
pub const FETCHES_MAX: usize = 1024;
/// How long a fetch lives without flows. Its flows may come one after the other.
const LINGER: Span = Span::from_millis(3);

/// The request and the peer that tell a fetch from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FetchName {
    pub batch: u64,
    pub request: u64,
    pub peer: [u8; 16],
}

#[derive(Debug)]
struct Fetch {
    name: FetchName,
    flows: usize,
    ended: Time,
}

#[derive(Debug, Default)]
pub struct Fetches {
    open: BTreeMap<u64, Fetch>,
    names: HashMap<FetchName, u64>,
    of_flow: HashMap<FlowId, u64>,
    /// The number of the last fetch that began, which is also how many did.
    last: u64,
    /// Times to look at a fetch, with its number.
    timers: BTreeSet<(Time, u64)>,
}

impl Fetches {
    /// Adds a flow to the fetch of this name. Returns the fetch's number, or `None` if there are
    /// too many fetches.
    pub fn joined(&mut self, name: FetchName, flow: FlowId) -> Option<u64> {
        let number = match self.names.get(&name) {
            Some(&number) => number,
            None if self.open.len() >= FETCHES_MAX => return None,
            None => self.begin(name),
        };
        self.open.get_mut(&number)?.flows += 1;
        self.of_flow.insert(flow, number);
        Some(number)
    }

    fn begin(&mut self, name: FetchName) -> u64 {
        self.last += 1;
        self.open.insert(self.last, Fetch { name, flows: 0, ended: Time::NEVER });
        self.names.insert(name, self.last);
        self.last
    }

    pub fn left(&mut self, now: Time, flow: FlowId) {
        let Some(number) = self.of_flow.remove(&flow) else { return };
        if let Some(fetch) = self.open.get_mut(&number) {
            fetch.flows -= 1;
            if fetch.flows == 0 {
                fetch.ended = now;
                self.timers.insert((now + LINGER, number));
            }
        }
    }

    /// Ends old fetches without flows. Returns their numbers.
    pub fn poll(&mut self, now: Time) -> Vec<u64> {
        let mut ended = Vec::new();
        while let Some(&(at, number)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            let is_over = |fetch: &Fetch| fetch.flows == 0 && fetch.ended + LINGER <= now;
            if self.open.get(&number).is_some_and(is_over)
                && let Some(fetch) = self.open.remove(&number)
            {
                self.names.remove(&fetch.name);
                ended.push(number);
            }
        }
        ended
    }

    /// Returns when [`Fetches::poll`] has something to do.
    pub fn due(&self) -> Time {
        self.timers.first().map_or(Time::NEVER, |&(at, _)| at)
    }

    pub const fn count(&self) -> u64 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(request: u64) -> FetchName {
        FetchName { batch: 1, request, peer: [7; 16] }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    #[test]
    fn a_fetch_ends_a_while_after_its_last_flow_and_leaves_nothing() {
        let mut fetches = Fetches::default();
        assert_eq!(fetches.joined(name(1), FlowId(10)), Some(1));
        fetches.left(at(1), FlowId(10));
        assert_eq!(fetches.joined(name(1), FlowId(11)), Some(1));
        assert!(fetches.poll(at(20)).is_empty(), "it went on meanwhile");
        fetches.left(at(21), FlowId(11));
        assert!(fetches.poll(at(23)).is_empty());
        assert_eq!(fetches.poll(at(24)), [1]);
        assert!(fetches.names.is_empty() && fetches.of_flow.is_empty());
        assert_eq!((fetches.due(), fetches.count()), (Time::NEVER, 1));
        assert_eq!(fetches.joined(name(1), FlowId(12)), Some(2));
    }

    #[test]
    fn beyond_the_limit_nothing_is_known() {
        let mut fetches = Fetches::default();
        for request in 0..FETCHES_MAX as u64 {
            fetches.joined(name(request), FlowId(request));
        }
        assert_eq!(fetches.joined(name(u64::MAX), FlowId(u64::MAX)), None);
        fetches.left(at(0), FlowId(u64::MAX));
        assert_eq!(fetches.open.len(), FETCHES_MAX);
    }
}
