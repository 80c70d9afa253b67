//! Processes of `laxity-engine` in fault campaigns: their configurations, and what one of them
//! alone answers.
//!
//! ```text
//! worker ──HTTP──▶ decode ──prompts──▶ prefill0 ◀──KV of beginnings, experts' rows──▶ prefill1
//!                    ▲───────KV───────────┘
//! ```
//!
//! They wait for the time that computing would take, so they need little processor time. KV in a
//! wrong place changes an answer all the same, and a byte that is damaged fails its batch.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::child::{Guarded, lock, poll};
use crate::client::{Question, ask, get};
use crate::error::LabError;
use crate::sandbox;

const START_MAX: Duration = Duration::from_secs(10);
const ALONE_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);
const HTTP_PORT: u16 = 8000;
const PEERS_PORT: u16 = 7500;
const PROMPTS: u32 = 16;
/// Tokens with which the prompts of a family begin, in blocks of 8.
const SHARED: u32 = 48;

/// The model, its cache and its scheduler. The cache holds a few prompts, so beginnings are
/// evicted, and fetched again. An engine waits for others for longer than an answer may take, so
/// that it can't hide a lost message.
const COMMON: &str = "\
device = \"cpu\"
kv = { blocks = 96, block_tokens = 8 }
schedule = { tokens = 37 }
timing = { layer_us = 200.0, token_us = 2.0, expert_us = 100.0, row_us = 1.0 }
[model]
name = \"tiny\"
layers = 3
hidden = 48
heads = 4
kv_heads = 2
head_dim = 32
ffn = 80
vocab = 260
context = 1024
moe = { experts = 4, per_token = 2 }
weights = { seed = 7 }
";

/// What one engine alone answers to each of the [`prompts`], once it was asked.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineAnswers(Arc<Mutex<Option<Vec<Vec<u32>>>>>);

impl EngineAnswers {
    pub(super) fn of(&self, program: &Path) -> Result<Vec<Vec<u32>>, LabError> {
        let mut known = lock(&self.0);
        if let Some(answers) = &*known {
            return Ok(answers.clone());
        }
        let folder = tempfile::tempdir().map_err(LabError::system("making a folder"))?;
        let runtime = runtime()?;
        let whole = EngineSpec::new("whole", 0, COMMON);
        let mut alone = EngineProcess::start(program, &folder.path().join("engine"), whole)?;
        alone.await_ready(&runtime)?;
        let prompts = prompts().into_iter().enumerate();
        let answers = prompts.map(|(number, prompt)| {
            let answer = ask(alone.spec.endpoint, question(number, prompt), 0, |_, _| {});
            let answer = async { tokio::time::timeout(ALONE_MAX, answer).await };
            let wrong = match runtime.block_on(answer) {
                Ok(answer) if answer.error.is_none() => return Ok(answer.tokens),
                Ok(answer) => answer.error.unwrap_or_default(),
                Err(_) => format!("has no answer after {ALONE_MAX:?}"),
            };
            Err(LabError::program("laxity-engine", wrong))
        });
        let answers = answers.collect::<Result<Vec<_>, _>>()?;
        *known = Some(answers.clone());
        Ok(answers)
    }
}

pub(super) fn runtime() -> Result<Runtime, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(LabError::system("starting a runtime"))
}

/// Returns the prompts of all campaigns. Three of four begin as others of their family do.
pub(super) fn prompts() -> Vec<Vec<u32>> {
    let tokens = |number: u32, length: u32| {
        (0..length).map(move |at| (at * 37 + at / 7 + number * 101 + 11) % 256)
    };
    let prompt = |number: u32| {
        let family = if number % 4 == 3 { 100 + number } else { number % 4 };
        tokens(family, SHARED).chain(tokens(number + 10, 3 + 5 * number)).collect()
    };
    (0..PROMPTS).map(prompt).collect()
}

pub(super) fn question(number: usize, prompt: Vec<u32>) -> Question {
    Question {
        id: number as u64,
        at_ns: 0,
        prompt,
        output_tokens: 3 + number as u32 % 5,
        ttft_ms: 100.0 + 200.0 * (number % 4) as f64,
        prefill: None,
        local: false,
    }
}

/// Returns this process's own address on the loopback interface, so that its engines have ports
/// that nobody else takes, also after one of them was killed.
fn host() -> Ipv4Addr {
    // Process ids of Linux have at most 22 bits.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | high, middle, low)
}

fn peer(place: u16) -> SocketAddr {
    SocketAddr::from((host(), PEERS_PORT + place))
}

#[derive(Clone, Debug)]
pub(super) struct EngineSpec {
    pub(super) name: &'static str,
    pub(super) endpoint: SocketAddr,
    text: String,
}

impl EngineSpec {
    fn new(name: &'static str, place: u16, text: &str) -> Self {
        let endpoint = SocketAddr::from((host(), HTTP_PORT + place));
        Self { name, endpoint, text: format!("listen = \"{endpoint}\"\n{text}") }
    }

    /// Returns the engines of a worker. The first one answers. With `reads`, KV of beginnings is
    /// read by the engine that needs it, not sent by the one that has it.
    pub(super) fn cluster(socket: &Path, reads: bool) -> [Self; 3] {
        // The stall timeout is that of the other paths. The NIC is that of engines in setting.rs.
        let laxity = format!("laxity = {{ socket = {socket:?}, nic = 2, stall_ms = 100 }}\n");
        let (front, first, second) = (peer(0), peer(1), peer(2));
        let decode = format!(
            "role = \"decode\"\npeers = {{ listen = \"{front}\", prefill = [\"{first}\", \
             \"{second}\"], patience_ms = 60000 }}\n"
        );
        let prefill = |own: SocketAddr, other: SocketAddr| {
            format!(
                "role = \"prefill\"\npeers = {{ listen = \"{own}\", reuse = [\"{other}\"], \
                 experts = [\"{first}\", \"{second}\"], reads = {reads}, patience_ms = 60000, \
                 ask_ms = 60000 }}\n"
            )
        };
        let all = [
            ("decode", decode),
            ("prefill0", prefill(first, second)),
            ("prefill1", prefill(second, first)),
        ];
        let mut place = 0;
        all.map(|(name, role)| {
            let spec = Self::new(name, place, &format!("{role}{laxity}{COMMON}"));
            place += 1;
            spec
        })
    }
}

/// A running engine. It ends with the thread that started it, or when it is dropped.
pub(super) struct EngineProcess {
    pub(super) spec: EngineSpec,
    program: PathBuf,
    file: PathBuf,
    pub(super) process: Guarded,
}

impl EngineProcess {
    /// Starts an engine whose files have names that begin with `base`.
    pub(super) fn start(program: &Path, base: &Path, spec: EngineSpec) -> Result<Self, LabError> {
        let file = base.with_extension(format!("{}.toml", spec.name));
        let log = base.with_extension(format!("{}.log", spec.name));
        fs::write(&file, &spec.text).map_err(LabError::file("writing", &file))?;
        let process = Self::spawn(program, &file, &log)?;
        Ok(Self { spec, program: program.to_owned(), file, process })
    }

    fn spawn(program: &Path, file: &Path, log: &Path) -> Result<Guarded, LabError> {
        let mut command = sandbox::internal("faults-daemon");
        Guarded::start("laxity-engine", command.arg(program).arg("--config").arg(file), log)
    }

    pub(super) fn await_ready(&mut self, runtime: &Runtime) -> Result<(), LabError> {
        let is_up = poll(START_MAX, LOOK_EVERY, || {
            let answered = runtime.block_on(get(self.spec.endpoint, "/health")).is_ok();
            (answered || self.process.ended().is_some()).then_some(answered)
        });
        if is_up != Some(true) {
            let how = format!("does not start{}", self.process.tail());
            return Err(LabError::program(self.spec.name, how));
        }
        Ok(())
    }

    /// Kills the engine, and starts it again at the same addresses.
    pub(super) fn replace(&mut self) -> Result<(), LabError> {
        self.process.kill();
        self.process = Self::spawn(&self.program, &self.file, &self.process.log)?;
        Ok(())
    }

    /// Returns what is wrong if the engine ended by itself or one of its threads panicked.
    pub(super) fn look(&mut self) -> Option<String> {
        let name = self.spec.name;
        if let Some(status) = self.process.ended() {
            return Some(format!("{name} ended by itself: {status}{}", self.process.tail()));
        }
        let text = fs::read(&self.process.log).ok()?;
        let text = String::from_utf8_lossy(&text);
        text.lines().find(|line| line.contains("panicked")).map(|line| format!("{name}: {line}"))
    }

    /// Waits until an engine that was told to end has done so. Returns what is wrong.
    pub(super) fn await_end(&mut self, give_up: Instant) -> Option<String> {
        let how = match self.process.await_end(give_up) {
            Some(status) if status.success() => return None,
            Some(status) => format!("ended with {status}"),
            None => "still runs after SIGTERM".to_owned(),
        };
        Some(format!("{} {how}{}", self.spec.name, self.process.tail()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_prompts_begin_as_others_do_and_none_is_another() {
        let prompts = prompts();
        let shared = |one: &[u32], other: &[u32]| {
            one.iter().zip(other).take_while(|(one, other)| one == other).count()
        };
        let mut relatives = 0;
        for (at, one) in prompts.iter().enumerate() {
            for other in &prompts[at + 1..] {
                let shared = shared(one, other);
                assert!(shared < one.len().min(other.len()));
                relatives += usize::from(shared == SHARED as usize);
            }
        }
        assert!(relatives >= 12, "{relatives}");
    }
}
