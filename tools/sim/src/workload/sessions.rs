//! Generated recordings: sessions begin at random, have turns with think times in between, and
//! share prefixes of a catalogue.
//!
//! A session's first prompt is a prefix of the catalogue and a text. Each later prompt is the
//! previous prompt, its answer and another text. Only the full blocks of the previous prompt can be
//! reused. The answer was never a prompt, and with separate decode units its cache is elsewhere.
//! Published traces count reuse in the same way.
//!
//! Sessions begin as a Poisson process that is stationary at time 0. For each number `k` of
//! completed turns, the number of sessions that wait for turn `k + 1` is Poisson with mean (starts
//! per second) · (share that has turn `k + 1`) · (mean gap). Each waits for the rest of a gap. The
//! number of turns therefore does not ramp up. Their first prompt here finds an empty cache, as at
//! the start of any recording.
//!
//! *Think times* shrink with the simulated time. A recording of hours that is replayed in a minute,
//! as in MFS §6.2, has shortened think times, or hardly any session would have two turns. They are
//! multiplied by `seconds / recorded_s` (at most 1). The time of the preceding answer is added:
//! [`ANSWER_S`], which is shortened only if `seconds` is less than 20 times as long.

use std::collections::BTreeMap;
use std::ops::Range;

use laxity_policy::Time;
use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, Exp1, Poisson, StandardNormal};

use super::draft::within;
use super::shapes::{LogNormal, MOST_TURNS, Shape, THINK_SIGMA, Text};
use super::{MOST_BLOCKS, Request, Requests, WorkloadError};
use crate::scenario::Workload;

/// Time of the previous turn's answer, which is added to each think time, in seconds.
pub const ANSWER_S: f64 = 1.0;

/// Returns the first `count` requests of a process of `rate` requests per second, with think times
/// for `workload.seconds`. Lengths are multiplied by `workload.length_scale` and clipped at
/// `workload.longest`. A session ends with a clipped prompt. A lower `count` gives a prefix of the
/// same requests.
///
/// Fails if there are more than [`MOST_BLOCKS`] blocks.
pub fn generate(
    shape: &Shape,
    workload: &Workload,
    rate: f64,
    count: usize,
    rng: &mut impl Rng,
) -> Result<Requests, WorkloadError> {
    let mut generator = Generator::new(shape, workload, rate, rng);
    generator.begin(rng);
    while generator.made.list.len() < count {
        generator.turn(rng)?;
    }
    generator.made.distinct_blocks = generator.next_id;
    Ok(generator.made)
}

struct Session {
    turns: u32,
    prefix: usize,
    prompt: u32,
    output: u32,
    /// Full blocks of the last prompt, if it is part of the recording.
    seen: Option<Range<usize>>,
}

struct Generator<'a> {
    shape: &'a Shape,
    scale: f64,
    longest: u32,
    catalogue: Catalogue,
    /// Sessions that begin per second.
    starts: f64,
    /// Mean think time, in seconds.
    think_s: f64,
    /// Time that is added to each think time, in seconds.
    answer_s: f64,
    /// Shares of the sessions that have turns 2, 3, …
    shares: Vec<f64>,
    /// The next turns of sessions, and `None` where a session begins, by the bits of their time in
    /// seconds and a number. The bits of positive times sort as the times do.
    due: BTreeMap<(u64, u64), Option<Session>>,
    events: u64,
    next_id: u32,
    made: Requests,
}

impl<'a> Generator<'a> {
    fn new(shape: &'a Shape, workload: &Workload, rate: f64, rng: &mut impl Rng) -> Self {
        let scale = workload.length_scale;
        let longest = f64::from(shape.longest) * scale;
        let longest = longest.clamp(1.0, f64::from(workload.longest)) as u32;
        let shares: Vec<f64> = (1..MOST_TURNS)
            .scan(1.0, |share, turn| {
                *share *= going_on(shape, turn);
                Some(*share)
            })
            .collect();
        let turns = 1.0 + shares.iter().sum::<f64>();
        let faster = (workload.seconds / shape.recorded_s).min(1.0);
        Self {
            shape,
            scale,
            longest,
            catalogue: Catalogue::new(shape, scale, longest, rng),
            starts: rate / turns,
            think_s: shape.think_mean_s * faster,
            answer_s: ANSWER_S.min(workload.seconds / 20.0),
            shares,
            due: BTreeMap::new(),
            events: 0,
            next_id: 0,
            made: Requests { block_tokens: shape.block_tokens, ..Requests::default() },
        }
    }

    /// Creates the sessions that a stationary process has at time 0.
    fn begin(&mut self, rng: &mut impl Rng) {
        for turns in 1..MOST_TURNS {
            let share = self.shares[turns as usize - 1];
            let mean = self.starts * share * (self.think_s + self.answer_s);
            let waiting = Poisson::new(mean).map_or(0.0, |count| count.sample(rng)) as u64;
            for _ in 0..waiting {
                // Sessions whose prompt became too long have ended.
                let session = (1..turns).try_fold(self.first(rng), |before, _| {
                    (before.prompt < self.longest).then(|| self.next(before, rng))
                });
                let left = self.gap(true, rng) * rng.random::<f64>();
                if let Some(session) = session.filter(|session| session.prompt < self.longest) {
                    self.expect(left, Some(session));
                }
            }
        }
        self.expect_start(0.0, rng);
    }

    fn turn(&mut self, rng: &mut impl Rng) -> Result<(), WorkloadError> {
        let ((bits, _), before) = self.due.pop_first().expect("the next start is always due");
        let at_s = f64::from_bits(bits);
        let mut session = match before {
            Some(before) => self.next(before, rng),
            None => {
                self.expect_start(at_s, rng);
                self.first(rng)
            }
        };
        session.seen = Some(self.emit(at_s, &session)?);
        let goes_on = session.turns < MOST_TURNS
            && session.prompt < self.longest
            && rng.random::<f64>() < going_on(self.shape, session.turns);
        if goes_on {
            let gap_s = self.gap(false, rng);
            self.expect(at_s + gap_s, Some(session));
        }
        Ok(())
    }

    fn expect_start(&mut self, now_s: f64, rng: &mut impl Rng) {
        let gap: f64 = Exp1.sample(rng);
        self.expect(now_s + gap / self.starts, None);
    }

    fn expect(&mut self, at_s: f64, session: Option<Session>) {
        self.due.insert((at_s.to_bits(), self.events), session);
        self.events += 1;
    }

    /// Returns the time to the next turn. `around` selects the gap that contains an instant, whose
    /// probability is weighted by length. A log-normal distribution weighted in this way has the
    /// median multiplied by exp(σ²).
    fn gap(&self, around: bool, rng: &mut impl Rng) -> f64 {
        let variance = THINK_SIGMA * THINK_SIGMA;
        let mut median = self.think_s / (variance / 2.0).exp();
        let whole_s = self.answer_s + self.think_s;
        if around && rng.random::<f64>() * whole_s < self.think_s {
            median *= variance.exp();
        }
        let think = LogNormal { median, sigma: THINK_SIGMA };
        self.answer_s + drawn(think, rng)
    }

    fn first(&self, rng: &mut impl Rng) -> Session {
        let prefix = self.catalogue.pick(rng);
        let text = self.text(&self.shape.first, rng);
        let prompt = f64::from(self.catalogue.tokens[prefix]) + text;
        Session {
            turns: 1,
            prefix,
            prompt: self.clipped(prompt),
            output: self.output(rng),
            seen: None,
        }
    }

    fn next(&self, before: Session, rng: &mut impl Rng) -> Session {
        let text = self.text(&self.shape.later, rng);
        let answer = f64::from(before.output) * self.scale;
        Session {
            turns: before.turns + 1,
            prompt: self.clipped(f64::from(before.prompt) + answer + text),
            output: self.output(rng),
            ..before
        }
    }

    fn text(&self, text: &Text, rng: &mut impl Rng) -> f64 {
        let document = rng.random::<f64>() < text.documents;
        let length = if document { text.document } else { text.typed };
        drawn(length, rng) * self.scale
    }

    fn output(&self, rng: &mut impl Rng) -> u32 {
        drawn(self.shape.output, rng).round().clamp(1.0, 1e6) as u32
    }

    fn clipped(&self, tokens: f64) -> u32 {
        tokens.round().clamp(1.0, f64::from(self.longest)) as u32
    }

    /// Adds a session's prompt to the recording and returns the range of its full blocks.
    fn emit(&mut self, at_s: f64, session: &Session) -> Result<Range<usize>, WorkloadError> {
        let size = self.shape.block_tokens;
        let first_block = self.made.blocks.len();
        let blocks = session.prompt.div_ceil(size);
        within(first_block as u64 + u64::from(blocks), MOST_BLOCKS, "blocks")?;
        match session.seen.clone() {
            Some(seen) => self.made.blocks.extend_from_within(seen),
            None => {
                let shared = self.catalogue.blocks(session.prefix, size, &mut self.next_id);
                self.made.blocks.extend(shared);
            }
        }
        let known = self.made.blocks.len() - first_block;
        let fresh = blocks - known as u32;
        self.made.blocks.extend(self.next_id..self.next_id + fresh);
        self.next_id += fresh;
        self.made.list.push(Request {
            arrival: Time((at_s * 1e9) as u64),
            prompt_tokens: session.prompt,
            output_tokens: session.output,
            first_block: first_block as u32,
            blocks,
        });
        Ok(first_block..first_block + (session.prompt / size) as usize)
    }
}

struct Catalogue {
    /// Cumulative popularity of the prefixes. The last value is about 1.
    popularity: Vec<f64>,
    tokens: Vec<u32>,
    first_id: Vec<Option<u32>>,
}

impl Catalogue {
    /// Creates a catalogue with log-normal lengths, scaled so that the mean over requests is the
    /// shape's. Without scaling, seeds would differ too much, because few prefixes are very
    /// popular.
    fn new(shape: &Shape, scale: f64, longest: u32, rng: &mut impl Rng) -> Self {
        let weights: Vec<f64> =
            (1..=shape.prefixes).map(|rank| f64::from(rank).powf(-shape.zipf)).collect();
        let total: f64 = weights.iter().sum();
        let length = LogNormal { median: 1.0, sigma: shape.prefix_sigma };
        let lengths: Vec<f64> = weights.iter().map(|_| drawn(length, rng)).collect();
        let pairs = lengths.iter().zip(&weights);
        let mean = pairs.map(|(length, weight)| length * weight / total).sum::<f64>();
        let factor = shape.prefix_mean * scale / mean;
        let cut = |length: f64| (length * factor).round().min(f64::from(longest)) as u32;
        Self {
            popularity: weights
                .iter()
                .scan(0.0, |sum, weight| {
                    *sum += weight / total;
                    Some(*sum)
                })
                .collect(),
            tokens: lengths.into_iter().map(cut).collect(),
            first_id: vec![None; weights.len()],
        }
    }

    fn pick(&self, rng: &mut impl Rng) -> usize {
        let place = rng.random::<f64>();
        let index = self.popularity.partition_point(|&sum| sum <= place);
        index.min(self.popularity.len() - 1)
    }

    /// Returns the full blocks of a prefix. The rest of the prefix is not shared, because its block
    /// also contains what follows.
    fn blocks(&mut self, prefix: usize, size: u32, next_id: &mut u32) -> Range<u32> {
        let blocks = self.tokens[prefix] / size;
        let first = *self.first_id[prefix].get_or_insert_with(|| {
            let first = *next_id;
            *next_id += blocks;
            first
        });
        first..first + blocks
    }
}

/// Returns the probability that a session continues after turn `turn`.
fn going_on(shape: &Shape, turn: u32) -> f64 {
    let before = f64::from(turn - 1);
    (shape.alpha + before) / (shape.alpha + shape.beta + before)
}

fn drawn(from: LogNormal, rng: &mut impl Rng) -> f64 {
    let normal: f64 = StandardNormal.sample(rng);
    from.median * (from.sigma * normal).exp()
}
