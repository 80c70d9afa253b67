//! The complete model: embedding, layers of attention and feed-forward networks, and the output of
//! the rows for which it is wanted.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};

use super::attention::{Heads, Rows, attend};
use super::experts::{ExpertBank, FeedForward, Router};
use super::linear::Linear;
use super::pages::Pages;
use super::weights::Weights;
use crate::model::{
    self, ExpertPeers, Experts, KvCache, Model, ModelShape, Piece, Watch, check_pieces, fail,
};
use crate::schedule::Room;

struct Norm {
    factors: Tensor,
    eps: f32,
}

impl Norm {
    fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&rows.contiguous()?, &self.factors, self.eps)
    }
}

enum Network {
    Dense(FeedForward),
    Experts(Router),
}

struct Layer {
    before_attention: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    before_network: Norm,
    network: Network,
}

/// The rows of one batch, with what all layers need of them.
struct BatchRows {
    /// The cosines and sines of the rows' positions.
    rotation: (Tensor, Tensor),
    rows: Rows,
    /// Where the rows' own keys and values go.
    slots: Vec<u32>,
}

/// A model with its weights and its KV cache.
pub struct Decoder {
    shape: ModelShape,
    device: Device,
    pages: Pages,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    bank: Arc<ExpertBank>,
    cos: Tensor,
    sin: Tensor,
    identity: [u8; 16],
}

impl Decoder {
    /// Draws the weights and makes an empty KV cache. Of the experts it has those for
    /// which `holds` returns true.
    pub fn load(
        shape: &ModelShape,
        holds: &dyn Fn(usize) -> bool,
        device: &Device,
        room: Room,
    ) -> Result<Self> {
        let weights = Weights(shape.weights.seed);
        let hidden = shape.hidden;
        let norm = || -> Result<Norm> {
            Ok(Norm {
                factors: Tensor::ones(hidden, DType::F32, device)?,
                eps: shape.norm_eps as f32,
            })
        };
        let embedding = weights.matrix("model.embed_tokens.weight", shape.vocab, hidden, device)?;
        let head = if shape.tied_embeddings {
            embedding.clone()
        } else {
            weights.matrix("lm_head.weight", shape.vocab, hidden, device)?
        };
        let layers = (0..shape.layers)
            .map(|layer| load_layer(weights, layer, shape, device, &norm))
            .collect::<Result<_>>()?;
        let bank = Arc::new(ExpertBank::load(weights, shape, holds, device)?);
        let (cos, sin) = rotary(shape, device)?;
        Ok(Self {
            shape: shape.clone(),
            device: device.clone(),
            pages: Pages::new(shape, room, device)?,
            embedding,
            layers,
            norm: norm()?,
            head: Linear(head),
            bank,
            cos,
            sin,
            identity: model::identity(shape, &shape.weights.seed.to_le_bytes()),
        })
    }

    fn attention(&self, number: usize, normed: &Tensor, batch: &BatchRows) -> Result<Tensor> {
        let BatchRows { rotation, rows, slots } = batch;
        let (layer, pages) = (&self.layers[number], &self.pages);
        let (heads, count) = (rows.heads, slots.len());
        let turned = |rows: &Tensor, heads: usize, width: usize| -> Result<Tensor> {
            let rows = rows.reshape((1, count, heads, width))?.contiguous()?;
            candle_nn::rotary_emb::rope_thd(&rows, &rotation.0, &rotation.1)?
                .reshape((count, heads * width))
        };
        let queries = turned(&layer.query.forward(normed)?, heads.heads, heads.width)?;
        let keys = turned(&layer.key.forward(normed)?, heads.kv_heads, heads.width)?;
        let values = layer.value.forward(normed)?;
        pages.write(number, slots, &keys, &values)?;
        let (keys, values) = pages.layer(number);
        let attended = attend(&queries.contiguous()?, keys, values, rows)?;
        layer.output.forward(&attended)
    }

    fn outputs(&self, pieces: &[Piece], stream: &Tensor) -> Result<Vec<Vec<f32>>> {
        let mut last = Vec::new();
        let mut row = 0;
        for piece in pieces {
            row += piece.tokens.len() as u32;
            if piece.wants_output {
                last.push(row - 1);
            }
        }
        if last.is_empty() {
            return Ok(Vec::new());
        }
        let index = Tensor::from_slice(&last, last.len(), &self.device)?;
        let rows = self.norm.forward(&stream.index_select(&index, 0)?)?;
        self.head.forward(&rows)?.to_dtype(DType::F32)?.to_vec2()
    }
}

impl Model for Decoder {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn kv(&self) -> &dyn KvCache {
        &self.pages
    }

    fn experts(&self) -> Arc<dyn Experts> {
        Arc::clone(&self.bank) as Arc<dyn Experts>
    }

    fn forward(
        &self,
        pieces: &[Piece],
        watch: &mut dyn Watch,
        peers: &mut dyn ExpertPeers,
    ) -> model::Result<Vec<Vec<f32>>> {
        check_pieces(&self.shape, pieces)?;
        let pages = &self.pages;
        let tokens: Vec<u32> = pieces.iter().flat_map(|p| p.tokens.iter().copied()).collect();
        let of_piece = |(number, p): (usize, &Piece)| {
            (p.start..p.start + p.tokens.len()).map(move |at| (number, at))
        };
        let rows = Rows {
            rows: pieces.iter().enumerate().flat_map(of_piece).collect(),
            pages: pieces.iter().map(|p| p.blocks.clone()).collect(),
            block_tokens: pages.block_tokens(),
            heads: Heads {
                heads: self.shape.heads,
                kv_heads: self.shape.kv_heads(),
                width: self.shape.head_dim(),
            },
        };
        if !rows.fits(usize::MAX) {
            fail!("a piece has fewer blocks than its tokens need");
        }
        let slots = rows.own_slots();
        let positions: Vec<u32> = rows.rows.iter().map(|(_, at)| *at as u32).collect();
        let positions = Tensor::from_vec(positions, tokens.len(), &self.device)?;
        let rotation =
            (self.cos.index_select(&positions, 0)?, self.sin.index_select(&positions, 0)?);
        let batch = BatchRows { rotation, rows, slots };
        let index = Tensor::from_slice(&tokens, tokens.len(), &self.device)?;
        let mut stream = self.embedding.index_select(&index, 0)?;
        for (number, layer) in self.layers.iter().enumerate() {
            watch.before_layer(number, pages)?;
            let normed = layer.before_attention.forward(&stream)?;
            let attended = self.attention(number, &normed, &batch)?;
            stream = (stream + attended)?;
            let normed = layer.before_network.forward(&stream)?;
            let made = match &layer.network {
                Network::Dense(network) => network.forward(&normed)?,
                Network::Experts(router) => router.forward(number, &normed, &self.bank, peers)?,
            };
            stream = (stream + made)?;
            watch.after_layer(number, pages)?;
        }
        Ok(self.outputs(pieces, &stream)?)
    }
}

fn load_layer(
    weights: Weights,
    layer: usize,
    shape: &ModelShape,
    device: &Device,
    norm: &dyn Fn() -> Result<Norm>,
) -> Result<Layer> {
    let at = format!("model.layers.{layer}");
    let (hidden, kv) = (shape.hidden, shape.kv_width());
    let attention = shape.heads * shape.head_dim();
    let matrix = |name: &str, out: usize, width: usize| {
        let name = format!("{at}.self_attn.{name}_proj.weight");
        weights.matrix(&name, out, width, device).map(Linear)
    };
    let network = match Router::load(weights, layer, shape, device)? {
        Some(router) => Network::Experts(router),
        None => {
            let names = ["gate", "up", "down"].map(|part| format!("{at}.mlp.{part}_proj.weight"));
            Network::Dense(FeedForward::load(weights, &names, shape, device)?)
        }
    };
    Ok(Layer {
        before_attention: norm()?,
        query: matrix("q", attention, hidden)?,
        key: matrix("k", kv, hidden)?,
        value: matrix("v", kv, hidden)?,
        output: matrix("o", hidden, attention)?,
        before_network: norm()?,
        network,
    })
}

/// Returns cosines and sines `[context, head_dim / 2]` of the angles position × theta^(−2i/d).
fn rotary(shape: &ModelShape, device: &Device) -> Result<(Tensor, Tensor)> {
    let half = shape.head_dim() / 2;
    let angles: Vec<f64> = (0..shape.context)
        .flat_map(|position| {
            (0..half).map(move |pair| {
                let power = -2.0 * pair as f64 / (2 * half) as f64;
                position as f64 * shape.rope_theta.powf(power)
            })
        })
        .collect();
    let tensor = |of: fn(f64) -> f64| {
        let numbers: Vec<f32> = angles.iter().map(|angle| of(*angle) as f32).collect();
        Tensor::from_vec(numbers, (shape.context, half), device)
    };
    Ok((tensor(f64::cos)?, tensor(f64::sin)?))
}
