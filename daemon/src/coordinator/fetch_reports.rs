//! Which fetches the coordinator has been told of.

use std::collections::{BTreeMap, BTreeSet};

use laxity_wire::v1::{FetchWanted, event::Event as Kind};

use super::outgoing::Draft;
use crate::driver::fetches::Name;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FetchReports {
    open: BTreeMap<u64, Fetch>,
    /// Fetches that were not told.
    new: BTreeSet<u64>,
}

#[derive(Debug)]
struct Fetch {
    name: Name,
    bytes: u64,
    told: bool,
}

impl FetchReports {
    /// A flow of so many bytes belongs to a fetch. Returns whether the fetch is new.
    pub(super) fn add(&mut self, number: u64, name: Name, bytes: u64) -> bool {
        let is_new = !self.open.contains_key(&number);
        let fetch = self.open.entry(number).or_insert(Fetch {
            name,
            bytes: 0,
            told: false,
        });
        fetch.bytes = fetch.bytes.saturating_add(bytes);
        is_new
    }

    /// A new fetch has to be told.
    pub(super) fn announce(&mut self, number: u64) {
        self.new.insert(number);
    }

    /// A fetch is over. Returns whether the coordinator knows it.
    pub(super) fn end(&mut self, number: u64) -> bool {
        self.new.remove(&number);
        self.open.remove(&number).is_some_and(|old| old.told)
    }

    /// All fetches have to be told again.
    pub(super) fn restate(&mut self) {
        self.new = self.open.keys().copied().collect();
        for fetch in self.open.values_mut() {
            fetch.told = false;
        }
    }

    /// Tells of the fetches that are new, as far as there is room and as `knows` their batches.
    /// Returns whether that was all.
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
                ..FetchWanted::default()
            }));
            !fetch.told
        });
        !draft.is_full()
    }
}
