//! A fault campaign in the guest: the rounds of `laxity lab faults`, with workers on verbs and on
//! the NCCL plugin over verbs, and faults of queue pairs and links beside those of the daemon and
//! its clients.

use std::path::PathBuf;
use std::sync::Mutex;

use super::Lab;
use super::case::CaseReport;
use super::catalogue::SECRET;
use crate::child::lock;
use crate::error::LabError;
use crate::faults::{self, Campaign, PathPrograms, Player, Setting, TransferCounts};

pub(super) const NAME: &str = "campaign";
/// The same, and queue pairs of verbs get bundles.
pub(super) const OF_BUNDLES: &str = "campaign_of_bundles";

/// Folder in the guest's memory for a schedule that failed. It is gone with the guest, so the case
/// prints the schedule, and how to play the whole campaign again.
const FAILURES: &str = scratch!("laxity-campaign");

pub(super) fn run(name: &str, lab: &Lab<'_>, case: &mut CaseReport) -> Result<(), LabError> {
    let programs = lab.programs;
    let verbs = PathPrograms {
        program: programs.checks.join("campaign"),
        library: programs.library.clone(),
        gid_index: lab.guest.facts.gid_index,
        secret: (name == OF_BUNDLES).then(|| PathBuf::from(SECRET)),
        ..PathPrograms::default()
    };
    let plugin = programs.nccl.as_ref().map(|nccl| nccl.plugin.clone());
    let setting = Setting::in_guest(programs.laxityd.clone(), verbs, plugin, lab.matrix.plant);
    for path in &setting.left_out {
        lab.guest.say(path)?;
    }
    let paths = ["verbs", "nccl"].into_iter().filter(|path| setting.uses(path)).collect::<Vec<_>>();
    let campaign = Campaign {
        seed: lab.matrix.seed,
        faults: lab.matrix.faults,
        jobs: 1,
        player: Player::Processes(Box::new(setting)),
        state: None,
        failures: PathBuf::from(FAILURES),
        shrink: 0,
    };
    // The guest can't be shared with the campaign's threads.
    let said = Mutex::new(String::new());
    let result = faults::run(&campaign, false, |line| {
        lock(&said).extend([line, "\n"]);
    });
    let said = lock(&said);
    if !said.is_empty() {
        lab.guest.say(said.trim_end())?;
    }
    let report = result?;
    lab.guest.say(&faults::tables(&report))?;
    for (_, failure) in &report.failures {
        let schedule = serde_json::to_string(&failure.schedule).unwrap_or_default();
        lab.guest.say(&format!(
            "round {}, play it again with the same options and --seed {}: {schedule}",
            failure.round, campaign.seed
        ))?;
    }
    let of = |count: fn(&TransferCounts) -> u64| report.by_path.values().map(count).sum::<u64>();
    case.library.scheduled_bytes = of(|counts| counts.scheduled_bytes);
    case.library.bypassed_bytes = of(|counts| counts.bypassed_bytes);
    case.seen = format!(
        "{} faults, {} transfers, {} bytes compared, {} permitted, {} bypassed, {} ended by a \
         fault, longest wait {} ms",
        report.faults,
        report.transfers,
        report.bytes_checked,
        case.library.scheduled_bytes,
        case.library.bypassed_bytes,
        of(|counts| counts.ended_by_fault),
        report.longest_stall_ms
    );
    if name == OF_BUNDLES {
        let siblings = of(|counts| counts.by_siblings);
        case.seen += &format!(", {siblings} work requests by siblings");
        case.check(siblings > 0, "no sibling carried anything");
    }
    let violations = report.failures.iter().flat_map(|(_, failure)| &failure.violations);
    violations.for_each(|violation| case.fail(violation.clone()));
    case.check(report.violations == 0, format!("{} rounds failed", report.violations));
    for path in paths {
        let counts = report.by_path.get(path).cloned().unwrap_or_default();
        let is_used = counts.transfers > 0 && counts.scheduled_bytes > 0;
        case.check(is_used, format!("{path}: nothing completed with a permit"));
    }
    Ok(())
}
