//! The KV bytes of a run with vLLM, counted three times: by vLLM's connector, by the hosts'
//! daemons, and by the connector again when each request was alone. A byte that one count lacks is
//! lost.
//!
//! The connector counts what a transfer moved, and knows nothing of Laxity. The daemons count what
//! clients submitted, and what clients reported as completed.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::carriage;
use crate::counts::Counts;
use crate::daemons;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    All,
    /// All, but some only when they were asked again after the death of a process.
    AllInTheEnd,
    Some,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ledger {
    /// Bytes that went from prefill to decode.
    pub moved_bytes: u64,
    /// Bytes that prefill hosts read from the store. Which blocks the store has depends on timing.
    pub reused_bytes: u64,
    /// Bytes that prefill hosts put into the store.
    pub stored_bytes: u64,
    /// What `moved_bytes` was for the same requests when each was alone.
    pub alone_bytes: u64,
    pub transfers: u64,
    pub failed_transfers: u64,
    /// Requests whose KV expired because nobody fetched it.
    pub expired: u64,
    pub transfer_ms: f64,
    pub post_ms: f64,
    /// Mean time of a transfer from when it was asked for until its permit, in ms. 0 without a
    /// daemon.
    pub permit_wait_ms: f64,
    /// Mean time from when a transfer was posted until the connector saw that it was complete, in
    /// ms. 0 without a daemon.
    pub network_ms: f64,
    pub submitted_bytes: u64,
    pub permitted_bytes: u64,
    pub completed_bytes: u64,
    pub bypassed_bytes: u64,
    /// Whether any of the counts could be compared. Without daemons, KV of a run in which requests
    /// were given up has nothing to be compared with.
    pub checked: bool,
}

impl Ledger {
    pub fn of(counts: &Counts, alone_bytes: u64) -> Self {
        let count = |name: &str| counts.get(name) as u64;
        let ms = |name: &str| counts.mean(name) * 1e3;
        Self {
            moved_bytes: moved(counts),
            reused_bytes: count("vllm:mooncake_store_operation_bytes_total.load_get"),
            stored_bytes: count("vllm:mooncake_store_operation_bytes_total.save_put"),
            alone_bytes,
            transfers: count("vllm:nixl_bytes_transferred_count"),
            failed_transfers: count("vllm:nixl_num_failed_transfers_total"),
            expired: count("vllm:nixl_num_kv_expired_reqs_total"),
            transfer_ms: ms("vllm:nixl_xfer_time_seconds"),
            post_ms: ms("vllm:nixl_post_time_seconds"),
            permit_wait_ms: ms("laxity:kv_permit_wait_seconds"),
            network_ms: ms("laxity:kv_network_seconds"),
            submitted_bytes: count("laxityd_submitted_bytes"),
            permitted_bytes: count("laxityd_permitted_bytes"),
            completed_bytes: count("laxityd_completed_bytes"),
            bypassed_bytes: count("laxityd_bypassed_bytes"),
            checked: false,
        }
    }

    /// Returns the bytes that one count has and another lacks. `scheduled` says whether there were
    /// daemons.
    pub fn compare(&mut self, scheduled: bool, answered: Answered) -> u64 {
        let mut lost = 0;
        self.checked = scheduled || answered != Answered::Some;
        if scheduled {
            let known = self.completed_bytes + self.bypassed_bytes;
            let submitted = self.submitted_bytes + self.bypassed_bytes;
            let engine = self.moved_bytes + self.reused_bytes + self.stored_bytes;
            // A request that was given up may leave a transfer behind that began and did not end.
            // Laxity completes one that failed, and the connector counts none of its bytes. Nor
            // does it count what a process completed just before its death.
            lost += match (self.failed_transfers, answered) {
                (0, Answered::All | Answered::Some) => known.abs_diff(engine),
                _ => engine.saturating_sub(known),
            };
            if answered == Answered::All {
                lost += submitted.abs_diff(known);
            }
        }
        lost + match answered {
            Answered::All => self.alone_bytes.abs_diff(self.moved_bytes),
            // KV of a request that failed may have moved before, and moves again.
            Answered::AllInTheEnd => self.alone_bytes.saturating_sub(self.moved_bytes),
            Answered::Some => 0,
        }
    }
}

pub fn moved(counts: &Counts) -> u64 {
    counts.get("vllm:nixl_bytes_transferred_sum") as u64
}

/// Adds what each host's daemon counted of its clients to the counters of the host.
pub fn add_daemons(folder: &Path, counts: &mut [Counts]) {
    for (host, counts) in counts.iter_mut().enumerate() {
        let Some(status) = daemons::status(folder, host) else { continue };
        let mut add = |name: &str, bytes: u64| {
            *counts.of.entry(format!("laxityd_{name}_bytes")).or_default() += bytes as f64;
        };
        // Collectives have a ledger of their own. Ports count clients that are gone, too.
        let stages = status.ports.iter().flat_map(|port| &port.stages);
        for stage in stages.filter(|stage| stage.stage != carriage::COLLECTIVE) {
            add("submitted", stage.submitted_bytes);
            add("permitted", stage.permitted_bytes);
            add("completed", stage.completed_bytes);
        }
        let plugins = status.clients.iter().filter(|client| carriage::is_plugin(&client.name));
        let plugins: u64 = plugins.map(|client| client.bypassed_bytes).sum();
        add("bypassed", status.totals.bypassed_bytes.saturating_sub(plugins));
        let mut stages: BTreeMap<String, u64> = BTreeMap::new();
        let permitted = status.ports.iter().flat_map(|port| &port.permitted);
        for permitted in permitted.filter(|permitted| permitted.stage != carriage::COLLECTIVE) {
            *stages.entry(permitted.stage.to_string()).or_default() += permitted.bytes;
        }
        for (stage, bytes) in stages {
            // UCX marks nothing over TCP, whatever the permit says.
            counts.stage_bytes.entry(stage).or_default().insert(0, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(moved: u64, submitted: u64, completed: u64) -> Counts {
        let mut counts = Counts::read(&format!(
            "vllm:nixl_bytes_transferred_sum{{engine=\"0\"}} {moved}\n\
             vllm:nixl_bytes_transferred_count{{engine=\"0\"}} 2\n\
             laxity:kv_permit_wait_seconds_sum{{engine=\"0\"}} 0.5\n\
             laxity:kv_permit_wait_seconds_count{{engine=\"0\"}} 2\n\
             vllm:nixl_bytes_transferred_bucket{{engine=\"0\",le=\"2048.0\"}} 2\n"
        ));
        counts.of.insert("laxityd_submitted_bytes".to_owned(), submitted as f64);
        counts.of.insert("laxityd_completed_bytes".to_owned(), completed as f64);
        counts
    }

    #[test]
    fn a_byte_that_one_of_the_counts_lacks_is_lost() {
        let lost = |moved, submitted, completed, alone| {
            let mut ledger = Ledger::of(&counts(moved, submitted, completed), alone);
            ledger.compare(true, Answered::All)
        };
        assert_eq!(lost(700, 700, 700, 700), 0);
        assert_eq!(Ledger::of(&counts(700, 700, 700), 700).permit_wait_ms, 250.0);
        assert_eq!(lost(700, 700, 699, 700), 2, "not completed, though moved");
        assert_eq!(lost(700, 0, 0, 700), 700, "moved past the daemon");
        assert_eq!(lost(600, 600, 600, 700), 100, "decode computed what it did not fetch");
        let mut unfinished = Ledger::of(&counts(600, 700, 600), 700);
        assert_eq!(unfinished.compare(true, Answered::Some), 0, "a request was given up");
        let mut failed = Ledger { failed_transfers: 1, completed_bytes: 700, ..unfinished };
        assert_eq!(failed.compare(true, Answered::Some), 0, "the sender died");
        let mut alone = Ledger::of(&counts(700, 0, 0), 700);
        assert_eq!((alone.compare(false, Answered::All), alone.checked), (0, true), "no daemon");
    }

    #[test]
    fn after_a_death_the_bytes_are_checked_without_a_daemon_too_or_said_to_be_unchecked() {
        let after = |moved, completed, scheduled, answered| {
            let mut ledger = Ledger::of(&counts(moved, completed, completed), 700);
            (ledger.compare(scheduled, answered), ledger.checked)
        };
        assert_eq!(after(750, 0, false, Answered::AllInTheEnd), (0, true), "moved again");
        assert_eq!(after(600, 0, false, Answered::AllInTheEnd), (100, true), "computed instead");
        assert_eq!(after(750, 760, true, Answered::AllInTheEnd), (0, true), "completed at last");
        assert_eq!(after(750, 740, true, Answered::AllInTheEnd), (10, true), "past the daemon");
        assert_eq!(after(600, 0, false, Answered::Some), (0, false), "nothing to compare");
    }

    #[test]
    fn bytes_of_the_store_need_permits_and_may_differ_from_those_of_requests_alone() {
        let mut counts = counts(700, 760, 760);
        let store = |operation| format!("vllm:mooncake_store_operation_bytes_total.{operation}");
        counts.of.insert(store("load_get"), 20.0);
        counts.of.insert(store("save_put"), 40.0);
        assert_eq!(Ledger::of(&counts, 700).compare(true, Answered::All), 0);
        counts.of.insert(store("load_get"), 25.0);
        let lost = Ledger::of(&counts, 700).compare(true, Answered::All);
        assert_eq!(lost, 5, "read past the daemon");
    }
}
