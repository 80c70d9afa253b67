//! The order of prompts by simulated annealing (Huang et al., *SLO-Aware Scheduling for Large
//! Language Model Inferences*, arXiv 2504.14966: “SA” of HyperFlexis' figure 7), inside an
//! instance; in front of several, whatever places requests.
//!
//! Of the orders of those that wait, the one with the largest `G = n / t` is looked for: `n`
//! requests that meet their objectives, by prediction, over the sum `t` of all their latencies. The
//! search begins with the better of two orders, by arrival and by predicted latency; a neighbour
//! has two requests swapped; one that is worse by `d` of its `G` is taken with `exp(−d / T)`. It
//! begins at `T₀` and cools by a factor until it is cold.
//!
//! Departures. That paper also chooses sizes of batches, for an engine whose batches end together;
//! with continuous batching there are none, and only the order is left. `G` is taken as a share of
//! what the search began with, as temperatures have to be of its size. Temperatures are of here
//! (they are chosen by hand there); beyond [`Annealing::LOOKED_AT`] the line is by arrival. It is
//! searched when somebody came since the last time. Latencies are those of eq. 1 and 2 of
//! HyperFlexis, lengths the mean of the application.

use rustc_hash::FxHashMap;

use crate::Time;
use crate::discipline::{Discipline, Rank, Reranked, View};
use crate::hyperflexis::Linear;
use crate::iteration::Event;
use crate::job::{Job, Phase};
use crate::ledger::Targets;
use crate::request::{ApplicationId, RequestId};

/// One that waits, as the search sees it.
#[derive(Clone, Copy, Debug)]
struct Waits {
    id: RequestId,
    prefill: f64,
    decode: f64,
    /// Time left for its first token, ns, and whether its tokens are in time.
    left: f64,
    keeps: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Annealing {
    model: Linear,
    tokens: u32,
    random: u64,
    /// Places in line that the last search gave.
    places: FxHashMap<RequestId, i64>,
    next: i64,
    came: bool,
    /// Requests and tokens of an application so far.
    history: FxHashMap<ApplicationId, (f64, f64)>,
}

impl Annealing {
    /// Requests whose order is looked for.
    pub const LOOKED_AT: usize = 48;
    const HOT: f64 = 0.1;
    const COLD: f64 = 0.001;
    const COOLS: f64 = 0.85;
    /// Neighbours at each temperature.
    const TRIES: usize = 24;

    /// Iterations of so many tokens at most, which take what `model` says.
    #[must_use]
    pub fn new(model: Linear, tokens: u32) -> Self {
        Self {
            model,
            tokens,
            random: 0x9e37_79b9_7f4a_7c15,
            places: FxHashMap::default(),
            next: 0,
            came: false,
            history: FxHashMap::default(),
        }
    }

    /// SplitMix64 (Steele, Lea, Flood 2014): the same numbers in each run.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.random() % count.max(1) as u64) as usize
    }

    fn waits(&self, now: Time, job: &Job, decoding: f64, context: f64) -> Waits {
        let output = self
            .history
            .get(&job.spec.application)
            .map_or(f64::from(job.spec.output_max) / 2.0, |(n, t)| t / n);
        let targets = Targets::of(&job.spec);
        let tokens = f64::from(job.prefill_left());
        let step = self.model.decode_ns(decoding + 1.0, context + tokens);
        let deadline = job.spec.arrival.0.saturating_add(targets.ttft) as f64;
        Waits {
            id: job.id(),
            prefill: self.model.prefill_ns(tokens, tokens * tokens),
            decode: output * step,
            left: deadline - now.0 as f64,
            keeps: step <= targets.tpot as f64,
        }
    }

    /// `G` of an order.
    fn gain(order: &[Waits]) -> f64 {
        let (mut at, mut good, mut latency) = (0.0, 0.0, 0.0);
        for one in order {
            at += one.prefill;
            good += f64::from(u8::from(one.keeps && at <= one.left));
            latency += at + one.decode;
        }
        if latency > 0.0 { good / latency } else { 0.0 }
    }

    fn search(&mut self, by_arrival: Vec<Waits>) -> Vec<Waits> {
        let mut shortest = by_arrival.clone();
        shortest.sort_by(|x, y| (x.prefill + x.decode).total_cmp(&(y.prefill + y.decode)));
        let mut order = by_arrival;
        let mut gain = Self::gain(&order);
        let other = Self::gain(&shortest);
        if other > gain {
            (order, gain) = (shortest, other);
        }
        if order.len() < 2 {
            return order;
        }
        let scale = gain.max(f64::MIN_POSITIVE);
        let (mut best, mut best_gain) = (order.clone(), gain);
        let mut temperature = Self::HOT;
        while temperature > Self::COLD {
            for _ in 0..Self::TRIES {
                let (x, y) = (self.below(order.len()), self.below(order.len()));
                order.swap(x, y);
                let with = Self::gain(&order);
                let worse = (gain - with) / scale;
                let dice = (self.random() >> 11) as f64 / (1u64 << 53) as f64;
                if worse <= 0.0 || dice < (-worse / temperature).exp() {
                    gain = with;
                    if gain > best_gain {
                        best.clone_from(&order);
                        best_gain = gain;
                    }
                } else {
                    order.swap(x, y);
                }
            }
            temperature *= Self::COOLS;
        }
        best
    }
}

impl Discipline for Annealing {
    fn name(&self) -> &'static str {
        "simulated_annealing"
    }

    fn rank(&self, job: &Job) -> Rank {
        // Who came after the last search is behind all that it ordered, by arrival.
        let place = self.places.get(&job.id()).copied();
        Rank(place.unwrap_or(i64::MAX))
    }

    fn observe(&mut self, now: Time, event: &Event, view: &dyn View) -> Reranked {
        match event {
            Event::Arrived(_) => {
                self.came = true;
                return Reranked::None;
            }
            Event::Cancelled(request) => {
                self.places.remove(request);
                return Reranked::None;
            }
            Event::Capacity(_) => return Reranked::None,
            Event::Done { .. } => {}
        }
        if !std::mem::take(&mut self.came) {
            return Reranked::None;
        }
        let decodes = view.decodes();
        let (decoding, context) = (f64::from(decodes.decodes), decodes.decode_context as f64);
        let mut line: Vec<&Job> = view
            .in_line()
            .filter(|job| job.phase == Phase::Waiting)
            .collect();
        line.sort_by_key(|job| (job.spec.arrival, job.id()));
        line.truncate(Self::LOOKED_AT);
        let waits = line
            .iter()
            .map(|job| self.waits(now, job, decoding, context))
            .collect();
        let order = self.search(waits);
        for one in order {
            self.next += 1;
            self.places.insert(one.id, self.next);
        }
        Reranked::All
    }

    fn budget(&mut self, _: Time, view: &dyn View) -> u32 {
        self.tokens.saturating_sub(view.decodes().decodes)
    }

    fn finished(&mut self, _: Time, job: &Job) {
        self.places.remove(&job.id());
        let history = self.history.entry(job.spec.application).or_default();
        history.0 += 1.0;
        history.1 += f64::from(job.generated);
    }

    fn refused(&mut self, request: RequestId) {
        self.places.remove(&request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(number: u64, prefill: f64, left: f64) -> Waits {
        Waits {
            id: RequestId(number),
            prefill,
            decode: 0.0,
            left,
            keeps: true,
        }
    }

    /// The largest gain of all orders.
    fn largest(order: &mut Vec<Waits>, from: usize) -> f64 {
        if from == order.len() {
            return Annealing::gain(order);
        }
        let mut most: f64 = 0.0;
        for at in from..order.len() {
            order.swap(from, at);
            most = most.max(largest(order, from + 1));
            order.swap(from, at);
        }
        most
    }

    #[test]
    fn the_order_with_the_largest_gain_is_found_where_it_is_neither_that_of_arrival_nor_of_length()
    {
        let all = vec![
            waits(0, 5.0, 100.0),
            waits(1, 10.0, 12.0),
            waits(2, 2.0, 100.0),
            waits(3, 4.0, 16.0),
            waits(4, 6.0, 30.0),
        ];
        let mut shortest = all.clone();
        shortest.sort_by(|x, y| x.prefill.total_cmp(&y.prefill));
        let begins = Annealing::gain(&all).max(Annealing::gain(&shortest));
        let most = largest(&mut all.clone(), 0);
        let model = Linear {
            prefill: [0.0; 3],
            decode: [0.0; 3],
        };
        let found = Annealing::gain(&Annealing::new(model, 1).search(all));
        assert!(begins + 1e-6 < most, "{begins} and {most}");
        assert!((found - most).abs() < 1e-9, "{found} and {most}");
    }

    #[test]
    fn the_same_line_is_put_into_the_same_order() {
        let line: Vec<Waits> = (0..40)
            .map(|i| waits(i, (7 * i % 13) as f64 + 1.0, (11 * i % 97) as f64))
            .collect();
        let order = |mut of: Annealing| of.search(line.clone()).iter().map(|w| w.id.0).collect();
        let model = Linear {
            prefill: [0.0; 3],
            decode: [0.0; 3],
        };
        let one: Vec<u64> = order(Annealing::new(model, 1));
        let two: Vec<u64> = order(Annealing::new(model, 1));
        assert_eq!(one, two);
        assert!(Annealing::gain(&line) > 0.0);
    }
}
