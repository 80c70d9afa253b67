//! Checks whether KV transfer has a better traffic class than collectives. By default UCX sets 106
//! (DSCP 26, ECN-capable), NCCL sets 0, and Mooncake sets none. On a fabric with a lossless class
//! for DSCP 26, the KV cache is then in that class and collectives are not.

use laxity_job::Profile;
use laxity_wire::Status;

use super::finding::Finding;
use super::processes::{Process, Seen};

/// The traffic class of one library in one process.
struct Choice<'a> {
    process: &'a Process,
    library: &'static str,
    class: u8,
    /// Whether a variable sets the class, rather than the library.
    pinned: bool,
}

impl Choice<'_> {
    fn words(&self) -> String {
        format!(
            "{} of {}: class {} (DSCP {}){}",
            self.library,
            self.process.subject(),
            self.class,
            self.class >> 2,
            if self.pinned { ", pinned" } else { "" }
        )
    }
}

/// Returns how well a fabric treats `dscp`. Higher is better: CS1 (the scavenger) is lowest, then
/// best effort, then the daemon's levels in their order. Without a daemon, the class selector
/// counts.
fn standing(dscp: u8, status: Option<&Status>) -> usize {
    let levels = status.and_then(|status| status.ports.first()).map(|port| &port.levels);
    let place = levels.and_then(|levels| levels.iter().position(|level| level.dscp == dscp));
    match (dscp, place) {
        (8, _) => 0,
        (0, _) => 1,
        (_, Some(place)) => usize::MAX - place,
        (_, None) => 2 + usize::from(dscp >> 3),
    }
}

fn choices(process: &Process) -> (Vec<Choice<'_>>, Vec<Choice<'_>>) {
    let choice = |library, variable: &str, default| {
        // UCX has "auto" for its default, which is not a number.
        let set = process.variables.get(variable).and_then(|value| value.trim().parse().ok());
        Choice { process, library, class: set.unwrap_or(default), pinned: set.is_some() }
    };
    let (mut kv, mut collectives) = (Vec::new(), Vec::new());
    if process.mooncake {
        kv.push(choice("Mooncake", "MC_IB_TC", default_class("mooncake")));
    }
    if process.ucx {
        kv.push(choice("UCX", "UCX_IB_TRAFFIC_CLASS", default_class("ucx")));
    }
    if process.nccl {
        collectives.push(choice("NCCL", "NCCL_IB_TC", default_class("nccl")));
    }
    (kv, collectives)
}

/// Returns the class that the library of a profile sets by default.
fn default_class(profile: &str) -> u8 {
    let profiles = Profile::builtin();
    let found = profiles.iter().find(|found| found.name == profile);
    found.map_or(0, |found| found.qp.default_traffic_class)
}

/// Reports whether some KV transfer of this host has a better class than some collective.
pub(crate) fn inverted(seen: &Seen, status: Option<&Status>) -> Vec<Finding> {
    let (mut kv, mut collectives) = (Vec::new(), Vec::new());
    for process in &seen.processes {
        let (of_kv, of_collectives) = choices(process);
        kv.extend(of_kv);
        collectives.extend(of_collectives);
    }
    // The preload library replaces all classes but pinned ones.
    let counts = |choice: &&Choice<'_>| choice.pinned || !choice.process.preloaded;
    let rank = |choice: &&Choice<'_>| standing(choice.class >> 2, status);
    let best = kv.iter().filter(counts).max_by_key(rank);
    let worst = collectives.iter().filter(counts).min_by_key(rank);
    let mut findings = Vec::new();
    match (best, worst) {
        (Some(kv), Some(collective)) if rank(&kv) > rank(&collective) => {
            let found =
                format!("KV transfer is above collectives: {}; {}", kv.words(), collective.words());
            let finding = Finding::warn("inverted-classes", found)
                .because(
                    "a GPU waits for a collective, and on this fabric a KV transfer that \
                    could wait goes first",
                )
                .action(
                    "run both under `laxity run` without these variables, or set NCCL_IB_TC \
                    above UCX_IB_TRAFFIC_CLASS and MC_IB_TC",
                );
            findings.push(finding);
        }
        (Some(kv), Some(collective)) => {
            let found = format!(
                "collectives are not below KV transfer: {}; {}",
                collective.words(),
                kv.words()
            );
            findings.push(Finding::ok("inverted-classes", found));
        }
        _ if seen.processes.is_empty() => findings.push(
            Finding::info(
                "inverted-classes",
                "nothing runs; by themselves UCX sets class 106 (DSCP 26), NCCL 0, Mooncake none",
            )
            .because(
                "outside Laxity, KV transfer over UCX is in a better class than NCCL's collectives",
            )
            .action("run both under `laxity run`, or set NCCL_IB_TC and UCX_IB_TRAFFIC_CLASS"),
        ),
        _ => findings.push(Finding::ok(
            "inverted-classes",
            "no KV transfer and collectives side by side that choose their own classes",
        )),
    }
    for pinned in kv.iter().chain(&collectives).filter(|c| c.pinned && c.process.preloaded) {
        let finding = Finding::info("pinned-class", pinned.words())
            .about(pinned.process.subject())
            .because("Laxity keeps it: transfers of every stage go in its class")
            .action("start it without the variable to have transfers marked by their stage");
        findings.push(finding);
    }
    findings
}
