//! The first process of the sandbox. It builds the fabric once and then plays and measures one run
//! after another: first requests alone, then all requests under each policy. It reports to the
//! caller on standard output, as lines of JSON.

mod deaths;
mod messages;
mod processor;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use laxity_shm::sleep::now_ns;

use crate::carriage::Carriage;
use crate::client::{Answer, Job, Question, Said};
use crate::collectives::{self, ExchangeLedger};
use crate::config::Engine;
use crate::coordinator::Coordinator;
use crate::counts::Counts;
use crate::daemons::Daemons;
use crate::error::LabError;
use crate::foreign::Foreign;
use crate::ledger;
use crate::message;
use crate::plan::{self, Asked};
use crate::processes::Engines;
use crate::sandbox;
use crate::vllm::restart;
use crate::wiring::{self, Wiring};
use processor::{busy_jiffies, lab_jiffies};

pub use messages::{Event, LabSpec, RunRecord};

/// Name of the policy that runs without daemons.
pub const NONE: &str = "none";

/// Time between the start of the clients and time zero, in ns.
const LEAD_NS: u64 = 500_000_000;

/// Objective of a request that is played alone, in ms. It is long because it is not evaluated.
const NO_HURRY_MS: f64 = 60_000.0;

/// Longest time that a request alone may take, even on a busy machine.
const ALONE_WITHIN: Duration = Duration::from_secs(30);

/// Tokens of a prompt that only opens connections between processes.
const WARM_TOKENS: u32 = 64;

/// The host whose daemon is killed if the configuration says so.
const VICTIM: usize = 0;

pub fn init() -> i32 {
    let outcome = sandbox::furnish().and_then(|()| run(&read_spec()?));
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            tell(&Event::Failed(error.to_string()));
            1
        }
    }
}

fn tell(event: &Event) {
    // If the write fails, the caller is gone and this process ends soon, too.
    let _ = std::io::stdout().lock().write_all(&message::line(event));
}

fn read_spec() -> Result<LabSpec, LabError> {
    let mut stdin = BufReader::new(std::io::stdin());
    let mut line = String::new();
    stdin.read_line(&mut line).map_err(LabError::system("reading what to run"))?;
    std::thread::spawn(move || {
        // The read ends when the caller ends. The exit of pid 1 then ends the whole sandbox.
        let _ = stdin.read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
    serde_json::from_str(&line).map_err(|error| LabError::unreadable("reading what to run", error))
}

fn run(spec: &LabSpec) -> Result<(), LabError> {
    let lab = Controller { spec, wiring: Wiring::build(&spec.config, &spec.tools)? };
    let mut alone = RunRecord::default();
    let first = usize::from(!spec.alone.is_empty());
    if first > 0 {
        alone = lab
            .play(0, NONE, &spec.alone, None)
            .map_err(LabError::step("playing requests one by one"))?;
        tell(&Event::Measured(Box::new(alone.clone())));
    }
    let objectives = objectives(spec, &alone)?;
    for (index, policy) in spec.config.policies.iter().enumerate() {
        let record = lab
            .play(first + index, policy, &spec.asked, Some(&objectives))
            .map_err(LabError::step(format_args!("running policy `{policy}`")))?;
        tell(&Event::Measured(Box::new(record)));
    }
    Ok(())
}

/// Returns the objective of each request, in ns: `slo_scale` times its TTFT alone, which is
/// computed or else measured.
fn objectives(spec: &LabSpec, alone: &RunRecord) -> Result<HashMap<u64, u64>, LabError> {
    let objective = |took_ns: u64| (took_ns as f64 * spec.config.slo_scale) as u64;
    let computed = spec.asked.iter();
    let computed = computed.filter_map(|one| Some((one.id, objective(one.placed?.ideal_ns))));
    let mut objectives: HashMap<u64, u64> = computed.collect();
    for answer in &alone.answers {
        match (answer.first_ns, &answer.error) {
            (Some(first_ns), None) => {
                let took = first_ns.saturating_sub(answer.begin_ns);
                objectives.entry(answer.id).or_insert(objective(took));
            }
            (_, why) => {
                let (id, why) = (answer.id, why.as_deref().unwrap_or("no token came"));
                return Err(LabError::Request(format!(
                    "request {id} was not served though it was alone: {why}"
                )));
            }
        }
    }
    Ok(objectives)
}

struct Controller<'a> {
    spec: &'a LabSpec,
    wiring: Wiring<'a>,
}

struct Run<'a> {
    /// Index of the run, from 0.
    index: usize,
    policy: &'a str,
    asked: &'a [Asked],
    /// Objectives by request, in ns. `None` if requests are played one by one.
    objectives: Option<&'a HashMap<u64, u64>>,
    folder: PathBuf,
    daemons: Option<Daemons>,
    coordinator: Option<Coordinator>,
}

impl Run<'_> {
    fn tell_progress(&self, finished: usize, elapsed_s: f64) {
        tell(&Event::Progress { run: self.index, finished, elapsed_s });
    }
}

impl Controller<'_> {
    fn play<'a>(
        &self,
        index: usize,
        policy: &'a str,
        asked: &'a [Asked],
        objectives: Option<&'a HashMap<u64, u64>>,
    ) -> Result<RunRecord, LabError> {
        let (config, tools) = (&self.spec.config, &self.spec.tools);
        let folder = Path::new(sandbox::FOLDER).join(index.to_string());
        fs::create_dir_all(&folder).map_err(LabError::file("creating", &folder))?;
        let scheduled = policy != NONE;
        let coordinator = match &tools.coordinator {
            Some(program) if scheduled => {
                Some(Coordinator::start(program, config.coordinator_config.as_deref(), &folder)?)
            }
            _ => None,
        };
        let daemons = match (&tools.laxityd, scheduled) {
            (_, false) => None,
            (Some(laxityd), true) => Some(Daemons::start(config, policy, &folder, laxityd)?),
            (None, true) => {
                return Err(LabError::missing("laxityd", "name it with --laxityd"));
            }
        };
        if coordinator.is_some() {
            Coordinator::await_daemons(config.hosts(), &folder)?;
        }
        let mut engines =
            Engines::start(config, &folder, tools, scheduled.then_some(policy), &self.spec.asked)?;
        let foreign = match objectives {
            Some(_) => Foreign::start(config, &folder)?,
            None => None,
        };
        let mut run = Run { index, policy, asked, objectives, folder, daemons, coordinator };
        let record = self.measure(&mut run, &mut engines);
        let record = record.map_err(|error| collectives::first_cause(config, &run.folder, error));
        let foreign = foreign.map(|senders| senders.end(&run.folder));
        let buffers_unbounded = engines.buffers_unbounded;
        let mut exchanged = match &record {
            Ok(_) if collectives::wanted(config) => {
                // A request that was given up may go on, and its layers exchange rows.
                engines.end_engines();
                Some(ExchangeLedger::ask(config, &run.folder, scheduled)?)
            }
            _ => None,
        };
        let mut carriage = tools.nccl_plugin.as_ref().map(|_| Carriage::default());
        if let Some(carriage) = carriage.as_mut().filter(|_| scheduled) {
            carriage.ask_daemons(config, &run.folder);
        }
        drop(engines);
        if let (Some(carriage), Ok(record)) = (&mut carriage, &record) {
            carriage.add_engines(&record.counts);
            let missing = carriage.read_reports(config, &run.folder);
            if let Some(exchanged) = &mut exchanged {
                missing.map_or(Ok(()), Err)?;
                exchanged.add_reports(carriage);
            }
        }
        let hosts = config.hosts();
        let said = run.coordinator.take();
        let coordinator = said.map(|coordinator| coordinator.record(hosts, &run.folder));
        let daemon_restarts = run.daemons.as_ref().map_or(0, Daemons::restarts);
        if let Some(daemons) = run.daemons.take() {
            daemons.stop();
        }
        Ok(RunRecord {
            daemon_restarts,
            carriage,
            exchanged,
            coordinator,
            foreign,
            buffers_unbounded,
            ..record?
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
            prefill: match config.engine {
                Engine::Vllm => Some(restart::prefill_host(config, asked.id)),
                Engine::Timed | Engine::Real => asked.placed.map(|placed| placed.host),
            },
            local: false,
        }
    }

    /// Computes the shared prefixes and makes every process open its connections to the others.
    /// Timed engines have the prefixes already, so each decode host sends one short prompt to each
    /// prefill host.
    fn warm(&self, engines: &mut Engines) -> Result<(), LabError> {
        let config = &self.spec.config;
        let mut of_hosts: Vec<Vec<Question>> = vec![Vec::new(); config.decodes];
        // An answer of one token sends no KV to decode.
        let prefills = config.prefills();
        // vLLM's prefill processes have nothing before the run. Their caches fill as requests come.
        let placed = config.engine != Engine::Real;
        let (output_tokens, prefixes) = if placed {
            let short = |number| (u64::MAX - number, WARM_TOKENS);
            let prompts = (prefills * config.decodes) as u64;
            (2, (0..prompts).map(short).collect())
        } else {
            (1, plan::shared(&self.spec.asked))
        };
        for (number, (prefix, tokens)) in prefixes.into_iter().enumerate() {
            of_hosts[number % config.decodes].push(Question {
                id: 0,
                at_ns: 0,
                prompt: plan::prefix_tokens(config.seed, prefix, tokens),
                output_tokens,
                ttft_ms: NO_HURRY_MS,
                prefill: placed.then_some(number / config.decodes % prefills),
                local: false,
            });
        }
        // One host after the other, so that the placement of prefixes does not depend on timing.
        for (decode, questions) in of_hosts.into_iter().enumerate() {
            self.one_by_one(decode, questions, engines, |answer| match answer.error {
                None => Ok(()),
                Some(why) => {
                    Err(LabError::Request(format!("a shared prefix is not computed: {why}")))
                }
            })
            .map_err(LabError::step(format_args!("warming up, decode host {decode}")))?;
        }
        Ok(())
    }

    /// Sends questions to a decode host, each after the answer to the previous one.
    fn one_by_one(
        &self,
        decode: usize,
        questions: Vec<Question>,
        engines: &mut Engines,
        mut answered: impl FnMut(Answer) -> Result<(), LabError>,
    ) -> Result<(), LabError> {
        let mut left = questions.len();
        if left == 0 {
            return Ok(());
        }
        let job = Job::Ask { questions, begin_ns: None };
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
                None => {
                    let what = "a request has no answer".to_owned();
                    let said = String::new();
                    return Err(LabError::Timeout { what, within: ALONE_WITHIN, said });
                }
            }
        }
        Ok(())
    }

    fn measure(&self, run: &mut Run<'_>, engines: &mut Engines) -> Result<RunRecord, LabError> {
        run.tell_progress(0, 0.0);
        self.warm(engines)?;
        let counts_before = self.counts(run, engines)?;
        let links_before = self.wiring.counters()?;
        let (busy_before, lab_before, from) = (busy_jiffies(), lab_jiffies(), Instant::now());
        let mut record = match run.objectives {
            None => self.alone(run, engines)?,
            Some(_) => self.together(run, engines)?,
        };
        record.end_ns = now_ns();
        let (busy_after, lab_after, span) = (busy_jiffies(), lab_jiffies(), from.elapsed());
        let links = wiring::between(&links_before, &self.wiring.counters()?);
        self.ask_again(run, engines, &mut record)?;
        engines.check()?;
        let mut counts = self.counts(run, engines)?;
        if let Some(restart) = &record.restart {
            counts[restart.host].add(&restart.counts);
        }
        let since = |(after, before): (&Counts, &Counts)| after.since(before);
        let counts = counts.iter().zip(&counts_before).map(since).collect();
        record.answers.sort_by_key(|answer| answer.id);
        // Jiffies are 10 ms: USER_HZ is 100 on every Linux. A span shorter than one would give a
        // meaningless average.
        let jiffies = 100.0 * span.as_secs_f64().max(0.01);
        Ok(RunRecord {
            policy: run.policy.to_owned(),
            counts,
            links,
            busy_cores: busy_after.saturating_sub(busy_before) as f64 / jiffies,
            lab_cores: lab_after.saturating_sub(lab_before) as f64 / jiffies,
            ..record
        })
    }

    /// Returns the counters of each host's engine, and with vLLM those of its daemon.
    fn counts(&self, run: &Run<'_>, engines: &mut Engines) -> Result<Vec<Counts>, LabError> {
        let mut counts = engines.counts()?;
        if self.spec.config.engine == Engine::Vllm && run.daemons.is_some() {
            ledger::add_daemons(&run.folder, &mut counts);
        }
        if collectives::wanted(&self.spec.config) {
            collectives::add_counts(&self.spec.config, &run.folder, &mut counts)?;
        }
        Ok(counts)
    }

    /// Returns the answers that the decode hosts give without fetching KV, by request.
    fn local(
        &self,
        run: &Run<'_>,
        engines: &mut Engines,
    ) -> Result<BTreeMap<u64, Vec<u32>>, LabError> {
        let mut answers = BTreeMap::new();
        for decode in 0..self.spec.config.decodes {
            let of_host = run.asked.iter().filter(|a| a.decode == decode);
            let local = of_host.map(|a| Question { local: true, ..self.question(a, None) });
            self.one_by_one(decode, local.collect(), engines, |answer| {
                answers.insert(answer.id, answer.tokens);
                Ok(())
            })?;
        }
        Ok(answers)
    }

    /// Plays each request after the answer to the previous one. With vLLM all answers have to be
    /// those of a decode host that computes everything, or KV would be damaged on its way.
    fn alone(&self, run: &Run<'_>, engines: &mut Engines) -> Result<RunRecord, LabError> {
        let config = &self.spec.config;
        let local = match config.engine {
            Engine::Vllm => self.local(run, engines)?,
            Engine::Timed | Engine::Real => BTreeMap::new(),
        };
        let mut record = RunRecord { begin_ns: now_ns(), ..RunRecord::default() };
        for decode in 0..config.decodes {
            let of_host = run.asked.iter().filter(|a| a.decode == decode);
            let questions: Vec<Question> = of_host.map(|a| self.question(a, None)).collect();
            self.one_by_one(decode, questions, engines, |answer| {
                if local.get(&answer.id).is_some_and(|tokens| *tokens != answer.tokens) {
                    return Err(LabError::Request(format!(
                        "request {} gets other tokens with KV of a prefill host ({:?}) than \
                         without ({:?})",
                        answer.id, answer.tokens, local[&answer.id]
                    )));
                }
                record.answers.push(answer);
                let share = record.answers.len() as f64 / run.asked.len() as f64;
                run.tell_progress(record.answers.len(), share * config.duration_s);
                Ok(())
            })?;
        }
        Ok(record)
    }

    fn together(&self, run: &mut Run<'_>, engines: &mut Engines) -> Result<RunRecord, LabError> {
        let config = &self.spec.config;
        let mut record = RunRecord { begin_ns: now_ns() + LEAD_NS, ..RunRecord::default() };
        let begun = Instant::now() + Duration::from_nanos(LEAD_NS);
        let (asked, objectives, begin_ns) = (run.asked, run.objectives, record.begin_ns);
        let jobs = (0..config.decodes).map(|decode| {
            let of_host = asked.iter().filter(|a| a.decode == decode);
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
        let victim = restart::victim(config);
        let mut kill_vllm_at = victim.map(|(host, seconds)| (host, at(seconds)));
        let mut tell_at = Instant::now();
        while record.answers.len() < asked.len() && Instant::now() < give_up {
            let now = Instant::now();
            if kill_at.take_if(|at| *at <= now).is_some()
                && let Some(daemons) = &run.daemons
            {
                daemons.kill(VICTIM);
            }
            if kill_coordinator_at.take_if(|at| *at <= now).is_some()
                && let Some(coordinator) = &mut run.coordinator
            {
                coordinator.kill();
            }
            let passed_ns = now.saturating_duration_since(begun).as_nanos() as u64;
            let at_work = |host| restart::is_at_work(config, host, asked, &record, passed_ns);
            if let Some((host, _)) = kill_vllm_at.take_if(|(host, at)| *at <= now && at_work(*host))
            {
                record.restart = Some(self.kill_vllm(run, engines, host)?);
            }
            if tell_at <= now {
                tell_at = now + Duration::from_millis(200);
                let elapsed_s = now.saturating_duration_since(begun).as_secs_f64();
                run.tell_progress(record.answers.len(), elapsed_s);
            }
            let until = [kill_at, kill_coordinator_at]
                .into_iter()
                .flatten()
                .fold(tell_at.min(give_up), Instant::min);
            match engines.hear(&mut clients, until)? {
                Some((_, Said::First { id, first_ns })) => {
                    record.firsts.insert(id, first_ns);
                }
                Some((_, Said::Answered(answer))) => {
                    record.firsts.remove(&answer.id);
                    record.answers.push(answer);
                }
                _ => {}
            }
        }
        Ok(record)
    }
}
