//! The schedulers of the engine and their record. `laxity-requests` decides which tokens of which
//! sequences are computed next, and where.
//!
//! [`Schedulers`] is the layer between the engine and the schedulers. It can write all their inputs
//! and outputs to a file, as one JSON object a line. The settings come first, and then events,
//! reservations and decisions in order, with their times.
//! [`replay`] gives new schedulers the same events in virtual time and compares their decisions.

pub mod places;
mod scheduler;
pub mod settings;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use laxity_files::ReadError;
use laxity_requests::iteration::{Event, Load, Plan, Refusal};
use laxity_requests::job::Job;
use laxity_requests::request::RequestId;
use laxity_requests::{Span, Time, dispatch};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::{ConfigError, value};
use places::{Dispatcher, Places};
use scheduler::Scheduler;
pub use settings::{Policy, Settings};

/// Pause before a scheduler without a plan is asked again while requests wait, because its decision
/// may depend on the time.
const ASK_AGAIN: Span = Span::from_millis(20);

/// The size of the pool of blocks that a scheduler accounts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Number of blocks.
    pub blocks: u32,
    /// Tokens of one block.
    pub block_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RecordLine {
    Begin {
        settings: Box<Settings>,
        room: Room,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        places: Option<Places>,
    },
    Event {
        at: u64,
        event: Event,
    },
    Reserve {
        at: u64,
        request: RequestId,
        tokens: u32,
        granted: bool,
    },
    Plan {
        at: u64,
        plan: Option<Plan>,
    },
    Refusal {
        refusal: Refusal,
    },
    Dispatch {
        at: u64,
        event: dispatch::Event,
    },
    Place {
        at: u64,
        decision: Option<dispatch::Decision>,
    },
}

/// The schedulers, and the record of their decisions.
#[derive(Debug)]
pub struct Schedulers {
    scheduler: Scheduler,
    dispatcher: Option<Dispatcher>,
    room: Room,
    record: Option<(PathBuf, BufWriter<File>)>,
    /// Whether an event came since the scheduler was last asked.
    asked_for: bool,
    /// Time to ask the scheduler again without an event.
    ask_again: Option<Time>,
}

impl Schedulers {
    /// Makes a scheduler, and a dispatcher if there are prefill processes. Writes a record if a
    /// file is named.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn new(
        settings: &Settings,
        room: Room,
        places: Option<Places>,
        record: Option<&Path>,
    ) -> io::Result<Self> {
        let record = match record {
            Some(path) => Some((path.to_owned(), BufWriter::new(File::create(path)?))),
            None => None,
        };
        let mut schedulers = Self {
            scheduler: Scheduler::new(settings, room),
            dispatcher: places.as_ref().map(Dispatcher::new),
            room,
            record,
            asked_for: true,
            ask_again: None,
        };
        schedulers.note(&RecordLine::Begin { settings: Box::new(settings.clone()), room, places });
        Ok(schedulers)
    }

    fn note(&mut self, line: &RecordLine) {
        let Some((path, file)) = self.record.as_mut() else {
            return;
        };
        let written = serde_json::to_writer(&mut *file, line)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(b"\n"));
        if let Err(error) = written {
            // A full disk must not stop serving.
            tracing::warn!("the record {} ends here: {error}", path.display());
            self.record = None;
        }
    }

    /// Passes an event to the scheduler.
    pub fn handle(&mut self, now: Time, event: &Event) {
        if self.record.is_some() {
            self.note(&RecordLine::Event { at: now.0, event: event.clone() });
        }
        self.scheduler.handle(now, event);
        self.asked_for = true;
    }

    /// Returns the plan of the next iteration, if there is one.
    pub fn plan(&mut self, now: Time) -> Option<Plan> {
        let again = self.ask_again.is_some_and(|at| now >= at);
        if !std::mem::take(&mut self.asked_for) && !again {
            return None;
        }
        let plan = self.scheduler.plan(now);
        let idle = plan.is_none() && self.waits();
        self.ask_again = idle.then(|| now + ASK_AGAIN);
        if self.record.is_some() {
            self.note(&RecordLine::Plan { at: now.0, plan: plan.clone() });
        }
        plan
    }

    /// Reports whether requests wait for an iteration.
    fn waits(&self) -> bool {
        let load = self.scheduler.load();
        load.waiting > 0 || load.running > 0
    }

    /// Reserves blocks for a request that arrives with KV. Returns false if there are too few.
    pub fn reserve(&mut self, now: Time, request: RequestId, tokens: u32) -> bool {
        let granted = self.scheduler.reserve(request, tokens).is_ok();
        self.note(&RecordLine::Reserve { at: now.0, request, tokens, granted });
        granted
    }

    /// Returns the requests that the scheduler refused since the last call.
    pub fn refusals(&mut self) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        while let Some(refusal) = self.scheduler.poll_refusal() {
            self.note(&RecordLine::Refusal { refusal });
            refusals.push(refusal);
        }
        refusals
    }

    /// Returns the load of the scheduler.
    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// Returns the state of a request.
    pub fn job(&self, request: RequestId) -> Option<&Job> {
        self.scheduler.job(request)
    }

    /// Reports whether a request is relegated, which means that it is served last.
    pub fn is_relegated(&self, request: RequestId) -> bool {
        self.job(request).is_some_and(|job| job.relegated)
    }

    /// Returns the number of iterations from which the latency model learned.
    pub fn learned(&self) -> u64 {
        self.scheduler.learned()
    }

    /// Passes an event to the dispatcher.
    pub fn dispatch(&mut self, now: Time, event: &dispatch::Event) {
        let Some(dispatcher) = self.dispatcher.as_mut() else {
            return;
        };
        dispatcher.handle(now, event);
        if self.record.is_some() {
            self.note(&RecordLine::Dispatch { at: now.0, event: event.clone() });
        }
    }

    /// Returns the next decision of the dispatcher. Must be called while a prompt waits for one.
    pub fn place(&mut self, now: Time) -> Option<dispatch::Decision> {
        let decision = self.dispatcher.as_mut()?.poll(now);
        self.note(&RecordLine::Place { at: now.0, decision });
        decision
    }

    /// Returns the size of the scheduler's pool.
    pub const fn room(&self) -> Room {
        self.room
    }

    /// Writes buffered lines to the record.
    pub fn flush(&mut self) {
        if let Some((path, file)) = self.record.as_mut()
            && let Err(error) = file.flush()
        {
            tracing::warn!("the record {} is not whole: {error}", path.display());
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    pub events: usize,
    /// Number of plans, all equal to the recorded ones.
    pub plans: usize,
    /// Number of tokens in all plans.
    pub tokens: u64,
    /// Number of dispatch decisions, all equal to the recorded ones.
    pub places: usize,
}

/// Most bytes of a line of a record. The first line has the settings.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The reason why a record cannot be replayed, or the decision that differs.
#[derive(Debug, Error)]
pub enum ReplayError {
    #[error("{0}")]
    File(#[from] ReadError),
    #[error("line {line}: {cause}")]
    Unreadable { line: usize, cause: io::Error },
    #[error("line {line}: {cause}")]
    RecordLine { line: usize, cause: serde_json::Error },
    #[error("line {0}: a record begins with its settings, once")]
    Begin(usize),
    #[error("line {line}: {cause}")]
    Settings { line: usize, cause: ConfigError },
    #[error("line {line}: recorded was {recorded}, now it is {now}")]
    Differs { line: usize, recorded: String, now: String },
}

/// Checks the settings of a record, which may be edited or damaged.
fn check(settings: &Settings, room: Room, places: Option<&Places>) -> Result<(), ConfigError> {
    settings.check()?;
    let sizes = [
        ("room.blocks", room.blocks),
        ("room.block_tokens", room.block_tokens),
        ("places.block_tokens", places.map_or(1, |places| places.block_tokens)),
    ];
    match sizes.into_iter().find(|(_, size)| *size == 0) {
        Some((field, _)) => Err(value(field, 0, "at least 1")),
        None => Ok(()),
    }
}

/// Replays the events of a record with a new scheduler, and compares its decisions.
///
/// # Errors
/// Fails if the file is no record, or a decision differs.
pub fn replay(path: &Path) -> Result<Replayed, ReplayError> {
    let mut schedulers: Option<(Scheduler, Option<Dispatcher>)> = None;
    let mut replayed = Replayed::default();
    let record = BufReader::new(laxity_files::open(path)?);
    for (index, text) in laxity_files::lines(record, LINE_BYTES_MAX).enumerate() {
        let number = index + 1;
        let text = text.map_err(|cause| ReplayError::Unreadable { line: number, cause })?;
        let line: RecordLine = serde_json::from_str(&text)
            .map_err(|cause| ReplayError::RecordLine { line: number, cause })?;
        let (replica, dispatcher) = match (&line, schedulers.as_mut()) {
            (RecordLine::Begin { settings, room, places }, None) => {
                check(settings, *room, places.as_ref()).map_err(|cause| {
                    let line = number;
                    ReplayError::Settings { line, cause }
                })?;
                let scheduler = Scheduler::new(settings, *room);
                schedulers = Some((scheduler, places.as_ref().map(Dispatcher::new)));
                continue;
            }
            (RecordLine::Begin { .. }, Some(_)) | (_, None) => {
                return Err(ReplayError::Begin(number));
            }
            (_, Some((replica, dispatcher))) => (replica, dispatcher),
        };
        let differs =
            |recorded: String, now: String| ReplayError::Differs { line: number, recorded, now };
        match line {
            RecordLine::Begin { .. } => return Err(ReplayError::Begin(number)),
            RecordLine::Event { at, event } => {
                replica.handle(Time(at), &event);
                replayed.events += 1;
            }
            RecordLine::Reserve { request, tokens, granted, .. } => {
                let now = replica.reserve(request, tokens).is_ok();
                if now != granted {
                    return Err(differs(granted.to_string(), now.to_string()));
                }
            }
            RecordLine::Plan { at, plan } => {
                let now = replica.plan(Time(at));
                if now != plan {
                    return Err(differs(format!("{plan:?}"), format!("{now:?}")));
                }
                if let Some(plan) = plan {
                    replayed.plans += 1;
                    let composition = plan.composition();
                    replayed.tokens +=
                        u64::from(composition.prefill_tokens) + u64::from(composition.decodes);
                }
            }
            RecordLine::Dispatch { at, event } => {
                if let Some(dispatcher) = dispatcher {
                    dispatcher.handle(Time(at), &event);
                }
                replayed.events += 1;
            }
            RecordLine::Place { at, decision } => {
                let now = dispatcher.as_mut().and_then(|who| who.poll(Time(at)));
                if now != decision {
                    return Err(differs(format!("{decision:?}"), format!("{now:?}")));
                }
                replayed.places += usize::from(decision.is_some());
            }
            RecordLine::Refusal { refusal } => {
                let now = replica.poll_refusal();
                if now != Some(refusal) {
                    return Err(differs(format!("{refusal:?}"), format!("{now:?}")));
                }
            }
        }
    }
    Ok(replayed)
}
