//! Water-filling at one band: finds the level that uses all of the band's room.
//!
//! Transfer `i` has weight `w_i` and gets at most `w_i · b_i`, because of its other ports. The
//! level of a band with room `R` is the `λ` with
//!
//! ```text
//! Σ min(w_i · b_i, w_i · λ) = R
//! ```
//!
//! The left side is concave and piecewise linear in `λ`. From any start, Newton's method is at or
//! below the solution after one step. It then rises to the solution in as many steps as there are
//! pieces in between, usually one or two. It needs no sorting and two sums per step.

/// Number of partial sums, so that additions need not wait for each other.
const WAYS: usize = 4;

/// Returns `Σ w·b` of the transfers with bounds below `level`, and `Σ w` of the others.
fn split(bounds: &[f64], weights: &[f64], level: f64) -> (f64, f64) {
    let mut below = [0.0; WAYS];
    let mut above = [0.0; WAYS];
    let mut add = |way: usize, bound: f64, weight: f64| {
        let bounded = bound < level;
        below[way] += if bounded { bound * weight } else { 0.0 };
        above[way] += if bounded { 0.0 } else { weight };
    };
    let (bound_rows, bound_rest) = bounds.as_chunks::<WAYS>();
    let (weight_rows, weight_rest) = weights.as_chunks::<WAYS>();
    for (bounds, weights) in bound_rows.iter().zip(weight_rows) {
        for way in 0..WAYS {
            add(way, bounds[way], weights[way]);
        }
    }
    for (&bound, &weight) in bound_rest.iter().zip(weight_rest) {
        add(0, bound, weight);
    }
    (below.iter().sum(), above.iter().sum())
}

pub(super) fn sums(bounds: &[f64], weights: &[f64]) -> (f64, f64) {
    let mut need = [0.0; WAYS];
    let mut weight = [0.0; WAYS];
    let (bound_rows, bound_rest) = bounds.as_chunks::<WAYS>();
    let (weight_rows, weight_rest) = weights.as_chunks::<WAYS>();
    for (bounds, weights) in bound_rows.iter().zip(weight_rows) {
        for way in 0..WAYS {
            need[way] += bounds[way] * weights[way];
            weight[way] += weights[way];
        }
    }
    for (&one, &of_weight) in bound_rest.iter().zip(weight_rest) {
        need[0] += one * of_weight;
        weight[0] += of_weight;
    }
    (need.iter().sum(), weight.iter().sum())
}

/// Returns the level at which the transfers use `room`, which must be less than `Σ w·b`. `weight`
/// is `Σ w`. `guess` is the start, preferably the previous level.
pub(super) fn level(room: f64, bounds: &[f64], weights: &[f64], weight: f64, guess: f64) -> f64 {
    // Every transfer gets at least this.
    let floor = room / weight;
    let mut level = if guess.is_finite() { guess.max(floor) } else { floor };
    // Each step except the first bounds at least one more transfer.
    for _ in 0..bounds.len() + 2 {
        let (below, above) = split(bounds, weights, level);
        let next = if above > 0.0 { ((room - below) / above).max(floor) } else { floor };
        if next == level {
            break;
        }
        level = next;
    }
    level
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(room: f64, transfers: &[(f64, f64)], guess: f64) -> f64 {
        let bounds: Vec<f64> = transfers.iter().map(|t| t.0).collect();
        let weights: Vec<f64> = transfers.iter().map(|t| t.1).collect();
        level(room, &bounds, &weights, weights.iter().sum(), guess)
    }

    #[test]
    fn the_level_is_the_same_from_wherever_it_is_sought() {
        let transfers = [(1.0, 1.0), (f64::INFINITY, 2.0), (4.0, 1.0), (6.0, 1.0)];
        for guess in [0.0, 1.0, 2.25, 3.0, 5.0, 7.0, f64::INFINITY] {
            // The first transfer gets 1, and the remaining 9 go to weights of 4.
            assert_eq!(fill(10.0, &transfers, guess), 2.25, "from {guess}");
            // 1 + 4 + 2 · 5 + 5
            assert_eq!(fill(20.0, &transfers, guess), 5.0, "from {guess}");
        }
    }

    #[test]
    fn many_transfers_are_summed_as_few_are() {
        let transfers: Vec<(f64, f64)> = (1..=101).map(|n| (f64::from(n), 1.0)).collect();
        // Fifty transfers are bounded with 1 to 50 bytes, and 51 get 50.5.
        let room = 1275.0 + 51.0 * 50.5;
        for guess in [0.0, 50.5, 99.0, f64::INFINITY] {
            assert!((fill(room, &transfers, guess) - 50.5).abs() < 1e-12);
        }
    }
}
