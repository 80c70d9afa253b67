//! The experts of a Mixtral-shaped layer: a router, and the feed-forward networks of which each token takes a few.
//!
//! Experts may be elsewhere: [`ExpertPeers`] takes a layer's tokens to the processes that hold their experts and brings back what those made of them
//! (the two all-to-alls of expert parallelism). Contributions are added in ascending order of the expert, wherever each was computed, so that the sum
//! is the same to the bit.

use std::collections::BTreeMap;

use candle_core::{D, Device, Result, Tensor, bail};

use super::linear::Linear;
use super::shape::ModelShape;
use super::weights::{Weights, WeightsError};

/// A gated feed-forward network: `down(silu(gate(x)) · up(x))`.
#[derive(Clone, Debug)]
pub struct FeedForward {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// Reads the three matrices; `names` are gate, up, down.
    ///
    /// # Errors
    /// One is not there.
    pub fn load(
        weights: &Weights,
        names: [&str; 3],
        shape: &ModelShape,
        device: &Device,
    ) -> std::result::Result<Self, WeightsError> {
        let [gate, up, down] = names;
        Ok(Self {
            gate: Linear::new(weights.matrix(gate, shape.ffn, shape.hidden, device)?),
            up: Linear::new(weights.matrix(up, shape.ffn, shape.hidden, device)?),
            down: Linear::new(weights.matrix(down, shape.hidden, shape.ffn, device)?),
        })
    }

    /// Of rows `[n, hidden]`.
    ///
    /// # Errors
    /// The shapes do not fit.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        let gated = (self.gate.forward(rows)?.silu()? * self.up.forward(rows)?)?;
        self.down.forward(&gated)
    }
}

/// The experts that this process holds, by layer and number.
#[derive(Debug, Default)]
pub struct ExpertBank {
    layers: Vec<BTreeMap<usize, FeedForward>>,
}

impl ExpertBank {
    /// Reads those experts that `holds` says yes to.
    ///
    /// # Errors
    /// A weight is not there.
    pub fn load(
        weights: &Weights,
        shape: &ModelShape,
        holds: &dyn Fn(usize) -> bool,
        device: &Device,
    ) -> std::result::Result<Self, WeightsError> {
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let mut held = BTreeMap::new();
            for expert in (0..shape.moe.map_or(0, |moe| moe.experts)).filter(|e| holds(*e)) {
                let at = format!("model.layers.{layer}.block_sparse_moe.experts.{expert}");
                let [gate, up, down] = ["w1", "w3", "w2"].map(|w| format!("{at}.{w}.weight"));
                let names = [gate.as_str(), up.as_str(), down.as_str()];
                held.insert(expert, FeedForward::load(weights, names, shape, device)?);
            }
            layers.push(held);
        }
        Ok(Self { layers })
    }

    /// Whether this process holds an expert.
    #[must_use]
    pub fn holds(&self, expert: usize) -> bool {
        self.layers.iter().any(|layer| layer.contains_key(&expert))
    }

    /// What an expert of a layer makes of rows.
    ///
    /// # Errors
    /// It is not here.
    pub fn run(&self, layer: usize, expert: usize, rows: &Tensor) -> Result<Tensor> {
        let network = self.layers.get(layer).and_then(|held| held.get(&expert));
        match network {
            Some(network) => network.forward(rows),
            None => bail!("expert {expert} of layer {layer} is not held here"),
        }
    }
}

/// Rows for one expert, as they go to the process that holds it, and as they come back.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRows {
    /// Which.
    pub expert: usize,
    /// `rows × hidden` numbers.
    pub numbers: Vec<f32>,
}

/// Where the experts are that this process does not hold.
pub trait ExpertPeers {
    /// Takes the rows on their way; answers come with [`ExpertPeers::collect`]. Both once a layer, also with nothing to say.
    ///
    /// # Errors
    /// A peer is gone.
    fn dispatch(&mut self, layer: usize, rows: Vec<ExpertRows>) -> Result<()>;

    /// What the experts made of them: the same experts with as many rows.
    ///
    /// # Errors
    /// A peer is gone.
    fn collect(&mut self, layer: usize) -> Result<Vec<ExpertRows>>;
}

/// All experts are held here.
#[derive(Clone, Copy, Debug)]
pub struct AllLocal;

impl ExpertPeers for AllLocal {
    fn dispatch(&mut self, layer: usize, rows: Vec<ExpertRows>) -> Result<()> {
        match rows.first() {
            Some(rows) => bail!("expert {} of layer {layer} is held nowhere", rows.expert),
            None => Ok(()),
        }
    }

    fn collect(&mut self, _layer: usize) -> Result<Vec<ExpertRows>> {
        Ok(Vec::new())
    }
}

/// The router of a layer.
#[derive(Clone, Debug)]
pub struct Router {
    gate: Linear,
    per_token: usize,
}

/// Of one expert: the rows that go to it, with their weights.
type Assigned = BTreeMap<usize, (Vec<u32>, Vec<f32>)>;

impl Router {
    /// Reads the router of a layer.
    ///
    /// # Errors
    /// It is not there.
    pub fn load(
        weights: &Weights,
        layer: usize,
        shape: &ModelShape,
        device: &Device,
    ) -> std::result::Result<Option<Self>, WeightsError> {
        let Some(moe) = shape.moe else {
            return Ok(None);
        };
        let name = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        let gate = weights.matrix(&name, moe.experts, shape.hidden, device)?;
        Ok(Some(Self {
            gate: Linear::new(gate),
            per_token: moe.per_token,
        }))
    }

    /// The likeliest experts of each row, their probabilities normalised to 1 among them (as Mixtral does); the lower number where they tie.
    fn assign(&self, rows: &Tensor) -> Result<Assigned> {
        let odds = candle_nn::ops::softmax(&self.gate.forward(rows)?, D::Minus1)?;
        let odds: Vec<Vec<f32>> = odds.to_vec2()?;
        let mut assigned = Assigned::new();
        for (row, odds) in odds.iter().enumerate() {
            let mut order: Vec<usize> = (0..odds.len()).collect();
            order.sort_by(|&a, &b| odds[b].total_cmp(&odds[a]).then(a.cmp(&b)));
            order.truncate(self.per_token);
            let sum: f32 = order.iter().map(|&expert| odds[expert]).sum();
            for expert in order {
                let (to, weights) = assigned.entry(expert).or_default();
                to.push(row as u32);
                weights.push(odds[expert] / sum);
            }
        }
        Ok(assigned)
    }

    /// What the experts together make of rows `[n, hidden]`.
    ///
    /// # Errors
    /// An expert cannot be reached.
    pub fn forward(
        &self,
        layer: usize,
        rows: &Tensor,
        bank: &ExpertBank,
        peers: &mut dyn ExpertPeers,
    ) -> Result<Tensor> {
        let assigned = self.assign(rows)?;
        let (count, hidden) = rows.dims2()?;
        let device = rows.device();
        let of = |to: &[u32]| -> Result<Tensor> {
            let index = Tensor::from_slice(to, to.len(), device)?;
            rows.index_select(&index, 0)
        };
        let mut away = Vec::new();
        for (&expert, (to, _)) in assigned.iter().filter(|(e, _)| !bank.holds(**e)) {
            let numbers = of(to)?.flatten_all()?.to_vec1()?;
            away.push(ExpertRows { expert, numbers });
        }
        peers.dispatch(layer, away)?;
        let mut made = BTreeMap::new();
        for (&expert, (to, _)) in assigned.iter().filter(|(e, _)| bank.holds(**e)) {
            made.insert(expert, bank.run(layer, expert, &of(to)?)?);
        }
        for ExpertRows { expert, numbers } in peers.collect(layer)? {
            let rows = assigned.get(&expert).map_or(0, |(to, _)| to.len());
            if rows == 0 || numbers.len() != rows * hidden {
                bail!(
                    "expert {expert} of layer {layer} answered {} numbers for {rows} rows",
                    numbers.len()
                );
            }
            made.insert(expert, Tensor::from_vec(numbers, (rows, hidden), device)?);
        }
        let mut sum = Tensor::zeros((count, hidden), rows.dtype(), device)?;
        for (expert, (to, weights)) in assigned {
            let Some(made) = made.get(&expert) else {
                bail!("expert {expert} of layer {layer} did not answer");
            };
            let weights = Tensor::from_vec(weights, (to.len(), 1), device)?;
            let index = Tensor::from_slice(&to, to.len(), device)?;
            sum = sum.index_add(&index, &made.broadcast_mul(&weights)?, 0)?;
        }
        Ok(sum)
    }
}
