//! Requests: recorded ones from a file, or made-up ones with published statistics.
//!
//! Whatever the source, three steps give the workload of a point:
//!
//! 1. a *recording*: requests in order of time, each with its lengths and the prefix blocks that
//!    say what it shares with others. The readers make it from a file ([`mooncake`], [`azure`],
//!    [`qwen`], [`burstgpt`]), the generators ([`shapes`], [`sessions`]) from a seed;
//! 2. lengths are multiplied by `length_scale` and clipped at `longest` (`lengths`);
//! 3. arrival times are put on it, in its order (`arrivals`): the paper takes requests from a trace
//!    and lets them arrive as a Poisson process of the wanted rate (MFS §6.2).
//!
//! A recording that is too short for the rate is played again from its start, each time with block
//! ids of its own. With the same ids every repetition would find its whole prompt in the cache, a
//! reuse of 100 % that nobody recorded; with its own, each round has the reuse of the recording and
//! starts cold, as the recording did.

mod arrivals;
pub mod azure;
pub mod burstgpt;
mod calendar;
mod draft;
mod error;
mod input;
mod jsonl;
mod lengths;
pub mod mooncake;
mod number;
pub mod qwen;
pub mod sessions;
pub mod shapes;
mod summary;
mod table;

use laxity_policy::Time;
use rand::SeedableRng as _;
use rand_chacha::ChaCha12Rng;

pub use error::WorkloadError;
pub use summary::Summary;

use crate::scenario::{Arrivals, Source, Workload};

/// One request. Its blocks lie in [`Requests::blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrives.
    pub arrival: Time,
    /// Tokens of its prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens that it generates, at least 1: the first token is what is waited for.
    pub output_tokens: u32,
    /// Index of its first block in [`Requests::blocks`].
    pub first_block: u32,
    /// How many blocks it has: `prompt_tokens / block_tokens`, rounded up, the last one possibly
    /// partial; none if the source says nothing of prefixes (Azure, BurstGPT).
    pub blocks: u32,
}

/// A workload, in order of arrival.
///
/// A block id stands for the whole prefix up to and including that block: two requests with the
/// same id have the same ids, and the same tokens, before it. Ids are dense, `0..distinct_blocks`,
/// numbered in the order in which they first appear.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// The requests.
    pub list: Vec<Request>,
    /// The blocks of all requests, one after the other.
    pub blocks: Vec<u32>,
    /// How many different blocks there are.
    pub distinct_blocks: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Requests {
    /// The blocks of a request's prompt, first to last.
    #[must_use]
    pub fn blocks_of(&self, request: &Request) -> &[u32] {
        &self.blocks[request.first_block as usize..][..request.blocks as usize]
    }
}

/// The most requests of a workload.
pub const MOST_REQUESTS: u64 = 20_000_000;

/// The most blocks of all its requests together; 4 bytes each.
pub const MOST_BLOCKS: u64 = 1 << 30;

/// `block_tokens` where nothing is known of blocks.
const UNKNOWN_BLOCK_TOKENS: u32 = 16;

/// Random numbers for one purpose, so that, say, other gaps between arrivals leave prompts as they
/// are.
fn random(seed: u64, purpose: Purpose) -> ChaCha12Rng {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    rng.set_stream(purpose as u64);
    rng
}

#[derive(Clone, Copy)]
enum Purpose {
    Arrivals = 1,
    Content = 2,
}

/// The requests that arrive in `workload.seconds` at `rate` per second in the whole cluster
/// (`workload.rate_per_gpu` is not looked at). Sources that are made up ignore `workload.file`.
///
/// # Errors
/// See [`WorkloadError`].
pub fn load(workload: &Workload, rate: f64, seed: u64) -> Result<Requests, WorkloadError> {
    check(workload, rate)?;
    let recorded = workload.arrivals == Arrivals::Recorded;
    let mut times = if recorded {
        Vec::new()
    } else {
        arrivals::drawn(workload, rate, &mut random(seed, Purpose::Arrivals))
    };
    let requests = match shapes::of(workload.source) {
        Some(shape) => {
            let count = if recorded {
                // Two at least: times can only be multiplied where there is a gap.
                ((rate * workload.seconds).round() as usize).max(2)
            } else {
                times.len()
            };
            let mut content = random(seed, Purpose::Content);
            sessions::generate(&shape, workload, rate, count, &mut content)?
        }
        None => lengths::scaled(read(workload)?, workload.length_scale, workload.longest)?,
    };
    if recorded {
        times = arrivals::recorded(&requests.list, rate, workload.seconds)?;
    }
    if times.is_empty() {
        return Err(WorkloadError::TooFew {
            seconds: workload.seconds,
            rate,
        });
    }
    arrivals::retimed(requests, &times)
}

/// The recording that the workload names, as it is in its file.
pub(crate) fn read(workload: &Workload) -> Result<Requests, WorkloadError> {
    let reader: fn(&std::path::Path) -> _ = match workload.source {
        Source::Mooncake => mooncake::read,
        Source::Qwen => qwen::read,
        Source::Azure => azure::read,
        _ => burstgpt::read,
    };
    match &workload.file {
        Some(path) => reader(path),
        None => Err(WorkloadError::NoFile {
            source_name: workload.source.name(),
        }),
    }
}

fn check(workload: &Workload, rate: f64) -> Result<(), WorkloadError> {
    let rules = [
        ("rate", rate, 1e-9..=1e9, "a positive number of requests/s"),
        (
            "seconds",
            workload.seconds,
            1e-6..=1e7,
            "a number from 0.000001 to 10000000",
        ),
        (
            "length_scale",
            workload.length_scale,
            1e-6..=1e6,
            "a number from 0.000001 to 1000000",
        ),
        (
            "burstiness",
            workload.burstiness,
            0.0..=100.0,
            "a number from 0 (evenly spaced) to 100",
        ),
        (
            "longest",
            f64::from(workload.longest),
            1.0..=f64::MAX,
            "at least 1 token",
        ),
    ];
    for (field, found, allowed, expected) in rules {
        if !allowed.contains(&found) {
            return Err(WorkloadError::Setting {
                field,
                found: found.to_string(),
                expected,
            });
        }
    }
    if rate * workload.seconds > MOST_REQUESTS as f64 {
        return Err(WorkloadError::TooMany {
            most: MOST_REQUESTS,
            what: "requests",
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
