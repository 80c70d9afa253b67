//! From what was measured with the real engine to what is reported. Where a field has the name of
//! one of [`measure`](crate::report::measure), it means the same.
//!
//! * *TTFT* is from when a request was due to be asked to its first token at the client, whatever
//!   becomes of the rest of the answer. One that never had a token counts as missed, and with the
//!   time until it was given up.
//! * *The objective* is so many times the TTFT of the same request alone, measured in the first
//!   run.
//! * *An exchange* is from when a layer's tokens leave for experts elsewhere until all are back: it
//!   blocks the layer, and has the experts' computation in it.
//! * *Bytes* by stage and DSCP are the engines' own count of payload; by DSCP alone, the queues' of
//!   the fabric, with headers.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::config::LabConfig;
use crate::coordinator::CoordinatorRecord;
use crate::engine::client::{Answer, different};
use crate::engine::controller::ServedRecord;
use crate::engine::counts::Counts;
use crate::engine::plan::{Asked, Asking};
use crate::report::distribution::{Sample, Summary};
use crate::report::measure::Machine;
use crate::trace::Fitting;
use crate::wiring::LinkRecord;
use crate::workload::{self, Statistics};

/// Everything a run of the lab with the real engine found.
#[derive(Clone, Debug, Serialize)]
pub struct EngineReport {
    /// Tells it from a replay's report.
    pub engine: &'static str,
    /// One per policy, in the order asked for.
    pub runs: Vec<EngineRun>,
    /// What arrived.
    pub workload: EngineWorkload,
    /// The requests one by one.
    pub alone: Alone,
    /// Where it ran.
    pub machine: Machine,
    /// The configuration, complete.
    pub config: LabConfig,
}

impl EngineReport {
    /// Whether all answers have to be the same: only where the computation is the same to the bit.
    #[must_use]
    pub fn must_agree(&self) -> bool {
        self.config.serving().device == crate::engine::config::Device::Cpu
    }

    /// Requests that were answered otherwise than alone, by policy.
    #[must_use]
    pub fn disagreements(&self) -> Vec<(&str, &[u64])> {
        let differ = |run: &&EngineRun| !run.answers_different.is_empty();
        self.runs
            .iter()
            .filter(differ)
            .map(|run| (run.policy.as_str(), &run.answers_different[..]))
            .collect()
    }
}

/// What one policy achieved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EngineRun {
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
    pub hosts: Vec<EngineHost>,
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
    pub percentiles: EnginePercentiles,
}

/// A host's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineHost {
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
    /// Prompt tokens that it computed.
    pub prompt_tokens: u64,
}

/// Percentiles 0 … 100.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EnginePercentiles {
    /// TTFT, ms.
    pub ttft_ms: Vec<f64>,
    /// TTFT over the request's own alone.
    pub slowdown: Vec<f64>,
    /// (deadline − first token) / objective.
    pub earliness: Vec<f64>,
}

/// What arrived.
#[derive(Clone, Debug, Serialize)]
pub struct EngineWorkload {
    /// Hash over all arrivals: equal hashes, equal arrivals.
    pub arrivals_digest: String,
    /// Statistics of the requests.
    #[serde(flatten)]
    pub statistics: Statistics,
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
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn ttft_ns(answer: &Answer) -> Option<u64> {
    Some(answer.first_ns?.saturating_sub(answer.begin_ns).max(1))
}

fn all(record: &ServedRecord) -> Counts {
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
    alone: &ServedRecord,
    records: &[ServedRecord],
    machine: Machine,
) -> EngineReport {
    let counts = all(alone);
    let prefixes = crate::engine::plan::shared(&asking.asked);
    EngineReport {
        engine: config.engine.name(),
        runs: records
            .iter()
            .map(|record| engine_run(config, &asking.asked, alone, record))
            .collect(),
        workload: EngineWorkload {
            arrivals_digest: workload::digest(&asking.requests),
            statistics: workload::statistics(&asking.requests, config.duration_s),
            prefixes: prefixes.len(),
            prefix_tokens: prefixes.iter().map(|(_, tokens)| u64::from(*tokens)).sum(),
            fitting: asking.fitting.clone(),
        },
        alone: Alone {
            ttft_ms: Sample::new(alone.answers.iter().filter_map(ttft_ns).map(ms)).summary(),
            exchange_ms: counts.mean("exchange_seconds") * 1e3,
            iteration_ms: counts.mean("iteration_seconds") * 1e3,
            wall_s: alone.end_ns.saturating_sub(alone.begin_ns) as f64 / 1e9,
        },
        machine,
        config: config.clone(),
    }
}

fn engine_run(
    config: &LabConfig,
    asked: &[Asked],
    alone: &ServedRecord,
    record: &ServedRecord,
) -> EngineRun {
    let own: BTreeMap<u64, u64> = alone
        .answers
        .iter()
        .filter_map(|answer| Some((answer.id, ttft_ns(answer)?)))
        .collect();
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
    let mut run = EngineRun {
        policy: record.policy.clone(),
        requests: asked.len(),
        completed: whole().count(),
        errors,
        answers_compared: whole().filter(|a| own.contains_key(&a.id)).count(),
        answers_different: different(&alone.answers, &record.answers),
        ttft_slo_attainment: times.iter().filter(in_time).count() as f64
            / asked.len().max(1) as f64,
        ttft_ms: ttft.summary(),
        slowdown: slowdown.summary(),
        earliness: Sample::new(times.iter().map(|time| left(time).max(0.0))).mean(),
        tokens_per_s: served_tokens / span_s,
        requests_per_s: whole().count() as f64 / span_s,
        exchange_ms: counts.mean("exchange_seconds") * 1e3,
        exchanges: counts.get("exchange_seconds_count") as u64,
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
        daemon_restarts: record.daemon_restarts,
        coordinator: record.coordinator.clone(),
        buffers_unbounded: record.buffers_unbounded,
        busy_cores: record.busy_cores,
        lab_cores: record.lab_cores,
        wall_s: span_s,
        percentiles: EnginePercentiles {
            ttft_ms: ttft.percentiles(),
            slowdown: slowdown.percentiles(),
            earliness: earliness.percentiles(),
        },
        ..EngineRun::default()
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
    run
}

fn hosts(config: &LabConfig, record: &ServedRecord, span_s: f64) -> Vec<EngineHost> {
    let capacity = f64::from(config.port_mbit) * 1e6 / 8.0 * span_s;
    let share = |counters: &crate::fabric::PortCounters| {
        counters.values().map(|queue| queue.bytes).sum::<u64>() as f64 / capacity
    };
    record
        .links
        .iter()
        .zip(&record.counts)
        .enumerate()
        .map(|(host, (link, counts))| EngineHost {
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
        }
    }

    /// Three requests that take 100 ms alone: one in time, one late and otherwise answered, one
    /// that failed.
    pub(crate) fn example() -> EngineReport {
        example_with(|_| {})
    }

    fn example_with(change: impl Fn(&mut ServedRecord)) -> EngineReport {
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
        let alone = ServedRecord {
            policy: "none".to_owned(),
            end_ns: 600_000_000,
            answers: [1, 2, 3]
                .map(|id| answer(id, 200 * id, 100, &[id as u32]))
                .into(),
            counts: vec![counts(0), counts(0), counts(0)],
            ..ServedRecord::default()
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
        let mut record = ServedRecord {
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
            ..ServedRecord::default()
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
