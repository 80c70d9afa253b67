//! The runs with the real engine, one after another on the same fabric: first each request alone,
//! which gives objectives and the answers that all others are compared with, then the policies.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::client::{Answer, Job, Question, Said};
use super::counts::Counts;
use super::plan::{self, Asked};
use super::processes::Engines;
use crate::config::{Engine, LabConfig};
use crate::controller::{Event, NONE, busy_jiffies, children_cpu_s, tell};
use crate::coordinator::{Coordinator, CoordinatorRecord};
use crate::daemons::Daemons;
use crate::probe::Tools;
use crate::sandbox;
use crate::wiring::{self, LinkRecord, Wiring};
use crate::worker::now_ns;

/// What the caller sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineSpec {
    /// Configuration.
    pub config: LabConfig,
    /// The requests.
    pub asked: Vec<Asked>,
    /// Programs.
    pub tools: Tools,
}

/// What was measured in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServedRecord {
    /// The policy.
    pub policy: String,
    /// Time zero, CLOCK_MONOTONIC ns.
    pub begin_ns: u64,
    /// When the last answer was there, or the rest was given up.
    pub end_ns: u64,
    /// What came of the requests; those that were given up are missing.
    pub answers: Vec<Answer>,
    /// When the first token came of requests that were given up after it, by number,
    /// CLOCK_MONOTONIC ns.
    pub firsts: BTreeMap<u64, u64>,
    /// What the engines counted, by host.
    pub counts: Vec<Counts>,
    /// What the fabric counted, by host.
    pub links: Vec<LinkRecord>,
    /// Daemons that were started again.
    pub daemon_restarts: u32,
    /// What daemons said of the coordinator at the end; none if there was none.
    pub coordinator: Option<CoordinatorRecord>,
    /// The kernel kept its own buffers at some host.
    pub buffers_unbounded: bool,
    /// Processors that were busy on average, over the whole machine, from the start of clients.
    pub busy_cores: f64,
    /// Processors that engines, clients and daemons kept busy on average.
    pub lab_cores: f64,
}

/// Between the start of clients and time zero.
const LEAD_NS: u64 = 500_000_000;

/// Objective of a request that is played alone: there is nothing that it could miss.
const NO_HURRY_MS: f64 = 60_000.0;

/// A request that is alone is done within this, whatever else the machine does.
const ALONE_WITHIN: Duration = Duration::from_secs(30);

/// Tokens of a prompt that only makes processes talk to each other.
const WARM_TOKENS: u32 = 64;

/// The host whose daemon is killed, if one is to be.
const VICTIM: usize = 0;

/// Makes all runs.
///
/// # Errors
/// A part of the lab failed.
pub fn run(spec: &EngineSpec) -> anyhow::Result<()> {
    let lab = Lab {
        spec,
        wiring: Wiring::build(&spec.config, &spec.tools)?,
    };
    let alone = lab
        .play(0, NONE, None)
        .context("playing the requests one by one")?;
    let objectives = objectives(&spec.config, &alone)?;
    tell(&Event::Served(Box::new(alone)));
    for (index, policy) in spec.config.policies.iter().enumerate() {
        let record = lab
            .play(index + 1, policy, Some(&objectives))
            .with_context(|| format!("running policy `{policy}`"))?;
        tell(&Event::Served(Box::new(record)));
    }
    Ok(())
}

/// Time from arrival in which each request's first token is due: so many times what it took alone.
fn objectives(config: &LabConfig, alone: &ServedRecord) -> anyhow::Result<HashMap<u64, u64>> {
    let mut objectives = HashMap::new();
    for answer in &alone.answers {
        match (answer.first_ns, &answer.error) {
            (Some(first_ns), None) => {
                let took = first_ns.saturating_sub(answer.begin_ns);
                objectives.insert(answer.id, (took as f64 * config.slo_scale) as u64);
            }
            (_, why) => bail!(
                "request {} was not served though it was alone: {}",
                answer.id,
                why.as_deref().unwrap_or("no token came")
            ),
        }
    }
    Ok(objectives)
}

struct Lab<'a> {
    spec: &'a EngineSpec,
    wiring: Wiring<'a>,
}

impl Lab<'_> {
    fn play(
        &self,
        index: usize,
        policy: &str,
        objectives: Option<&HashMap<u64, u64>>,
    ) -> anyhow::Result<ServedRecord> {
        let (config, tools) = (&self.spec.config, &self.spec.tools);
        let folder = Path::new(sandbox::FOLDER).join(index.to_string());
        fs::create_dir_all(&folder)?;
        let scheduled = policy != NONE;
        let mut coordinator = match &tools.coordinator {
            Some(program) if scheduled => Some(Coordinator::start(
                program,
                config.coordinator_config.as_deref(),
                &folder,
            )?),
            _ => None,
        };
        let daemons = match (&tools.laxityd, scheduled) {
            (_, false) => None,
            (Some(laxityd), true) => Some(Daemons::start(config, policy, &folder, laxityd)?),
            (None, true) => bail!("there is no laxityd"),
        };
        if coordinator.is_some() {
            Coordinator::await_daemons(config.hosts(), &folder)?;
        }
        let program = tools
            .laxity_engine
            .as_deref()
            .context("there is no laxity-engine")?;
        let cpu_before = children_cpu_s();
        let started = Instant::now();
        let mut engines = Engines::start(config, &folder, program, scheduled, &self.spec.asked)?;
        let run = self.measure(
            index,
            policy,
            objectives,
            &mut engines,
            daemons.as_ref(),
            coordinator.as_mut(),
        );
        let buffers_unbounded = engines.buffers_unbounded;
        drop(engines);
        let said = coordinator.map(|coordinator| coordinator.record(config.hosts(), &folder));
        let daemon_restarts = daemons.as_ref().map_or(0, Daemons::restarts);
        if let Some(daemons) = daemons {
            daemons.stop();
        }
        Ok(ServedRecord {
            daemon_restarts,
            coordinator: said,
            buffers_unbounded,
            lab_cores: (children_cpu_s() - cpu_before) / started.elapsed().as_secs_f64(),
            ..run?
        })
    }

    fn question(&self, asked: &Asked, objectives: Option<&HashMap<u64, u64>>) -> Question {
        let config = &self.spec.config;
        let objective = objectives.and_then(|all| all.get(&asked.id));
        Question {
            id: asked.id,
            at_ns: asked.arrival_ns,
            prompt: asked.prompt(config.seed),
            output_tokens: config.serving().output_tokens,
            ttft_ms: objective.map_or(NO_HURRY_MS, |&ns| ns as f64 / 1e6),
        }
    }

    /// Fills the caches with the shared prefixes, and makes every process talk to every other once.
    /// Timed engines have the prefixes already: each decode host asks for as many short prompts as
    /// there are prefill hosts.
    fn warm(&self, engines: &mut Engines) -> anyhow::Result<()> {
        let config = &self.spec.config;
        let mut of_hosts: Vec<Vec<Question>> = vec![Vec::new(); config.decodes];
        // With one token, no KV goes to decode.
        let (output_tokens, prefixes) = match config.engine {
            Engine::Timed => {
                let prompts = config.units * config.ranks * config.decodes;
                let short = |number| (u64::MAX - number, WARM_TOKENS);
                (2, (0..prompts as u64).map(short).collect())
            }
            _ => (1, plan::shared(&self.spec.asked)),
        };
        for (number, (prefix, tokens)) in prefixes.into_iter().enumerate() {
            of_hosts[number % config.decodes].push(Question {
                id: 0,
                at_ns: 0,
                prompt: plan::prefix_tokens(config.seed, prefix, tokens),
                output_tokens,
                ttft_ms: NO_HURRY_MS,
            });
        }
        // One host after the other: what lies where must not depend on which of them was faster.
        for (decode, questions) in of_hosts.into_iter().enumerate() {
            self.one_by_one(decode, questions, engines, |answer| match answer.error {
                None => Ok(()),
                Some(why) => bail!("a shared prefix is not computed: {why}"),
            })
            .with_context(|| format!("warming up, decode host {decode}"))?;
        }
        Ok(())
    }

    /// Asks a decode host, each question when the one before has its answer.
    fn one_by_one(
        &self,
        decode: usize,
        questions: Vec<Question>,
        engines: &mut Engines,
        mut answered: impl FnMut(Answer) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut left = questions.len();
        if left == 0 {
            return Ok(());
        }
        let job = Job::Ask {
            questions,
            begin_ns: None,
        };
        let host = self.spec.config.decode_host(decode);
        let mut clients = engines.clients([(host, job)])?;
        let mut until = Instant::now() + ALONE_WITHIN;
        while left > 0 {
            match engines.hear(&mut clients, until)? {
                Some((_, Said::Answered(answer))) => {
                    answered(answer)?;
                    left -= 1;
                    until = Instant::now() + ALONE_WITHIN;
                }
                Some(_) => {}
                None => bail!("a request has no answer after {ALONE_WITHIN:?}"),
            }
        }
        Ok(())
    }

    fn measure(
        &self,
        index: usize,
        policy: &str,
        objectives: Option<&HashMap<u64, u64>>,
        engines: &mut Engines,
        daemons: Option<&Daemons>,
        coordinator: Option<&mut Coordinator>,
    ) -> anyhow::Result<ServedRecord> {
        let before_warming = Event::Progress {
            run: index,
            finished: 0,
            elapsed_s: 0.0,
        };
        tell(&before_warming);
        self.warm(engines)?;
        let counts_before = engines.counts()?;
        let links_before = self.wiring.counters()?;
        let (busy_before, busy_from) = (busy_jiffies(), Instant::now());
        let mut answers = Vec::new();
        let mut firsts = BTreeMap::new();
        let begin_ns = match objectives {
            None => {
                let begin_ns = now_ns()?;
                self.alone(index, engines, &mut answers)?;
                begin_ns
            }
            Some(_) => {
                let begin_ns = now_ns()? + LEAD_NS;
                self.together(
                    (index, begin_ns),
                    objectives,
                    engines,
                    (daemons, coordinator),
                    (&mut answers, &mut firsts),
                )?;
                begin_ns
            }
        };
        let end_ns = now_ns()?;
        let (busy_after, busy_span) = (busy_jiffies(), busy_from.elapsed());
        let links = wiring::between(&links_before, &self.wiring.counters()?);
        engines.check()?;
        let counts = engines
            .counts()?
            .iter()
            .zip(&counts_before)
            .map(|(after, before)| after.since(before))
            .collect();
        answers.sort_by_key(|answer| answer.id);
        // Jiffies are 10 ms: USER_HZ is 100 on every Linux.
        let busy_s = busy_after.saturating_sub(busy_before) as f64 / 100.0;
        Ok(ServedRecord {
            policy: policy.to_owned(),
            begin_ns,
            end_ns,
            answers,
            firsts,
            counts,
            links,
            // Within one of them nothing can be said.
            busy_cores: busy_s / busy_span.as_secs_f64().max(0.01),
            ..ServedRecord::default()
        })
    }

    /// Each request when the one before has its answer.
    fn alone(
        &self,
        index: usize,
        engines: &mut Engines,
        answers: &mut Vec<Answer>,
    ) -> anyhow::Result<()> {
        let config = &self.spec.config;
        for decode in 0..config.decodes {
            let of_host = self.spec.asked.iter().filter(|a| a.decode == decode);
            let questions: Vec<Question> = of_host.map(|a| self.question(a, None)).collect();
            self.one_by_one(decode, questions, engines, |answer| {
                answers.push(answer);
                let share = answers.len() as f64 / self.spec.asked.len() as f64;
                tell(&Event::Progress {
                    run: index,
                    finished: answers.len(),
                    elapsed_s: share * config.duration_s,
                });
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Each request at its time.
    fn together(
        &self,
        (index, begin_ns): (usize, u64),
        objectives: Option<&HashMap<u64, u64>>,
        engines: &mut Engines,
        (daemons, mut coordinator): (Option<&Daemons>, Option<&mut Coordinator>),
        (answers, firsts): (&mut Vec<Answer>, &mut BTreeMap<u64, u64>),
    ) -> anyhow::Result<()> {
        let config = &self.spec.config;
        let begun = Instant::now() + Duration::from_nanos(LEAD_NS);
        let jobs = (0..config.decodes).map(|decode| {
            let of_host = self.spec.asked.iter().filter(|a| a.decode == decode);
            let job = Job::Ask {
                questions: of_host.map(|a| self.question(a, objectives)).collect(),
                begin_ns: Some(begin_ns),
            };
            (config.decode_host(decode), job)
        });
        let mut clients = engines.clients(jobs)?;
        let at = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        let give_up = at(config.duration_s + config.drain_s);
        let mut kill_at = config.kill_daemon_at.map(at);
        let mut kill_coordinator_at = config.kill_coordinator_at.map(at);
        let mut tell_at = Instant::now();
        while answers.len() < self.spec.asked.len() && Instant::now() < give_up {
            let now = Instant::now();
            if kill_at.take_if(|at| *at <= now).is_some()
                && let Some(daemons) = daemons
            {
                daemons.kill(VICTIM);
            }
            if kill_coordinator_at.take_if(|at| *at <= now).is_some()
                && let Some(coordinator) = &mut coordinator
            {
                coordinator.kill();
            }
            if tell_at <= now {
                tell_at = now + Duration::from_millis(200);
                tell(&Event::Progress {
                    run: index,
                    finished: answers.len(),
                    elapsed_s: now.saturating_duration_since(begun).as_secs_f64(),
                });
            }
            let until = [kill_at, kill_coordinator_at]
                .into_iter()
                .flatten()
                .fold(tell_at.min(give_up), Instant::min);
            match engines.hear(&mut clients, until)? {
                Some((_, Said::First { id, first_ns })) => {
                    firsts.insert(id, first_ns);
                }
                Some((_, Said::Answered(answer))) => {
                    firsts.remove(&answer.id);
                    answers.push(answer);
                }
                _ => {}
            }
        }
        Ok(())
    }
}
