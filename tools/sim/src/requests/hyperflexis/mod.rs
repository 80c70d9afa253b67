//! What HyperFlexis claims (*Joint Design of Algorithms and Systems for Multi-SLO Serving and Fast
//! Scaling*), run again: §8 and §9.
//!
//! The parts: [`tasks`] table 1; [`world`] the machine and the systems; [`attainment`] figures 3, 4
//! and 7; [`staged`] figure 6; [`elastic`] scaling, its cost, table 2 and figure 8; [`accuracy`]
//! how far off predictions are, and what each of the options that fill holes of the paper is worth.
//!
//! `ttft_share` was chosen on seeds from 1001; the figures are of the seeds that are asked for,
//! from 1 by default.

mod accuracy;
mod attainment;
mod elastic;
mod staged;
mod tasks;
mod world;

use laxity_requests::Span;

use super::PaperError;
use super::reproduction::{Claim, Options, Reproduction, Section};
use world::Machine;

/// The calibrations: how much faster prompts are in chunks of 2500 tokens than of 256.
const RATIOS: [f64; 2] = [1.4, 2.0];

/// What a part found.
#[derive(Debug, Default)]
struct Found {
    sections: Vec<Section>,
    claims: Vec<Claim>,
}

/// Runs all of it.
///
/// # Errors
/// If what is built in cannot be had.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let machines = [Machine::new(RATIOS[0])?, Machine::new(RATIOS[1])?];
    let mut sections = Vec::new();
    let mut claims = Vec::new();
    let parts = [
        accuracy::run(&machines, options),
        attainment::run(&machines, options),
        staged::run(&machines[0], options),
        elastic::run(&machines[0], options),
        accuracy::ablations(&machines[0], options),
    ];
    for found in parts {
        sections.extend(found.sections);
        claims.extend(found.claims);
    }
    Ok(Reproduction {
        title: "HyperFlexis: dispatch by what an instance can still promise".to_owned(),
        sections,
        claims,
        quick: options.quick,
    })
}

/// How long requests come.
const fn lasts(options: &Options) -> Span {
    Span::from_millis(if options.quick { 6_000 } else { 60_000 })
}

fn strings(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    #[test]
    fn a_quick_run_has_all_parts_and_says_that_it_is_no_finding() {
        let options = Options {
            seeds: vec![1],
            quick: true,
            jobs: NonZero::new(2).expect("two"),
            data: None,
            progress: false,
        };
        let found = reproduce(&options).expect("all is built in");
        assert!(found.quick);
        for section in &found.sections {
            assert!(!section.rows.is_empty(), "{}", section.title);
            for row in &section.rows {
                assert_eq!(row.len(), section.head.len(), "{}", section.title);
            }
        }
        // Even a quick run is past the knee where tokens have little time, and there the line in
        // front of instances shows.
        let mut past = found
            .claims
            .iter()
            .filter(|claim| claim.says.contains("past the knee"));
        assert!(past.any(|claim| claim.holds), "{:?}", found.claims);
        assert_eq!(reproduce(&options).expect("again"), found);
    }
}
