//! Requests: recorded ones from a file, or made-up ones with published statistics.
//!
//! Whatever the source, three steps give the workload of a point:
//!
//! 1. a *recording*: requests in order of time, each with its lengths and the prefix blocks that
//!    say what it shares with others. The readers make it from a file (`csv`, `jsonl`), the
//!    generators ([`shapes`], [`sessions`]) from a seed;
//! 2. lengths are multiplied by `length_scale` and clipped at `longest` (`lengths`);
//! 3. arrival times are put on it, in its order (`arrivals`): the paper takes requests from a trace
//!    and lets them arrive as a Poisson process of the wanted rate (MFS §6.2).
//!
//! A recording that is too short for the rate is played again from its start, each time with block
//! ids of its own. With the same ids every repetition would find its whole prompt in the cache, a
//! reuse of 100 % that nobody recorded; with its own, each round has the reuse of the recording and
//! starts cold, as the recording did.

mod arrivals;
mod csv;
mod draft;
mod error;
mod field;
mod input;
mod jsonl;
mod lengths;
pub mod sessions;
pub mod shapes;
mod summary;

use std::path::Path;

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

/// The requests that arrive in `workload.seconds` at `rate` per second in the whole cluster, of a
/// valid scenario. `workload.rate_per_gpu` is not looked at, and sources that are made up ignore
/// `workload.file`.
///
/// # Errors
/// See [`WorkloadError`].
pub fn load(workload: &Workload, rate: f64, seed: u64) -> Result<Requests, WorkloadError> {
    draft::within((rate * workload.seconds) as u64, MOST_REQUESTS, "requests")?;
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

/// A recording in the format of Azure's traces.
pub(crate) fn read_azure(path: &Path) -> Result<Requests, WorkloadError> {
    csv::read(path, &csv::AZURE)
}

/// The recording that the workload names, as it is in its file.
pub(crate) fn read(workload: &Workload) -> Result<Requests, WorkloadError> {
    // Of a scenario that is valid it names a file.
    let path = workload.file.as_deref().unwrap_or(Path::new(""));
    match workload.source {
        Source::Mooncake => jsonl::read(path, &jsonl::MOONCAKE),
        Source::Qwen => jsonl::read(path, &jsonl::QWEN),
        Source::Azure => read_azure(path),
        _ => csv::read(path, &csv::BURSTGPT),
    }
}

#[cfg(test)]
mod tests;
