//! Attention of ragged rows over a paged KV cache.
//!
//! On CPUs it is an operation of this module. Each row reads the keys and values of its context in
//! place, in order of position. So its result does not depend on the batch, and nothing is gathered
//! or padded. Elsewhere it consists of candle's operations (gather, multiply, mask, softmax,
//! multiply) for each sequence. A test compares both.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

/// Count of numbers that are multiplied in parallel.
const LANES: usize = 8;

/// The rows of a batch, with their sequences and the blocks of their contexts.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The sequence (an index into `pages`) of each row, and the position in it.
    pub rows: Vec<(usize, usize)>,
    /// The blocks of each sequence, in order.
    pub pages: Vec<Vec<u32>>,
    pub block_tokens: usize,
    pub heads: Heads,
}

impl Rows {
    fn slot(&self, sequence: usize, position: usize) -> usize {
        let block = self.pages[sequence][position / self.block_tokens] as usize;
        block * self.block_tokens + position % self.block_tokens
    }

    /// Returns the slots for the rows' own keys and values.
    pub fn own_slots(&self) -> Vec<u32> {
        self.rows.iter().map(|&(sequence, position)| self.slot(sequence, position) as u32).collect()
    }

    /// Reports whether every position has a block below `blocks`.
    pub fn fits(&self, blocks: usize) -> bool {
        self.rows.iter().all(|&(sequence, position)| {
            self.pages.get(sequence).is_some_and(|pages| {
                position / self.block_tokens < pages.len()
                    && pages.iter().all(|&page| (page as usize) < blocks)
            })
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub width: usize,
}

impl Heads {
    fn scale(self) -> f64 {
        1.0 / (self.width as f64).sqrt()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0_f32; LANES];
    let (a_whole, b_whole) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_whole.remainder(), b_whole.remainder());
    for (a, b) in a_whole.zip(b_whole) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

impl Rows {
    /// Computes all heads of one row.
    fn row(&self, row: usize, query: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) {
        let Heads { heads, kv_heads, width } = self.heads;
        let (sequence, position) = self.rows[row];
        let stride = kv_heads * width;
        let scale = self.heads.scale() as f32;
        let slots: Vec<usize> =
            (0..=position).map(|position| self.slot(sequence, position) * stride).collect();
        let mut scores = vec![0_f32; slots.len()];
        for head in 0..heads {
            let query = &query[head * width..(head + 1) * width];
            let at = head / (heads / kv_heads) * width;
            let mut highest = f32::NEG_INFINITY;
            for (score, &slot) in scores.iter_mut().zip(&slots) {
                *score = dot(query, &keys[slot + at..slot + at + width]) * scale;
                highest = highest.max(*score);
            }
            let mut sum = 0_f32;
            for score in &mut scores {
                *score = (*score - highest).exp();
                sum += *score;
            }
            let out = &mut out[head * width..(head + 1) * width];
            out.fill(0.0);
            for (&score, &slot) in scores.iter().zip(&slots) {
                let value = &values[slot + at..slot + at + width];
                for (out, value) in out.iter_mut().zip(value) {
                    *out += score * value;
                }
            }
            for out in out {
                *out /= sum;
            }
        }
    }
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((from, to)) = layout.contiguous_offsets() else {
        bail!("attention needs contiguous tensors")
    };
    Ok(&storage.as_slice::<f32>()?[from..to])
}

impl CustomOp3 for Rows {
    fn name(&self) -> &'static str {
        "paged-attention"
    }

    fn cpu_fwd(
        &self,
        queries: &CpuStorage,
        queries_layout: &Layout,
        keys: &CpuStorage,
        keys_layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let queries = slice(queries, queries_layout)?;
        let keys = slice(keys, keys_layout)?;
        let values = slice(values, values_layout)?;
        let width = self.heads.heads * self.heads.width;
        let mut out = vec![0_f32; queries.len()];
        out.par_chunks_mut(width)
            .zip(queries.par_chunks(width))
            .enumerate()
            .for_each(|(row, (out, query))| self.row(row, query, keys, values, out));
        Ok((CpuStorage::F32(out), queries_layout.shape().clone()))
    }
}

/// Returns `softmax(q·kᵀ/√d)·v` of `queries` `[rows, heads × width]` over `keys` and `values`
/// `[slots, kv_heads × width]`. Each row uses its sequence up to its own position.
/// Fails if the tensors have other shapes, or a row's block does not exist.
pub fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor, rows: &Rows) -> Result<Tensor> {
    let heads = rows.heads;
    let (count, width) = queries.dims2()?;
    let (slots, kv_width) = keys.dims2()?;
    if count != rows.rows.len()
        || width != heads.heads * heads.width
        || kv_width != heads.kv_heads * heads.width
        || values.dims2()? != (slots, kv_width)
        || !rows.fits(slots / rows.block_tokens)
    {
        bail!(
            "attention: {count} rows of {width} over {slots} slots of {kv_width} do not fit \
             {heads:?}"
        );
    }
    if queries.device().is_cpu() && queries.dtype() == DType::F32 {
        queries.apply_op3_no_bwd(keys, values, rows)
    } else {
        gathered(queries, keys, values, rows)
    }
}

/// Returns the result of [`attend`], computed with candle's operations.
fn gathered(queries: &Tensor, keys: &Tensor, values: &Tensor, rows: &Rows) -> Result<Tensor> {
    let (heads, device) = (rows.heads, queries.device());
    let mut out = Vec::new();
    let mut row = 0;
    while row < rows.rows.len() {
        let (sequence, first) = rows.rows[row];
        let count = rows.rows[row..].iter().take_while(|(other, _)| *other == sequence).count();
        let context = first + count;
        let slots: Vec<u32> =
            (0..context).map(|position| rows.slot(sequence, position) as u32).collect();
        let slots = Tensor::from_vec(slots, context, device)?;
        let split = |tensor: &Tensor| -> Result<Tensor> {
            let tensor = tensor
                .index_select(&slots, 0)?
                .reshape((context, heads.kv_heads, 1, heads.width))?;
            let copies = heads.heads / heads.kv_heads;
            tensor
                .expand((context, heads.kv_heads, copies, heads.width))?
                .reshape((context, heads.heads, heads.width))?
                .transpose(0, 1)?
                .contiguous()
        };
        let query = queries
            .narrow(0, row, count)?
            .reshape((count, heads.heads, heads.width))?
            .transpose(0, 1)?
            .contiguous()?;
        let scores = (query.matmul(&split(keys)?.transpose(1, 2)?)? * heads.scale())?;
        let scores = scores.broadcast_add(&mask(first, count, device)?)?;
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        let attended = weights.matmul(&split(values)?)?;
        let width = heads.heads * heads.width;
        out.push(attended.transpose(0, 1)?.contiguous()?.reshape((count, width))?);
        row += count;
    }
    Tensor::cat(&out, 0)
}

/// Returns a mask `[1, count, first + count]`: 0 at positions that a row may use, else -inf.
fn mask(first: usize, count: usize, device: &Device) -> Result<Tensor> {
    let context = first + count;
    let value =
        |position: usize, row: usize| if position <= first + row { 0.0 } else { f32::NEG_INFINITY };
    let of_row = |row: usize| (0..context).map(move |position| value(position, row));
    let mask: Vec<f32> = (0..count).flat_map(of_row).collect();
    Tensor::from_vec(mask, (1, count, context), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operation_of_our_own_gives_what_the_crates_give() {
        let heads = Heads { heads: 4, kv_heads: 2, width: 12 };
        let device = Device::Cpu;
        let keys = Tensor::randn(0_f32, 1.0, (6 * 4, 24), &device).unwrap();
        let values = Tensor::randn(0_f32, 1.0, (6 * 4, 24), &device).unwrap();
        let rows = Rows {
            rows: vec![(0, 3), (0, 4), (0, 5), (1, 9)],
            pages: vec![vec![4, 1], vec![5, 0, 2]],
            block_tokens: 4,
            heads,
        };
        let queries = Tensor::randn(0_f32, 1.0, (4, 48), &device).unwrap();
        let own = attend(&queries, &keys, &values, &rows).unwrap();
        let other = gathered(&queries, &keys, &values, &rows).unwrap();
        let difference = (own - other).unwrap().abs().unwrap();
        let worst: f32 = difference.max_all().unwrap().to_scalar().unwrap();
        assert!(worst < 1e-5, "{worst}");
    }

    #[test]
    fn a_row_without_a_block_is_an_error_and_no_panic() {
        let heads = Heads { heads: 1, kv_heads: 1, width: 2 };
        let cache = Tensor::zeros((8, 2), DType::F32, &Device::Cpu).unwrap();
        let query = Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap();
        for (position, page) in [(4, 0), (0, 9)] {
            let (rows, pages) = (vec![(0, position)], vec![vec![page]]);
            let rows = Rows { rows, pages, block_tokens: 4, heads };
            assert!(attend(&query, &cache, &cache, &rows).is_err());
        }
    }
}
