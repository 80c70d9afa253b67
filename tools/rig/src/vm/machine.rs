//! A virtual machine on the host's side: boots it, reads its messages and determines how it ended.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::channel::{self, CONTENT_BYTES_MAX, FrameKind};
use super::failure::{self, VmError};
use super::image;
use super::job::{ANSWER_FILE, Facts, Finished, VmAnswer, VmJob};
use super::keeper::Keeper;
use super::qemu::Farewell;
use super::start::{QEMU, power_on};
use crate::error::LabError;
use crate::probe::{CannotRun, Lack, lack};
use crate::sandbox::find_program;

pub use super::start::VmConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Empty,
    Stdin,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmReport {
    pub guest: Facts,
    /// Time from the start of QEMU until network and devices were up, in ms.
    pub boot_ms: u64,
    /// Time from the end of the boot until QEMU ended, in ms.
    pub job_ms: u64,
    #[serde(flatten)]
    pub finished: Finished,
}

pub fn lacks(config: &VmConfig) -> Vec<Lack> {
    let mut lacks: Vec<Lack> =
        [(QEMU, "qemu-system-x86"), ("ip", "iproute2"), ("tc", "iproute2"), ("rdma", "iproute2")]
            .into_iter()
            .filter(|(program, _)| find_program(program).is_none())
            .map(|(program, package)| {
                let setup = "run `tools/setup.sh verbs` (Debian, Ubuntu: apt install";
                lack(program, format!("{setup} {package})"))
            })
            .collect();
    lacks.extend(image::lacks(&config.cache));
    lacks
}

/// A message from the threads that wait for input.
enum VmEvent {
    Frame(FrameKind, Vec<u8>),
    ChannelClosed,
    QemuEnded(Option<ExitStatus>),
}

/// A guest that runs its job. Dropping this ends the guest.
#[derive(Debug)]
pub struct Vm {
    /// The keeper ends QEMU when it is dropped with this.
    _keeper: Keeper,
    folder: PathBuf,
    events: Receiver<VmEvent>,
    channel: UnixStream,
    started: Instant,
    boot_ms: u64,
    facts: Facts,
    config: VmConfig,
}

/// Boots a guest, runs a job and returns its result. `output` gets the output of the job.
pub fn run(
    config: &VmConfig,
    job: &VmJob,
    input: Input,
    output: &mut dyn FnMut(Stream, &[u8]) -> io::Result<()>,
) -> Result<VmReport, VmError> {
    Vm::boot(config, job)?.finish(input, output)
}

impl Vm {
    /// Boots a guest and returns when its network and devices are up and its job begins.
    ///
    /// The calling program must call [`crate::lab::internal_call`] first in `main`.
    pub fn boot(config: &VmConfig, job: &VmJob) -> Result<Self, VmError> {
        config.network.validate()?;
        let lacking = lacks(config);
        if !lacking.is_empty() {
            return Err(CannotRun(lacking).into());
        }
        let image = image::prepare(&config.cache, &|text| eprintln!("laxity: {text}"))
            .map_err(VmError::Start)?;
        let started = Instant::now();
        let (keeper, stdout, folder) = power_on(config, &image, job).map_err(VmError::Start)?;
        let (events_in, events) = sync_channel(64);
        let to_events = events_in.clone();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = to_events
                .send(VmEvent::QemuEnded(line.trim().parse().ok().map(ExitStatus::from_raw)));
        });
        let channel = connect(&folder, &events)?;
        let mut frames = channel
            .try_clone()
            .map_err(LabError::system("opening the channel"))
            .map_err(VmError::Start)?;
        std::thread::spawn(move || {
            while let Ok((kind, content)) = channel::receive(&mut frames) {
                if events_in.send(VmEvent::Frame(kind, content)).is_err() {
                    return;
                }
            }
            let _ = events_in.send(VmEvent::ChannelClosed);
        });
        let mut vm = Self {
            _keeper: keeper,
            folder,
            events,
            channel,
            started,
            boot_ms: 0,
            facts: Facts::default(),
            config: config.clone(),
        };
        vm.wait_until_ready()?;
        Ok(vm)
    }

    fn wait_until_ready(&mut self) -> Result<(), VmError> {
        let give_up = self.started + self.config.boot_limit;
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(VmEvent::Frame(FrameKind::Ready, content)) => {
                    self.boot_ms = self.started.elapsed().as_millis() as u64;
                    self.facts = serde_json::from_slice(&content)
                        .map_err(|error| {
                            LabError::unreadable("the guest speaks another version", error)
                        })
                        .map_err(VmError::Start)?;
                    return Ok(());
                }
                Ok(VmEvent::QemuEnded(ended)) => {
                    return Err(self
                        .verdict(ended)
                        .err()
                        .unwrap_or_else(|| VmError::Lost { console: self.console() }));
                }
                Ok(_) => {}
                Err(_) => {
                    return Err(VmError::Hung {
                        silent_s: self.config.boot_limit.as_secs(),
                        when: " after power-on",
                        console: self.console(),
                    });
                }
            }
        }
    }

    /// Forwards the job's input and output until the job ends.
    pub fn finish(
        self,
        input: Input,
        output: &mut dyn FnMut(Stream, &[u8]) -> io::Result<()>,
    ) -> Result<VmReport, VmError> {
        let began = Instant::now();
        self.pass_on(input)?;
        let give_up = self.config.limit.map(|limit| began + limit);
        let mut heard = Instant::now();
        let mut ended = None;
        let mut open = true;
        while open || ended.is_none() {
            let now = Instant::now();
            let silent = heard + self.config.silence_limit;
            if give_up.is_some_and(|give_up| now >= give_up) {
                return Err(VmError::TimedOut { limit: self.config.limit.unwrap_or_default() });
            }
            let until = give_up.map_or(silent, |give_up| give_up.min(silent));
            match self.events.recv_timeout(until.saturating_duration_since(now)) {
                Ok(VmEvent::Frame(kind, content)) => {
                    match kind {
                        FrameKind::Stdout => output(Stream::Stdout, &content),
                        FrameKind::Stderr => output(Stream::Stderr, &content),
                        _ => Ok(()),
                    }
                    .map_err(VmError::Output)?;
                    heard = Instant::now();
                }
                Ok(VmEvent::ChannelClosed) => open = false,
                Ok(VmEvent::QemuEnded(how)) => ended = Some(how),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= silent => {
                    return Err(VmError::Hung {
                        silent_s: self.config.silence_limit.as_secs(),
                        when: " while it ran its job",
                        console: self.console(),
                    });
                }
                Err(_) => {}
            }
        }
        let finished = self.verdict(ended.flatten())?;
        Ok(VmReport {
            guest: self.facts.clone(),
            boot_ms: self.boot_ms,
            job_ms: began.elapsed().as_millis() as u64,
            finished,
        })
    }

    fn pass_on(&self, input: Input) -> Result<(), VmError> {
        let mut channel = self
            .channel
            .try_clone()
            .map_err(LabError::system("opening the channel"))
            .map_err(VmError::Start)?;
        std::thread::spawn(move || {
            let mut buffer = vec![0; CONTENT_BYTES_MAX];
            if input != Input::Empty {
                let mut stdin = io::stdin().lock();
                while let Ok(length @ 1..) = stdin.read(&mut buffer) {
                    if channel::send(&mut channel, FrameKind::Stdin, &buffer[..length]).is_err() {
                        return;
                    }
                }
            }
            let _ = channel::send(&mut channel, FrameKind::Stdin, &[]);
        });
        Ok(())
    }

    fn verdict(&self, ended: Option<ExitStatus>) -> Result<Finished, VmError> {
        let console = self.console();
        let code = ended.and_then(|ended| ended.code());
        match code.and_then(Farewell::of_status) {
            Some(Farewell::Finished) => {}
            Some(Farewell::Lost) => return Err(VmError::Lost { console }),
            Some(Farewell::NoRoot) => {
                let said = "its first files do not fit this machine; the console says why";
                return Err(VmError::Failed(format!("{said}:\n{console}")));
            }
            None if console.contains(failure::PANIC) => return Err(VmError::Panicked { console }),
            None if code == Some(0) => return Err(VmError::WentDown { console }),
            None => return Err(qemu_failed(&self.folder, ended)),
        }
        let path = self.folder.join("control").join(ANSWER_FILE);
        let answer: VmAnswer = fs::read(&path)
            .map_err(LabError::file("reading", &path))
            .and_then(|bytes| Ok(serde_json::from_slice(&bytes)?))
            .map_err(|error| VmError::Failed(format!("the guest's answer: {error}")))?;
        answer.map_err(VmError::Failed)
    }

    pub fn console(&self) -> String {
        let bytes = fs::read(self.folder.join("console")).unwrap_or_default();
        failure::tail(&String::from_utf8_lossy(&bytes))
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // The shutdown wakes the thread that reads the channel.
        let _ = self.channel.shutdown(Shutdown::Both);
    }
}

fn connect(folder: &Path, events: &Receiver<VmEvent>) -> Result<UnixStream, VmError> {
    const LIMIT: Duration = Duration::from_secs(30);
    let give_up = Instant::now() + LIMIT;
    loop {
        match UnixStream::connect(folder.join(OsStr::new("channel"))) {
            Ok(channel) => return Ok(channel),
            Err(error) if Instant::now() > give_up => {
                let why = LabError::system("QEMU does not open its channel")(error);
                return Err(VmError::Start(why));
            }
            Err(_) => {}
        }
        if let Ok(VmEvent::QemuEnded(ended)) = events.recv_timeout(Duration::from_millis(5)) {
            return Err(qemu_failed(folder, ended));
        }
    }
}

fn qemu_failed(folder: &Path, ended: Option<ExitStatus>) -> VmError {
    let said = fs::read_to_string(folder.join("qemu.log")).unwrap_or_default();
    let status = ended.map_or("an unknown status".into(), |ended| ended.to_string());
    VmError::Qemu { status, said: said.trim().to_owned() }
}
