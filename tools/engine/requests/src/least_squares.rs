//! Least squares without negative coefficients, from normal equations of a few unknowns.

pub(crate) fn product<const N: usize>(x: &[f64; N], y: &[f64; N]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Returns the solution without negative values that has the least squares, or `None` if there is
/// none. Tries each subset of the unknowns and takes the others as zero, so the result is exact.
/// Columns count as dependent if a pivot is at most `tolerance` times its diagonal element.
pub(crate) fn non_negative<const N: usize>(
    normal: &[[f64; N]; N],
    right: &[f64; N],
    tolerance: f64,
) -> Option<[f64; N]> {
    let cost = |x: &[f64; N]| -> f64 {
        let quadratic: f64 = (0..N).map(|at| x[at] * product(&normal[at], x)).sum();
        quadratic - 2.0 * product(right, x)
    };
    let solutions = (1..1_u32 << N).filter_map(|set| solve(normal, right, set, tolerance));
    solutions
        .filter(|x| x.iter().all(|value| *value >= 0.0))
        .min_by(|x, y| cost(x).total_cmp(&cost(y)))
}

/// Solves the rows and columns in `set` by Gaussian elimination with pivots; other results are
/// zero. Returns `None` if columns depend on each other. A smaller set has the same solution then.
fn solve<const N: usize>(
    normal: &[[f64; N]; N],
    right: &[f64; N],
    set: u32,
    tolerance: f64,
) -> Option<[f64; N]> {
    let at: Vec<usize> = (0..N).filter(|index| set >> index & 1 == 1).collect();
    let n = at.len();
    let mut m: Vec<([f64; N], f64)> = Vec::with_capacity(n);
    for row in &at {
        let cell = |column: usize| at.get(column).map_or(0.0, |column| normal[*row][*column]);
        m.push((std::array::from_fn(cell), right[*row]));
    }
    for column in 0..n {
        let size = |row: &usize| m[*row].0[column].abs();
        let pivot = (column..n).max_by(|x, y| size(x).total_cmp(&size(y)))?;
        if size(&pivot) <= tolerance * normal[at[column]][at[column]] {
            return None;
        }
        m.swap(column, pivot);
        let (pivot_row, pivot_right) = m[column];
        for (row, (cells, right)) in m.iter_mut().enumerate() {
            if row != column {
                let factor = cells[column] / pivot_row[column];
                for (cell, pivot) in cells.iter_mut().zip(&pivot_row).skip(column) {
                    *cell -= factor * pivot;
                }
                *right -= factor * pivot_right;
            }
        }
    }
    let mut x = [0.0; N];
    for (row, index) in at.iter().enumerate() {
        x[*index] = m[row].1 / m[row].0[row];
    }
    Some(x)
}
