//! Maestro (Wang et al., arXiv 2606.12950): its claims in virtual time. Workflows of agents
//! ([`apps`]) over a few GPUs that share many models ([`catalogue`], [`machine`], [`world`]), under
//! the workflow tier of `laxity-requests`.
//!
//! What the paper ran on 64 A100s and a trace that is not public is made up here with the
//! statistics that it gives: orders of schedulers and the kinds of effects can be compared,
//! absolute figures cannot.

mod apps;
mod catalogue;
mod colocation;
mod figures;
mod machine;
mod prediction;
mod regimes;
mod trial;
mod world;

use super::PaperError;
use super::reproduction::{Options, Reproduction};

/// Runs it.
///
/// # Errors
/// If a built-in GPU can't be had.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let kit = trial::Kit::new(options.quick)?;
    let mut memory = figures::Memory::default();
    let (mut sections, mut claims) = figures::overall(&kit, options, &mut memory);
    for (section, claim) in [
        figures::preemption(&kit, options, false, &mut memory),
        figures::preemption(&kit, options, true, &mut memory),
        figures::routing(&kit, options, &mut memory),
        regimes::variants(&kit, options, &mut memory),
        regimes::rounds(&kit, options, &mut memory),
        regimes::longer(&kit, options, &mut memory),
        (regimes::aging(&kit, options, &mut memory), Vec::new()),
        memory.section(),
        colocation::budget(&kit),
        colocation::reserved(&kit),
        prediction::section(options.quick)?,
    ] {
        sections.push(section);
        claims.extend(claim);
    }
    Ok(Reproduction {
        title: "Maestro: workflows of agents over few GPUs and many models".to_owned(),
        sections,
        claims,
        quick: options.quick,
    })
}

#[cfg(test)]
mod tests;
