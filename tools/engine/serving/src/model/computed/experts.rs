//! The experts of a Mixtral-shaped layer: a router, and feed-forward networks of which each token
//! uses a few.
//!
//! Other processes may hold experts. [`ExpertPeers`] sends a layer's tokens to these processes and
//! returns the outputs (the two all-to-alls of expert parallelism). Outputs are added in ascending
//! order of the experts, wherever they were computed, so that the sum is identical to the bit.

use std::collections::BTreeMap;

use candle_core::{D, Device, Result, Tensor, bail};

use super::linear::Linear;
use super::weights::Weights;
use crate::model::{self, ExpertPeers, ExpertRows, Experts, ModelShape, fail};

/// A gated feed-forward network: `down(silu(gate(x)) · up(x))`.
pub struct FeedForward {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// Draws the three matrices. `names` are those of gate, up and down.
    pub fn load(
        weights: Weights,
        names: &[String; 3],
        shape: &ModelShape,
        device: &Device,
    ) -> Result<Self> {
        let [gate, up, down] = names;
        Ok(Self {
            gate: Linear(weights.matrix(gate, shape.ffn, shape.hidden, device)?),
            up: Linear(weights.matrix(up, shape.ffn, shape.hidden, device)?),
            down: Linear(weights.matrix(down, shape.hidden, shape.ffn, device)?),
        })
    }

    /// Returns the output for rows `[n, hidden]`.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        let gated = (self.gate.forward(rows)?.silu()? * self.up.forward(rows)?)?;
        self.down.forward(&gated)
    }
}

/// The experts that this process holds, by layer and number.
pub struct ExpertBank {
    layers: Vec<BTreeMap<usize, FeedForward>>,
    hidden: usize,
    device: Device,
}

impl ExpertBank {
    /// Draws the experts for which `holds` returns true.
    pub fn load(
        weights: Weights,
        shape: &ModelShape,
        holds: &dyn Fn(usize) -> bool,
        device: &Device,
    ) -> Result<Self> {
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let mut held = BTreeMap::new();
            for expert in (0..shape.moe.map_or(0, |moe| moe.experts)).filter(|e| holds(*e)) {
                let at = format!("model.layers.{layer}.block_sparse_moe.experts.{expert}");
                let names = ["w1", "w3", "w2"].map(|w| format!("{at}.{w}.weight"));
                held.insert(expert, FeedForward::load(weights, &names, shape, device)?);
            }
            layers.push(held);
        }
        Ok(Self { layers, hidden: shape.hidden, device: device.clone() })
    }

    pub fn holds(&self, expert: usize) -> bool {
        self.layers.iter().any(|layer| layer.contains_key(&expert))
    }

    /// Returns an expert's output for rows.
    /// Fails if this process does not hold the expert.
    pub fn compute(&self, layer: usize, expert: usize, rows: &Tensor) -> Result<Tensor> {
        let network = self.layers.get(layer).and_then(|held| held.get(&expert));
        match network {
            Some(network) => network.forward(rows),
            None => bail!("expert {expert} of layer {layer} is not held here"),
        }
    }
}

impl Experts for ExpertBank {
    fn run(&self, layer: usize, groups: Vec<ExpertRows>) -> model::Result<Vec<ExpertRows>> {
        let run = |group: ExpertRows| {
            let numbers = numbers(&group.rows);
            let count = numbers.len() / self.hidden;
            let rows = Tensor::from_vec(numbers, (count, self.hidden), &self.device)?;
            let made = self.compute(layer, group.expert, &rows)?;
            Ok(ExpertRows { expert: group.expert, rows: bits(&made)? })
        };
        groups.into_iter().map(run).collect()
    }
}

/// Returns the numbers of rows in the form that goes to another process.
fn bits(rows: &Tensor) -> Result<Vec<u32>> {
    let numbers: Vec<f32> = rows.flatten_all()?.to_vec1()?;
    Ok(numbers.into_iter().map(f32::to_bits).collect())
}

/// Returns the numbers of rows that came from another process.
fn numbers(bits: &[u32]) -> Vec<f32> {
    bits.iter().copied().map(f32::from_bits).collect()
}

pub struct Router {
    gate: Linear,
    per_token: usize,
}

/// The rows for each expert, with their weights.
type Assigned = BTreeMap<usize, (Vec<u32>, Vec<f32>)>;

impl Router {
    /// Draws the router of a layer.
    pub fn load(
        weights: Weights,
        layer: usize,
        shape: &ModelShape,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some(moe) = shape.moe else { return Ok(None) };
        let name = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        let gate = weights.matrix(&name, moe.experts, shape.hidden, device)?;
        Ok(Some(Self { gate: Linear(gate), per_token: moe.per_token }))
    }

    /// Returns the likeliest experts of each row. Their probabilities are normalised to a sum of 1,
    /// as in Mixtral. Of equal experts the lower number wins.
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

    /// Returns the experts' combined output for rows `[n, hidden]`.
    pub fn forward(
        &self,
        layer: usize,
        rows: &Tensor,
        bank: &ExpertBank,
        peers: &mut dyn ExpertPeers,
    ) -> model::Result<Tensor> {
        let assigned = self.assign(rows)?;
        let (count, hidden) = rows.dims2()?;
        let device = rows.device();
        let of = |to: &[u32]| -> Result<Tensor> {
            let index = Tensor::from_slice(to, to.len(), device)?;
            rows.index_select(&index, 0)
        };
        let mut away = Vec::new();
        for (&expert, (to, _)) in assigned.iter().filter(|(e, _)| !bank.holds(**e)) {
            let rows = bits(&of(to)?)?;
            away.push(ExpertRows { expert, rows });
        }
        peers.dispatch(layer, away)?;
        let mut made = BTreeMap::new();
        for (&expert, (to, _)) in assigned.iter().filter(|(e, _)| bank.holds(**e)) {
            made.insert(expert, bank.compute(layer, expert, &of(to)?)?);
        }
        for group in peers.collect(layer)? {
            let (expert, numbers) = (group.expert, numbers(&group.rows));
            let rows = assigned.get(&expert).map_or(0, |(to, _)| to.len());
            if rows == 0 || numbers.len() != rows * hidden {
                let count = numbers.len();
                fail!("expert {expert} of layer {layer} answered {count} numbers for {rows} rows");
            }
            made.insert(expert, Tensor::from_vec(numbers, (rows, hidden), device)?);
        }
        let mut sum = Tensor::zeros((count, hidden), rows.dtype(), device)?;
        for (expert, (to, weights)) in assigned {
            let Some(made) = made.get(&expert) else {
                fail!("expert {expert} of layer {layer} did not answer");
            };
            let weights = Tensor::from_vec(weights, (to.len(), 1), device)?;
            let index = Tensor::from_slice(&to, to.len(), device)?;
            sum = sum.index_add(&index, &made.broadcast_mul(&weights)?, 0)?;
        }
        Ok(sum)
    }
}
