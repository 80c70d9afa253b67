//! The bytes of a run's exchanges, counted by the processes that sent and received them, by the
//! plugins in these processes, and by the hosts' daemons. A byte that one count lacks is lost.
//!
//! All counts are of whole messages, and since the processes started. So they include the warm-up.
//! They are taken when vLLM has ended: no exchange begins from then on, and those that have begun
//! still end, because the processes of all hosts go on.

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
    /// Exchanges that were not over when vLLM had ended.
    pub open: u64,
    /// Bytes that the layers' tokens cause, there and back.
    pub due_bytes: u64,
    pub sent_bytes: u64,
    /// Bytes that arrived undamaged.
    pub received_bytes: u64,
    /// Bytes that the plugins' reports have: sent, and received.
    pub plugin_bytes: u64,
    pub plugin_received_bytes: u64,
    /// Bytes of the plugins as the daemons count them: submitted, permitted and completed. They are
    /// 0 without daemons.
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
        self.plugin_received_bytes = carriage.received_bytes;
    }

    /// Returns the bytes that one count has and another lacks. Each pair is of two programs, or of
    /// two hosts. `scheduled` says whether daemons counted from the start to the end.
    pub fn lost_bytes(&self, scheduled: bool) -> u64 {
        // What a layer asked for at one host, and what came at the others and back.
        let mut lost = self.received_bytes.abs_diff(self.due_bytes);
        lost += self.plugin_bytes.abs_diff(self.sent_bytes);
        lost += self.plugin_received_bytes.abs_diff(self.received_bytes);
        if scheduled {
            lost += self.sent_bytes.abs_diff(self.completed_bytes + self.bypassed_bytes);
            // A permit that came too late for its message is one of bytes that bypassed it.
            lost += self.sent_bytes.saturating_sub(self.permitted_bytes + self.bypassed_bytes);
        }
        lost
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
            plugin_received_bytes: 100,
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
        assert_eq!(lost(|of| of.received_bytes = 97), 6, "two counts have them");
        assert_eq!(lost(|of| of.plugin_received_bytes = 97), 3);
        assert_eq!(lost(|of| of.plugin_bytes = 0), 100);
        assert_eq!(lost(|of| of.permitted_bytes = 85), 5, "sent without a permit");
        assert_eq!(lost(|of| of.permitted_bytes = 95), 0, "a late permit");
        assert_eq!(lost(|of| of.completed_bytes = 89), 1);
        assert_eq!(lost(|of| of.due_bytes = 0), 100, "unasked");
        assert_eq!(lost(|of| (of.open, of.due_bytes) = (1, 120)), 20, "an exchange never ended");
        let alone = ExchangeLedger { permitted_bytes: 0, completed_bytes: 0, ..ledger };
        assert_eq!(alone.lost_bytes(false), 0, "no daemon");
    }
}
