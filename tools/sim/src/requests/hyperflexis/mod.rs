//! Reproduction of HyperFlexis (*Joint Design of Algorithms and Systems for Multi-SLO Serving and
//! Fast Scaling*), §8 and §9.
//!
//! [`tasks`] has table 1, [`world`] the machine and the systems, and [`studies`] the experiments.
//! The claims are in `claims/hyperflexis.toml`.
//!
//! `ttft_share` was chosen on seeds from 1001. The results have the requested seeds, from 1 by
//! default.

mod studies;
mod tasks;
mod world;

use super::PaperError;
use super::measurements::Measurements;
use super::reproduction::{Options, Reproduction};
use crate::reproduce::runner;
use world::Machine;

/// Calibrations: throughput of prompts in chunks of 2500 tokens divided by that in chunks of 256.
const RATIOS: [f64; 2] = [1.4, 2.0];

/// Runs all experiments.
/// Returns an error if a built-in GPU or model cannot be loaded, or a claim cannot be evaluated.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let machines = [Machine::new(RATIOS[0])?, Machine::new(RATIOS[1])?];
    let mut found = Measurements::default();
    let mut sections = studies::attainment(&machines, options, &mut found);
    sections.extend(studies::staged(&machines[0], options, &mut found));
    sections.extend(studies::elastic(&machines[0], options, &mut found));
    sections.push(studies::ablations(&machines[0], options, &mut found));
    Ok(Reproduction {
        title: "HyperFlexis: dispatch by what an instance can still promise".to_owned(),
        sections,
        claims: runner::run(include_str!("../../../claims/hyperflexis.toml"), &found)?,
        quick: options.quick,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_has_all_parts_and_says_that_it_is_no_finding() {
        let options = Options::quick(1);
        let found = reproduce(&options).expect("all is built in");
        assert!(found.quick);
        found.assert_whole();
        // Even a quick run is beyond the knee where time per token is short. There the dispatcher's
        // queue has an effect.
        let mut past = found.claims.iter().filter(|claim| claim.says.contains("past the knee"));
        assert!(past.any(|claim| claim.holds), "{:?}", found.claims);
        assert_eq!(reproduce(&options).expect("again"), found);
    }
}
