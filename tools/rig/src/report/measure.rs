//! Turns measurements into a report.
//!
//! * *TTFT* is the time from the arrival of a request to its first token at the client. The rest of
//!   the answer has no effect on it. A request without a token counts as missed, and its time is
//!   that until it was given up.
//! * *The objective* is a multiple of the TTFT of the same request alone. That is computed
//!   ([`ideal`](crate::ideal)) for the timed engine and measured for the real one.
//! * *An exchange* lasts from when a layer's tokens leave for experts on other hosts until all are
//!   back. It blocks the layer and includes the experts' computation.
//! * *Bytes* by stage and DSCP are payload that the engines counted. Bytes by DSCP alone include
//!   headers, and the fabric's queues counted them.

use std::collections::BTreeMap;

use crate::client::{Answer, complete, different};
use crate::config::{Engine, LabConfig};
use crate::controller::{NONE, RunRecord};
use crate::counts::Counts;
use crate::ledger::{self, Answered, Ledger};
use crate::plan::{Asked, Asking};
use crate::report::distribution::Sample;
use crate::vllm::restart::RestartReport;
use crate::wiring::LinkRecord;
use crate::workload;

pub use super::contents::{
    Alone, HostReport, IdealCheck, LabReport, Machine, Percentiles, PolicyRun, Stages,
    WorkloadReport,
};

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn ttft_ns(answer: &Answer) -> Option<u64> {
    Some(answer.first_ns?.saturating_sub(answer.begin_ns).max(1))
}

fn alone_ns(asked: &[Asked], alone: &RunRecord) -> BTreeMap<u64, u64> {
    let measured = alone.answers.iter();
    let measured = measured.filter_map(|answer| Some((answer.id, ttft_ns(answer)?)));
    let computed = asked.iter();
    let computed = computed.filter_map(|one| Some((one.id, one.placed?.ideal_ns)));
    measured.chain(computed).collect()
}

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
    // All answers to a request are compared with the first complete one.
    let mut reference = BTreeMap::new();
    for (id, tokens) in
        std::iter::once(alone).chain(records).flat_map(|record| complete(&record.answers))
    {
        reference.entry(id).or_insert(tokens);
    }
    LabReport {
        engine: config.engine.name(),
        runs: records
            .iter()
            .map(|record| {
                policy_run(config, &asking.asked, &own, ledger::moved(&counts), record, &reference)
            })
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

/// Returns the TTFT of each request, its TTFT alone, and whether it had a token. A request without
/// a token took at least until the lab gave it up.
fn times(
    asked: &[Asked],
    own: &BTreeMap<u64, u64>,
    answers: &BTreeMap<u64, &Answer>,
    record: &RunRecord,
) -> Vec<(u64, u64, bool)> {
    asked
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
        .collect()
}

/// Adds what the record has as it is, its errors, and the counters of the links.
fn add_record(run: &mut PolicyRun, record: &RunRecord) {
    run.foreign.clone_from(&record.foreign);
    run.coordinator.clone_from(&record.coordinator);
    run.plugin.clone_from(&record.carriage);
    run.collectives = record.exchanged;
    run.daemon_restarts = record.daemon_restarts;
    run.buffers_unbounded = record.buffers_unbounded;
    (run.busy_cores, run.lab_cores) = (record.busy_cores, record.lab_cores);
    for error in record.answers.iter().filter_map(|answer| answer.error.clone()) {
        *run.errors.entry(error).or_default() += 1;
    }
    for LinkRecord { egress, ingress } in &record.links {
        for (&dscp, counters) in ingress {
            *run.fabric_bytes.entry(dscp).or_default() += counters.bytes;
        }
        for (&dscp, counters) in egress {
            *run.nic_bytes.entry(dscp).or_default() += counters.bytes;
        }
        run.fabric_drops += egress.values().chain(ingress.values()).map(|c| c.drops).sum::<u64>();
    }
}

fn policy_run(
    config: &LabConfig,
    asked: &[Asked],
    own: &BTreeMap<u64, u64>,
    alone_bytes: u64,
    record: &RunRecord,
    reference: &BTreeMap<u64, &[u32]>,
) -> PolicyRun {
    let answers: BTreeMap<u64, &Answer> = record.answers.iter().map(|a| (a.id, a)).collect();
    let times = times(asked, own, &answers, record);
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
    let tokens_of: BTreeMap<u64, u32> = asked.iter().map(|a| (a.id, a.tokens)).collect();
    let served_tokens: f64 = whole()
        .map(|a| f64::from(tokens_of.get(&a.id).copied().unwrap_or(0)) + a.tokens.len() as f64)
        .sum();
    let span_s = record.end_ns.saturating_sub(record.begin_ns).max(1) as f64 / 1e9;
    let mut ledger = (config.engine == Engine::Vllm).then(|| Ledger::of(&counts, alone_bytes));
    let wrong = different(reference, &record.answers);
    let mut run = PolicyRun {
        wrong_answers: wrong.len(),
        bytes_lost: bytes_lost(record, ledger.as_mut(), asked),
        policy: record.policy.clone(),
        requests: asked.len(),
        completed: whole().count(),
        answers_compared: whole().filter(|a| reference.contains_key(&a.id)).count(),
        answers_different: wrong,
        ttft_slo_attainment: times.iter().filter(in_time).count() as f64
            / asked.len().max(1) as f64,
        ttft_ms: ttft.summary(),
        slowdown: slowdown.summary(),
        earliness: Sample::new(times.iter().map(|time| left(time).max(0.0))).mean(),
        tokens_per_s: served_tokens / span_s,
        requests_per_s: whole().count() as f64 / span_s,
        exchange_ms: counts.mean("exchange_seconds") * 1e3,
        exchanges: counts.get("exchange_seconds_count") as u64,
        stages_ms: stages(config.engine, &counts, whole().count()),
        kv_wait_ms: counts.mean("kv_wait_seconds") * 1e3,
        iteration_ms: counts.mean("iteration_seconds") * 1e3,
        tokens_found: counts.get("prompt_tokens_found_total") as u64,
        tokens_fetched: counts.get("prompt_tokens_fetched_total") as u64,
        prefilled_elsewhere: counts.get("prefilled_elsewhere_total") as u64,
        prefilled_after_all: counts.get("prefilled_after_all_total") as u64,
        batches_failed: counts.get("batches_failed_total") as u64,
        hosts: hosts(config, record, span_s),
        stage_bytes: counts.stage_bytes.clone(),
        scheduled_bytes: scheduled(&counts),
        bypassed_bytes: bypassed(&counts),
        kv: ledger,
        restart: record
            .restart
            .as_ref()
            .map(|restart| RestartReport::of(config, asked, &record.answers, restart, reference)),
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
    add_record(&mut run, record);
    run
}

/// Returns the bytes that one count has and another lacks.
fn bytes_lost(record: &RunRecord, kv: Option<&mut Ledger>, asked: &[Asked]) -> u64 {
    // A daemon that was started again doesn't know what the one before it counted.
    let scheduled = record.policy != NONE && record.daemon_restarts == 0;
    let again = record.restart.iter().flat_map(|restart| &restart.again);
    let whole = record.answers.iter().chain(again).filter(|answer| answer.error.is_none());
    let answered = match record.answers.iter().filter(|answer| answer.error.is_none()).count() {
        all if all == asked.len() => Answered::All,
        _ if asked.iter().all(|request| whole.clone().any(|of| of.id == request.id)) => {
            Answered::AllInTheEnd
        }
        _ => Answered::Some,
    };
    let kv = kv.map_or(0, |kv| kv.compare(scheduled, answered));
    kv + record.exchanged.as_ref().map_or(0, |of| of.lost_bytes(scheduled))
}

/// Returns the bytes that went out with a permit, as `laxity-engine` or else the daemon counts
/// them.
fn scheduled(counts: &Counts) -> u64 {
    (counts.get("scheduled_bytes_total") + counts.get("laxityd_completed_bytes")) as u64
}

fn bypassed(counts: &Counts) -> u64 {
    (counts.get("bypassed_bytes_total") + counts.get("laxityd_bypassed_bytes")) as u64
}

fn stages(engine: Engine, counts: &Counts, requests: usize) -> Stages {
    if engine == Engine::Vllm {
        return stages_of_vllm(counts, requests);
    }
    let mean = |part| counts.mean(&format!("ttft_{part}_seconds")) * 1e3;
    Stages {
        queued: mean("queued"),
        kv_reuse_stall: mean("kv_wait"),
        collective: mean("exchange"),
        compute: mean("compute"),
        p2d_tail: mean("p2d_tail"),
    }
}

/// Returns the mean parts of a request, over its prefill and its decode process. Without hints,
/// vLLM measures none of them but the exchanges. Those are a part of computing: vLLM's worker waits
/// for them in its forward pass. They are counted once for all requests of a batch.
fn stages_of_vllm(counts: &Counts, requests: usize) -> Stages {
    let mean = |part| {
        counts.get(&format!("laxity:ttft_{part}_seconds_sum")) / requests.max(1) as f64 * 1e3
    };
    Stages {
        queued: mean("queue"),
        collective: counts.get("exchange_seconds_sum") / requests.max(1) as f64 * 1e3,
        compute: mean("compute"),
        p2d_tail: mean("load"),
        ..Stages::default()
    }
}

fn hosts(config: &LabConfig, record: &RunRecord, span_s: f64) -> Vec<HostReport> {
    let capacity = f64::from(config.port_mbit) * 1e6 / 8.0 * span_s;
    let share = |counters: &crate::fabric::DscpCounters| {
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
            scheduled_bytes: scheduled(counts),
            bypassed_bytes: bypassed(counts),
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

    /// Returns a report of three requests that take 100 ms alone. One is in time, one is late with
    /// a different answer, and one failed.
    pub(crate) fn example() -> LabReport {
        example_with(|_| {})
    }

    fn example_with(change: impl Fn(&mut RunRecord)) -> LabReport {
        let config = LabConfig { slo_scale: 2.0, decodes: 1, ..LabConfig::real() };
        let request = |arrival_s| Request { arrival_s, tokens: 100, reused: 16, prefix: 1 };
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
            answers: [1, 2, 3].map(|id| answer(id, 200 * id, 100, &[id as u32])).into(),
            counts: vec![counts(0), counts(0), counts(0)],
            ..RunRecord::default()
        };
        let mut failed = answer(3, 1200, 10, &[]);
        failed.first_ns = None;
        failed.error = Some("503: not now".to_owned());
        let link = LinkRecord {
            egress: [(46, QueueCounters { bytes: 10, drops: 0 })].into(),
            ingress: [(46, QueueCounters { bytes: 10, drops: 0 })].into(),
        };
        let mut record = RunRecord {
            policy: "laxity".to_owned(),
            begin_ns: 1_000_000_000,
            end_ns: 2_000_000_000,
            answers: vec![answer(1, 1000, 150, &[1]), answer(2, 1100, 300, &[9]), failed],
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
        // The TTFTs are 150 and 300, and for the failed request the 800 ms until the end.
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
            // The TTFTs are 50, 150 and 300.
            assert_eq!((run.ttft_ms.p50, run.ttft_ms.p99), (150.0, 300.0));
            assert_eq!(run.completed, 2);
        }
    }
}
