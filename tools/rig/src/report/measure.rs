//! From what was measured to what is reported. The JSON of a report is this file's structs.
//!
//! * *TTFT* is from when a request was due to be asked to its first token at the client, whatever
//!   becomes of the rest of the answer. One that never had a token counts as missed, and with the
//!   time until it was given up.
//! * *The objective* is so many times the TTFT of the same request alone: computed
//!   ([`ideal`](crate::ideal)) for the timed engine, measured for the real one.
//! * *An exchange* is from when a layer's tokens leave for experts elsewhere until all are back: it
//!   blocks the layer, and has the experts' computation in it.
//! * *Bytes* by stage and DSCP are the engines' own count of payload; by DSCP alone, the queues' of
//!   the fabric, with headers.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::carriage::Carriage;
use crate::client::{Answer, complete, different};
use crate::config::LabConfig;
use crate::controller::RunRecord;
use crate::coordinator::CoordinatorRecord;
use crate::counts::Counts;
use crate::plan::{Asked, Asking};
use crate::report::distribution::{Sample, Summary};
use crate::trace::Fitting;
use crate::wiring::LinkRecord;
use crate::workload::{self, Statistics};

/// Everything a lab run found.
#[derive(Clone, Debug, Serialize)]
pub struct LabReport {
    /// What made the traffic: `timed` or `real`.
    pub engine: &'static str,
    /// One per policy, in the order asked for.
    pub runs: Vec<PolicyRun>,
    /// What arrived.
    pub workload: WorkloadReport,
    /// The requests one by one.
    pub alone: Alone,
    /// Where it ran.
    pub machine: Machine,
    /// The configuration, complete.
    pub config: LabConfig,
}

impl LabReport {
    /// Whether all answers have to be the same: only where the computation is the same to the bit.
    #[must_use]
    pub fn must_agree(&self) -> bool {
        self.config.serving().device == crate::serving::Device::Cpu
    }

    /// Requests that were answered otherwise than alone, by policy.
    #[must_use]
    pub fn disagreements(&self) -> Vec<(&str, &[u64])> {
        let differ = |run: &&PolicyRun| !run.answers_different.is_empty();
        self.runs
            .iter()
            .filter(differ)
            .map(|run| (run.policy.as_str(), &run.answers_different[..]))
            .collect()
    }
}

/// What one policy achieved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PolicyRun {
    /// The policy.
    pub policy: String,
    /// Requests that arrived.
    pub requests: usize,
    /// Requests with a whole answer.
    pub completed: usize,
    /// Why requests failed, and how many for that reason; those that were given up are not among
    /// them.
    pub errors: BTreeMap<String, usize>,
    /// Answers that were compared with those that the requests got alone.
    pub answers_compared: usize,
    /// Requests whose answer was another one.
    pub answers_different: Vec<u64>,
    /// Share of the requests whose first token was in time.
    pub ttft_slo_attainment: f64,
    /// Time to first token at the client, ms.
    pub ttft_ms: Summary,
    /// TTFT over the request's own alone.
    pub slowdown: Summary,
    /// Mean of the positive part of (deadline − first token) / objective.
    pub earliness: f64,
    /// Tokens of prompts and answers that were served, per second, from time zero to the last
    /// answer.
    pub tokens_per_s: f64,
    /// The same of whole requests.
    pub requests_per_s: f64,
    /// Mean time of an exchange with experts elsewhere, ms.
    pub exchange_ms: f64,
    /// How many there were.
    pub exchanges: u64,
    /// Parts of the TTFT, means in ms.
    pub stages_ms: Stages,
    /// Mean time that a layer waited for KV that another host had, ms.
    pub kv_wait_ms: f64,
    /// Mean time of an iteration, ms.
    pub iteration_ms: f64,
    /// Prompt tokens that were in a prefill host's own cache.
    pub tokens_found: u64,
    /// Prompt tokens whose KV another prefill host had.
    pub tokens_fetched: u64,
    /// Prompts that a prefill host computed for a decode host.
    pub prefilled_elsewhere: u64,
    /// Prompts that a decode host computed itself, since no prefill host did.
    pub prefilled_after_all: u64,
    /// Batches that failed.
    pub batches_failed: u64,
    /// Bytes over capacity, all ports.
    pub link_utilisation: f64,
    /// By host.
    pub hosts: Vec<HostReport>,
    /// Bytes that the switch's ports sent, by DSCP; `0` is unmarked.
    pub fabric_bytes: BTreeMap<u8, u64>,
    /// Bytes that the hosts' own ports sent, by DSCP.
    pub nic_bytes: BTreeMap<u8, u64>,
    /// Packets that any queue dropped.
    pub fabric_drops: u64,
    /// Payload by stage and DSCP.
    pub stage_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    /// Payload that went out with a permit.
    pub scheduled_bytes: u64,
    /// Payload that went out without one; all of it, where there was no daemon.
    pub bypassed_bytes: u64,
    /// Time without a scheduler at the host that was longest without, ms; each host's own is in
    /// [`Self::hosts`].
    pub unscheduled_ms: f64,
    /// What became of exchanges that the NCCL plugin carried; none if the engine's own connections
    /// did.
    pub plugin: Option<Carriage>,
    /// Daemons that died and were started again.
    pub daemon_restarts: u32,
    /// What the coordinator did; none if there was none.
    pub coordinator: Option<CoordinatorRecord>,
    /// Sockets had the kernel's own buffers at some host: not to be compared with runs where they
    /// had not.
    pub buffers_unbounded: bool,
    /// Processors that were busy, over the whole machine.
    pub busy_cores: f64,
    /// Processors that the lab's own processes kept busy, while caches were filled, too.
    pub lab_cores: f64,
    /// How long it took, s.
    pub wall_s: f64,
    /// Percentiles 0 … 100 for plots.
    pub percentiles: Percentiles,
}

/// A host's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostReport {
    /// The host.
    pub host: String,
    /// Its port towards the switch, share of its rate.
    pub egress: f64,
    /// The switch's port towards it.
    pub ingress: f64,
    /// Payload that it sent, by stage.
    pub sent_bytes: BTreeMap<String, u64>,
    /// Of that, with a permit.
    pub scheduled_bytes: u64,
    /// And without.
    pub bypassed_bytes: u64,
    /// Time without a scheduler, ms.
    pub unscheduled_ms: f64,
    /// Prompt tokens that it computed.
    pub prompt_tokens: u64,
}

/// Percentiles 0 … 100.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// TTFT, ms.
    pub ttft_ms: Vec<f64>,
    /// TTFT over the request's own alone.
    pub slowdown: Vec<f64>,
    /// (deadline − first token) / objective.
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
    /// Mean TTFT of a request alone, ms: what objectives are multiples of.
    pub ideal_ttft_ms: f64,
    /// Prefixes that were computed before each run, and their tokens in all.
    pub prefixes: usize,
    /// See there.
    pub prefix_tokens: u64,
    /// How a recording was fitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fitting: Option<Fitting>,
}

/// The requests one by one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Alone {
    /// Time to first token, ms.
    pub ttft_ms: Summary,
    /// Mean time of an exchange, ms.
    pub exchange_ms: f64,
    /// Mean time of an iteration, ms.
    pub iteration_ms: f64,
    /// How long all took, s.
    pub wall_s: f64,
    /// The check of the computed contention-free TTFT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ideal_check: Option<IdealCheck>,
}

/// Requests played one by one, against the computed contention-free TTFT.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct IdealCheck {
    /// How many.
    pub requests: usize,
    /// Mean of measured over computed.
    pub measured_over_computed: f64,
    /// The largest of them.
    pub worst: f64,
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

fn ttft_ns(answer: &Answer) -> Option<u64> {
    Some(answer.first_ns?.saturating_sub(answer.begin_ns).max(1))
}

/// What each request takes alone: as computed, or else as measured.
fn alone_ns(asked: &[Asked], alone: &RunRecord) -> BTreeMap<u64, u64> {
    let measured = alone.answers.iter();
    let measured = measured.filter_map(|answer| Some((answer.id, ttft_ns(answer)?)));
    let computed = asked.iter();
    let computed = computed.filter_map(|one| Some((one.id, one.placed?.ideal_ns)));
    measured.chain(computed).collect()
}

/// Compares requests that had the fabric to themselves with what was computed for them.
fn ideal_check(asked: &[Asked], alone: &RunRecord) -> Option<IdealCheck> {
    let computed = alone_ns(asked, &RunRecord::default());
    let ratios =
        Sample::new(alone.answers.iter().filter_map(|answer| {
            Some(ttft_ns(answer)? as f64 / *computed.get(&answer.id)? as f64)
        }));
    (!ratios.is_empty()).then(|| IdealCheck {
        requests: ratios.len(),
        measured_over_computed: ratios.mean(),
        worst: ratios.quantile(1.0),
    })
}

fn all(record: &RunRecord) -> Counts {
    let mut sum = Counts::default();
    for counts in &record.counts {
        sum.add(counts);
    }
    sum
}

/// Makes the report.
#[must_use]
pub fn report(
    config: &LabConfig,
    asking: &Asking,
    alone: &RunRecord,
    records: &[RunRecord],
    machine: Machine,
) -> LabReport {
    let counts = all(alone);
    let prefixes = crate::plan::shared(&asking.asked);
    let own = alone_ns(&asking.asked, alone);
    // Whoever answered first is who all others are compared with.
    let mut reference = BTreeMap::new();
    for (id, tokens) in std::iter::once(alone)
        .chain(records)
        .flat_map(|record| complete(&record.answers))
    {
        reference.entry(id).or_insert(tokens);
    }
    LabReport {
        engine: config.engine.name(),
        runs: records
            .iter()
            .map(|record| policy_run(config, &asking.asked, &own, record, &reference))
            .collect(),
        workload: WorkloadReport {
            arrivals_digest: workload::digest(&asking.requests),
            statistics: workload::statistics(&asking.requests, config.duration_s),
            ideal_ttft_ms: Sample::new(own.values().map(|ns| ms(*ns))).mean(),
            prefixes: prefixes.len(),
            prefix_tokens: prefixes.iter().map(|(_, tokens)| u64::from(*tokens)).sum(),
            fitting: asking.fitting.clone(),
        },
        alone: Alone {
            ttft_ms: Sample::new(alone.answers.iter().filter_map(ttft_ns).map(ms)).summary(),
            exchange_ms: counts.mean("exchange_seconds") * 1e3,
            iteration_ms: counts.mean("iteration_seconds") * 1e3,
            wall_s: alone.end_ns.saturating_sub(alone.begin_ns) as f64 / 1e9,
            ideal_check: ideal_check(&asking.asked, alone),
        },
        machine,
        config: config.clone(),
    }
}

fn policy_run(
    config: &LabConfig,
    asked: &[Asked],
    own: &BTreeMap<u64, u64>,
    record: &RunRecord,
    reference: &BTreeMap<u64, &[u32]>,
) -> PolicyRun {
    let answers: BTreeMap<u64, &Answer> = record.answers.iter().map(|a| (a.id, a)).collect();
    // (TTFT, that alone, there was one): of a request that never had a token it is known that it
    // took at least until it was given up.
    let times: Vec<(u64, u64, bool)> = asked
        .iter()
        .map(|request| {
            let alone = own.get(&request.id).copied().unwrap_or(1);
            let due = record.begin_ns + request.arrival_ns;
            let took = match answers.get(&request.id) {
                Some(answer) => ttft_ns(answer),
                None => record
                    .firsts
                    .get(&request.id)
                    .map(|first_ns| first_ns.saturating_sub(due).max(1)),
            };
            match took {
                Some(took) => (took, alone, true),
                None => (record.end_ns.saturating_sub(due), alone, false),
            }
        })
        .collect();
    let left = |&(took, alone, _): &(u64, u64, bool)| {
        let objective = alone as f64 * config.slo_scale;
        (objective - took as f64) / objective
    };
    let in_time = |time: &&(u64, u64, bool)| time.2 && left(time) >= 0.0;
    let ttft = Sample::new(times.iter().map(|time| ms(time.0)));
    let slowdown = Sample::new(times.iter().map(|time| time.0 as f64 / time.1 as f64));
    let earliness = Sample::new(times.iter().map(left));
    let counts = all(record);
    let whole = || record.answers.iter().filter(|a| a.error.is_none());
    let mut errors = BTreeMap::new();
    for error in record.answers.iter().filter_map(|a| a.error.clone()) {
        *errors.entry(error).or_default() += 1;
    }
    let tokens_of: BTreeMap<u64, u32> = asked.iter().map(|a| (a.id, a.tokens)).collect();
    let served_tokens: f64 = whole()
        .map(|a| f64::from(tokens_of.get(&a.id).copied().unwrap_or(0)) + a.tokens.len() as f64)
        .sum();
    let span_s = record.end_ns.saturating_sub(record.begin_ns).max(1) as f64 / 1e9;
    let mut run = PolicyRun {
        policy: record.policy.clone(),
        requests: asked.len(),
        completed: whole().count(),
        errors,
        answers_compared: whole().filter(|a| reference.contains_key(&a.id)).count(),
        answers_different: different(reference, &record.answers),
        ttft_slo_attainment: times.iter().filter(in_time).count() as f64
            / asked.len().max(1) as f64,
        ttft_ms: ttft.summary(),
        slowdown: slowdown.summary(),
        earliness: Sample::new(times.iter().map(|time| left(time).max(0.0))).mean(),
        tokens_per_s: served_tokens / span_s,
        requests_per_s: whole().count() as f64 / span_s,
        exchange_ms: counts.mean("exchange_seconds") * 1e3,
        exchanges: counts.get("exchange_seconds_count") as u64,
        stages_ms: stages(&counts),
        kv_wait_ms: counts.mean("kv_wait_seconds") * 1e3,
        iteration_ms: counts.mean("iteration_seconds") * 1e3,
        tokens_found: counts.get("prompt_tokens_found_total") as u64,
        tokens_fetched: counts.get("prompt_tokens_fetched_total") as u64,
        prefilled_elsewhere: counts.get("prefilled_elsewhere_total") as u64,
        prefilled_after_all: counts.get("prefilled_after_all_total") as u64,
        batches_failed: counts.get("batches_failed_total") as u64,
        hosts: hosts(config, record, span_s),
        stage_bytes: counts.stage_bytes.clone(),
        scheduled_bytes: counts.get("scheduled_bytes_total") as u64,
        bypassed_bytes: counts.get("bypassed_bytes_total") as u64,
        plugin: record.carriage.clone(),
        daemon_restarts: record.daemon_restarts,
        coordinator: record.coordinator.clone(),
        buffers_unbounded: record.buffers_unbounded,
        busy_cores: record.busy_cores,
        lab_cores: record.lab_cores,
        wall_s: span_s,
        percentiles: Percentiles {
            ttft_ms: ttft.percentiles(),
            slowdown: slowdown.percentiles(),
            earliness: earliness.percentiles(),
        },
        ..PolicyRun::default()
    };
    let unscheduled = run.hosts.iter().map(|host| host.unscheduled_ms);
    run.unscheduled_ms = unscheduled.fold(0.0, f64::max);
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
    run
}

/// Takes the mean TTFT of prompts that prefill hosts computed apart.
fn stages(counts: &Counts) -> Stages {
    let mean = |part| counts.mean(&format!("ttft_{part}_seconds")) * 1e3;
    Stages {
        queued: mean("queued"),
        kv_reuse_stall: mean("kv_wait"),
        collective: mean("exchange"),
        compute: mean("compute"),
        p2d_tail: mean("p2d_tail"),
    }
}

fn hosts(config: &LabConfig, record: &RunRecord, span_s: f64) -> Vec<HostReport> {
    let capacity = f64::from(config.port_mbit) * 1e6 / 8.0 * span_s;
    let share = |counters: &crate::fabric::PortCounters| {
        counters.values().map(|queue| queue.bytes).sum::<u64>() as f64 / capacity
    };
    record
        .links
        .iter()
        .zip(&record.counts)
        .enumerate()
        .map(|(host, (link, counts))| HostReport {
            host: config.host_name(host),
            egress: share(&link.egress),
            ingress: share(&link.ingress),
            sent_bytes: counts
                .stage_bytes
                .iter()
                .map(|(stage, by_dscp)| (stage.clone(), by_dscp.values().sum()))
                .collect(),
            scheduled_bytes: counts.get("scheduled_bytes_total") as u64,
            bypassed_bytes: counts.get("bypassed_bytes_total") as u64,
            unscheduled_ms: counts.get("unscheduled_ms_total"),
            prompt_tokens: counts.get("prompt_tokens_total") as u64,
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fabric::QueueCounters;
    use crate::workload::Request;

    fn answer(id: u64, begin_ms: u64, ttft_ms: u64, tokens: &[u32]) -> Answer {
        let first_ns = (begin_ms + ttft_ms) * 1_000_000;
        Answer {
            id,
            begin_ns: begin_ms * 1_000_000,
            first_ns: Some(first_ns),
            end_ns: first_ns + 5_000_000,
            tokens: tokens.to_vec(),
            error: None,
        }
    }

    fn asked(id: u64, arrival_ms: u64) -> Asked {
        Asked {
            id,
            arrival_ns: arrival_ms * 1_000_000,
            tokens: 100,
            reused: 16,
            prefix: id % 2,
            decode: 0,
            placed: None,
        }
    }

    /// Three requests that take 100 ms alone: one in time, one late and otherwise answered, one
    /// that failed.
    pub(crate) fn example() -> LabReport {
        example_with(|_| {})
    }

    fn example_with(change: impl Fn(&mut RunRecord)) -> LabReport {
        let config = LabConfig {
            slo_scale: 2.0,
            decodes: 1,
            ..LabConfig::real()
        };
        let request = |arrival_s| Request {
            arrival_s,
            tokens: 100,
            reused: 16,
            prefix: 1,
        };
        let asking = Asking {
            requests: vec![request(0.0), request(0.1), request(0.2)],
            asked: vec![asked(1, 0), asked(2, 100), asked(3, 200)],
            fitting: None,
        };
        let counts = |dscp: u8| {
            Counts::read(&format!(
                "laxity_engine_sent_bytes_total{{stage=\"p2d\",dscp=\"{dscp}\"}} 1000\n\
                 laxity_engine_scheduled_bytes_total 1000\n"
            ))
        };
        let alone = RunRecord {
            policy: "none".to_owned(),
            end_ns: 600_000_000,
            answers: [1, 2, 3]
                .map(|id| answer(id, 200 * id, 100, &[id as u32]))
                .into(),
            counts: vec![counts(0), counts(0), counts(0)],
            ..RunRecord::default()
        };
        let mut failed = answer(3, 1200, 10, &[]);
        failed.first_ns = None;
        failed.error = Some("503: not now".to_owned());
        let link = LinkRecord {
            egress: [(
                46,
                QueueCounters {
                    bytes: 10,
                    drops: 0,
                },
            )]
            .into(),
            ingress: [(
                46,
                QueueCounters {
                    bytes: 10,
                    drops: 0,
                },
            )]
            .into(),
        };
        let mut record = RunRecord {
            policy: "laxity".to_owned(),
            begin_ns: 1_000_000_000,
            end_ns: 2_000_000_000,
            answers: vec![
                answer(1, 1000, 150, &[1]),
                answer(2, 1100, 300, &[9]),
                failed,
            ],
            counts: vec![counts(46), counts(46), counts(10)],
            links: vec![link.clone(), link.clone(), link],
            ..RunRecord::default()
        };
        change(&mut record);
        report(&config, &asking, &alone, &[record], Machine::default())
    }

    #[test]
    fn what_is_late_or_failed_is_not_in_time_and_another_answer_is_named() {
        let report = example();
        let run = &report.runs[0];
        assert_eq!((run.requests, run.completed), (3, 2));
        assert!((run.ttft_slo_attainment - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(run.errors["503: not now"], 1);
        assert_eq!(run.answers_compared, 2);
        assert_eq!(report.disagreements(), [("laxity", &[2_u64][..])]);
        assert_eq!(run.stage_bytes["p2d"], [(10, 1000), (46, 2000)].into());
        assert_eq!(run.scheduled_bytes, 3000);
        // 150, 300 and, of the one that failed, the 800 ms until the end.
        assert_eq!((run.ttft_ms.p50, run.ttft_ms.p99), (300.0, 800.0));
        assert!((run.earliness - 0.25 / 3.0).abs() < 1e-9);
        assert!((run.requests_per_s - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_first_token_in_time_counts_whatever_becomes_of_the_answer() {
        let broken = example_with(|record| record.answers[2].first_ns = Some(1_250_000_000));
        let given_up = example_with(|record| {
            record.answers.pop();
            record.firsts.insert(3, 1_250_000_000);
        });
        for run in [&broken.runs[0], &given_up.runs[0]] {
            assert!((run.ttft_slo_attainment - 2.0 / 3.0).abs() < 1e-9);
            // 50, 150 and 300.
            assert_eq!((run.ttft_ms.p50, run.ttft_ms.p99), (150.0, 300.0));
            assert_eq!(run.completed, 2);
        }
    }
}
