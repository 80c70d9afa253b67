//! The fetches that were reported to the coordinator.

use std::collections::{BTreeMap, BTreeSet};

use laxity_wire::v1::{FetchWanted, event::Event as Kind};

use super::outgoing::Draft;
use crate::driver::fetches::FetchName;

/// The open fetches, and which of them were reported.
#[derive(Debug, Default)]
pub(super) struct FetchReports {
    open: BTreeMap<u64, ReportedFetch>,
    /// Fetches that were not reported yet.
    new: BTreeSet<u64>,
}

#[derive(Debug)]
struct ReportedFetch {
    name: FetchName,
    bytes: u64,
    told: bool,
}

impl FetchReports {
    /// Adds a flow of `bytes` bytes to a fetch. Returns whether the fetch is new.
    pub(super) fn add(&mut self, number: u64, name: FetchName, bytes: u64) -> bool {
        let is_new = !self.open.contains_key(&number);
        let fetch =
            self.open.entry(number).or_insert(ReportedFetch { name, bytes: 0, told: false });
        fetch.bytes = fetch.bytes.saturating_add(bytes);
        is_new
    }

    /// Marks a new fetch for the next report.
    pub(super) fn announce(&mut self, number: u64) {
        self.new.insert(number);
    }

    /// Removes a fetch that is over. Returns whether the fetch was reported.
    pub(super) fn end(&mut self, number: u64) -> bool {
        self.new.remove(&number);
        self.open.remove(&number).is_some_and(|old| old.told)
    }

    /// Marks all fetches for a new report.
    pub(super) fn restate(&mut self) {
        self.new = self.open.keys().copied().collect();
        for fetch in self.open.values_mut() {
            fetch.told = false;
        }
    }

    /// Adds new fetches to `draft` while there is room. A fetch waits until the coordinator `knows`
    /// its batch. Returns whether all were added.
    pub(super) fn tell(&mut self, knows: impl Fn(u64) -> bool, draft: &mut Draft) -> bool {
        let open = &mut self.open;
        self.new.retain(|number| {
            let Some(fetch) = open.get_mut(number).filter(|fetch| knows(fetch.name.batch)) else {
                return true;
            };
            fetch.told = draft.push(Kind::FetchWanted(FetchWanted {
                fetch: *number,
                batch: fetch.name.batch,
                request: fetch.name.request,
                victim_address: fetch.name.peer.to_vec(),
                bytes: fetch.bytes,
            }));
            !fetch.told
        });
        !draft.is_full()
    }
}
