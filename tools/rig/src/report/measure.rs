//! From what was measured to what is reported. The JSON of a report is this file's structs.
//!
//! * *TTFT* is from a request's arrival to the last byte of its KV cache at decode, as MFS's
//!   footnote 1 takes it. A request that never got there counts as missed, and with the time
//!   until it was given up.
//! * *Collective time* is that of one all-to-all phase at one rank: first byte submitted to last
//!   byte received.
//! * *Earliness* is (deadline − finish) / SLO of a request: its positive part is bandwidth taken
//!   before it was needed (MFS §6.3), its negative part a miss. Reported is the mean of the
//!   positive part.
//! * *Link utilisation* is what the switch's port and the host's port sent, over their rate and
//!   the run's length, averaged over all ports.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::distribution::{Sample, Summary};
use crate::carriage::Carriage;
use crate::config::{LabConfig, Scaling};
use crate::controller::RunRecord;
use crate::coordinator::CoordinatorRecord;
use crate::lab::Arrivals;
use crate::plan::PlannedRequest;
use crate::trace::Fitting;
use crate::wiring::LinkRecord;
use crate::workload::{self, Statistics};

/// Everything a lab run found.
#[derive(Clone, Debug, Serialize)]
pub struct LabReport {
    /// One per policy, in the order asked for.
    pub runs: Vec<PolicyRun>,
    /// What arrived.
    pub workload: WorkloadReport,
    /// How the model was scaled to this machine.
    pub scaling: ScalingReport,
    /// Where it ran.
    pub machine: Machine,
    /// The configuration, complete.
    pub config: LabConfig,
}

/// What one policy achieved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyRun {
    /// The policy.
    pub policy: String,
    /// Requests that arrived.
    pub requests: usize,
    /// Requests that had their first token before they were given up.
    pub completed: usize,
    /// Share of the requests whose first token was in time.
    pub ttft_slo_attainment: f64,
    /// Time to first token, ms.
    pub ttft_ms: Summary,
    /// TTFT over the request's own contention-free TTFT.
    pub slowdown: Summary,
    /// Duration of an all-to-all phase, ms.
    pub collective_ms: Summary,
    /// Mean of the positive part of (deadline − finish) / SLO.
    pub earliness: f64,
    /// Parts of the TTFT, means in ms.
    pub stages_ms: Stages,
    /// Bytes over capacity, all ports.
    pub link_utilisation: f64,
    /// The same by host.
    pub hosts: Vec<HostUtilisation>,
    /// Bytes that the switch's ports sent, by DSCP; `0` is unmarked.
    pub fabric_bytes: BTreeMap<u8, u64>,
    /// Bytes that the hosts' own ports sent, by DSCP.
    pub nic_bytes: BTreeMap<u8, u64>,
    /// Packets that any queue dropped.
    pub fabric_drops: u64,
    /// Payload that the replay's own connections sent, by stage and DSCP: what `fabric_bytes` has
    /// to agree with, if `plugin` is none.
    pub stage_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    /// What became of all-to-alls that the NCCL plugin carried; none if the replay's own
    /// connections did.
    pub plugin: Option<Carriage>,
    /// Payload handed to TCP, and to the plugin.
    pub bytes_sent: u64,
    /// Payload received, each byte counted the first time.
    pub bytes_received: u64,
    /// Payload received again.
    pub bytes_duplicated: u64,
    /// Payload left out by a flow that went on.
    pub bytes_missing: u64,
    /// Payload that was not what had been sent.
    pub bytes_corrupted: u64,
    /// Payload that went out with a permit.
    pub scheduled_bytes: u64,
    /// Payload that went out without one though a daemon was asked for.
    pub bypassed_bytes: u64,
    /// Time without a scheduler at the host that was longest without, ms; each host's own is in
    /// [`Self::hosts`].
    pub unscheduled_ms: f64,
    /// Daemons that died and were started again.
    pub daemon_restarts: u32,
    /// What the coordinator did; none if there was none.
    pub coordinator: Option<CoordinatorRecord>,
    /// Processors that were busy, over the whole machine.
    pub busy_cores: f64,
    /// Processors that the lab's own processes kept busy.
    pub lab_cores: f64,
    /// How long it took, s.
    pub wall_s: f64,
    /// Percentiles 0 … 100 for plots.
    pub percentiles: Percentiles,
}

/// Mean parts of the TTFT, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Stages {
    /// Arrival until the request's batch began.
    pub queued: f64,
    /// Its batch waited for reused KV (stage 1).
    pub kv_reuse_stall: f64,
    /// Its batch waited for collectives (stage 2).
    pub collective: f64,
    /// The rest of its batch's layers: compute.
    pub compute: f64,
    /// Last layer until decode had everything (the part of stage 3 that nothing hid).
    pub p2d_tail: f64,
}

/// How much of a host's link was used.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostUtilisation {
    /// The host.
    pub host: String,
    /// Its port towards the switch, share of its rate.
    pub egress: f64,
    /// The switch's port towards it.
    pub ingress: f64,
    /// Time without a scheduler, ms.
    pub unscheduled_ms: f64,
    /// Payload that went out without a permit though a daemon was asked for.
    pub bypassed_bytes: u64,
}

/// Percentiles 0 … 100.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// TTFT, ms.
    pub ttft_ms: Vec<f64>,
    /// All-to-all phases, ms.
    pub collective_ms: Vec<f64>,
    /// (deadline − finish) / SLO.
    pub earliness: Vec<f64>,
}

/// What arrived.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Hash over all arrivals: equal hashes, equal arrivals.
    pub arrivals_digest: String,
    /// Statistics of the requests.
    #[serde(flatten)]
    pub statistics: Statistics,
    /// What they offer to the prefill units: busy time of each alone on an idle fabric, over the
    /// units' time.
    pub offered_load: f64,
    /// Share of the requests that fetch their prefix from another unit.
    pub fetched_share: f64,
    /// Mean contention-free TTFT, ms.
    pub ideal_ttft_ms: f64,
    /// How a recording was fitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fitting: Option<Fitting>,
}

/// How the model was scaled.
#[derive(Clone, Debug, Serialize)]
pub struct ScalingReport {
    /// Sizes and times.
    #[serde(flatten)]
    pub scaling: Scaling,
    /// Share of an uncontended layer of the mean request that collectives take.
    pub comm_share: f64,
    /// All-to-all bytes over KV bytes of a token at a layer.
    pub collective_to_kv: f64,
    /// The check of the analytic contention-free TTFT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ideal_check: Option<IdealCheck>,
}

/// Requests played one by one, against the analytic contention-free TTFT.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct IdealCheck {
    /// How many.
    pub requests: usize,
    /// Mean of measured over computed.
    pub measured_over_computed: f64,
    /// The largest of them.
    pub worst: f64,
    /// Mean all-to-all phase with the fabric to itself, ms.
    pub collective_ms: f64,
}

/// Where it ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processors.
    pub cores: usize,
    /// Kernel release.
    pub kernel: String,
    /// Of the processor.
    pub model: String,
}

impl Machine {
    /// This machine.
    #[must_use]
    pub fn of_this() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo");
        let model = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            model: model
                .map(|(_, model)| model.trim().to_owned())
                .unwrap_or_default(),
        }
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Compares requests that had the fabric to themselves with what was computed for them.
#[must_use]
pub fn ideal_check(plan: &[PlannedRequest], record: &RunRecord) -> IdealCheck {
    let finished: HashMap<u64, u64> = record.finished.iter().copied().collect();
    let ratios = Sample::new(plan.iter().filter_map(|request| {
        let ttft = finished.get(&request.id)? - record.begin_ns - request.arrival_ns;
        Some(ttft as f64 / request.ideal_ns as f64)
    }));
    let collectives = record
        .workers
        .iter()
        .flat_map(|worker| &worker.collective_ns);
    IdealCheck {
        requests: ratios.len(),
        measured_over_computed: ratios.mean(),
        worst: ratios.quantile(1.0),
        collective_ms: Sample::new(collectives.map(|&ns| ms(ns))).mean(),
    }
}

/// Makes the report.
#[must_use]
pub fn report(
    config: &LabConfig,
    arrivals: &Arrivals,
    records: &[RunRecord],
    ideal_check: Option<IdealCheck>,
    machine: Machine,
) -> LabReport {
    let plan = &arrivals.plan;
    let scaling = config.scaling();
    let count = plan.len().max(1) as f64;
    let mean_new = plan.iter().map(|r| f64::from(r.new_tokens)).sum::<f64>() / count;
    let exchange_ns = 2.0
        * (scaling.collective_bytes(mean_new as u32) * (scaling.ranks as u64 - 1)) as f64
        / scaling.goodput_bytes_per_s
        * 1e9;
    let compute_ns = scaling.compute_ns(mean_new as u32) as f64;
    LabReport {
        runs: records
            .iter()
            .map(|record| policy_run(config, plan, record))
            .collect(),
        workload: WorkloadReport {
            arrivals_digest: workload::digest(&arrivals.requests),
            statistics: workload::statistics(&arrivals.requests, config.duration_s),
            offered_load: crate::plan::offered_load(config, &arrivals.requests),
            fetched_share: plan.iter().filter(|r| r.fetched() > 0).count() as f64 / count,
            ideal_ttft_ms: plan.iter().map(|r| ms(r.ideal_ns)).sum::<f64>() / count,
            fitting: arrivals.fitting.clone(),
        },
        scaling: ScalingReport {
            scaling,
            comm_share: exchange_ns / (exchange_ns + compute_ns),
            collective_to_kv: config.model.collective_to_kv,
            ideal_check,
        },
        machine,
        config: config.clone(),
    }
}

fn policy_run(config: &LabConfig, plan: &[PlannedRequest], record: &RunRecord) -> PolicyRun {
    let finished: HashMap<u64, u64> = record.finished.iter().copied().collect();
    let span_ns = record.end_ns.saturating_sub(record.begin_ns).max(1);
    // Of a request that never finished it is known that it took at least until it was given up.
    let ttft_ns = |request: &PlannedRequest| {
        let end = finished.get(&request.id).copied().unwrap_or(record.end_ns);
        end.saturating_sub(record.begin_ns + request.arrival_ns)
    };
    let in_time = |request: &&PlannedRequest| {
        finished.contains_key(&request.id) && ttft_ns(request) <= request.slo_ns
    };
    let earliness =
        Sample::new(plan.iter().map(|request| {
            (request.slo_ns as f64 - ttft_ns(request) as f64) / request.slo_ns as f64
        }));
    let early = Sample::new(plan.iter().map(|request| {
        ((request.slo_ns as f64 - ttft_ns(request) as f64) / request.slo_ns as f64).max(0.0)
    }));
    let ttft = Sample::new(plan.iter().map(|request| ms(ttft_ns(request))));
    let collectives = Sample::new(
        record
            .workers
            .iter()
            .flat_map(|w| &w.collective_ns)
            .map(|&ns| ms(ns)),
    );
    let traffic = || record.workers.iter().map(|worker| &worker.traffic);
    let mut run = PolicyRun {
        policy: record.policy.clone(),
        requests: plan.len(),
        completed: finished.len(),
        ttft_slo_attainment: plan.iter().filter(in_time).count() as f64 / plan.len().max(1) as f64,
        ttft_ms: ttft.summary(),
        slowdown: Sample::new(
            plan.iter()
                .map(|request| ttft_ns(request) as f64 / request.ideal_ns as f64),
        )
        .summary(),
        collective_ms: collectives.summary(),
        earliness: early.mean(),
        stages_ms: stages(config, plan, record, &finished),
        hosts: utilisation(config, record, span_ns),
        bytes_sent: traffic()
            .flat_map(|t| t.sent.values())
            .flat_map(BTreeMap::values)
            .chain(traffic().flat_map(|t| t.carried.values()))
            .sum(),
        bytes_received: traffic().flat_map(|t| t.received.values()).sum(),
        bytes_duplicated: traffic().map(|t| t.duplicated).sum(),
        bytes_missing: traffic().map(|t| t.missing).sum(),
        bytes_corrupted: traffic().map(|t| t.corrupted).sum(),
        scheduled_bytes: record
            .workers
            .iter()
            .map(|w| w.client.scheduled_bytes)
            .sum(),
        bypassed_bytes: record.workers.iter().map(|w| w.client.bypassed_bytes).sum(),
        unscheduled_ms: record
            .workers
            .iter()
            .map(|w| ms(w.client.unscheduled_ns))
            .fold(0.0, f64::max),
        daemon_restarts: record.daemon_restarts,
        plugin: record.carriage.clone(),
        coordinator: record.coordinator.clone(),
        busy_cores: record.busy_cores,
        lab_cores: record.lab_cores,
        wall_s: span_ns as f64 / 1e9,
        percentiles: Percentiles {
            ttft_ms: ttft.percentiles(),
            collective_ms: collectives.percentiles(),
            earliness: earliness.percentiles(),
        },
        ..PolicyRun::default()
    };
    let ports = run.hosts.len().max(1) as f64 * 2.0;
    run.link_utilisation = run.hosts.iter().map(|h| h.egress + h.ingress).sum::<f64>() / ports;
    for LinkRecord { egress, ingress } in &record.links {
        for (&dscp, counters) in ingress {
            *run.fabric_bytes.entry(dscp).or_default() += counters.bytes;
        }
        for (&dscp, counters) in egress {
            *run.nic_bytes.entry(dscp).or_default() += counters.bytes;
        }
        run.fabric_drops += egress
            .values()
            .chain(ingress.values())
            .map(|c| c.drops)
            .sum::<u64>();
    }
    for (stage, by_dscp) in traffic().flat_map(|t| &t.sent) {
        for (&dscp, &bytes) in by_dscp {
            let stage = run.stage_bytes.entry(stage.clone()).or_default();
            *stage.entry(dscp).or_default() += bytes;
        }
    }
    run
}

fn utilisation(config: &LabConfig, record: &RunRecord, span_ns: u64) -> Vec<HostUtilisation> {
    let capacity = f64::from(config.port_mbit) * 1e6 / 8.0 * span_ns as f64 / 1e9;
    let share = |counters: &crate::fabric::PortCounters| {
        counters.values().map(|queue| queue.bytes).sum::<u64>() as f64 / capacity
    };
    record
        .links
        .iter()
        .enumerate()
        .map(|(host, link)| {
            let client = record
                .workers
                .get(host)
                .map(|w| w.client)
                .unwrap_or_default();
            HostUtilisation {
                host: config.host_name(host),
                egress: share(&link.egress),
                ingress: share(&link.ingress),
                unscheduled_ms: ms(client.unscheduled_ns),
                bypassed_bytes: client.bypassed_bytes,
            }
        })
        .collect()
}

/// Takes the TTFT of the requests that finished apart, as their unit's leader saw it.
fn stages(
    config: &LabConfig,
    plan: &[PlannedRequest],
    record: &RunRecord,
    finished: &HashMap<u64, u64>,
) -> Stages {
    let leaders = (0..config.units).map(|unit| config.prefill_host(unit, 0));
    let batches = leaders
        .filter_map(|host| record.workers.get(host))
        .flat_map(|worker| &worker.batches);
    let (mut sum, mut count) = (Stages::default(), 0.0_f64);
    for batch in batches {
        for id in &batch.requests {
            let request = plan.get(*id as usize - 1);
            let (Some(request), Some(&end_ns)) = (request, finished.get(id)) else {
                continue;
            };
            count += 1.0;
            sum.queued += ms(batch
                .begun_ns
                .saturating_sub(record.begin_ns + request.arrival_ns));
            sum.kv_reuse_stall += ms(batch.kv_stall_ns);
            sum.collective += ms(batch.collective_ns);
            let layers = batch.computed_ns - batch.begun_ns;
            sum.compute += ms(layers.saturating_sub(batch.kv_stall_ns + batch.collective_ns));
            sum.p2d_tail += ms(end_ns.saturating_sub(batch.computed_ns));
        }
    }
    let count = count.max(1.0);
    Stages {
        queued: sum.queued / count,
        kv_reuse_stall: sum.kv_reuse_stall / count,
        collective: sum.collective / count,
        compute: sum.compute / count,
        p2d_tail: sum.p2d_tail / count,
    }
}

#[cfg(test)]
#[path = "measure_tests.rs"]
pub(crate) mod tests;
