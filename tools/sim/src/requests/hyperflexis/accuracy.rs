//! Errors of the latency model (appendix A).

use laxity_requests::hyperflexis::latency::{self, Error, Sample};
use laxity_requests::latency::{Composition, Latency as _};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;

use super::world::Machine;
use crate::requests::reproduction::{Options, Section};

fn strings(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

/// Returns steps that were not used for the fit, with prompts and contexts of any length up to
/// 2048.
fn held_out(machine: &Machine, prompts: bool, decodes: bool, seed: u64) -> Vec<Sample> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let mut samples = Vec::new();
    for _ in 0..2_000 {
        let mut of = Composition::default();
        if prompts {
            let mut left: u32 = 2_048;
            for _ in 0..rng.random_range(1..16) {
                let tokens = rng.random_range(4..700).min(left);
                if tokens > 0 {
                    of = of.with_chunk(0, tokens);
                    left -= tokens;
                }
            }
        }
        if decodes {
            for _ in 0..rng.random_range(1..192) {
                of = of.with_decode(rng.random_range(4..2_020));
            }
        }
        let took = machine.clock.iteration(&of);
        samples.push(Sample { of, took });
    }
    samples
}

fn percent(value: f64) -> String {
    format!("{:.1}", value * 100.0)
}

pub(super) fn fitted(machines: &[Machine; 2], options: &Options) -> Section {
    let mut rows = Vec::new();
    let seed = options.seeds.first().copied().unwrap_or(1);
    for machine in machines {
        let model = &machine.model;
        let profile = latency::profile(&machine.clock, 32_768);
        let decode = |sample: &Sample| sample.of.decodes > 0;
        let (tokens, prompts): (Vec<_>, Vec<_>) = profile.into_iter().partition(decode);
        let mut row = |name: &str, error: Error| {
            rows.push(vec![
                format!("ratio {}: {name}", machine.ratio),
                error.steps.to_string(),
                percent(error.mean),
                percent(error.p95),
                percent(error.most),
                percent(error.bias),
            ]);
        };
        row("profile, prompts", model.error(&prompts));
        row("profile, tokens", model.error(&tokens));
        let held = |prompts, decodes| model.error(&held_out(machine, prompts, decodes, seed));
        row("held out, prompts", held(true, false));
        row("held out, tokens", held(false, true));
        row("held out, both in a step", held(true, true));
    }
    let coefficients = |machine: &Machine| {
        let [a, b, c] = machine.model.prefill;
        let [d, e, f] = machine.model.decode;
        format!(
            "Ratio {}: E_p = {:.2} ms + {:.2} µs · Σ l + {:.4} ns · Σ l²; E_d = {:.2} ms + {:.2} \
             ns · Σ l_cur + {:.2} µs · B.",
            machine.ratio,
            a / 1e6,
            b / 1e3,
            c,
            d / 1e6,
            e,
            f / 1e3
        )
    };
    Section {
        title: "Latency model (eq. 1 and 2): |predicted / measured − 1|, %".to_owned(),
        head: strings(&["steps", "count", "mean", "95th percentile", "largest", "bias"]),
        rows,
        notes: machines.iter().map(coefficients).collect::<Vec<_>>().join("\n"),
    }
}
