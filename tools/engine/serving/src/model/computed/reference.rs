//! A slow implementation of the model, with which [`Decoder`] is compared. It uses double
//! precision, a whole sequence at once, no cache, and no tensor crate for arithmetic.

use candle_core::Device;

use super::decoder::Decoder;
use super::weights::Weights;
use crate::model::shape::tests::{piece, tiny};
use crate::model::{AllLocal, Model as _, ModelShape, Unwatched, greedy};
use crate::schedule::Room;

type Matrix = Vec<Vec<f64>>;

fn matrix(weights: Weights, name: &str, out: usize, width: usize) -> Matrix {
    let tensor = weights.matrix(name, out, width, &Device::Cpu).unwrap();
    let rows: Vec<Vec<f32>> = tensor.to_vec2().unwrap();
    rows.iter().map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
}

fn times(matrix: &Matrix, vector: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| row.iter().zip(vector).map(|(a, b)| a * b).sum()).collect()
}

fn norm(vector: &[f64], eps: f64) -> Vec<f64> {
    let mean = vector.iter().map(|x| x * x).sum::<f64>() / vector.len() as f64;
    vector.iter().map(|x| x / (mean + eps).sqrt()).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let highest = scores.iter().copied().fold(f64::MIN, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

fn turn(vector: &mut [f64], heads: usize, position: usize, theta: f64) {
    let width = vector.len() / heads;
    let half = width / 2;
    for head in vector.chunks_mut(width) {
        for pair in 0..half {
            let angle = position as f64 / theta.powf(2.0 * pair as f64 / width as f64);
            let (a, b) = (head[pair], head[pair + half]);
            head[pair] = a * angle.cos() - b * angle.sin();
            head[pair + half] = b * angle.cos() + a * angle.sin();
        }
    }
}

fn network(shape: &ModelShape, weights: Weights, names: [String; 3], x: &[f64]) -> Vec<f64> {
    let [gate, up, down] = names;
    let gate = times(&matrix(weights, &gate, shape.ffn, shape.hidden), x);
    let up = times(&matrix(weights, &up, shape.ffn, shape.hidden), x);
    let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    times(&matrix(weights, &down, shape.hidden, shape.ffn), &inner)
}

fn feed_forward(shape: &ModelShape, weights: Weights, layer: usize, x: &[f64]) -> Vec<f64> {
    let at = format!("model.layers.{layer}");
    let Some(moe) = shape.moe else {
        let names = ["gate", "up", "down"].map(|part| format!("{at}.mlp.{part}_proj.weight"));
        return network(shape, weights, names, x);
    };
    let at = format!("{at}.block_sparse_moe");
    let router = matrix(weights, &format!("{at}.gate.weight"), moe.experts, shape.hidden);
    let odds = softmax(&times(&router, x));
    let mut order: Vec<usize> = (0..moe.experts).collect();
    order.sort_by(|a, b| odds[*b].total_cmp(&odds[*a]));
    order.truncate(moe.per_token);
    let sum: f64 = order.iter().map(|e| odds[*e]).sum();
    let mut out = vec![0.0; shape.hidden];
    for expert in order {
        let names = ["w1", "w3", "w2"].map(|w| format!("{at}.experts.{expert}.{w}.weight"));
        for (out, y) in out.iter_mut().zip(network(shape, weights, names, x)) {
            *out += odds[expert] / sum * y;
        }
    }
    out
}

fn reference(shape: &ModelShape, tokens: &[u32]) -> Vec<f64> {
    let weights = Weights(shape.weights.seed);
    let (heads, kv_heads, width) = (shape.heads, shape.kv_heads(), shape.head_dim());
    let embedding = matrix(weights, "model.embed_tokens.weight", shape.vocab, shape.hidden);
    let mut stream: Matrix = tokens.iter().map(|t| embedding[*t as usize].clone()).collect();
    for layer in 0..shape.layers {
        let projection = |name: &str, out: usize, width: usize| {
            let name = format!("model.layers.{layer}.self_attn.{name}_proj.weight");
            matrix(weights, &name, out, width)
        };
        let query = projection("q", heads * width, shape.hidden);
        let key = projection("k", kv_heads * width, shape.hidden);
        let value = projection("v", kv_heads * width, shape.hidden);
        let output = projection("o", shape.hidden, heads * width);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = norm(x, shape.norm_eps);
            let mut q = times(&query, &normed);
            let mut k = times(&key, &normed);
            turn(&mut q, heads, position, shape.rope_theta);
            turn(&mut k, kv_heads, position, shape.rope_theta);
            keys.push(k);
            values.push(times(&value, &normed));
            let mut attended = vec![0.0; heads * width];
            for head in 0..heads {
                let of = head / (heads / kv_heads) * width;
                let q = &q[head * width..(head + 1) * width];
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|k| {
                        let dot: f64 = q.iter().zip(&k[of..of + width]).map(|(a, b)| a * b).sum();
                        dot / (width as f64).sqrt()
                    })
                    .collect();
                for (share, v) in softmax(&scores).iter().zip(&values) {
                    for i in 0..width {
                        attended[head * width + i] += share * v[of + i];
                    }
                }
            }
            for (x, y) in x.iter_mut().zip(times(&output, &attended)) {
                *x += y;
            }
            let normed = norm(x, shape.norm_eps);
            for (x, y) in x.iter_mut().zip(feed_forward(shape, weights, layer, &normed)) {
                *x += y;
            }
        }
    }
    let last = norm(stream.last().unwrap(), shape.norm_eps);
    times(&matrix(weights, "lm_head.weight", shape.vocab, shape.hidden), &last)
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i * 37 + 11) % 256).collect()
}

/// Loads a model with a KV cache of this many blocks of 8 tokens.
fn load(shape: &ModelShape, blocks: u32) -> candle_core::Result<Decoder> {
    let room = Room { blocks, block_tokens: 8 };
    Decoder::load(shape, &|_| true, &Device::Cpu, room)
}

#[test]
fn outputs_are_those_of_the_slow_reference() {
    for moe in [false, true] {
        let shape = tiny(moe);
        let model = load(&shape, 8).unwrap();
        let tokens = prompt(29);
        let outputs = model
            .forward(&[piece(&tokens, 0, &[3, 1, 7, 0])], &mut Unwatched, &mut AllLocal)
            .unwrap();
        let expected = reference(&shape, &tokens);
        let scale = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        assert!(scale > 0.1, "the model says nothing: {scale}");
        for (ours, theirs) in outputs[0].iter().zip(&expected) {
            assert!((f64::from(*ours) - theirs).abs() < 1e-4 * scale, "moe {moe}: {ours} {theirs}");
        }
        let best = expected
            .iter()
            .position(|x| x == expected.iter().max_by(|a, b| a.total_cmp(b)).unwrap());
        assert_eq!(Some(greedy(&outputs[0]) as usize), best);
    }
}

#[test]
fn a_tokens_outputs_are_the_same_to_the_bit_in_any_chunks_and_company() {
    for moe in [false, true] {
        let shape = tiny(moe);
        let tokens = prompt(40);
        let other = prompt(90);
        let bits = |outputs: &[f32]| outputs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let whole = {
            let model = load(&shape, 5).unwrap();
            let all = [piece(&tokens, 0, &[0, 1, 2, 3, 4])];
            bits(&model.forward(&all, &mut Unwatched, &mut AllLocal).unwrap()[0])
        };
        for chunk in [1, 3, 8, 17, 39] {
            let model = load(&shape, 32).unwrap();
            let own = [9, 2, 30, 17, 5];
            let others: Vec<u32> = (18..30).collect();
            let mut last = Vec::new();
            for (number, part) in tokens.chunks(chunk).enumerate() {
                let start = number * chunk;
                let mut batch = vec![piece(part, start, &own)];
                // The piece is preceded by another sequence, of a different length each time.
                let at = number * 7 % 60;
                if number % 3 != 0 {
                    batch.insert(0, piece(&other[at..at + 1 + number * 11 % 20], at, &others));
                }
                let outputs = model.forward(&batch, &mut Unwatched, &mut AllLocal).unwrap();
                last = bits(outputs.last().unwrap());
            }
            assert_eq!(last, whole, "moe {moe}, chunks of {chunk}");
        }
    }
}
