//! The workers of a round: their processes, and the threads that pass their frames to the oracle.

use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::frame::Frame;
use super::oracle::Oracle;
use super::plant::{Plant, Reported};
use super::task::{FINISH, Role, Task, command};
use crate::config::LabConfig;
use crate::error::LabError;
use crate::probe::{CannotRun, find_daemon, find_library, find_nccl_plugin};
use crate::sandbox::find_program;

/// Longest time until a worker that was told to finish has done so.
const FINISH_MAX: Duration = Duration::from_secs(10);
/// Longest time until a worker learns that its peer was killed.
const PEER_MAX: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct Setting {
    pub laxityd: PathBuf,
    /// Path of the `laxityd` that takes turns with it, such as another release's.
    pub then: Option<PathBuf>,
    /// Path of the C library, if this machine can run the worker that uses it.
    pub c_library: Option<PathBuf>,
    /// Path of the NCCL plugin, if there is one.
    pub nccl_plugin: Option<PathBuf>,
    pub plant: Option<Plant>,
    /// Path whose workers have the planted bug.
    pub plant_on: String,
}

impl Setting {
    /// Finds the programs. Paths whose library or interpreter is missing are left out.
    pub fn find(
        laxityd: Option<&PathBuf>,
        then: Option<&PathBuf>,
        (plant, plant_on): (Option<Plant>, &str),
    ) -> Result<Self, CannotRun> {
        let has_python = find_program("python3").is_some();
        Ok(Self {
            laxityd: find_daemon(laxityd).map_err(|lack| CannotRun(vec![lack]))?,
            then: match then {
                Some(_) => Some(find_daemon(then).map_err(|lack| CannotRun(vec![lack]))?),
                None => None,
            },
            c_library: find_library("liblaxity_client.so").filter(|_| has_python),
            nccl_plugin: find_nccl_plugin(&LabConfig::default()).ok(),
            plant,
            plant_on: plant_on.to_owned(),
        })
    }

    pub fn left_out(&self) -> Vec<&'static str> {
        let c = "c: needs python3 and liblaxity_client.so (cargo build -p laxity-client-c)";
        let nccl = "nccl: needs libnccl-net-laxity.so (cargo build -p laxity-nccl)";
        let all = [(self.c_library.is_none(), c), (self.nccl_plugin.is_none(), nccl)];
        all.into_iter().filter_map(|(lacks, why)| lacks.then_some(why)).collect()
    }
}

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

pub(super) struct Cast<'a> {
    setting: &'a Setting,
    socket: PathBuf,
    folder: PathBuf,
    seed: u64,
    started: u64,
    /// Whether the planted bug may happen.
    pub(super) armed: Arc<AtomicBool>,
    oracle: Arc<Mutex<Oracle>>,
    workers: Vec<Worker>,
    hostile: Vec<(u64, Child)>,
}

pub(super) fn lock(oracle: &Mutex<Oracle>) -> MutexGuard<'_, Oracle> {
    oracle.lock().unwrap_or_else(PoisonError::into_inner)
}

fn path_of(role: Role) -> &'static str {
    match role {
        Role::Client => "client",
        Role::C => "c",
        Role::NcclSender | Role::NcclReceiver => "nccl",
        Role::Hostile => "hostile",
    }
}

fn signal(child: &Child, signal: Signal) {
    // The child is not reaped yet, so the id is its own.
    let _ = kill(Pid::from_raw(child.id().cast_signed()), signal);
}

impl<'a> Cast<'a> {
    pub(super) fn start(
        setting: &'a Setting,
        folder: &Path,
        socket: PathBuf,
        seed: u64,
        oracle: &Arc<Mutex<Oracle>>,
    ) -> Result<Self, LabError> {
        let mut cast = Self {
            setting,
            socket,
            folder: folder.to_owned(),
            seed,
            started: 0,
            armed: Arc::default(),
            oracle: Arc::clone(oracle),
            workers: Vec::new(),
            hostile: Vec::new(),
        };
        cast.add(Role::Client)?;
        cast.add(Role::Client)?;
        if setting.c_library.is_some() {
            cast.add(Role::C)?;
        }
        if setting.nccl_plugin.is_some() {
            cast.add_pair()?;
        }
        Ok(cast)
    }

    fn task(&mut self, role: Role) -> Task {
        self.started += 1;
        let library = match role {
            Role::C => &self.setting.c_library,
            _ => &self.setting.nccl_plugin,
        };
        Task {
            role,
            socket: self.socket.clone(),
            seed: self.seed.wrapping_add(self.started),
            leaks_lanes: self.setting.plant == Some(Plant::LeakLane),
            library: library.clone().unwrap_or_default(),
            handle: self.folder.join("handle"),
        }
    }

    fn add(&mut self, role: Role) -> Result<(), LabError> {
        let task = self.task(role);
        let mut child = command(&task)?.spawn().map_err(LabError::start("a worker"))?;
        let path = path_of(role);
        let number = lock(&self.oracle).add(path);
        let pipe = child.stdout.take().ok_or_else(LabError::no_pipe)?;
        let mut pipe = BufReader::with_capacity(1 << 17, pipe);
        let oracle = Arc::clone(&self.oracle);
        let has_bug = path == self.setting.plant_on && role != Role::NcclSender;
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

    fn add_pair(&mut self) -> Result<(), LabError> {
        // The handle of an earlier pair, which leads nowhere.
        let _ = std::fs::remove_file(self.folder.join("handle"));
        self.add(Role::NcclReceiver)?;
        self.add(Role::NcclSender)
    }

    fn chosen(&self, choice: u64) -> usize {
        (choice % self.workers.len().max(1) as u64) as usize
    }

    /// Kills a worker and starts another one. Its peer, if it has one, has to learn of its death.
    pub(super) fn kill(&mut self, choice: u64) -> Result<(), LabError> {
        let mut worker = self.workers.remove(self.chosen(choice));
        let _ = worker.child.kill();
        let _ = worker.child.wait();
        let _ = worker.reader.join();
        lock(&self.oracle).killed(worker.number);
        let peer = |other: &Worker| path_of(other.role) == "nccl";
        match worker.role {
            Role::NcclSender | Role::NcclReceiver => {
                if let Some(at) = self.workers.iter().position(peer) {
                    let mut peer = self.workers.remove(at);
                    let (number, receiver) = (peer.number, peer.number.min(worker.number));
                    // A worker that is not connected yet has no peer whose death it could see.
                    let connected = lock(&self.oracle).has_begun(receiver);
                    signal(&peer.child, Signal::SIGCONT);
                    if !connected {
                        let _ = peer.child.kill();
                    }
                    let how = end(peer, Instant::now() + PEER_MAX);
                    let mut oracle = lock(&self.oracle);
                    if let Some(how) = how.filter(|_| connected) {
                        oracle.blame(format!("nccl: after the death of its peer, a worker {how}"));
                    }
                    oracle.killed(number);
                }
                self.add_pair()
            }
            role => self.add(role),
        }
    }

    pub(super) fn stop(&self, choice: u64) -> usize {
        let worker = &self.workers[self.chosen(choice)];
        signal(&worker.child, Signal::SIGSTOP);
        worker.number
    }

    /// Continues the worker `number`, unless it was killed.
    pub(super) fn go_on(&self, number: usize) {
        let mut same = self.workers.iter().filter(|worker| worker.number == number);
        if let Some(worker) = same.next() {
            signal(&worker.child, Signal::SIGCONT);
        }
    }

    fn obedient(&mut self) -> Vec<&mut Worker> {
        let knows = |worker: &&mut Worker| matches!(worker.role, Role::Client | Role::C);
        self.workers.iter_mut().filter(knows).collect()
    }

    pub(super) fn tell(&mut self, choice: u64, command: u8) {
        let mut all = self.obedient();
        let at = (choice % all.len().max(1) as u64) as usize;
        if let Some(worker) = all.get_mut(at) {
            worker.tell(command);
        }
    }

    pub(super) fn tell_all(&mut self, command: u8) {
        self.obedient().into_iter().for_each(|worker| worker.tell(command));
    }

    pub(super) fn add_hostile(&mut self, choice: u64) -> Result<u64, LabError> {
        let task = Task { seed: choice, ..self.task(Role::Hostile) };
        let child = command(&task)?.spawn().map_err(LabError::start("a hostile client"))?;
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

    pub(super) fn finish(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.tell(FINISH));
        let give_up = Instant::now() + FINISH_MAX;
        for worker in std::mem::take(&mut self.workers) {
            let (number, path) = (worker.number, path_of(worker.role));
            let how = end(worker, give_up);
            let mut oracle = lock(&self.oracle);
            if let Some(how) = how {
                oracle.blame(format!("{path}: a worker {how}"));
            }
            oracle.ended(number);
        }
    }
}

fn end(mut worker: Worker, give_up: Instant) -> Option<String> {
    let how = loop {
        match worker.child.try_wait() {
            Ok(None) if Instant::now() < give_up => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                let _ = worker.child.kill();
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

impl Drop for Cast<'_> {
    fn drop(&mut self) {
        let workers = std::mem::take(&mut self.workers).into_iter().map(|worker| worker.child);
        let hostile = std::mem::take(&mut self.hostile).into_iter().map(|(_, child)| child);
        for mut child in workers.chain(hostile) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
