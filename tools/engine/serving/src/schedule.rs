//! Which pieces of which sequences are computed next: decided by `laxity-requests`, recorded here.
//!
//! [`Desk`] stands between the engine and the scheduler. All that the scheduler hears and says passes through it, and goes to a file if one is asked for: one JSON
//! object a line, first the settings, then events, reservations and plans in order, with the time of each. [`replay`] gives a scheduler
//! made anew the same events, in virtual time, and compares what it says.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use laxity_requests::Time;
use laxity_requests::baseline::{Fixed, Order};
use laxity_requests::iteration::{Event, Iteration as _, Load, Plan, Refusal};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::RequestId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Who is first in line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Whoever came first.
    #[default]
    Fcfs,
    /// The earliest deadline.
    Edf,
    /// The shortest remaining prompt.
    Srpf,
}

/// How iterations are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Who is first in line.
    pub policy: Policy,
    /// Tokens an iteration computes at most, those of running answers included: the chunk.
    pub tokens: u32,
    /// Blocks that a prompt which starts leaves free while others run.
    pub watermark: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Fcfs,
            tokens: 256,
            watermark: 0,
        }
    }
}

/// The pool that a scheduler keeps the book of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Blocks.
    pub blocks: u32,
    /// Tokens a block.
    pub block_tokens: u32,
}

fn scheduler(settings: Settings, room: Room) -> Replica {
    let order = match settings.policy {
        Policy::Fcfs => Order::Fcfs,
        Policy::Edf => Order::Edf,
        Policy::Srpf => Order::Srpf,
    };
    let fixed = Fixed {
        order,
        tokens: settings.tokens,
    };
    let pool = Pool::new(room.blocks, room.block_tokens);
    Replica::new(pool, settings.watermark, Box::new(fixed))
}

/// A line of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Begin {
        settings: Settings,
        room: Room,
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
}

/// The scheduler, and the record of what it said.
#[derive(Debug)]
pub struct Desk {
    replica: Replica,
    room: Room,
    record: Option<(PathBuf, BufWriter<File>)>,
    /// Something happened since it was last asked.
    asked_for: bool,
}

impl Desk {
    /// A scheduler; what passes is recorded in a file, if one is named.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(settings: Settings, room: Room, record: Option<&Path>) -> io::Result<Self> {
        let record = match record {
            Some(path) => Some((path.to_owned(), BufWriter::new(File::create(path)?))),
            None => None,
        };
        let mut desk = Self {
            replica: scheduler(settings, room),
            room,
            record,
            asked_for: true,
        };
        desk.note(&Line::Begin { settings, room });
        Ok(desk)
    }

    fn note(&mut self, line: &Line) {
        let Some((path, file)) = self.record.as_mut() else {
            return;
        };
        let written = serde_json::to_writer(&mut *file, line)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(b"\n"));
        if let Err(error) = written {
            // A full disk is no reason to stop serving.
            tracing::warn!("the record {} ends here: {error}", path.display());
            self.record = None;
        }
    }

    /// Something happened.
    pub fn handle(&mut self, now: Time, event: &Event) {
        if self.record.is_some() {
            self.note(&Line::Event {
                at: now.0,
                event: event.clone(),
            });
        }
        self.replica.handle(now, event);
        self.asked_for = true;
    }

    /// What to compute now.
    pub fn plan(&mut self, now: Time) -> Option<Plan> {
        if !std::mem::take(&mut self.asked_for) {
            return None;
        }
        let plan = self.replica.plan(now);
        if self.record.is_some() {
            self.note(&Line::Plan {
                at: now.0,
                plan: plan.clone(),
            });
        }
        plan
    }

    /// Keeps blocks for a request that is about to arrive with KV; false if there are too few.
    pub fn reserve(&mut self, now: Time, request: RequestId, tokens: u32) -> bool {
        let granted = self.replica.reserve(request, tokens).is_ok();
        self.note(&Line::Reserve {
            at: now.0,
            request,
            tokens,
            granted,
        });
        granted
    }

    /// Whom it turned away since the last call.
    pub fn refusals(&mut self) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        while let Some(refusal) = self.replica.poll_refusal() {
            self.note(&Line::Refusal { refusal });
            refusals.push(refusal);
        }
        refusals
    }

    /// What stands here.
    #[must_use]
    pub fn load(&self) -> Load {
        self.replica.load()
    }

    /// The pool that it keeps the book of.
    #[must_use]
    pub const fn room(&self) -> Room {
        self.room
    }

    /// Writes what the record still holds back.
    pub fn flush(&mut self) {
        if let Some((path, file)) = self.record.as_mut()
            && let Err(error) = file.flush()
        {
            tracing::warn!("the record {} is not whole: {error}", path.display());
        }
    }
}

/// What a replay came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Events given.
    pub events: usize,
    /// Plans compared, all equal.
    pub plans: usize,
    /// Tokens in those plans.
    pub tokens: u64,
}

/// A record that cannot be replayed, or another decision than the recorded one.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{0}")]
    File(#[from] io::Error),
    /// A line is not one of a record.
    #[error("line {line}: {cause}")]
    Line {
        /// Which.
        line: usize,
        /// Why.
        cause: serde_json::Error,
    },
    /// The first line does not give the settings.
    #[error("line {0}: a record begins with its settings, once")]
    Begin(usize),
    /// The scheduler now says something else.
    #[error("line {line}: recorded was {recorded}, now it is {now}")]
    Differs {
        /// Which.
        line: usize,
        /// As recorded.
        recorded: String,
        /// As said now.
        now: String,
    },
}

/// Gives a new scheduler what a recorded one heard, and compares what it says.
///
/// # Errors
/// The record is none, or a decision differs.
pub fn replay(path: &Path) -> Result<Replayed, ReplayError> {
    let mut replica: Option<Replica> = None;
    let mut replayed = Replayed::default();
    for (index, text) in BufReader::new(File::open(path)?).lines().enumerate() {
        let number = index + 1;
        let line: Line = serde_json::from_str(&text?).map_err(|cause| ReplayError::Line {
            line: number,
            cause,
        })?;
        let replica = match (&line, replica.as_mut()) {
            (Line::Begin { settings, room }, None) => {
                replica = Some(scheduler(*settings, *room));
                continue;
            }
            (Line::Begin { .. }, Some(_)) | (_, None) => return Err(ReplayError::Begin(number)),
            (_, Some(replica)) => replica,
        };
        let differs = |recorded: String, now: String| ReplayError::Differs {
            line: number,
            recorded,
            now,
        };
        match line {
            Line::Begin { .. } => return Err(ReplayError::Begin(number)),
            Line::Event { at, event } => {
                replica.handle(Time(at), &event);
                replayed.events += 1;
            }
            Line::Reserve {
                request,
                tokens,
                granted,
                ..
            } => {
                let now = replica.reserve(request, tokens).is_ok();
                if now != granted {
                    return Err(differs(granted.to_string(), now.to_string()));
                }
            }
            Line::Plan { at, plan } => {
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
            Line::Refusal { refusal } => {
                let now = replica.poll_refusal();
                if now != Some(refusal) {
                    return Err(differs(format!("{refusal:?}"), format!("{now:?}")));
                }
            }
        }
    }
    Ok(replayed)
}
