//! The death of one vLLM in the middle of a run: what was asked of it, and what came of the rest.
//!
//! Another process takes its place at once. Requests of the dead process may fail. They are asked
//! again when all processes answer. Requests of other hosts must not notice. When all are answered,
//! nothing may be left of the dead process: no block of KV that a prefill host keeps for it, no
//! bytes in flight at its daemon, and no client.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::client::{Answer, different};
use crate::config::LabConfig;
use crate::controller::RunRecord;
use crate::counts::Counts;
use crate::plan::Asked;

/// Returns the prefill host of a request. Hosts take turns, so that requests go to the same hosts
/// under every policy.
pub fn prefill_host(config: &LabConfig, request: u64) -> usize {
    request.saturating_sub(1) as usize / config.decodes % config.prefills()
}

/// Returns the host whose process is killed, which is the last of its kind, and when, in s.
pub fn victim(config: &LabConfig) -> Option<(usize, f64)> {
    let vllm = config.vllm.as_ref()?;
    let prefill = vllm.kill_prefill_at.map(|at| (config.prefills() - 1, at));
    prefill.or_else(|| Some((config.hosts() - 1, vllm.kill_decode_at?)))
}

/// Reports whether a host has a part in a request.
fn takes_part(config: &LabConfig, host: usize, asked: &Asked) -> bool {
    prefill_host(config, asked.id) == host || config.decode_host(asked.decode) == host
}

/// Time after which a request is in the middle of its way. A request alone takes twice as long.
const UNDER_WAY_AFTER_NS: u64 = 300_000_000;

/// Reports whether a host has a request in the middle of its way, `passed_ns` after time zero.
pub fn is_at_work(
    config: &LabConfig,
    host: usize,
    asked: &[Asked],
    record: &RunRecord,
    passed_ns: u64,
) -> bool {
    let of_host = asked.iter().filter(|of| takes_part(config, host, of));
    let mut begun = of_host.filter(|of| of.arrival_ns + UNDER_WAY_AFTER_NS <= passed_ns);
    let has_left =
        |id| record.firsts.contains_key(&id) || record.answers.iter().any(|answer| answer.id == id);
    begun.any(|of| !has_left(of.id))
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RestartRecord {
    pub host: usize,
    /// Counters of the process just before its death.
    pub counts: Counts,
    #[serde(skip)]
    pub died: Option<Instant>,
    /// Answers to the requests that were asked again, because they had failed.
    pub again: Vec<Answer>,
    /// What is left of the dead process when all requests were answered.
    pub left: Vec<String>,
}

/// What the death of a process did to the requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RestartReport {
    pub host: String,
    /// Requests of that host.
    pub requests: usize,
    /// Requests of that host that failed, or had no whole answer in time.
    pub failed: usize,
    /// The same for requests that the host has no part in.
    pub failed_elsewhere: usize,
    /// Requests that were asked again, and have the tokens that they had alone.
    pub right_again: usize,
    /// Requests that were asked again, and failed or have other tokens.
    pub wrong_again: usize,
    /// What is left of the dead process when all requests were answered.
    pub left: Vec<String>,
}

impl RestartReport {
    pub fn of(
        config: &LabConfig,
        asked: &[Asked],
        answers: &[Answer],
        restart: &RestartRecord,
        reference: &BTreeMap<u64, &[u32]>,
    ) -> Self {
        let is_whole = |id| answers.iter().any(|answer| answer.id == id && answer.error.is_none());
        let (own, others): (Vec<&Asked>, Vec<&Asked>) =
            asked.iter().partition(|request| takes_part(config, restart.host, request));
        let failed = |of: &[&Asked]| of.iter().filter(|request| !is_whole(request.id)).count();
        let errors = restart.again.iter().filter(|answer| answer.error.is_some()).count();
        let wrong_again = errors + different(reference, &restart.again).len();
        Self {
            host: config.host_name(restart.host),
            requests: own.len(),
            failed: failed(&own),
            failed_elsewhere: failed(&others),
            right_again: restart.again.len() - wrong_again,
            wrong_again,
            left: restart.left.clone(),
        }
    }

    /// Returns what must not happen when a process dies, or `None`.
    pub fn fault(&self) -> Option<String> {
        let host = &self.host;
        let what = match (self.failed_elsewhere, self.wrong_again) {
            (0, 0) => format!("{} is left of it", self.left.first()?),
            (0, wrong) => format!("{wrong} requests of {host} failed or had other tokens again"),
            (failed, _) => format!("{failed} requests failed that {host} had no part in"),
        };
        Some(format!("vLLM of {host} was killed and started again, and {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_of_the_dead_process_may_fail_and_only_once() {
        let mut config = LabConfig::vllm();
        assert_eq!(victim(&config), None);
        config.vllm.as_mut().unwrap().kill_prefill_at = Some(2.0);
        let hosts: Vec<usize> = (1..=4).map(|id| prefill_host(&config, id)).collect();
        assert_eq!((hosts, victim(&config)), (vec![0, 1, 0, 1], Some((1, 2.0))));
        let request = |id| Asked {
            id,
            arrival_ns: 0,
            tokens: 9,
            reused: 0,
            prefix: 0,
            decode: 0,
            placed: None,
        };
        let asked: Vec<Asked> = (1..=4).map(request).collect();
        let at_work = |answered: u64, passed_ns| {
            let answers = vec![Answer { id: answered, ..Answer::default() }];
            let record = RunRecord { answers, ..RunRecord::default() };
            is_at_work(&config, 1, &asked[..2], &record, passed_ns)
        };
        assert!(at_work(1, UNDER_WAY_AFTER_NS) && !at_work(1, UNDER_WAY_AFTER_NS - 1));
        assert!(!at_work(2, UNDER_WAY_AFTER_NS), "it was answered");
        let firsts = BTreeMap::from([(2, 1)]);
        let record = RunRecord { firsts, ..RunRecord::default() };
        let at_decode = is_at_work(&config, 1, &asked[..2], &record, UNDER_WAY_AFTER_NS);
        assert!(!at_decode, "it is at decode");
        let tokens = [5, 6];
        let reference: BTreeMap<u64, &[u32]> = (1..=4).map(|id| (id, &tokens[..])).collect();
        let answer = |id, error: Option<&str>| Answer {
            id,
            tokens: tokens.into(),
            error: error.map(str::to_owned),
            ..Answer::default()
        };
        let of = |failed: u64, again: Answer| {
            let answers: Vec<Answer> =
                (1..=4).filter(|&id| id != failed).map(|id| answer(id, None)).collect();
            let again = vec![again];
            let restart = RestartRecord { host: 1, again, ..RestartRecord::default() };
            RestartReport::of(&config, &asked, &answers, &restart, &reference)
        };
        let fine = of(2, answer(2, None));
        assert_eq!((fine.requests, fine.failed, fine.right_again, fine.fault()), (2, 1, 1, None));
        let elsewhere = of(3, answer(3, None)).fault().unwrap();
        assert!(elsewhere.contains("1 requests failed that unit1.0"), "{elsewhere}");
        assert!(of(2, answer(2, Some("503"))).fault().unwrap().contains("again"));
        let other = Answer { tokens: vec![5, 7], ..answer(2, None) };
        assert_eq!(of(2, other).wrong_again, 1);
        let kept = RestartReport { left: vec!["a client".to_owned()], ..fine };
        assert!(kept.fault().unwrap().ends_with("a client is left of it"));
    }

    #[test]
    fn requests_of_a_dead_decode_process_are_those_of_its_host_whoever_computed_their_prompts() {
        let mut config = LabConfig { decodes: 2, ..LabConfig::vllm() };
        config.vllm.as_mut().unwrap().kill_decode_at = Some(3.0);
        assert_eq!(victim(&config), Some((3, 3.0)));
        let request = |id, decode| Asked {
            id,
            arrival_ns: 0,
            tokens: 9,
            reused: 0,
            prefix: 0,
            decode,
            placed: None,
        };
        let asked: Vec<Asked> = (1..=4).map(|id| request(id, (id as usize - 1) % 2)).collect();
        let prefills: Vec<usize> = (1..=4).map(|id| prefill_host(&config, id)).collect();
        assert_eq!(prefills, [0, 0, 1, 1]);
        let restart = RestartRecord { host: 3, ..RestartRecord::default() };
        let report = RestartReport::of(&config, &asked, &[], &restart, &BTreeMap::new());
        assert_eq!((report.requests, report.failed, report.failed_elsewhere), (2, 2, 2));
        assert!(is_at_work(&config, 3, &asked, &RunRecord::default(), UNDER_WAY_AFTER_NS));
    }
}
