//! The choice of a stage's node (Maestro §III-D, Algorithm 3, eq. 5 and 6), and the margin of KV
//! above the prediction.
//!
//! `S = A − λ·T_ready − μ·C_deg`, `T_ready = T_q + T_act`, `A = γ·proximity + (1 − γ)·fit`.
//!
//! The paper contradicts itself or leaves open these points:
//! * Eq. 5 adds a unitless `A` to times. The text calls metrics normalised, but `T_ready` and
//!   `C_deg` in milliseconds. Here [`Mode::Fitness`] normalises all by 5/95-percentile bounds over
//!   recent candidates. [`Mode::EndToEnd`] is the latency in ms to which the paper calls eq. 5
//!   equivalent. They aren't equivalent.
//! * `proximity = 1 − norm(RTT)`. `fit = 1 − (R_head − R_need) / max R_head` over all candidates.
//! * Interactive stages have a larger weight of `proximity`, so there are `γ` and `γ_interactive`.
//! * `ρ` is the 95th percentile of the relative underestimation over a window, limited to [0.1,
//!   0.3]. It is 0.3 until there are 20 values. The EWMA in the text has no use with a quantile.

use std::collections::VecDeque;

use super::node::NodeEstimate;
use crate::Span;
use crate::workflow::Class;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Eq. 5 with normalised values and λ = μ = 1. `γ = 0` is the paper's “BinPack Only”.
    Fitness {
        /// Weight of proximity for batch stages, 0 to 1.
        gamma: f64,
        /// Weight of proximity for interactive stages, 0 to 1.
        gamma_interactive: f64,
    },
    /// The least sum `RTT + T_ready + C_deg` in ms.
    EndToEnd,
    /// The fewest stages, without regard to resident models: the paper's “Baseline”.
    LoadBalance,
    /// Nodes on which the model runs go first, and of those the one with the fewest stages.
    WarmShortest,
}

impl Mode {
    /// The paper's weights (§IV-D5, §III-D). Interactive stages have twice the weight of proximity.
    pub const MAESTRO: Self = Self::Fitness { gamma: 0.25, gamma_interactive: 0.5 };
    /// The paper's “BinPack Only”.
    pub const BIN_PACK: Self = Self::Fitness { gamma: 0.0, gamma_interactive: 0.0 };
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub node: usize,
    pub estimate: NodeEstimate,
    /// Round-trip time from the source of the job.
    pub rtt: Span,
    pub load: usize,
    pub warm: bool,
}

const WINDOW: usize = 512;
/// Number of choices between two computations of the bounds.
const REFRESH: u32 = 16;

#[derive(Clone, Debug, Default)]
struct PercentileBounds {
    recent: VecDeque<f64>,
    low: f64,
    high: f64,
}

impl PercentileBounds {
    fn push(&mut self, value: f64, most: usize) {
        if self.recent.len() == most {
            self.recent.pop_front();
        }
        self.recent.push_back(value);
    }

    fn refresh(&mut self, scratch: &mut Vec<f64>) {
        scratch.clear();
        scratch.extend(&self.recent);
        if scratch.is_empty() {
            return;
        }
        let at = |share: f64| ((scratch.len() - 1) as f64 * share).round() as usize;
        let (low, high) = (at(0.05), at(0.95));
        self.low = *scratch.select_nth_unstable_by(low, f64::total_cmp).1;
        self.high = *scratch.select_nth_unstable_by(high, f64::total_cmp).1;
    }

    /// Maps the lower bound to 0 and the upper to 1. If both are equal, larger values give 1 and
    /// others 0.
    fn norm(&self, value: f64) -> f64 {
        if self.high > self.low {
            ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        } else {
            f64::from(u8::from(value > self.high))
        }
    }
}

pub struct Fitness {
    mode: Mode,
    /// Of RTT, `T_ready` and `C_deg`.
    bounds: [PercentileBounds; 3],
    scratch: Vec<f64>,
    chosen: u32,
    /// Number of choices, by which equal candidates take turns.
    turn: usize,
}

/// Returns a candidate's RTT, `T_ready` and `C_deg` in ms.
fn times(of: &Candidate) -> [f64; 3] {
    let estimate = &of.estimate;
    let ready = estimate.queue + estimate.activation;
    [of.rtt.0, ready.0, estimate.degradation].map(|ns| ns as f64 / 1e6)
}

impl Fitness {
    pub fn new(mode: Mode) -> Self {
        Self { mode, bounds: Default::default(), scratch: Vec::new(), chosen: 0, turn: 0 }
    }

    /// Returns the node of the best candidate. Equal ones take turns. Otherwise the first node of
    /// an idle cluster would get every stage, and its GPU the weights of every model.
    pub fn choose(&mut self, candidates: &[Candidate], need: u64, class: Class) -> Option<usize> {
        if candidates.len() > 1 {
            self.learn(candidates);
        }
        let most = candidates.iter().map(|c| c.estimate.headroom).max()?.max(1);
        let mut best: Option<(f64, usize)> = None;
        let (before, after) = candidates.split_at(self.turn % candidates.len());
        self.turn = self.turn.wrapping_add(1);
        for candidate in after.iter().chain(before) {
            let score = self.score(candidate, need, most, class);
            if best.is_none_or(|(other, _)| score > other) {
                best = Some((score, candidate.node));
            }
        }
        best.map(|(_, node)| node)
    }

    fn learn(&mut self, candidates: &[Candidate]) {
        if !matches!(self.mode, Mode::Fitness { .. }) {
            return;
        }
        for candidate in candidates {
            for (bounds, value) in self.bounds.iter_mut().zip(times(candidate)) {
                bounds.push(value, WINDOW);
            }
        }
        // The first choices use the bounds of their own candidates.
        if self.chosen < REFRESH || self.chosen.is_multiple_of(REFRESH) {
            self.bounds.iter_mut().for_each(|bounds| bounds.refresh(&mut self.scratch));
        }
        self.chosen = self.chosen.wrapping_add(1);
    }

    fn score(&self, of: &Candidate, need: u64, most: u64, class: Class) -> f64 {
        let [rtt, waits, harm] = times(of);
        match self.mode {
            Mode::Fitness { gamma, gamma_interactive } => {
                let gamma = match class {
                    Class::Interactive => gamma_interactive,
                    Class::Batch => gamma,
                };
                let spare = of.estimate.headroom.saturating_sub(need) as f64;
                let fit = 1.0 - spare / most as f64;
                let [near, ready, degradation] = &self.bounds;
                let proximity = 1.0 - near.norm(rtt);
                gamma * proximity + (1.0 - gamma) * fit - ready.norm(waits) - degradation.norm(harm)
            }
            Mode::EndToEnd => -(rtt + waits + harm),
            Mode::LoadBalance => -(of.load as f64),
            Mode::WarmShortest => f64::from(u8::from(of.warm)) * 1e6 - of.load as f64,
        }
    }
}

/// The margin `ρ`: the share by which a stage's permitted KV exceeds its prediction.
#[derive(Clone, Debug, Default)]
pub struct Margin(PercentileBounds);

impl Margin {
    const WINDOW: usize = 256;
    const ENOUGH: usize = 20;

    /// Learns from a stage how much more KV it needed than predicted. Less counts as equal.
    pub fn observe(&mut self, needed: u64, predicted: u64) {
        let e = (needed as f64 / predicted.max(1) as f64 - 1.0).max(0.0);
        self.0.push(e, Self::WINDOW);
        if self.0.recent.len().is_multiple_of(8) || self.0.recent.len() == Self::WINDOW {
            self.0.refresh(&mut Vec::new());
        }
    }

    pub fn share(&self) -> f64 {
        if self.0.recent.len() < Self::ENOUGH {
            return 0.3;
        }
        self.0.high.clamp(0.1, 0.3)
    }

    /// Returns `R_need = (1 + ρ)·R` for predicted bytes `R`.
    pub fn need(&self, predicted: u64) -> u64 {
        (predicted as f64 * (1.0 + self.share())).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(node: usize, headroom: u64, rtt: u64, activation: u64) -> Candidate {
        Candidate {
            node,
            estimate: NodeEstimate {
                queue: Span::ZERO,
                activation: Span::from_millis(activation),
                degradation: 0,
                headroom,
            },
            rtt: Span::from_millis(rtt),
            load: node,
            warm: activation == 0,
        }
    }

    #[test]
    fn without_proximity_the_tightest_fit_is_taken() {
        let mut fitness = Fitness::new(Mode::BIN_PACK);
        let all = [candidate(0, 900, 0, 0), candidate(1, 150, 80, 0)];
        assert_eq!(fitness.choose(&all, 100, Class::Interactive), Some(1));
    }

    #[test]
    fn with_it_an_interactive_stage_stays_near() {
        let mut fitness = Fitness::new(Mode::MAESTRO);
        let all = [candidate(0, 300, 0, 0), candidate(1, 150, 80, 0)];
        assert_eq!(fitness.choose(&all, 100, Class::Interactive), Some(0));
    }

    #[test]
    fn a_warm_node_far_away_beats_a_cold_one_here() {
        let mut fitness = Fitness::new(Mode::MAESTRO);
        let all = [candidate(0, 300, 0, 20_000), candidate(1, 300, 80, 0)];
        assert_eq!(fitness.choose(&all, 100, Class::Interactive), Some(1));
        let mut end_to_end = Fitness::new(Mode::EndToEnd);
        assert_eq!(end_to_end.choose(&all, 100, Class::Batch), Some(1));
    }

    #[test]
    fn equal_nodes_take_turns() {
        let equal = [0, 1, 2].map(|node| Candidate { load: 0, ..candidate(node, 300, 0, 0) });
        for mode in [Mode::LoadBalance, Mode::WarmShortest, Mode::MAESTRO] {
            let mut fitness = Fitness::new(mode);
            let mut chosen: Vec<_> =
                (0..3).filter_map(|_| fitness.choose(&equal, 100, Class::Batch)).collect();
            chosen.sort_unstable();
            assert_eq!(chosen, [0, 1, 2], "{mode:?}");
        }
    }

    #[test]
    fn an_outlier_does_not_flatten_the_others() {
        let mut fitness = Fitness::new(Mode::MAESTRO);
        for _ in 0..100 {
            let usual = [candidate(0, 300, 0, 100), candidate(1, 300, 0, 200)];
            fitness.choose(&usual, 100, Class::Batch);
        }
        let all = [
            candidate(0, 300, 0, 200),
            candidate(1, 300, 0, 100),
            candidate(2, 300, 0, 10_000_000),
        ];
        assert_eq!(fitness.choose(&all, 100, Class::Batch), Some(1));
    }

    #[test]
    fn the_margin_is_the_upper_percentile_of_underestimation_within_its_bounds() {
        let mut margin = Margin::default();
        assert_eq!(margin.share(), 0.3);
        for _ in 0..256 {
            margin.observe(100, 100);
        }
        assert_eq!(margin.share(), 0.1);
        for i in 0..256 {
            margin.observe(100 + 20 * u64::from(i % 5 == 0), 100);
        }
        assert!((margin.share() - 0.2).abs() < 1e-9);
        for _ in 0..256 {
            margin.observe(300, 100);
        }
        assert_eq!(margin.share(), 0.3);
        assert_eq!(margin.need(1000), 1300);
    }
}
