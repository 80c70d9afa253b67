//! Checks of what the shared memory needs from the kernel (architecture §3.1).

use laxity_shm::layout::{Geometry, SLOTS_MIN};
use laxity_shm::region::Region;

use super::finding::Finding;
use super::root::Root;

/// The first kernel version with `membarrier(GLOBAL_EXPEDITED)`, the newest feature that is needed.
const VERSION_MIN: (u32, u32) = (4, 16);

/// The results of trying kernel features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tried {
    pub(crate) membarrier: bool,
    /// Why no sealed memfd could be created and mapped, if that failed.
    pub(crate) region: Result<(), String>,
}

pub(crate) fn try_out() -> Tried {
    let smallest = Geometry { lanes: 1, slots: SLOTS_MIN, colour: 0 };
    Tried {
        membarrier: laxity_shm::sleep::register(),
        region: Region::create(smallest).map(drop).map_err(|error| error.to_string()),
    }
}

pub(crate) fn kernel(root: &Root, tried: &Tried) -> Vec<Finding> {
    let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    let version = numbers.next().zip(numbers.next());
    let version = match version {
        Some(version) if version < VERSION_MIN => Finding::warn(
            "kernel",
            format!("Linux {release}"),
        )
        .because("before 4.16 there is no membarrier(GLOBAL_EXPEDITED): each submit needs a fence")
        .action("boot a newer kernel"),
        Some(_) => Finding::ok("kernel", format!("Linux {release}")),
        None => Finding::info("kernel", format!("of unknown version: `{release}`")),
    };
    let membarrier = if tried.membarrier {
        Finding::ok("membarrier", "allowed")
    } else {
        Finding::warn("membarrier", "refused")
            .because(
                "each submit executes a fence that otherwise only the sleeping side executes; \
                all else works",
            )
            .action("allow membarrier(2) in the seccomp profile of the container")
    };
    let region = match &tried.region {
        Ok(()) => Finding::ok("memfd", "shared memory can be made and sealed"),
        Err(problem) => Finding::error("memfd", problem.clone())
            .because("daemon and clients share sealed memory; without it nothing is scheduled")
            .action(
                "allow memfd_create(2) and fcntl(F_ADD_SEALS) in the seccomp profile of the \
                container, and check its memory limit",
            ),
    };
    vec![version, membarrier, region]
}
