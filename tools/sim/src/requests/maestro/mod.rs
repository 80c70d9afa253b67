//! Reproduction of Maestro (Wang et al., arXiv 2606.12950) in virtual time. Workflows of agents
//! ([`apps`]) run on a few GPUs that share many models ([`catalogue`], [`machine`], [`world`]),
//! under the workflow tier of `laxity-requests`.
//!
//! The paper used 64 A100s and a private trace. Both are modelled here from its statistics, so that
//! rankings and kinds of effects can be compared, but not absolute numbers.

mod apps;
mod catalogue;
mod machine;
mod studies;
mod trial;
mod world;

use super::PaperError;
use super::measurements::Measurements;
use super::reproduction::{Options, Reproduction};
use crate::reproduce::runner;

/// Runs all experiments.
/// Returns an error if a built-in GPU cannot be loaded or a claim cannot be evaluated.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let kit = trial::Kit::new(options.quick)?;
    let mut found = Measurements::default();
    let sections = studies::run(&kit, options, &mut found)?;
    Ok(Reproduction {
        title: "Maestro: workflows of agents over few GPUs and many models".to_owned(),
        sections,
        claims: runner::run(include_str!("../../../claims/maestro.toml"), &found)?,
        quick: options.quick,
    })
}

#[cfg(test)]
mod tests;
