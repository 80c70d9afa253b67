//! Requests: recorded in a file, or generated with published statistics.
//!
//! Three steps create the workload of a point:
//!
//! 1. A *recording* has requests in order of time, each with its lengths and prefix blocks. Readers
//!    (`csv`, `jsonl`) take it from a file, and generators ([`shapes`], [`sessions`]) from a seed.
//! 2. Lengths are multiplied by `length_scale` and clipped at `longest` (`lengths`).
//! 3. Requests get arrival times in their order (`arrivals`). The paper takes requests from a trace
//!    and lets them arrive as a Poisson process (MFS §6.2).
//!
//! A recording that is too short for the rate is repeated with new block ids. With the same ids a
//! repetition would find each whole prompt in the cache. With new ids it has the reuse of the
//! recording and starts with a cold cache.

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

/// One request. Its blocks are in [`Requests::blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub arrival: Time,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens that are generated, at least 1.
    pub output_tokens: u32,
    pub first_block: u32,
    /// Number of blocks: `prompt_tokens / block_tokens`, rounded up, so the last one may be
    /// partial. 0 if the source has no prefixes (Azure, BurstGPT).
    pub blocks: u32,
}

/// A workload, in order of arrival.
///
/// A block id stands for the whole prefix up to and including that block. Two requests with the
/// same id therefore have the same ids before it. Ids are dense, `0..distinct_blocks`, and numbered
/// by first use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    pub list: Vec<Request>,
    pub blocks: Vec<u32>,
    pub distinct_blocks: u32,
    pub block_tokens: u32,
}

impl Requests {
    pub fn blocks_of(&self, request: &Request) -> &[u32] {
        &self.blocks[request.first_block as usize..][..request.blocks as usize]
    }
}

pub const MOST_REQUESTS: u64 = 20_000_000;

/// Largest number of blocks of all requests together. Each takes 4 bytes.
pub const MOST_BLOCKS: u64 = 1 << 30;

/// Value of `block_tokens` for sources without blocks.
const UNKNOWN_BLOCK_TOKENS: u32 = 16;

/// Returns random numbers for one purpose. Changing the gaps, for example, does not change the
/// prompts.
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

/// Returns the requests of a valid scenario that arrive in `workload.seconds` at `rate` per second
/// in the whole cluster. `workload.rate_per_gpu` is ignored, and so is `workload.file` for
/// generated sources.
/// Fails if the trace cannot be read, or the workload is empty or too large.
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
                // Scaling of times needs at least one gap and thus two requests.
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
        return Err(WorkloadError::TooFew { seconds: workload.seconds, rate });
    }
    arrivals::retimed(requests, &times)
}

pub(crate) fn read_azure(path: &Path) -> Result<Requests, WorkloadError> {
    csv::read(path, &csv::AZURE)
}

pub(crate) fn read(workload: &Workload) -> Result<Requests, WorkloadError> {
    // A valid scenario with this source names a file.
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
