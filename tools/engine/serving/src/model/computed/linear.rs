//! Multiplication by a weight matrix, the same for a row whatever the other rows are.
//!
//! candle multiplies with the crate gemm, which takes another path (and so another order of the
//! sum) by the number of rows: for one, for fewer than there are columns, for more than 64. So
//! there is one number only: [`ROWS`] at a time, the last ones filled up with zeros. A
//! multiplication by a weight then always has the same shape. That a row's result is the same to
//! the bit is tested below, over many numbers of rows. The price is that a weight is read once for
//! [`ROWS`] rows, not once a batch.

use candle_core::{Result, Tensor};

/// Rows of every multiplication.
const ROWS: usize = 16;

/// A weight matrix, `[out, in]` as checkpoints have it.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
}

impl Linear {
    /// Of a matrix `[out, in]`.
    #[must_use]
    pub const fn new(weight: Tensor) -> Self {
        Self { weight }
    }

    /// `rows · weightᵀ` of `[rows, in]`.
    ///
    /// # Errors
    /// The shapes do not fit.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        let count = rows.dim(0)?;
        let weight = self.weight.t()?;
        let mut products = Vec::with_capacity(count.div_ceil(ROWS));
        for from in (0..count).step_by(ROWS) {
            let part = (count - from).min(ROWS);
            let some = rows.narrow(0, from, part)?;
            let some = some.pad_with_zeros(0, 0, ROWS - part)?.contiguous()?;
            products.push(some.matmul(&weight)?.narrow(0, 0, part)?);
        }
        match products.len() {
            1 => products.remove(0).contiguous(),
            _ => Tensor::cat(&products, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, IndexOp as _};

    use super::*;

    #[test]
    fn a_row_comes_out_the_same_to_the_bit_whatever_the_other_rows_are() {
        for (width, out) in [
            (48, 4),
            (48, 32),
            (48, 80),
            (64, 260),
            (130, 33),
            (1000, 96),
            (1408, 64),
            (3000, 17),
        ] {
            let weight = Tensor::randn(0_f32, 1.0, (out, width), &Device::Cpu).unwrap();
            let linear = Linear::new(weight);
            let rows = Tensor::randn(0_f32, 1.0, (150, width), &Device::Cpu).unwrap();
            let alone: Vec<Vec<f32>> = (0..150)
                .map(|row| {
                    let one = linear.forward(&rows.i(row..=row).unwrap()).unwrap();
                    one.flatten_all().unwrap().to_vec1().unwrap()
                })
                .collect();
            for (from, count) in [
                (0, 2),
                (3, 7),
                (1, 8),
                (5, 9),
                (0, 63),
                (2, 64),
                (0, 65),
                (10, 128),
                (0, 150),
            ] {
                let together = linear
                    .forward(&rows.i(from..from + count).unwrap())
                    .unwrap();
                assert_eq!(together.dtype(), DType::F32);
                let together: Vec<Vec<f32>> = together.to_vec2().unwrap();
                for (index, row) in together.iter().enumerate() {
                    let same = row
                        .iter()
                        .zip(&alone[from + index])
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{width}x{out}: row {index} of {count}");
                }
            }
        }
    }
}
