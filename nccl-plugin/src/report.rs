//! Counters of a process's messages, written at exit to the file that `LAXITY_REPORT` names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use laxity_client::{Stage, Stats};
use laxity_job::report::{Count, ReportLine};
use parking_lot::Mutex;

use crate::origin::Function;

/// The function, the stage and the DSCP that a row counts.
type ReportKey = (Function, u8, u8);

/// Counters of messages with one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReportRow {
    messages: u64,
    bytes: u64,
    deferred: u64,
    deferred_ns: u64,
    bypassed: u64,
    overdue: u64,
}

#[derive(Debug, Default)]
pub struct Report {
    rows: Mutex<BTreeMap<ReportKey, ReportRow>>,
    received: Count,
    overdue: Count,
    origins_known: Count,
    pub one_sided: OneSidedCounts,
}

/// Counters of one-sided operations.
#[derive(Debug, Default)]
pub struct OneSidedCounts {
    pub operations: Count,
    pub bytes: Count,
    /// Operations that waited for a permit.
    pub held: Count,
    /// Operations that waited longer than is allowed, and went unscheduled.
    pub overdue: Count,
}

/// The attributes of one message that was begun.
#[derive(Clone, Copy, Debug)]
pub struct SentMessage {
    /// The NCCL function that caused the message.
    pub function: Function,
    pub stage: Stage,
    /// The DSCP of the class in which the message went out.
    pub dscp: u8,
    pub bytes: u64,
    /// The time for which `isend` refused the message, in ns. 0 if it did not.
    pub waited_ns: u64,
    /// Whether the message went without a permit.
    pub bypassed: bool,
    /// Whether the message waited longer than is allowed, and went unscheduled.
    pub overdue: bool,
    /// Whether the profiler interface reported the message's collective.
    pub known: bool,
}

impl Report {
    /// Counts a message that was begun.
    pub fn sent(&self, message: &SentMessage) {
        let mut rows = self.rows.lock();
        let row = rows.entry((message.function, message.stage as u8, message.dscp)).or_default();
        row.messages += 1;
        row.bytes += message.bytes;
        row.deferred += u64::from(message.waited_ns > 0);
        row.deferred_ns += message.waited_ns;
        row.bypassed += u64::from(message.bypassed);
        row.overdue += u64::from(message.overdue);
        if message.known {
            self.origins_known.add(1);
        }
    }

    /// Counts bytes of a message whose rest went unscheduled, because its permit took too long.
    pub fn overdue(&self, bytes: u64) {
        self.overdue.add(bytes);
    }

    pub fn received(&self, bytes: u64) {
        self.received.add(bytes);
    }

    /// Reports whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        let is_two_sided = self.received.get() > 0 || !self.rows.lock().is_empty();
        !is_two_sided && self.one_sided.operations.get() == 0
    }

    /// Returns the report's line. `network` is the backend's name, `stats` the client's count.
    pub fn line(&self, network: &str, stats: &Stats) -> ReportLine {
        let mut line = ReportLine::of("nccl-net");
        line.text("network", network);
        line.counts([
            ("received_bytes", self.received.get()),
            ("overdue_rest_bytes", self.overdue.get()),
            ("origins_known", self.origins_known.get()),
            ("rma_operations", self.one_sided.operations.get()),
            ("rma_bytes", self.one_sided.bytes.get()),
            ("rma_held", self.one_sided.held.get()),
            ("rma_overdue", self.one_sided.overdue.get()),
        ]);
        line.counts(stats.reported());
        let mut sends = String::from("[");
        for (at, ((function, stage, dscp), row)) in self.rows.lock().iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let stage = Stage::from_number(*stage).map_or("unknown", Stage::name);
            let _ = write!(
                sends,
                "{comma}{{\"function\":\"{}\",\"stage\":\"{stage}\",\"dscp\":{dscp},\
                 \"messages\":{},\"bytes\":{},\"deferred\":{},\"deferred_ns\":{},\
                 \"bypassed\":{},\"overdue\":{}}}",
                function.name(),
                row.messages,
                row.bytes,
                row.deferred,
                row.deferred_ns,
                row.bypassed,
                row.overdue,
            );
        }
        sends.push(']');
        line.value("sends", sends);
        line
    }

    /// Appends the line to the file that the environment names, if it names one and something was
    /// counted.
    pub fn write(&self, network: &str, stats: &Stats) {
        if !self.is_empty() {
            self.line(network, stats).append();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_counts_by_function_stage_and_class() {
        let report = Report::default();
        assert!(report.is_empty());
        let message = SentMessage {
            function: Function::AllReduce,
            stage: Stage::Collective,
            dscp: 34,
            bytes: 10,
            waited_ns: 5,
            bypassed: false,
            overdue: false,
            known: true,
        };
        report.sent(&message);
        report.sent(&SentMessage { waited_ns: 0, ..message });
        report.received(3);
        let line = report.line("tcp", &Stats::default()).end();
        assert!(
            line.contains(r#""received_bytes":3,"overdue_rest_bytes":0,"origins_known":2"#),
            "{line}"
        );
        let row = [
            r#"{"function":"all_reduce","stage":"collective","dscp":34,"messages":2,"#,
            r#""bytes":20,"deferred":1,"deferred_ns":5,"bypassed":0,"overdue":0}"#,
        ];
        assert!(line.contains(&row.concat()), "{line}");
    }
}
