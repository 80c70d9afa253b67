//! The workers of a round: their processes, and the threads that pass their frames to the oracle.

use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_shm::sleep::now_ns;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid};
use serde_json::Value;

use super::frame::Frame;
use super::oracle::{Oracle, TransferCounts};
use super::plant::{Plant, Reported};
use super::setting::Setting;
use super::task::{FINISH, KILL_ENGINE, Role, Task, command};
use crate::child::{lock, poll};
use crate::error::LabError;

/// Longest time until a worker that was told to finish has done so. Engines may need some seconds
/// each for their answers, to forget them, and to end.
const FINISH_MAX: Duration = Duration::from_secs(40);
/// Longest wait for the first transfer of workers that first have to find each other.
const BEGIN_MAX: Duration = Duration::from_secs(3);
/// Longest time until a worker learns that its peer was killed. Mooncake connects again for a
/// second before it says so.
const PEER_MAX: Duration = Duration::from_secs(6);

struct Worker {
    number: usize,
    role: Role,
    child: Child,
    reader: JoinHandle<()>,
}

impl Worker {
    fn tell(&mut self, command: u8) {
        if let Some(pipe) = &mut self.child.stdin {
            // A worker that is gone is found at the end.
            let _ = pipe.write_all(&[command]);
        }
    }
}

pub(super) struct RoundWorkers<'a> {
    setting: &'a Setting,
    socket: PathBuf,
    folder: PathBuf,
    seed: u64,
    started: u64,
    /// Whether the planted bug may happen.
    pub(super) armed: Arc<AtomicBool>,
    oracle: Arc<Mutex<Oracle>>,
    workers: Vec<Worker>,
    /// Workers whose peer was killed, and until when they have to end.
    widowed: Vec<(Worker, Instant)>,
    hostile: Vec<(u64, Child)>,
}

/// The workers of each path, in the order of their start. Of a pair, the first receives, and
/// reports the bytes to the oracle.
const WORKERS: [(&str, &[Role]); 7] = [
    ("client", &[Role::Client, Role::Client]),
    ("c", &[Role::C]),
    ("nccl", &[Role::NcclReceiver, Role::NcclSender]),
    ("mooncake", &[Role::MooncakeTarget, Role::MooncakeInitiator]),
    ("engine", &[Role::Engine]),
    ("mooncake_c", &[Role::MooncakeCTarget, Role::MooncakeCInitiator]),
    ("verbs", &[Role::VerbsReceiver, Role::VerbsSender]),
];

fn path_of(role: Role) -> &'static str {
    let path = WORKERS.into_iter().find(|(_, workers)| workers.contains(&role));
    path.map_or("hostile", |(path, _)| path)
}

/// Returns the two workers of a path that needs two, the receiver first.
fn pair_of(role: Role) -> Option<[Role; 2]> {
    let mut pairs =
        WORKERS.into_iter().filter_map(|(_, workers)| <[Role; 2]>::try_from(workers).ok());
    pairs.find(|[receiver, sender]| receiver != sender && [*receiver, *sender].contains(&role))
}

/// Returns the worker whose first transfer has to be awaited, because the processes of this role
/// have to connect first.
fn first_of(role: Role) -> Option<Role> {
    if role == Role::Engine { Some(role) } else { pair_of(role).map(|[receiver, _]| receiver) }
}

fn signal(worker: &Worker, signal: Signal) {
    // The child is not reaped yet, so the id is its own.
    let id = Pid::from_raw(worker.child.id().cast_signed());
    // Engines are in the group of their worker.
    let _ = if worker.role == Role::Engine { killpg(id, signal) } else { kill(id, signal) };
}

impl<'a> RoundWorkers<'a> {
    pub(super) fn start(
        setting: &'a Setting,
        folder: &Path,
        socket: PathBuf,
        seed: u64,
        oracle: &Arc<Mutex<Oracle>>,
    ) -> Result<Self, LabError> {
        let mut round = Self {
            setting,
            socket,
            folder: folder.to_owned(),
            seed,
            started: 0,
            armed: Arc::default(),
            oracle: Arc::clone(oracle),
            workers: Vec::new(),
            widowed: Vec::new(),
            hostile: Vec::new(),
        };
        for (_, workers) in WORKERS.into_iter().filter(|(path, _)| setting.uses(path)) {
            workers.iter().try_for_each(|&role| round.add(role))?;
        }
        Ok(round)
    }

    /// Waits until each pair and each engine transfers, so that faults meet transfers.
    pub(super) fn await_pairs(&self) {
        for worker in &self.workers {
            self.await_begin(worker);
        }
    }

    /// Waits until a worker of a pair, or one with engines, transfers, or for a limited time.
    fn await_begin(&self, worker: &Worker) {
        let Some(receiver) = first_of(worker.role) else { return };
        let mut both = self.workers.iter();
        let Some(receiver) = both.find(|other| other.role == receiver) else { return };
        let has_begun = || lock(&self.oracle).has_begun(receiver.number).then_some(());
        poll(self.setting.pace.slow(BEGIN_MAX), Duration::from_millis(2), has_begun);
    }

    fn handle(&self, role: Role) -> PathBuf {
        self.folder.join(format!("handle-{}", path_of(role)))
    }

    fn task(&mut self, role: Role) -> Result<Task, LabError> {
        self.started += 1;
        let setting = self.setting;
        let programs = setting.programs(path_of(role));
        let answers = match role {
            Role::Engine => setting.answers.of(&programs.program)?,
            _ => Vec::new(),
        };
        let nccl = setting.pace.nccl;
        Ok(Task {
            role,
            socket: self.socket.clone(),
            seed: self.seed.wrapping_add(self.started),
            leaks_lanes: setting.plant == Some(Plant::LeakLane),
            leaks: setting.plant,
            full_rate: setting.full_rate,
            programs,
            alone: setting.has_only(&["mooncake_c", "nccl", "engine"]),
            device: if role == Role::NcclSender { nccl.sender } else { nccl.receiver },
            handle: self.handle(role),
            answers,
        })
    }

    fn command(&self, task: &Task) -> Result<Command, LabError> {
        command(task, self.setting.pace.nccl.settings)
    }

    fn add(&mut self, role: Role) -> Result<(), LabError> {
        let task = self.task(role)?;
        let mut child = self.command(&task)?.spawn().map_err(LabError::start("a worker"))?;
        let path = path_of(role);
        let number = lock(&self.oracle).add(path);
        let pipe = child.stdout.take().ok_or_else(LabError::no_pipe)?;
        let mut pipe = BufReader::with_capacity(1 << 17, pipe);
        let oracle = Arc::clone(&self.oracle);
        let receives = pair_of(role).is_none_or(|[first, _]| first == role);
        let has_bug = path == self.setting.plant_on && receives;
        let mut reported = Reported::new(self.setting.plant.filter(|_| has_bug), &self.armed);
        let reader = std::thread::spawn(move || {
            loop {
                match Frame::read(&mut pipe) {
                    Ok(Some(frame)) => {
                        for frame in reported.pass(frame) {
                            lock(&oracle).take(number, &frame);
                        }
                    }
                    Ok(None) => return,
                    Err(error) => return lock(&oracle).blame(format!("{path}: {error}")),
                }
            }
        });
        self.workers.push(Worker { number, role, child, reader });
        Ok(())
    }

    fn add_pair(&mut self, pair: [Role; 2]) -> Result<(), LabError> {
        // The handle of an earlier pair, which leads nowhere.
        let _ = std::fs::remove_file(self.handle(pair[0]));
        pair.into_iter().try_for_each(|role| self.add(role))
    }

    fn chosen(&self, choice: u64) -> usize {
        (choice % self.workers.len().max(1) as u64) as usize
    }

    /// Kills a worker and starts another one. Its peer, if it has one, has to learn of its death.
    /// Of a worker with engines, mostly only one engine is killed.
    pub(super) fn kill(&mut self, choice: u64) -> Result<(), LabError> {
        self.await_begin(&self.workers[self.chosen(choice)]);
        let (chosen, count) = (self.chosen(choice), self.workers.len().max(1) as u64);
        if self.workers[chosen].role == Role::Engine && !(choice / count).is_multiple_of(4) {
            self.workers[chosen].tell(KILL_ENGINE);
            return Ok(());
        }
        let mut worker = self.workers.remove(chosen);
        let killed_ns = now_ns();
        signal(&worker, Signal::SIGKILL);
        let _ = worker.child.wait();
        let _ = worker.reader.join();
        lock(&self.oracle).killed(worker.number);
        let Some(pair) = pair_of(worker.role) else { return self.add(worker.role) };
        if let Some(at) = self.workers.iter().position(|other| pair.contains(&other.role)) {
            let mut peer = self.workers.remove(at);
            lock(&self.oracle).peer_killed(peer.number, killed_ns);
            let receiver = peer.number.min(worker.number);
            signal(&peer, Signal::SIGCONT);
            if lock(&self.oracle).has_begun(receiver) {
                self.widowed.push((peer, Instant::now() + self.setting.pace.slow(PEER_MAX)));
            } else {
                // A worker that is not connected yet has no peer whose death it could see.
                let number = peer.number;
                let _ = peer.child.kill();
                let _ = end(peer, Instant::now() + self.setting.pace.slow(PEER_MAX));
                lock(&self.oracle).killed(number);
            }
        }
        self.add_pair(pair)
    }

    pub(super) fn stop(&self, choice: u64) -> usize {
        let worker = &self.workers[self.chosen(choice)];
        signal(worker, Signal::SIGSTOP);
        worker.number
    }

    pub(super) fn number(&self, choice: u64) -> usize {
        self.workers[self.chosen(choice)].number
    }

    pub(super) fn signal(&self, number: usize, what: Signal) {
        if let Some(worker) = self.workers.iter().find(|worker| worker.number == number) {
            signal(worker, what);
        }
    }

    fn obedient(&mut self, command: u8) -> Vec<&mut Worker> {
        self.workers.iter_mut().filter(|worker| worker.role.knows(command)).collect()
    }

    pub(super) fn tell(&mut self, choice: u64, command: u8) {
        let mut all = self.obedient(command);
        let at = (choice % all.len().max(1) as u64) as usize;
        if let Some(worker) = all.get_mut(at) {
            worker.tell(command);
        }
    }

    pub(super) fn tell_all(&mut self, command: u8) {
        self.obedient(command).into_iter().for_each(|worker| worker.tell(command));
    }

    pub(super) fn add_hostile(&mut self, choice: u64) -> Result<u64, LabError> {
        let task = Task { seed: choice, ..self.task(Role::Hostile)? };
        let child = self.command(&task)?.spawn().map_err(LabError::start("a hostile client"))?;
        self.hostile.push((self.started, child));
        Ok(self.started)
    }

    pub(super) fn end_hostile(&mut self, number: u64) {
        if let Some(at) = self.hostile.iter().position(|(of, _)| *of == number) {
            let (_, mut child) = self.hostile.remove(at);
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Returns the path of the worker that has a process, or whose process group has it.
    pub(super) fn path_of_process(&self, pid: u32) -> Option<&'static str> {
        let group = getpgid(Some(Pid::from_raw(pid.cast_signed()))).ok();
        let has = |worker: &&Worker| {
            let own = worker.child.id();
            own == pid || group.is_some_and(|group| group.as_raw() == own.cast_signed())
        };
        self.workers.iter().find(has).map(|worker| path_of(worker.role))
    }

    pub(super) fn processes(&self) -> Vec<(usize, &'static str, u32)> {
        let of = |worker: &Worker| (worker.number, path_of(worker.role), worker.child.id());
        self.workers.iter().map(of).collect()
    }

    /// Ends a worker in order, with its peer if it has one, and starts others in their place.
    pub(super) fn leave(&mut self, choice: u64) -> Result<(), LabError> {
        let chosen = self.chosen(choice);
        let role = self.workers[chosen].role;
        let pair = pair_of(role);
        let goes = |role| pair.is_some_and(|pair| pair.contains(&role));
        let all = std::mem::take(&mut self.workers).into_iter().enumerate();
        let (leaving, staying): (Vec<_>, Vec<_>) =
            all.partition(|(at, one)| *at == chosen || goes(one.role));
        self.workers = leaving.into_iter().map(|(_, worker)| worker).collect();
        self.finish();
        self.workers = staying.into_iter().map(|(_, worker)| worker).collect();
        match pair {
            Some(pair) => self.add_pair(pair),
            None => self.add(role),
        }
    }

    pub(super) fn finish(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.tell(FINISH));
        let give_up = Instant::now() + self.setting.pace.slow(FINISH_MAX);
        for worker in std::mem::take(&mut self.workers) {
            let number = worker.number;
            self.await_end(worker, "a worker", give_up);
            lock(&self.oracle).ended(number);
        }
        for (worker, give_up) in std::mem::take(&mut self.widowed) {
            let number = worker.number;
            self.await_end(worker, "after the death of its peer, a worker", give_up);
            lock(&self.oracle).killed(number);
        }
        self.read_reports();
    }

    fn await_end(&self, worker: Worker, which: &str, give_up: Instant) {
        let path = path_of(worker.role);
        if let Some(how) = end(worker, give_up) {
            lock(&self.oracle).blame(format!("{path}: {which} {how}"));
        }
    }

    /// Adds what the libraries counted in workers that ended by themselves.
    fn read_reports(&self) {
        for role in [Role::NcclSender, Role::VerbsSender, Role::MooncakeCInitiator] {
            let file = self.handle(role).with_extension("report");
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            // A soak reads it again after each worker that leaves.
            let _ = std::fs::remove_file(file);
            for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                // A process on Mooncake's C interface has a line of each preloaded library.
                // liblaxity.so carries nothing there.
                let of = |name: &str| line[name].as_u64().unwrap_or(0);
                let counted = TransferCounts {
                    scheduled_bytes: of("scheduled_bytes"),
                    bypassed_bytes: of("bypassed_bytes"),
                    by_siblings: of("by_siblings"),
                    ..TransferCounts::default()
                };
                lock(&self.oracle).counted(path_of(role), &counted);
            }
        }
    }
}

fn end(mut worker: Worker, give_up: Instant) -> Option<String> {
    let how = loop {
        match worker.child.try_wait() {
            Ok(None) if Instant::now() < give_up => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                signal(&worker, Signal::SIGKILL);
                let _ = worker.child.wait();
                break Some("waits forever".to_owned());
            }
            Ok(Some(status)) if status.success() => break None,
            Ok(Some(status)) => break Some(format!("ended with {status}")),
            Err(error) => break Some(format!("can't be waited for: {error}")),
        }
    };
    let _ = worker.reader.join();
    how
}

impl Drop for RoundWorkers<'_> {
    fn drop(&mut self) {
        let widowed = std::mem::take(&mut self.widowed).into_iter().map(|(worker, _)| worker);
        let workers = std::mem::take(&mut self.workers).into_iter().chain(widowed);
        let workers = workers.map(|worker| {
            signal(&worker, Signal::SIGKILL);
            worker.child
        });
        let hostile = std::mem::take(&mut self.hostile).into_iter().map(|(_, child)| child);
        for mut child in workers.chain(hostile) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
