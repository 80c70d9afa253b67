//! Shows the traffic classes of the libraries in each process, and checks whether those that are
//! set agree with `laxity env`, and whether KV transfer has a better one than collectives. By
//! default UCX sets 106 (DSCP 26, ECN-capable), NCCL and NVSHMEM set 0, and DeepEP V2 sets 3 (DSCP
//! 0). On a fabric with a lossless class for DSCP 26, the KV cache is then in that class, and
//! expert-parallel traffic and collectives are not.

use std::collections::BTreeSet;

use laxity_shm::record::Stage;
use laxity_wire::Status;

use super::finding::Finding;
use super::processes::{Process, ProcessScan};
use crate::class_table::{Field, Layers, Outcome, Rules, Setting, Variable, plan};

/// The traffic class of one library in one process.
struct Choice<'a> {
    process: &'a Process,
    variable: &'static Variable,
    class: u8,
    /// Whether a variable sets the class, rather than the library.
    pinned: bool,
}

impl Choice<'_> {
    fn short(&self) -> String {
        let pinned = if self.pinned { "pinned" } else { "its default" };
        format!("{} {} (DSCP {}, {pinned})", self.variable.library, self.class, self.class >> 2)
    }

    fn words(&self) -> String {
        format!(
            "{} of {}: class {} (DSCP {}){}",
            self.variable.library,
            self.process.subject(),
            self.class,
            self.class >> 2,
            if self.pinned { ", pinned" } else { "" }
        )
    }
}

/// Returns how well a fabric treats `dscp`. Higher is better: CS1 (the scavenger) is lowest, then
/// best effort, then the DSCPs of no level by their class selector, then the daemon's levels, the
/// first one highest.
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

fn choices(process: &Process) -> impl Iterator<Item = Choice<'_>> {
    let rows = process.class_variables.iter().filter(|row| row.sets == Field::TrafficClass);
    rows.map(move |&variable| {
        let (class, pinned) = variable.class_in(|name| process.variables.get(name).cloned());
        Choice { process, variable, class, pinned }
    })
}

/// Shows the classes of each process. A class that no variable sets is only right by chance.
pub(crate) fn table(seen: &ProcessScan) -> Vec<Finding> {
    let of_process = |process: &Process| {
        let choices: Vec<Choice<'_>> = choices(process).collect();
        let words: Vec<String> = choices.iter().map(Choice::short).collect();
        let finding = Finding::info("classes", words.join(", ")).about(process.subject());
        let unset = choices.iter().filter(|choice| !choice.pinned);
        let unset: Vec<&str> = unset.map(|choice| choice.variable.name.as_str()).collect();
        Some(match unset[..] {
            _ if choices.is_empty() => return None,
            [] => finding,
            _ => finding
                .because(format!("not set: {}", unset.join(", ")))
                .action("laxity env --profile wide-ep prints values that agree with the levels"),
        })
    };
    seen.processes.iter().filter_map(of_process).collect()
}

/// Compares the values that are set with those of `laxity env`. Bits of ECN do not count.
pub(crate) fn compared(seen: &ProcessScan, layers: Layers, rules: &Rules) -> Vec<Finding> {
    let plan = plan(layers, rules, |_| None);
    let of_process = |process: &Process| {
        let differing = |setting: &Setting| {
            let (row, Outcome::Set(planned)) = (setting.variable, &setting.outcome) else {
                return None;
            };
            let (name, class) = row.set_by(|name| process.variables.get(name).cloned())?;
            let ecn_bits = if row.sets == Field::TrafficClass { 2 } else { 0 };
            let differs = class >> ecn_bits != planned >> ecn_bits;
            let counts = differs && process.class_variables.contains(&row);
            counts.then(|| format!("{name} is {class}, not {planned}"))
        };
        let found: BTreeSet<String> = plan.iter().filter_map(differing).collect();
        (!found.is_empty()).then(|| {
            Finding::warn("classes", Vec::from_iter(found).join(", "))
                .about(process.subject())
                .because("its class is not that of its stage, so the network orders it otherwise")
                .action("unset it, and take what laxity env --profile wide-ep prints then")
        })
    };
    seen.processes.iter().filter_map(of_process).collect()
}

/// Reports whether some KV transfer of this host has a better class than some collective.
pub(crate) fn inverted(seen: &ProcessScan, status: Option<&Status>) -> Vec<Finding> {
    let (mut kv, mut collectives) = (Vec::new(), Vec::new());
    for process in &seen.processes {
        let is_collective = |choice: &Choice<'_>| choice.variable.stage == Stage::Collective;
        let (of_collectives, of_kv): (Vec<_>, Vec<_>) = choices(process).partition(is_collective);
        kv.extend(of_kv);
        collectives.extend(of_collectives);
    }
    // The preload library replaces classes that are not pinned, where it sees the queue pair.
    let counts =
        |choice: &&Choice<'_>| choice.pinned || !choice.process.preloaded || !choice.variable.verbs;
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
                    "run both under `laxity run --profile wide-ep` without these variables, or \
                    set them as `laxity env --profile wide-ep` prints them",
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
