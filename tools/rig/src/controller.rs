//! The first process of the sandbox: builds the fabric once, then plays one policy after another
//! on it and measures. It reports to the caller on its standard output, a line of JSON at a time.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};

use crate::carriage::Carriage;
use crate::carrier;
use crate::config::LabConfig;
use crate::coordinator::{Coordinator, CoordinatorRecord};
use crate::daemons::{self, Daemons};
use crate::engine;
use crate::engine::controller::{EngineSpec, ServedRecord};
use crate::message::{self, Notice, WorkerCommand, WorkerReport};
use crate::plan::PlannedRequest;
use crate::probe::Tools;
use crate::sandbox;
use crate::wiring::{self, LinkRecord, Wiring};
use crate::worker::{RunSpec, SPEC_FILE, now_ns};

/// Name of the run without daemons.
pub const NONE: &str = "none";

/// What the caller sends first; its end of the pipe then stays open for as long as it lives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Task {
    /// Play made-up requests.
    Replay(Box<LabSpec>),
    /// Have the real engine serve them.
    Engine(Box<EngineSpec>),
}

/// What a replay is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabSpec {
    /// Configuration.
    pub config: LabConfig,
    /// The runs to make.
    pub runs: Vec<Play>,
    /// Programs.
    pub tools: Tools,
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Play {
    /// Policy, or [`NONE`].
    pub policy: String,
    /// The requests.
    pub plan: Vec<PlannedRequest>,
}

/// What the controller tells the caller.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// How far a run is.
    Progress {
        /// Which run, from 0.
        run: usize,
        /// Requests that have their first token.
        finished: usize,
        /// Seconds since the first arrival could come.
        elapsed_s: f64,
    },
    /// A run is over.
    Measured(Box<RunRecord>),
    /// A run with the real engine is over.
    Served(Box<ServedRecord>),
    /// The lab cannot go on.
    Failed(String),
}

/// What was measured in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The policy.
    pub policy: String,
    /// Time zero, CLOCK_MONOTONIC ns.
    pub begin_ns: u64,
    /// When the last request had its first token, or was given up.
    pub end_ns: u64,
    /// When each request had its first token; those that never had are missing.
    pub finished: Vec<(u64, u64)>,
    /// What the workers measured, by host.
    pub workers: Vec<WorkerReport>,
    /// What the fabric counted, by host.
    pub links: Vec<LinkRecord>,
    /// Daemons that were started again.
    pub daemon_restarts: u32,
    /// What became of collectives that the NCCL plugin carried; none if it carried none.
    #[serde(default)]
    pub carriage: Option<Carriage>,
    /// What daemons said of the coordinator at the end; none if there was none.
    #[serde(default)]
    pub coordinator: Option<CoordinatorRecord>,
    /// Processors that were busy on average, over the whole machine.
    pub busy_cores: f64,
    /// Processors that the lab's workers and daemons kept busy on average. The kernel's work on
    /// their packets is not in it.
    pub lab_cores: f64,
}

/// *init*: the body of the first process.
pub fn init() -> i32 {
    let outcome = sandbox::furnish().and_then(|()| match read_task()? {
        Task::Replay(spec) => Controller {
            spec: &spec,
            wiring: Wiring::build(&spec.config, &spec.tools)?,
        }
        .run(),
        Task::Engine(spec) => engine::controller::run(&spec),
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            tell(&Event::Failed(format!("{error:#}")));
            1
        }
    }
}

pub(crate) fn tell(event: &Event) {
    // If the caller is gone, so is this process in a moment.
    let _ = std::io::stdout().lock().write_all(&message::line(event));
}

fn read_task() -> anyhow::Result<Task> {
    let mut stdin = BufReader::new(std::io::stdin());
    let mut line = String::new();
    stdin.read_line(&mut line)?;
    std::thread::spawn(move || {
        // Ends when the caller does, whatever ended it. As this is pid 1, everything ends with it.
        let _ = stdin.read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
    serde_json::from_str(&line).context("reading what to run")
}

struct Worker {
    child: Child,
    orders: ChildStdin,
}

struct Controller<'a> {
    spec: &'a LabSpec,
    wiring: Wiring<'a>,
}

impl Controller<'_> {
    fn run(&self) -> anyhow::Result<()> {
        for (index, play) in self.spec.runs.iter().enumerate() {
            let record = self
                .play(index, play)
                .with_context(|| format!("running policy `{}`", play.policy))?;
            tell(&Event::Measured(Box::new(record)));
        }
        Ok(())
    }

    fn play(&self, index: usize, play: &Play) -> anyhow::Result<RunRecord> {
        let config = &self.spec.config;
        let folder = Path::new(sandbox::FOLDER).join(index.to_string());
        fs::create_dir_all(&folder)?;
        let scheduled = play.policy != NONE;
        let spec = RunSpec {
            config: config.clone(),
            plan: play.plan.clone(),
            scheduled,
            nccl_plugin: self.spec.tools.nccl_plugin.clone(),
        };
        fs::write(folder.join(SPEC_FILE), serde_json::to_vec(&spec)?)?;
        let mut coordinator = match &self.spec.tools.coordinator {
            Some(program) if scheduled => Some(Coordinator::start(
                program,
                config.coordinator_config.as_deref(),
                &folder,
            )?),
            _ => None,
        };
        let daemons = match (&self.spec.tools.laxityd, scheduled) {
            (_, false) => None,
            (Some(laxityd), true) => Some(Daemons::start(config, &play.policy, &folder, laxityd)?),
            (None, true) => bail!("there is no laxityd"),
        };
        if coordinator.is_some() {
            Coordinator::await_daemons(config.hosts(), &folder)?;
        }
        let cpu_before = children_cpu_s();
        let mut run = Running::start(&spec, &folder)?;
        let record = run.measure(self, index, play, daemons.as_ref(), coordinator.as_mut());
        run.end();
        let said = coordinator.map(|coordinator| coordinator.record(config.hosts(), &folder));
        let restarts = daemons.as_ref().map_or(0, Daemons::restarts);
        if let Some(daemons) = daemons {
            daemons.stop();
        }
        let mut record = record?;
        if let Some(carriage) = &mut record.carriage {
            carriage.read_reports(config, &folder);
        }
        let span_s = (record.end_ns - record.begin_ns) as f64 / 1e9;
        Ok(RunRecord {
            daemon_restarts: restarts,
            coordinator: said,
            lab_cores: (children_cpu_s() - cpu_before) / span_s.max(1e-3),
            ..record
        })
    }
}

/// The workers of one run.
struct Running {
    folder: PathBuf,
    workers: Vec<Worker>,
    notices: Receiver<(usize, Option<Notice>)>,
}

/// Workers have this long to start, to connect, to report.
const STEP_WITHIN: Duration = Duration::from_secs(20);

/// Between "connected" and time zero, so that every worker knows it before it comes.
const LEAD_NS: u64 = 200_000_000;

impl Running {
    fn start(spec: &RunSpec, folder: &Path) -> anyhow::Result<Self> {
        let (sender, notices) = channel();
        let mut run = Self {
            folder: folder.to_owned(),
            workers: Vec::new(),
            notices,
        };
        for host in 0..spec.config.hosts() {
            match start_worker(spec, folder, host, sender.clone()) {
                Ok(worker) => run.workers.push(worker),
                Err(error) => {
                    run.end();
                    return Err(error);
                }
            }
        }
        Ok(run)
    }

    fn order(&mut self, order: &WorkerCommand) -> anyhow::Result<()> {
        let line = message::line(order);
        for worker in &mut self.workers {
            worker
                .orders
                .write_all(&line)
                .context("a worker takes no orders")?;
        }
        Ok(())
    }

    /// The next notice, `None` if there is none until then.
    fn next(&self, until: Instant) -> anyhow::Result<Option<(usize, Notice)>> {
        match self
            .notices
            .recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            Ok((host, Some(notice))) => Ok(Some((host, notice))),
            Ok((host, None)) => {
                // Its last words may still be on their way to the file.
                std::thread::sleep(Duration::from_millis(20));
                bail!(
                    "the worker of host {host} ended early{}",
                    daemons::tail(&self.log(host))
                )
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("all workers are gone"),
        }
    }

    fn log(&self, host: usize) -> PathBuf {
        worker_log(&self.folder, host)
    }

    fn await_all(&self, expected: &Notice) -> anyhow::Result<()> {
        let until = Instant::now() + STEP_WITHIN;
        let mut missing = self.workers.len();
        while missing > 0 {
            match self.next(until)? {
                Some((_, notice)) if notice == *expected => missing -= 1,
                Some(_) => {}
                None => bail!("{missing} workers are not `{expected:?}` after {STEP_WITHIN:?}"),
            }
        }
        Ok(())
    }

    fn measure(
        &mut self,
        controller: &Controller<'_>,
        index: usize,
        play: &Play,
        daemons: Option<&Daemons>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> anyhow::Result<RunRecord> {
        let config = &controller.spec.config;
        self.await_all(&Notice::Listening)?;
        self.order(&WorkerCommand::Connect)?;
        self.await_all(&Notice::Connected)?;
        let before = controller.wiring.counters()?;
        let begin_ns = now_ns()? + LEAD_NS;
        let busy_before = busy_jiffies();
        self.order(&WorkerCommand::Begin(begin_ns))?;
        let begun = Instant::now() + Duration::from_nanos(LEAD_NS);

        let last_arrival = play.plan.last().map_or(0, |request| request.arrival_ns);
        let give_up =
            begun + Duration::from_nanos(last_arrival) + Duration::from_secs_f64(config.drain_s);
        let mut kill_at = config
            .kill_daemon_at
            .map(|seconds| begun + Duration::from_secs_f64(seconds));
        let at = |seconds| begun + Duration::from_secs_f64(seconds);
        let mut kill_coordinator_at = config.kill_coordinator_at.map(at);
        let mut finished = Vec::new();
        let mut tell_at = Instant::now();
        while finished.len() < play.plan.len() && Instant::now() < give_up {
            let now = Instant::now();
            if kill_at.is_some_and(|at| at <= now) {
                kill_at = None;
                if let Some(daemons) = daemons {
                    daemons.kill(0);
                }
            }
            if kill_coordinator_at.is_some_and(|at| at <= now) {
                kill_coordinator_at = None;
                if let Some(coordinator) = &mut coordinator {
                    coordinator.kill();
                }
            }
            if tell_at <= now {
                tell_at = now + Duration::from_millis(200);
                let elapsed_s = now.saturating_duration_since(begun).as_secs_f64();
                tell(&Event::Progress {
                    run: index,
                    finished: finished.len(),
                    elapsed_s,
                });
            }
            let until = kill_at.map_or(tell_at, |at| at.min(tell_at)).min(give_up);
            if let Some((_, Notice::Finished { request, at_ns })) = self.next(until)? {
                finished.push((request, at_ns));
            }
        }
        let end_ns = now_ns()?;
        let busy_after = busy_jiffies();
        let after = controller.wiring.counters()?;
        let mut carriage = controller
            .spec
            .tools
            .nccl_plugin
            .as_ref()
            .map(|_| Carriage::default());
        if let Some(carriage) = carriage.as_mut().filter(|_| daemons.is_some()) {
            carriage.ask_daemons(config, &self.folder);
        }
        self.order(&WorkerCommand::Finish)?;
        let mut workers = Vec::new();
        let until = Instant::now() + STEP_WITHIN;
        while workers.len() < self.workers.len() {
            match self.next(until)? {
                Some((_, Notice::Report(report))) => workers.push(*report),
                Some(_) => {}
                None => bail!("workers do not report"),
            }
        }
        workers.sort_by_key(|report: &WorkerReport| report.host);
        if let Some(carriage) = &mut carriage {
            carriage.add_workers(&workers);
        }
        let links = wiring::between(&before, &after);
        // Jiffies are 10 ms: USER_HZ is 100 on every Linux.
        let busy_s = busy_after.saturating_sub(busy_before) as f64 / 100.0;
        Ok(RunRecord {
            policy: play.policy.clone(),
            begin_ns,
            end_ns,
            finished,
            workers,
            links,
            daemon_restarts: 0,
            carriage,
            coordinator: None,
            lab_cores: 0.0,
            busy_cores: busy_s / (end_ns.saturating_sub(begin_ns) as f64 / 1e9).max(1e-3),
        })
    }

    /// Ends the workers: they leave when their standard input does.
    fn end(self) {
        for Worker { mut child, orders } in self.workers {
            drop(orders);
            let until = Instant::now() + Duration::from_secs(2);
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > until {
                    // It may have ended just now; nothing is lost either way.
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn worker_log(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("worker{host}.log"))
}

fn start_worker(
    spec: &RunSpec,
    folder: &Path,
    host: usize,
    sender: Sender<(usize, Option<Notice>)>,
) -> anyhow::Result<Worker> {
    let mut command = sandbox::internal("worker");
    if spec.nccl_plugin.is_some() {
        command.envs(carrier::environment(
            &spec.config,
            folder,
            host,
            spec.scheduled,
        ));
    }
    let mut child = command
        .arg(folder)
        .arg(host.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(File::create(worker_log(folder, host))?)
        .spawn()
        .context("starting a worker")?;
    let (Some(orders), Some(notices)) = (child.stdin.take(), child.stdout.take()) else {
        bail!("a worker has no pipes");
    };
    std::thread::spawn(move || {
        let mut reported = false;
        for line in BufReader::new(notices).lines() {
            let notice = line
                .ok()
                .and_then(|line| serde_json::from_str::<Notice>(&line).ok());
            reported |= matches!(notice, Some(Notice::Report(_)));
            if sender.send((host, notice)).is_err() {
                return;
            }
        }
        if !reported {
            // Nobody listens any more if the run is over.
            let _ = sender.send((host, None));
        }
    });
    Ok(Worker { child, orders })
}

/// Processor time of all children that have ended, s.
pub(crate) fn children_cpu_s() -> f64 {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_CHILDREN) else {
        return 0.0;
    };
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// Time that the machine's processors were busy, in jiffies.
pub(crate) fn busy_jiffies() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let Some(line) = stat.lines().next() else {
        return 0;
    };
    let columns: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|column| column.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; what follows is contained in user and nice.
    columns
        .iter()
        .take(8)
        .enumerate()
        .filter(|(i, _)| *i != 3 && *i != 4)
        .map(|(_, n)| n)
        .sum()
}
