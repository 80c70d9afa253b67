//! The engines of one run, each a process in its host's namespace, and the clients of each host.

mod configuration;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::carriage;
use crate::child::{Guarded, tail};
use crate::client::{Job, Said};
use crate::collectives;
use crate::config::{Engine, LabConfig};
use crate::counts::Counts;
use crate::error::LabError;
use crate::fabric;
use crate::message;
use crate::plan::{Asked, held};
use crate::probe::Tools;
use crate::sandbox;
use crate::vllm::Vllm;

pub use configuration::engine_toml;
use configuration::holds_file;

/// Longest start of an engine: vLLM takes a minute, and on a machine that compiles beside it ten.
/// An early exit is noticed at once.
const START_WITHIN: Duration = Duration::from_secs(900);
/// Longest time of any job other than requests.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Longest time for engines to stop. An engine gives open answers 5 s, but here none are needed.
const STOP_WITHIN: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(10);

enum Heard {
    Said(Said),
    /// The error of a line that could not be read or parsed.
    Unreadable(String),
    Ended,
}

impl Heard {
    fn line(line: std::io::Result<String>) -> Self {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Self::Unreadable(error.to_string()),
        };
        match serde_json::from_str(&line) {
            Ok(said) => Self::Said(said),
            Err(error) => {
                let begin: String = line.chars().take(200).collect();
                Self::Unreadable(format!("`{begin}`: {error}"))
            }
        }
    }
}

/// Running clients, at most one per host. Dropping this kills them.
pub struct Clients {
    clients: Vec<Client>,
    heard: Receiver<(usize, Heard)>,
}

struct Client {
    host: usize,
    child: Child,
    /// Number of answers that the client has not sent yet. An exit before them is an error.
    owes: usize,
    log: PathBuf,
}

impl Client {
    /// Starts a client with its job. Its messages go to `sender` with the index `number`.
    fn start(
        mut command: Command,
        (number, host): (usize, usize),
        job: &Job,
        log: PathBuf,
        sender: Sender<(usize, Heard)>,
    ) -> Result<Self, LabError> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).map_err(LabError::file("creating", &log))?)
            .spawn()
            .map_err(LabError::start("a client"))?;
        // From here on, dropping the client kills the process, also if it does not read its job.
        let mut client = Self { host, child, owes: job.answers(), log };
        let pipes = (client.child.stdin.take(), client.child.stdout.take());
        let (Some(mut orders), Some(said)) = pipes else { return Err(LabError::no_pipe()) };
        orders
            .write_all(&message::line(job))
            .map_err(LabError::system("telling a client its job"))?;
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines() {
                if sender.send((number, Heard::line(line))).is_err() {
                    return;
                }
            }
            // The receiver is gone if the run is over.
            let _ = sender.send((number, Heard::Ended));
        });
        Ok(client)
    }

    fn last_words(&mut self) -> String {
        let status = self.child.wait();
        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        format!("{status}{}", tail(&self.log))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) struct Process {
    pub host: usize,
    pub guarded: Guarded,
}

pub struct Engines {
    folder: PathBuf,
    hosts: usize,
    processes: Vec<Process>,
    /// The processes that vLLM's layers ask for exchanges. They outlive vLLM, so that exchanges
    /// that have begun still end.
    exchanges: Vec<Process>,
    /// Whether some host's sockets have the kernel's own buffers.
    pub buffers_unbounded: bool,
}

impl Engines {
    /// Starts the engines and waits until all answer.
    pub fn start(
        config: &LabConfig,
        folder: &Path,
        tools: &Tools,
        policy: Option<&str>,
        asked: &[Asked],
    ) -> Result<Self, LabError> {
        let mut engines = Self {
            folder: folder.to_owned(),
            hosts: config.hosts(),
            processes: Vec::new(),
            exchanges: Vec::new(),
            buffers_unbounded: false,
        };
        let hosts: Vec<usize> = (0..config.hosts()).collect();
        let buffers = Job::Buffers(config.socket_buffer_bytes);
        let bounded = engines.each(&hosts, &buffers, ANSWER_WITHIN)?;
        engines.buffers_unbounded = bounded.iter().any(|said| matches!(said, Said::Buffers(false)));
        if config.engine == Engine::Vllm {
            engines.start_vllm(config, tools, policy)?;
        } else {
            engines.start_own(config, tools, policy.is_some(), asked)?;
        }
        engines.await_all()?;
        Ok(engines)
    }

    fn start_vllm(
        &mut self,
        config: &LabConfig,
        tools: &Tools,
        policy: Option<&str>,
    ) -> Result<(), LabError> {
        let missing = || LabError::missing("vLLM", "run `make setup-vllm`");
        let python = tools.python.as_deref().ok_or_else(missing)?;
        let folder = self.folder.clone();
        let vllm = Vllm::new(config, &folder, python, policy);
        vllm.prepare()?;
        for host in 0..self.hosts {
            let plugin = tools.nccl_plugin.as_deref().filter(|_| host < config.prefills());
            if let Some(plugin) = plugin {
                let scheduled = policy.is_some();
                let process = collectives::start(config, &folder, host, scheduled, plugin)?;
                self.exchanges.push(process);
            }
            vllm.start(host, &mut self.processes)?;
        }
        Ok(())
    }

    /// Kills the vLLM of a host as a crash would, and starts another in its place. Returns the
    /// counters that the dead process had. An answer takes several steps after its transfer, so
    /// they include the transfers of all requests that it answered.
    pub fn restart_vllm(
        &mut self,
        config: &LabConfig,
        tools: &Tools,
        policy: Option<&str>,
        host: usize,
    ) -> Result<Counts, LabError> {
        let missing = || LabError::missing("vLLM of a host", "the lab has none to kill");
        let counts = self.counts_of(&[host])?.remove(0);
        let log = self.log(host);
        let process = self.processes.iter_mut().find(|process| process.guarded.log == log);
        let (process, python) = process.zip(tools.python.as_deref()).ok_or_else(missing)?;
        process.guarded.kill();
        *process = Vllm::new(config, &self.folder, python, policy).start_engine(host)?;
        Ok(counts)
    }

    pub fn await_all(&mut self) -> Result<(), LabError> {
        let hosts: Vec<usize> = (0..self.hosts).collect();
        self.each(&hosts, &Job::Await, START_WITHIN).map(drop)
    }

    fn start_own(
        &mut self,
        config: &LabConfig,
        tools: &Tools,
        scheduled: bool,
        asked: &[Asked],
    ) -> Result<(), LabError> {
        let missing = || LabError::missing("laxity-engine", "name it with --laxity-engine");
        let program = tools.laxity_engine.as_deref().ok_or_else(missing)?;
        let folder = &self.folder.clone();
        if config.engine == Engine::Timed {
            for (host, prompts) in held(config, asked).into_iter().enumerate() {
                let path = holds_file(folder, host);
                fs::write(&path, serde_json::to_vec(&prompts)?)
                    .map_err(LabError::file("writing", &path))?;
            }
        }
        for host in 0..self.hosts {
            let file = folder.join(format!("engine{host}.toml"));
            let plugin = tools.nccl_plugin.as_deref().filter(|_| host < config.prefills());
            fs::write(&file, engine_toml(config, folder, host, scheduled, plugin)?)
                .map_err(LabError::file("writing", &file))?;
            let mut command = sandbox::internal("in");
            if plugin.is_some() {
                command.envs(carriage::environment(config, folder, host, scheduled));
            }
            command
                .arg(fabric::namespace(host))
                .arg(program)
                .arg("--config")
                .arg(&file)
                .env("RAYON_NUM_THREADS", config.serving().threads.to_string());
            let guarded = Guarded::start_group("laxity-engine", &mut command, &self.log(host))?;
            self.processes.push(Process { host, guarded });
        }
        Ok(())
    }

    fn log(&self, host: usize) -> PathBuf {
        self.folder.join(format!("engine{host}.log"))
    }

    pub fn check(&mut self) -> Result<(), LabError> {
        for Process { host, guarded } in self.exchanges.iter_mut().chain(&mut self.processes) {
            if let Some(status) = guarded.ended() {
                let how = format!("ended early ({status}){}", guarded.tail());
                return Err(LabError::program(format!("the engine of host {host}"), how));
            }
        }
        Ok(())
    }

    pub fn clients(
        &self,
        jobs: impl IntoIterator<Item = (usize, Job)>,
    ) -> Result<Clients, LabError> {
        self.clients_by(jobs, |host| {
            let mut command = sandbox::internal("client");
            command.arg(host.to_string());
            command
        })
    }

    fn clients_by(
        &self,
        jobs: impl IntoIterator<Item = (usize, Job)>,
        command: impl Fn(usize) -> Command,
    ) -> Result<Clients, LabError> {
        let (sender, heard) = channel();
        let start = |(number, (host, job)): (usize, (usize, Job))| {
            let log = self.folder.join(format!("client{host}.log"));
            Client::start(command(host), (number, host), &job, log, sender.clone())
        };
        let clients = jobs.into_iter().enumerate().map(start).collect::<Result<_, LabError>>()?;
        Ok(Clients { clients, heard })
    }

    /// Runs a job on some hosts, where each answers with one line. Returns the answers in the order
    /// of the hosts.
    fn each(
        &mut self,
        hosts: &[usize],
        job: &Job,
        within: Duration,
    ) -> Result<Vec<Said>, LabError> {
        let mut clients = self.clients(hosts.iter().map(|&host| (host, job.clone())))?;
        let until = Instant::now() + within;
        let mut answers: Vec<Option<Said>> = vec![None; hosts.len()];
        while let Some(missing) = answers.iter().position(Option::is_none) {
            match self.hear(&mut clients, until)? {
                None => {
                    let host = hosts[missing];
                    let (what, said) =
                        (format!("host {host} has no answer"), tail(&self.log(host)));
                    return Err(LabError::Timeout { what, within, said });
                }
                Some((host, answer)) => {
                    if let Some(at) = hosts.iter().position(|&other| other == host) {
                        answers[at] = Some(answer);
                    }
                }
            }
        }
        drop(clients);
        Ok(answers.into_iter().flatten().collect())
    }

    /// Returns the next message of a client, or `None` if none comes until `until`.
    pub fn hear(
        &mut self,
        clients: &mut Clients,
        until: Instant,
    ) -> Result<Option<(usize, Said)>, LabError> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match clients.heard.recv_timeout(left.min(Duration::from_millis(200))) {
                Ok((number, heard)) => {
                    let client = &mut clients.clients[number];
                    let host = client.host;
                    let failed =
                        |how| LabError::program(format_args!("a client on host {host}"), how);
                    match heard {
                        Heard::Said(Said::Failed(why)) => {
                            self.check()?;
                            return Err(failed(format!("failed: {why}{}", tail(&self.log(host)))));
                        }
                        Heard::Said(said) => {
                            if !matches!(said, Said::First { .. }) {
                                client.owes = client.owes.saturating_sub(1);
                            }
                            return Ok(Some((host, said)));
                        }
                        Heard::Unreadable(why) => {
                            return Err(failed(format!("says what cannot be read: {why}")));
                        }
                        Heard::Ended if client.owes > 0 => {
                            self.check()?;
                            let (owes, words) = (client.owes, client.last_words());
                            let how = format!("ended with {owes} answers to give: {words}");
                            return Err(failed(how));
                        }
                        Heard::Ended => {}
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.check()?;
                    if left.is_zero() {
                        return Ok(None);
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
    }

    /// Ends the engines, which begin no exchange from now on.
    pub fn end_engines(&mut self) {
        end(std::mem::take(&mut self.processes));
    }

    pub fn counts(&mut self) -> Result<Vec<Counts>, LabError> {
        self.counts_of(&(0..self.hosts).collect::<Vec<usize>>())
    }

    fn counts_of(&mut self, hosts: &[usize]) -> Result<Vec<Counts>, LabError> {
        let said = self.each(hosts, &Job::Metrics, ANSWER_WITHIN)?;
        let counts = said.iter().map(|said| match said {
            Said::Metrics(text) => Counts::read(text),
            _ => Counts::default(),
        });
        Ok(counts.collect())
    }
}

/// Ends processes, by force if they take too long.
fn end(mut processes: Vec<Process>) {
    processes.iter_mut().for_each(|process| process.guarded.signal(Signal::SIGTERM));
    let until = Instant::now() + STOP_WITHIN;
    for mut process in processes {
        process.guarded.await_end(until);
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.end_engines();
        end(std::mem::take(&mut self.exchanges));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Answer, Question};

    fn engines(folder: &tempfile::TempDir) -> Engines {
        Engines {
            folder: folder.path().to_owned(),
            hosts: 0,
            processes: Vec::new(),
            exchanges: Vec::new(),
            buffers_unbounded: false,
        }
    }

    fn ask(questions: usize, tokens: usize) -> Job {
        let question = Question {
            id: 1,
            at_ns: 0,
            prompt: vec![7; tokens],
            output_tokens: 1,
            ttft_ms: 1.0,
            prefill: None,
            local: false,
        };
        Job::Ask { questions: vec![question; questions], begin_ns: None }
    }

    fn shell(script: String) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        command
    }

    #[test]
    fn a_client_that_ends_before_it_has_said_all_or_says_nonsense_fails_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut engines = engines(&folder);
        let first = message::line(&Said::First { id: 1, first_ns: 5 });
        let answered = message::line(&Said::Answered(Answer::default()));
        let says = String::from_utf8([first, answered].concat()).unwrap();
        let mut hear = |questions, end: &str| {
            let script = format!("read job; printf '%s' '{says}'; {end}");
            let mut clients =
                engines.clients_by([(3, ask(questions, 1))], |_| shell(script.clone())).unwrap();
            let within = |time| Instant::now() + Duration::from_millis(time);
            for _ in 0..2 {
                let said = engines.hear(&mut clients, within(60_000)).unwrap();
                assert_eq!(said.unwrap().0, 3);
            }
            // Expected messages get a long wait, and the absence of a message a short one.
            let time = if end.is_empty() { 300 } else { 60_000 };
            engines.hear(&mut clients, within(time))
        };
        let error = hear(2, "echo out of ideas >&2; exit 3").unwrap_err();
        assert!(error.to_string().contains("host 3"), "{error}");
        assert!(error.to_string().contains("1 answers to give"), "{error}");
        assert!(error.to_string().contains("exit status: 3"), "{error}");
        assert!(error.to_string().contains("out of ideas"), "{error}");
        let error = hear(1, "echo nonsense").unwrap_err();
        assert!(error.to_string().contains("`nonsense`"), "{error}");
        assert!(hear(1, "").unwrap().is_none(), "it owed nothing more");
    }

    #[test]
    fn a_client_that_takes_no_job_is_not_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 600 <&-", pid.display());
        // The job is larger than the buffer of a pipe.
        let failed = engines(&folder).clients_by([(0, ask(1, 100_000))], |_| shell(script.clone()));
        assert!(failed.is_err());
        let pid = fs::read_to_string(pid).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists());
    }
}
