//! The timed model, which takes the time of computing. It needs no tensor library.
//!
//! KV and activations are patterns of the right size ([`pattern`]). The KV of a token in a layer
//! depends on the layer and on all tokens up to it. The answer depends on the KV of the whole
//! sequence in all layers. So misplaced bytes change the answer, and damaged bytes are an error.
//!
//! With the settings of [`Timing`], a batch of `n` tokens takes this time in each layer:
//!
//! ```text
//! layer_us  + token_us · n                attention; then the rows of experts elsewhere go out
//! expert_us + row_us   · (rows held here)  the experts of this process; then the others' answers are awaited
//! ```
//!
//! The experts of another process take `expert_us + row_us · rows` for the rows that one process
//! sends for one layer. Token `t` uses the experts `h(t), h(t) + 1, …` with a hash `h`, so all
//! experts have the same load on average.

mod kv;
pub mod pattern;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{
    ExpertPeers, ExpertRows, Experts, KvCache, Model, ModelShape, Piece, Result, Watch,
    check_pieces, fail, identity,
};
use crate::model::shape::Moe;
use crate::schedule::Room;
use kv::TimedKv;
use pattern::{mix, row, row_seed};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Time of attention in a layer that does not depend on the batch, in µs.
    pub layer_us: f64,
    /// Time of attention in a layer for each token, in µs.
    pub token_us: f64,
    /// Time of a layer's experts (or feed-forward network) that does not depend on the rows, in µs.
    pub expert_us: f64,
    /// Time of an expert for each row, in µs.
    pub row_us: f64,
    /// Path of a JSON file with the prompts whose KV is in the cache from the start. It has an
    /// array of arrays of tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<PathBuf>,
}

impl Timing {
    pub const fn all(&self) -> [(&'static str, f64); 4] {
        [
            ("timing.layer_us", self.layer_us),
            ("timing.token_us", self.token_us),
            ("timing.expert_us", self.expert_us),
            ("timing.row_us", self.row_us),
        ]
    }

    fn attention(&self, tokens: usize) -> Duration {
        micros(self.layer_us + self.token_us * tokens as f64)
    }

    fn experts(&self, rows: usize) -> Duration {
        micros(self.expert_us + self.row_us * rows as f64)
    }
}

fn micros(us: f64) -> Duration {
    Duration::from_secs_f64(us / 1e6)
}

/// Sleeps until `time` after `since`, so that work since then counts as part of the time.
fn take(since: Instant, time: Duration) {
    std::thread::sleep(time.saturating_sub(since.elapsed()));
}

pub struct TimedModel {
    shape: ModelShape,
    kv: TimedKv,
    experts: Arc<TimedExperts>,
    identity: [u8; 16],
}

impl TimedModel {
    /// Makes a model with an empty KV cache. It holds the experts for which `holds` returns true.
    pub fn new(
        shape: &ModelShape,
        timing: &Timing,
        holds: &dyn Fn(usize) -> bool,
        room: Room,
    ) -> Self {
        let experts = shape.moe.map_or(0, |moe| moe.experts);
        Self {
            shape: shape.clone(),
            kv: TimedKv::new(shape, room),
            experts: Arc::new(TimedExperts {
                held: (0..experts).map(holds).collect(),
                hidden: shape.hidden,
                timing: timing.clone(),
            }),
            identity: identity(shape, b"timed"),
        }
    }

    /// Fills blocks with the KV of a sequence's first tokens, without taking time.
    pub fn fill(&self, tokens: &[u32], blocks: &[u32]) -> Result<()> {
        let layers = 0..self.shape.layers;
        layers.into_iter().try_for_each(|layer| self.kv.compute(layer, blocks, 0, tokens))
    }

    /// Returns a batch's rows for experts elsewhere, by expert, and the number of rows that stay.
    fn route(&self, layer: usize, pieces: &[Piece], moe: Moe) -> Result<(Routed, usize)> {
        let mut away = Routed::new();
        let mut here = 0;
        for piece in pieces {
            let end = piece.start + piece.tokens.len();
            for seed in self.kv.seeds(layer, &piece.blocks, piece.start..end)? {
                for number in 0..moe.per_token as u64 {
                    let expert = (mix(seed).wrapping_add(number) % moe.experts as u64) as usize;
                    if self.experts.held[expert] {
                        here += 1;
                    } else {
                        away.entry(expert).or_default().push(mix(seed ^ expert as u64));
                    }
                }
            }
        }
        Ok((away, here))
    }

    /// Computes the rows of one layer with their experts, here and elsewhere.
    fn network(&self, layer: usize, pieces: &[Piece], peers: &mut dyn ExpertPeers) -> Result<()> {
        let Some(moe) = self.shape.moe else {
            let tokens = pieces.iter().map(|piece| piece.tokens.len()).sum();
            take(Instant::now(), self.experts.timing.experts(tokens));
            return Ok(());
        };
        let (away, here) = self.route(layer, pieces, moe)?;
        let hidden = self.shape.hidden;
        let groups = away.iter().map(|(&expert, seeds)| ExpertRows {
            expert,
            rows: seeds.iter().flat_map(|&seed| row(seed, hidden)).collect(),
        });
        peers.dispatch(layer, groups.collect())?;
        take(Instant::now(), self.experts.timing.experts(here));
        let mut missing = away;
        for group in peers.collect(layer)? {
            let expert = group.expert;
            let Some(seeds) = missing.remove(&expert) else {
                fail!("expert {expert} of layer {layer} answers, and was not asked");
            };
            let made = seeds.iter().map(|&seed| expert_output(layer, expert, seed));
            if !made.flat_map(|seed| row(seed, hidden)).eq(group.rows) {
                fail!("expert {expert} of layer {layer} answers with other rows than it has to");
            }
        }
        match missing.keys().next() {
            Some(expert) => fail!("expert {expert} of layer {layer} did not answer"),
            None => Ok(()),
        }
    }

    /// Returns the outputs of a piece's last token: 1 for the answer's token and 0 for all others.
    fn output(&self, piece: &Piece) -> Result<Vec<f32>> {
        let end = piece.start + piece.tokens.len();
        let mut sum = 0;
        for layer in 0..self.shape.layers {
            for seed in self.kv.seeds(layer, &piece.blocks, 0..end)? {
                sum = mix(sum ^ seed);
            }
        }
        let mut outputs = vec![0.0; self.shape.vocab];
        outputs[(sum % self.shape.vocab as u64) as usize] = 1.0;
        Ok(outputs)
    }
}

type Routed = std::collections::BTreeMap<usize, Vec<u64>>;

impl Model for TimedModel {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn kv(&self) -> &dyn KvCache {
        &self.kv
    }

    fn experts(&self) -> Arc<dyn Experts> {
        Arc::clone(&self.experts) as Arc<dyn Experts>
    }

    fn forward(
        &self,
        pieces: &[Piece],
        watch: &mut dyn Watch,
        peers: &mut dyn ExpertPeers,
    ) -> Result<Vec<Vec<f32>>> {
        check_pieces(&self.shape, pieces)?;
        let tokens = pieces.iter().map(|piece| piece.tokens.len()).sum();
        for layer in 0..self.shape.layers {
            watch.before_layer(layer, &self.kv)?;
            let begun = Instant::now();
            for piece in pieces {
                self.kv.compute(layer, &piece.blocks, piece.start, &piece.tokens)?;
            }
            take(begun, self.experts.timing.attention(tokens));
            self.network(layer, pieces, peers)?;
            watch.after_layer(layer, &self.kv)?;
        }
        let wanted = pieces.iter().filter(|piece| piece.wants_output);
        wanted.map(|piece| self.output(piece)).collect()
    }
}

struct TimedExperts {
    held: Vec<bool>,
    hidden: usize,
    timing: Timing,
}

const fn expert_output(layer: usize, expert: usize, seed: u64) -> u64 {
    mix(seed ^ mix(((layer as u64) << 32) | expert as u64))
}

impl Experts for TimedExperts {
    fn run(&self, layer: usize, groups: Vec<ExpertRows>) -> Result<Vec<ExpertRows>> {
        let begun = Instant::now();
        let mut count = 0;
        let mut made = Vec::with_capacity(groups.len());
        for group in groups {
            let expert = group.expert;
            if !self.held.get(expert).is_some_and(|held| *held) {
                fail!("expert {expert} of layer {layer} is not held here");
            }
            let mut rows = Vec::with_capacity(group.rows.len());
            for one in group.rows.chunks(self.hidden) {
                let Some(seed) = row_seed(one) else {
                    fail!("a row for expert {expert} of layer {layer} is damaged");
                };
                rows.extend(row(expert_output(layer, expert, seed), self.hidden));
                count += 1;
            }
            made.push(ExpertRows { expert, rows });
        }
        take(begun, self.timing.experts(count));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::tests::{piece, tiny};
    use crate::model::{AllLocal, Unwatched, greedy};

    fn quick(holds: &dyn Fn(usize) -> bool) -> TimedModel {
        model(&Timing::default(), holds)
    }

    fn model(timing: &Timing, holds: &dyn Fn(usize) -> bool) -> TimedModel {
        let room = Room { blocks: 32, block_tokens: 8 };
        TimedModel::new(&tiny(true), timing, holds, room)
    }

    fn prompt(count: u32) -> Vec<u32> {
        (0..count).map(|at| at * 7 % 251).collect()
    }

    fn answer(model: &TimedModel, pieces: &[Piece], peers: &mut dyn ExpertPeers) -> Result<u32> {
        let outputs = model.forward(pieces, &mut Unwatched, peers)?;
        Ok(greedy(outputs.last().unwrap()))
    }

    #[test]
    fn an_answer_is_the_same_in_any_chunks_company_and_with_kv_from_elsewhere() {
        let tokens = prompt(40);
        let whole = [piece(&tokens, 0, &[0, 1, 2, 3, 4])];
        let here = quick(&|_| true);
        let expected = answer(&here, &whole, &mut AllLocal).unwrap();
        for chunk in [1, 3, 17] {
            let other = quick(&|_| true);
            let mut last = 0;
            for (number, part) in tokens.chunks(chunk).enumerate() {
                let company = piece(&prompt(5), 0, &[20]);
                let own = piece(part, number * chunk, &[9, 2, 30, 17, 5]);
                last = answer(&other, &[company, own], &mut AllLocal).unwrap();
            }
            assert_eq!(last, expected, "chunks of {chunk}");
        }
        let imported = |layer_of: fn(usize) -> usize| {
            let there = quick(&|_| true);
            for layer in 0..3 {
                let bytes = here.kv().export(layer_of(layer), &[0, 1, 2], 0, 24).unwrap();
                assert_eq!(bytes.len(), 24 * here.kv().token_bytes());
                assert_eq!(there.kv().import(layer, &[4, 5, 6], 0, &bytes).unwrap(), 24);
            }
            let rest = piece(&tokens[24..], 24, &[4, 5, 6, 7, 8]);
            answer(&there, &[rest], &mut AllLocal).unwrap()
        };
        assert_eq!(imported(|layer| layer), expected);
        assert_ne!(imported(|layer| 2 - layer), expected, "KV of other layers");
        let filled = quick(&|_| true);
        filled.fill(&tokens[..24], &[4, 5, 6]).unwrap();
        let rest = piece(&tokens[24..], 24, &[4, 5, 6, 7, 8]);
        assert_eq!(answer(&filled, &[rest], &mut AllLocal).unwrap(), expected);
    }

    /// Experts of another process. If the last field is set, they damage that number.
    struct Other(TimedModel, Vec<ExpertRows>, Option<usize>);

    impl ExpertPeers for Other {
        fn dispatch(&mut self, layer: usize, groups: Vec<ExpertRows>) -> Result<()> {
            self.1 = self.0.experts().run(layer, groups)?;
            Ok(())
        }

        fn collect(&mut self, _layer: usize) -> Result<Vec<ExpertRows>> {
            let mut made = std::mem::take(&mut self.1);
            if let (Some(at), Some(group)) = (self.2, made.first_mut()) {
                group.rows[at] ^= 1;
            }
            Ok(made)
        }
    }

    #[test]
    fn experts_elsewhere_answer_and_damage_is_noticed_on_every_way() {
        let whole = [piece(&prompt(40), 0, &[0, 1, 2, 3, 4])];
        let expected = answer(&quick(&|_| true), &whole, &mut AllLocal).unwrap();
        let half = quick(&|expert| expert % 2 == 0);
        let other = |damaged| {
            let holds: &dyn Fn(usize) -> bool = &|expert| expert % 2 == 1;
            Other(quick(holds), Vec::new(), damaged)
        };
        assert_eq!(answer(&half, &whole, &mut other(None)).unwrap(), expected);
        let error = answer(&half, &whole, &mut other(Some(5))).unwrap_err();
        assert!(error.to_string().contains("other rows"), "{error}");
        let damaged = ExpertRows { expert: 1, rows: vec![7; 48] };
        let error = other(None).dispatch(0, vec![damaged]).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        let mut bytes = half.kv().export(0, &[0], 0, 3).unwrap();
        bytes[70] ^= 1;
        let error = half.kv().import(0, &[9], 0, &bytes).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }

    #[test]
    fn a_batch_takes_the_time_of_its_layers_tokens_and_rows() {
        let timing = Timing {
            layer_us: 1000.0,
            token_us: 100.0,
            expert_us: 2000.0,
            row_us: 50.0,
            holds: None,
        };
        // The time is 3 layers of (1 + 40 · 0.1) + (2 + 80 · 0.05) ms.
        let begun = Instant::now();
        let whole = [piece(&prompt(40), 0, &[0, 1, 2, 3, 4])];
        answer(&model(&timing, &|_| true), &whole, &mut AllLocal).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(33));
    }
}
