//! Collectives that the NCCL plugin carries: the environment of an engine's plugin, and the
//! counters of a run. The counters come from the engines, the plugins' reports and the hosts'
//! daemons.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::LabConfig;
use crate::counts::Counts;
use crate::daemons::{self, daemon_socket};
use crate::error::LabError;
use crate::fabric;

/// Longest time that a plugin waits to attach to its daemon, in ms. A plugin needs the daemon when
/// it opens connections, because the daemon says how to mark them.
const ATTACH_MS: u32 = 5_000;

/// Returns the environment of an engine whose plugin is to use the host's port and daemon and
/// nothing else.
pub fn environment(
    config: &LabConfig,
    folder: &Path,
    host: usize,
    scheduled: bool,
) -> Vec<(&'static str, OsString)> {
    let mut environment: Vec<(&'static str, OsString)> = vec![
        // With `=` NCCL takes the exact name. Without it the name is a prefix.
        ("NCCL_SOCKET_IFNAME", format!("={}", fabric::HOST_PORT).into()),
        ("NCCL_SOCKET_FAMILY", "AF_INET".into()),
        ("LAXITY_NET", "tcp".into()),
        // The default would be too short on a busy machine, and the plugin would then send
        // unscheduled.
        ("LAXITY_ATTACH_MS", ATTACH_MS.to_string().into()),
        // The lab's own connections are one per class, too.
        ("LAXITY_NSOCKS", "1".into()),
        ("LAXITY_NAME", config.host_name(host).into()),
        ("LAXITY_REPORT", report_path(folder, host).into()),
        ("LAXITY_STALL_MS", config.serving().stall_ms.to_string().into()),
    ];
    environment.push(if scheduled {
        ("LAXITY_SOCKET", daemon_socket(folder, host).into())
    } else {
        ("LAXITY_MODE", "off".into())
    });
    environment
}

/// What the plugin appends to `LAXITY_NAME`.
const CLIENT_SUFFIX: &str = "/nccl";

pub fn client_name(config: &LabConfig, host: usize) -> String {
    config.host_name(host) + CLIENT_SUFFIX
}

/// Reports whether a daemon's client of this name is a plugin.
pub fn is_plugin(client: &str) -> bool {
    client.ends_with(CLIENT_SUFFIX)
}

/// Returns the path of the report that the plugin writes when its process ends.
fn report_path(folder: &Path, host: usize) -> std::path::PathBuf {
    folder.join(format!("plugin{host}.json"))
}

/// The counters of the NCCL plugin over all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carriage {
    pub payload_bytes: u64,
    pub messages: u64,
    /// Times that the plugin answered "not now" to a message.
    pub refusals: u64,
    pub sent_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    pub received_bytes: u64,
    /// Messages that the plugin deferred until a permit came.
    pub deferred: u64,
    /// Messages that the plugin sent without a permit.
    pub bypassed: u64,
    /// Messages that the plugin sent without a permit because the longest allowed wait was over.
    pub overdue: u64,
    pub clients: u32,
    pub submitted_bytes: u64,
    pub permitted_bytes: BTreeMap<u8, u64>,
}

/// A line of a report, which the plugin or the preload library writes.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReportLine {
    pub library: String,
    pub network: String,
    pub received_bytes: u64,
    pub unscheduled_ns: u64,
    pub reattaches: u64,
    pub sends: Vec<Sends>,
    pub work_requests: u64,
    pub passed_work_requests: u64,
    /// One-sided operations that waited for a permit.
    pub rma_held: u64,
}

/// The plugin's counters of one kind of messages.
#[derive(Debug, Deserialize)]
pub(crate) struct Sends {
    pub stage: String,
    pub dscp: u8,
    pub messages: u64,
    pub bytes: u64,
    pub deferred: u64,
    pub bypassed: u64,
    pub overdue: u64,
}

impl Carriage {
    /// Adds what the daemons counted. The plugins must still be attached to them.
    pub fn ask_daemons(&mut self, config: &LabConfig, folder: &Path) {
        let prefill = 0..config.prefills();
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

    pub fn add_engines(&mut self, engines: &[Counts]) {
        for counts in engines {
            let count = |name: &str| counts.get(&format!("plugin_{name}_total")) as u64;
            self.payload_bytes += count("bytes");
            self.messages += count("messages");
            self.refusals += count("refusals");
        }
    }

    /// Adds the reports that the plugins wrote when their processes ended. A missing report counts
    /// as nothing sent. Returns the error that names the first one, for callers that need all.
    pub fn read_reports(&mut self, config: &LabConfig, folder: &Path) -> Option<LabError> {
        let mut missing = None;
        for host in 0..config.prefills() {
            let path = report_path(folder, host);
            if !self.add_report(&std::fs::read_to_string(&path).unwrap_or_default()) {
                let plugin = format!("the NCCL plugin of {}", config.host_name(host));
                let how = format!("left no report in {}, so its bytes are unknown", path.display());
                missing.get_or_insert(LabError::program(plugin, how));
            }
        }
        missing
    }

    /// Returns whether the text has a report.
    fn add_report(&mut self, text: &str) -> bool {
        let lines = text.lines().filter_map(|l| serde_json::from_str(l).ok());
        let lines: Vec<ReportLine> = lines.collect();
        self.received_bytes += lines.iter().map(|line| line.received_bytes).sum::<u64>();
        for row in lines.iter().flat_map(|line| &line.sends) {
            let stage = self.sent_bytes.entry(row.stage.clone()).or_default();
            *stage.entry(row.dscp).or_default() += row.bytes;
            self.deferred += row.deferred;
            self.bypassed += row.bypassed;
            self.overdue += row.overdue;
        }
        !lines.is_empty()
    }
}

pub const COLLECTIVE: &str = "collective";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_the_plugin_is_summed_by_stage_and_dscp() {
        let mut carriage = Carriage::default();
        carriage.add_report(concat!(
            r#"{"library":"nccl-net","pid":7,"network":"tcp","received_bytes":3,"sends":["#,
            r#"{"function":"unknown","stage":"collective","dscp":34,"messages":2,"bytes":20,"#,
            r#""deferred":1,"deferred_ns":5,"bypassed":0,"overdue":0},"#,
            r#"{"function":"unknown","stage":"collective","dscp":0,"messages":1,"bytes":4,"#,
            r#""deferred":0,"deferred_ns":0,"bypassed":1,"overdue":1}]}"#,
            "\nno report\n",
        ));
        assert!(!carriage.add_report(""), "no report");
        assert_eq!(carriage.received_bytes, 3);
        assert_eq!(carriage.sent_bytes["collective"], BTreeMap::from([(0, 4), (34, 20)]));
        let counts = (carriage.deferred, carriage.bypassed, carriage.overdue);
        assert_eq!(counts, (1, 1, 1));
    }

    #[test]
    fn a_plugin_without_a_report_is_named() {
        let (config, folder) = (LabConfig::vllm(), tempfile::tempdir().unwrap());
        let line = r#"{"library":"nccl-net","received_bytes":3,"sends":[]}"#;
        std::fs::write(report_path(folder.path(), 0), line).unwrap();
        let missing = Carriage::default().read_reports(&config, folder.path()).unwrap();
        assert!(missing.to_string().contains("plugin of unit1.0 left no report"), "{missing}");
        std::fs::write(report_path(folder.path(), 1), line).unwrap();
        assert!(Carriage::default().read_reports(&config, folder.path()).is_none());
    }

    #[test]
    fn the_environment_leads_to_the_hosts_own_daemon_or_to_none() {
        let value = |environment: &[(&str, OsString)], wanted: &str| {
            let found = environment.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        let config = LabConfig::default();
        let folder = Path::new("/run/lab/0");
        let scheduled = environment(&config, folder, 1, true);
        assert_eq!(value(&scheduled, "LAXITY_SOCKET").as_deref(), Some("/run/lab/0/laxityd1.sock"));
        assert_eq!(value(&scheduled, "LAXITY_NAME").as_deref(), Some("unit0.1"));
        assert_eq!(client_name(&config, 1), "unit0.1/nccl");
        assert_eq!(value(&scheduled, "LAXITY_MODE"), None);
        let alone = environment(&config, folder, 1, false);
        assert_eq!(value(&alone, "LAXITY_MODE").as_deref(), Some("off"));
        assert_eq!(value(&alone, "LAXITY_SOCKET"), None);
    }
}
