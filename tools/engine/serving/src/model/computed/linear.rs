//! Multiplication by a weight matrix, with a result for each row that is independent of other rows.
//!
//! candle uses the crate gemm, which chooses its path (and so the order of the sum) by the number
//! of rows: one, fewer than columns, or more than 64. So this module always multiplies [`ROWS`]
//! rows and fills up the last ones with zeros. A test checks for many numbers of rows that a row's
//! result is identical to the bit. The cost is that a weight is read once for [`ROWS`] rows instead
//! of once for a batch.

use candle_core::{Result, Tensor};

/// Number of rows of every multiplication.
const ROWS: usize = 16;

/// A weight matrix, with the shape `[out, in]` of checkpoints.
pub struct Linear(pub Tensor);

impl Linear {
    /// Returns `rows · weightᵀ` for rows `[rows, in]`.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        let count = rows.dim(0)?;
        let weight = self.0.t()?;
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
        for (width, out) in
            [(48, 4), (48, 32), (48, 80), (64, 260), (130, 33), (1000, 96), (1408, 64), (3000, 17)]
        {
            let weight = Tensor::randn(0_f32, 1.0, (out, width), &Device::Cpu).unwrap();
            let linear = Linear(weight);
            let rows = Tensor::randn(0_f32, 1.0, (150, width), &Device::Cpu).unwrap();
            let alone: Vec<Vec<f32>> = (0..150)
                .map(|row| {
                    let one = linear.forward(&rows.i(row..=row).unwrap()).unwrap();
                    one.flatten_all().unwrap().to_vec1().unwrap()
                })
                .collect();
            for (from, count) in
                [(0, 2), (3, 7), (1, 8), (5, 9), (0, 63), (2, 64), (0, 65), (10, 128), (0, 150)]
            {
                let together = linear.forward(&rows.i(from..from + count).unwrap()).unwrap();
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
