//! The bytes of a run's exchanges, counted by the processes that sent and received them, by the
//! plugin and by the hosts' daemons. A byte that one count lacks is lost.
//!
//! All counts are of whole messages, and since the processes started. So they include the warm-up.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::counters::Counters;
use crate::carriage::{self, Carriage};
use crate::config::LabConfig;
use crate::daemons;
use crate::error::LabError;

/// Longest time until daemons know of all bytes that arrived. Clients report that in batches.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangeLedger {
    pub exchanges: u64,
    /// Exchanges that were not over at the end, because a request was given up.
    pub open: u64,
    /// Bytes that the layers' tokens cause, there and back.
    pub due_bytes: u64,
    pub sent_bytes: u64,
    /// Bytes that arrived undamaged.
    pub received_bytes: u64,
    /// Bytes that the plugin's report has.
    pub plugin_bytes: u64,
    /// Bytes that the plugin submitted to the daemons, and so on. 0 without daemons.
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    pub completed_bytes: u64,
    /// Bytes that the plugin sent without a permit, as it told the daemons.
    pub bypassed_bytes: u64,
}

impl ExchangeLedger {
    /// Asks the processes, and the daemons if there are some, until the daemons know of all bytes
    /// that were sent.
    pub fn ask(config: &LabConfig, folder: &Path, scheduled: bool) -> Result<Self, LabError> {
        let give_up = Instant::now() + KNOWN_WITHIN;
        loop {
            let mut ledger = Self::default();
            for host in 0..config.prefills() {
                ledger.add(&Counters::ask(folder, host)?);
                if scheduled {
                    ledger.ask_daemon(config, folder, host);
                }
            }
            let known = ledger.completed_bytes + ledger.bypassed_bytes;
            let known = !scheduled || known >= ledger.sent_bytes;
            if known && ledger.open == 0 || Instant::now() > give_up {
                return Ok(ledger);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn add(&mut self, counters: &Counters) {
        self.exchanges += counters.exchanges;
        self.open += counters.open;
        self.due_bytes += counters.due_bytes;
        self.sent_bytes += counters.sent_bytes;
        self.received_bytes += counters.received_bytes;
    }

    fn ask_daemon(&mut self, config: &LabConfig, folder: &Path, host: usize) {
        let Some(status) = daemons::status(folder, host) else { return };
        let name = carriage::client_name(config, host);
        for client in status.clients.iter().filter(|client| client.name == name) {
            self.submitted_bytes += client.submitted_bytes;
            self.permitted_bytes += client.permitted_bytes;
            self.completed_bytes += client.completed_bytes;
            self.bypassed_bytes += client.bypassed_bytes;
        }
    }

    /// Adds the reports that the plugins wrote when the processes ended.
    pub fn add_reports(&mut self, carriage: &Carriage) {
        self.plugin_bytes = carriage.sent_bytes.values().flat_map(|of| of.values()).sum();
    }

    /// Returns the bytes that one count has and another lacks. `scheduled` says whether daemons
    /// counted from the start to the end.
    pub fn lost_bytes(&self, scheduled: bool) -> u64 {
        // The exchange of a request that was given up may have gone on between two counts.
        if self.open > 0 {
            return 0;
        }
        let mut counts = vec![self.sent_bytes, self.received_bytes, self.plugin_bytes];
        if scheduled {
            counts.push(self.completed_bytes + self.bypassed_bytes);
            // A permit that came too late for its message is one of bytes that bypassed it.
            counts.push((self.permitted_bytes + self.bypassed_bytes).min(self.due_bytes));
        }
        counts.iter().map(|bytes| bytes.abs_diff(self.due_bytes)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_byte_that_one_of_the_counts_lacks_is_lost() {
        let ledger = ExchangeLedger {
            due_bytes: 100,
            sent_bytes: 100,
            received_bytes: 100,
            plugin_bytes: 100,
            submitted_bytes: 90,
            permitted_bytes: 90,
            completed_bytes: 90,
            bypassed_bytes: 10,
            exchanges: 2,
            open: 0,
        };
        assert_eq!(ledger.lost_bytes(true), 0);
        let lost = |change: fn(&mut ExchangeLedger)| {
            let mut ledger = ledger;
            change(&mut ledger);
            ledger.lost_bytes(true)
        };
        assert_eq!(lost(|of| of.received_bytes = 97), 3);
        assert_eq!(lost(|of| of.plugin_bytes = 0), 100);
        assert_eq!(lost(|of| of.permitted_bytes = 85), 5, "sent without a permit");
        assert_eq!(lost(|of| of.permitted_bytes = 95), 0, "a late permit");
        assert_eq!(lost(|of| of.completed_bytes = 89), 1);
        assert_eq!(lost(|of| of.due_bytes = 0), 400, "unasked");
        let alone = ExchangeLedger { permitted_bytes: 0, completed_bytes: 0, ..ledger };
        assert_eq!(alone.lost_bytes(false), 0, "no daemon");
        assert_eq!(lost(|of| (of.open, of.due_bytes) = (1, 200)), 0, "not over yet");
    }
}
