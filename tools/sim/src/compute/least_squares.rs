//! Robust non-linear least squares for a few positive parameters: the method of Levenberg and
//! Marquardt on the parameters' logarithms, with numerical derivatives.
//!
//! Residuals are logarithms of (predicted / measured). The cost of each is `2 s² (√(1 + (r/s)²) −
//! 1)`, which is squared for small and absolute for large residuals. One badly chosen kernel thus
//! does not bend the curve. Runs must not use this module, because logarithms differ in the last
//! bit between platforms.

const SCALE: f64 = 0.1;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    start: f64,
    least: f64,
    most: f64,
}

impl Parameter {
    pub(crate) fn new(start: f64, least: f64, most: f64) -> Self {
        Self { start, least, most }
    }
}

pub(crate) fn least_squares<const N: usize>(
    parameters: [Parameter; N],
    residuals: impl Fn(&[f64; N], &mut Vec<f64>),
) -> [f64; N] {
    let values = |logs: &[f64; N]| logs.map(f64::exp);
    let clamp = |logs: [f64; N]| -> [f64; N] {
        std::array::from_fn(|i| logs[i].clamp(parameters[i].least.ln(), parameters[i].most.ln()))
    };
    let mut at = clamp(std::array::from_fn(|i| parameters[i].start.ln()));
    let (mut here, mut there) = (Vec::new(), Vec::new());
    residuals(&values(&at), &mut here);
    let mut damping = 1e-3;
    for _ in 0..500 {
        let (gradient, curvature) = normal_equations(&at, &here, |logs, out| {
            residuals(&values(logs), out);
        });
        let mut improved = false;
        while damping < 1e12 {
            let mut damped = curvature;
            for (i, row) in damped.iter_mut().enumerate() {
                row[i] += damping * row[i].max(1e-9);
            }
            let step = solve(damped, gradient);
            let next = clamp(std::array::from_fn(|i| at[i] - step[i].clamp(-1.0, 1.0)));
            residuals(&values(&next), &mut there);
            let gain = cost(&here) - cost(&there);
            if gain > 0.0 {
                improved = gain > 1e-13 * cost(&here);
                at = next;
                std::mem::swap(&mut here, &mut there);
                damping = (damping / 4.0).max(1e-12);
                break;
            }
            damping *= 4.0;
        }
        if !improved {
            break;
        }
    }
    values(&at)
}

fn cost(residuals: &[f64]) -> f64 {
    residuals.iter().map(|r| 2.0 * SCALE * SCALE * ((1.0 + (r / SCALE).powi(2)).sqrt() - 1.0)).sum()
}

fn normal_equations<const N: usize>(
    at: &[f64; N],
    here: &[f64],
    residuals: impl Fn(&[f64; N], &mut Vec<f64>),
) -> ([f64; N], [[f64; N]; N]) {
    const STEP: f64 = 1e-6;
    let slopes: Vec<Vec<f64>> = (0..N)
        .map(|i| {
            let mut moved = *at;
            moved[i] += STEP;
            let mut there = Vec::with_capacity(here.len());
            residuals(&moved, &mut there);
            let pairs = there.iter().zip(here);
            pairs.map(|(there, here)| (there - here) / STEP).collect()
        })
        .collect();
    let mut gradient = [0.0; N];
    let mut curvature = [[0.0; N]; N];
    for (index, residual) in here.iter().enumerate() {
        let weight = 1.0 / (1.0 + (residual / SCALE).powi(2)).sqrt();
        for i in 0..N {
            gradient[i] += weight * slopes[i][index] * residual;
            for j in 0..N {
                curvature[i][j] += weight * slopes[i][index] * slopes[j][index];
            }
        }
    }
    (gradient, curvature)
}

/// Solves a positive definite system of equations by elimination with the largest pivot first.
fn solve<const N: usize>(mut matrix: [[f64; N]; N], mut right: [f64; N]) -> [f64; N] {
    for column in 0..N {
        let pivot = (column..N)
            .max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))
            .expect("a column has rows");
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        for row in column + 1..N {
            let factor = matrix[row][column] / matrix[column][column];
            let above = matrix[column];
            for (value, above) in matrix[row].iter_mut().zip(above) {
                *value -= factor * above;
            }
            right[row] -= factor * right[column];
        }
    }
    for row in (0..N).rev() {
        let known: f64 = (row + 1..N).map(|k| matrix[row][k] * right[k]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the fit of `a + max(b x, c)` to 299 points, one of which takes `slow` times as long.
    fn roofline(slow: f64) -> [f64; 3] {
        let model = |p: &[f64; 3], x: f64| p[0] + (x * p[1]).max(p[2]);
        let bounds = |start| Parameter::new(start, 0.01, 100.0);
        least_squares([bounds(1.0), bounds(2.0), bounds(10.0)], |p, out| {
            out.clear();
            out.extend((1..300).map(|x| {
                let measured = model(&TRUTH, f64::from(x)) * if x == 77 { slow } else { 1.0 };
                (model(p, f64::from(x)) / measured).ln()
            }));
        })
    }

    const TRUTH: [f64; 3] = [5.0, 0.7, 40.0];

    #[test]
    fn it_finds_the_parameters_of_a_roofline() {
        for (found, truth) in roofline(1.0).iter().zip(TRUTH) {
            assert!((found / truth - 1.0).abs() < 1e-6, "{found} {truth}");
        }
    }

    #[test]
    fn an_outlier_matters_little() {
        for (found, truth) in roofline(10.0).iter().zip(TRUTH) {
            assert!((found / truth - 1.0).abs() < 0.05, "{found} {truth}");
        }
    }

    #[test]
    fn it_stays_within_bounds() {
        let [found] = least_squares([Parameter::new(0.5, 0.01, 1.0)], |p, out| {
            *out = vec![(p[0] / 3.0).ln()];
        });
        assert!((found - 1.0).abs() < 1e-12);
    }
}
