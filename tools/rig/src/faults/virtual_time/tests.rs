//! Tests of campaigns in virtual time.

use std::path::Path;

use super::play;
use crate::faults::plant::Plant;
use crate::faults::round::Outcome;
use crate::faults::schedule::{Fault, FaultKind, Schedule};
use crate::faults::{Campaign, Failure, Player, Report, replay, run};

fn campaign(seed: u64, faults: u64, plant: Option<Plant>, failures: &Path) -> Report {
    let campaign = Campaign {
        seed,
        faults,
        jobs: 2,
        player: Player::VirtualTime(plant),
        state: None,
        failures: failures.to_owned(),
        shrink: 60,
    };
    run(&campaign, false, |line| println!("{line}")).expect("a campaign")
}

#[test]
fn a_seed_gives_the_same_events_each_time() {
    let schedule = |round| Schedule::draw_of(&FaultKind::VIRTUAL, 7, round, 50);
    let digests = [0; 2].map(|_| {
        let rounds = (0..4).map(|round| play(&schedule(round), None).expect("a round"));
        let is_ordered = |outcome: &Outcome| outcome.orders > 20;
        rounds.inspect(|it| assert!(is_ordered(it), "{it:?}")).map(|it| it.digest).collect()
    });
    let [first, second]: [Vec<u64>; 2] = digests;
    assert_eq!(first, second);
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "{first:?}");
}

#[test]
fn a_campaign_finds_nothing_and_has_all_kinds_of_faults() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = campaign(1, 2000, None, folder.path());
    assert_eq!(report.violations, 0, "{:?}", report.failures);
    for kind in FaultKind::VIRTUAL {
        assert!(report.by_kind.contains_key(&kind.name()), "{kind:?}");
    }
    for (path, counts) in &report.by_path {
        let sent = counts.scheduled_bytes + counts.bypassed_bytes;
        assert!(counts.scheduled_bytes > sent / 2, "{path}: {counts:?}");
        assert!(counts.bypassed_bytes > 0 && counts.ended_by_fault > 0, "{path}: {counts:?}");
    }
    assert_eq!(report.faults, 2000);
}

#[test]
fn each_planted_bug_is_found_and_found_again_by_a_replay() {
    let folder = tempfile::tempdir().expect("a folder");
    for plant in [Plant::Twice, Plant::Drop, Plant::Swap, Plant::Leak, Plant::LeakLane] {
        let report = campaign(3, 200, Some(plant), folder.path());
        let (path, failure) = report.failures.first().unwrap_or_else(|| panic!("{plant:?}"));
        assert!(failure.schedule.faults.len() <= 5, "{plant:?}: {failure:?}");
        let read = Failure::read(path).expect("a failure");
        assert!(read.in_virtual_time);
        let again = replay(&Player::VirtualTime(Some(plant)), path, read, 1).expect("a replay");
        assert_eq!(again.failures[0].1.violations, failure.violations, "{plant:?}");
    }
}

/// Clients that complete none of their bytes in the levels, while others have scavenged work only:
/// without [`laxity_policy::SharedLink::keeps_scavengers_waiting`], others wait for 512 ms.
#[test]
fn a_liar_that_holds_its_part_does_not_keep_scavenged_flows_of_others_waiting() {
    let lies = [
        (277, 247, 11_702_522_002_090_630_172),
        (738, 143, 7_736_580_345_591_588_044),
        (994, 157, 11_942_499_609_960_555_167),
    ];
    let lie = |(at_ms, for_ms, choice)| Fault { at_ms, kind: FaultKind::Hostile, for_ms, choice };
    let schedule = Schedule { seed: 3_466_111_755_378_735_320, faults: lies.map(lie).to_vec() };
    let outcome = play(&schedule, None).expect("a round");
    assert!(outcome.longest_stall_ms < 100, "{outcome:?}");
}
