//! What became of collectives that the NCCL plugin carried, by those who ought to know: the
//! plugin's own report, and the hosts' daemons. The workers' counts ([`CarrierRecord`]) are of what
//! they gave it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::carrier::{CarrierRecord, client_name, report_path};
use crate::config::LabConfig;
use crate::daemons;
use crate::ledger::stage_name;
use crate::message::WorkerReport;

/// Over all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carriage {
    /// What the plugin calls itself.
    pub name: String,
    /// Payload that workers gave it, by stage.
    pub payload_bytes: BTreeMap<String, u64>,
    /// Messages that workers gave it.
    pub messages: u64,
    /// Times that it said "not now" to a message.
    pub refusals: u64,
    /// What it sent, by stage and DSCP, the replay's own heads included.
    pub sent_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    /// Messages that it held back for a permit.
    pub deferred: u64,
    /// Messages that it sent without a permit.
    pub bypassed: u64,
    /// Messages that had waited for their permit for as long as the plugin lets them, and are among
    /// those.
    pub overdue: u64,
    /// Daemons that had a client of the plugin's name at the end.
    pub clients: u32,
    /// Bytes that those clients submitted to them.
    pub submitted_bytes: u64,
    /// Bytes that those daemons permitted for stage 2, by DSCP.
    pub permitted_bytes: BTreeMap<u8, u64>,
    /// Hosts whose kernel did not let the plugin's sockets have the buffers of the lab's own.
    pub buffers_unbounded: u32,
}

/// A line of the plugin's report, as far as it matters here.
#[derive(Deserialize)]
struct PluginReport {
    #[serde(default)]
    sends: Vec<Sends>,
}

#[derive(Deserialize)]
struct Sends {
    stage: String,
    dscp: u8,
    bytes: u64,
    #[serde(default)]
    deferred: u64,
    #[serde(default)]
    bypassed: u64,
    #[serde(default)]
    overdue: u64,
}

impl Carriage {
    /// What daemons say while the plugins are still attached to them.
    pub fn ask_daemons(&mut self, config: &LabConfig, folder: &Path) {
        let prefill = 0..config.units * config.ranks;
        for (host, status) in prefill.filter_map(|h| Some((h, daemons::status(folder, h)?))) {
            let name = client_name(config, host);
            for client in status.clients.iter().filter(|client| client.name == name) {
                self.clients += 1;
                self.submitted_bytes += client.submitted_bytes;
            }
            for port in &status.ports {
                let collective = |p: &&laxity_wire::PermittedBytes| p.stage == COLLECTIVE;
                for permitted in port.permitted.iter().filter(collective) {
                    let level = port.levels.iter().find(|l| l.level == permitted.level);
                    let dscp = level.map_or(0, |level| level.dscp);
                    *self.permitted_bytes.entry(dscp).or_default() += permitted.bytes;
                }
            }
        }
    }

    /// What workers gave to the plugin.
    pub fn add_workers(&mut self, workers: &[WorkerReport]) {
        for worker in workers {
            let Some(CarrierRecord {
                name,
                messages,
                refusals,
                buffers_unbounded,
                ..
            }) = &worker.carrier
            else {
                continue;
            };
            self.name.clone_from(name);
            self.messages += messages;
            self.refusals += refusals;
            self.buffers_unbounded += u32::from(*buffers_unbounded);
            for (stage, bytes) in &worker.traffic.carried {
                *self.payload_bytes.entry(stage.clone()).or_default() += bytes;
            }
        }
    }

    /// What the plugins wrote when their processes ended. One that wrote nothing sent nothing, or
    /// was killed.
    pub fn read_reports(&mut self, config: &LabConfig, folder: &Path) {
        for host in 0..config.units * config.ranks {
            let text = std::fs::read_to_string(report_path(folder, host)).unwrap_or_default();
            self.add_report(&text);
        }
    }

    fn add_report(&mut self, text: &str) {
        let lines = text.lines().filter_map(|l| serde_json::from_str(l).ok());
        for row in lines.flat_map(|line: PluginReport| line.sends) {
            let stage = self.sent_bytes.entry(row.stage).or_default();
            *stage.entry(row.dscp).or_default() += row.bytes;
            self.deferred += row.deferred;
            self.bypassed += row.bypassed;
            self.overdue += row.overdue;
        }
    }
}

/// The name of stage 2.
const COLLECTIVE: &str = stage_name(crate::frame::Kind::Dispatch);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_the_plugin_is_summed_by_stage_and_dscp() {
        let mut carriage = Carriage::default();
        carriage.add_report(
            r#"{"library":"nccl-net","pid":7,"network":"tcp","received_bytes":3,"sends":[{"function":"unknown","stage":"collective","dscp":34,"messages":2,"bytes":20,"deferred":1,"deferred_ns":5,"bypassed":0,"overdue":0},{"function":"unknown","stage":"collective","dscp":0,"messages":1,"bytes":4,"deferred":0,"deferred_ns":0,"bypassed":1,"overdue":1}]}
no report
"#,
        );
        carriage.add_report("");
        assert_eq!(
            carriage.sent_bytes["collective"],
            BTreeMap::from([(0, 4), (34, 20)])
        );
        let counts = (carriage.deferred, carriage.bypassed, carriage.overdue);
        assert_eq!(counts, (1, 1, 1));
    }
}
