//! A contextual bandit (H-MAS Appendix C.2): LinUCB (Li et al. 2010) over the features of the long
//! view. Without randomness: among equals the first of the pool.

use super::super::pool::Kind;
use super::super::qos::Long;
use super::{Answer, Decision, Reward, Selector, lanes};
use crate::Time;

/// What is known of a policy: `A⁻¹` and `b` of a ridge regression of the reward.
#[derive(Clone, Debug)]
struct Arm {
    kind: Kind,
    inverse: Vec<Vec<f64>>,
    sums: Vec<f64>,
}

impl Arm {
    fn new(kind: Kind, features: usize) -> Self {
        let row = |i| (0..features).map(|j| f64::from(u8::from(i == j))).collect();
        Self {
            kind,
            inverse: (0..features).map(row).collect(),
            sums: vec![0.0; features],
        }
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        let row = |row: &Vec<f64>| row.iter().zip(x).map(|(a, b)| a * b).sum();
        self.inverse.iter().map(row).collect()
    }

    /// What it may be worth: the mean, and `alpha` deviations.
    fn score(&self, x: &[f64], alpha: f64) -> f64 {
        let ax = self.times(x);
        let mean: f64 = ax.iter().zip(&self.sums).map(|(a, b)| a * b).sum();
        let variance: f64 = ax.iter().zip(x).map(|(a, b)| a * b).sum();
        mean + alpha * variance.max(0.0).sqrt()
    }

    /// Sherman and Morrison: `A⁻¹ ← A⁻¹ − A⁻¹ x xᵀ A⁻¹ / (1 + xᵀ A⁻¹ x)`.
    fn learn(&mut self, x: &[f64], reward: f64) {
        let ax = self.times(x);
        let denominator = 1.0 + ax.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
        for (row, left) in self.inverse.iter_mut().zip(&ax) {
            for (cell, right) in row.iter_mut().zip(&ax) {
                *cell -= left * right / denominator;
            }
        }
        for (sum, value) in self.sums.iter_mut().zip(x) {
            *sum += reward * value;
        }
    }
}

/// LinUCB.
#[derive(Clone, Debug)]
pub struct Bandit {
    alpha: f64,
    pool: Vec<Kind>,
    arms: Vec<Arm>,
}

impl Bandit {
    /// Over such policies; `alpha` says how much it tries what it knows little of.
    #[must_use]
    pub fn new(pool: &[Kind], alpha: f64) -> Self {
        Self {
            alpha,
            pool: pool.to_vec(),
            arms: Vec::new(),
        }
    }
}

/// Features with a constant.
fn context(view: &Long) -> Vec<f64> {
    let mut x = view.features();
    x.push(1.0);
    x
}

impl Selector for Bandit {
    fn name(&self) -> &'static str {
        "bandit"
    }

    fn select(&mut self, _: Time, view: &Long, current: Kind) -> Answer {
        let x = context(view);
        if self.arms.is_empty() {
            self.arms = self.pool.iter().map(|k| Arm::new(*k, x.len())).collect();
        }
        let mut best = (f64::NEG_INFINITY, current);
        for arm in &self.arms {
            let score = arm.score(&x, self.alpha);
            if score > best.0 + 1e-12 {
                best = (score, arm.kind);
            }
        }
        Answer::Decided(Decision {
            kind: best.1,
            hints: Some(lanes(view)),
            bypass: false,
        })
    }

    fn reward(&mut self, view: &Long, reward: Reward) {
        let x = context(view);
        if let Some(arm) = self.arms.iter_mut().find(|arm| arm.kind == reward.kind) {
            arm.learn(&x, reward.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_to_prefer_what_pays_in_each_context() {
        let mut bandit = Bandit::new(&[Kind::Fcfs, Kind::Sjf], 0.5);
        let view = |heavy: bool| Long {
            heavy_share: f64::from(u8::from(heavy)),
            rps: 20.0,
            ..Long::default()
        };
        let pays = |heavy: bool, kind: Kind| {
            if (kind == Kind::Sjf) == heavy {
                0.9
            } else {
                0.3
            }
        };
        let chosen = |bandit: &mut Bandit, heavy: bool| match bandit.select(
            Time::ZERO,
            &view(heavy),
            Kind::Edf,
        ) {
            Answer::Decided(decision) => decision.kind,
            other => panic!("{other:?}"),
        };
        for round in 0..80 {
            let heavy = round % 2 == 0;
            let kind = chosen(&mut bandit, heavy);
            let reward = Reward {
                kind,
                value: pays(heavy, kind),
            };
            bandit.reward(&view(heavy), reward);
        }
        assert_eq!(chosen(&mut bandit, true), Kind::Sjf);
        assert_eq!(chosen(&mut bandit, false), Kind::Fcfs);
    }
}
