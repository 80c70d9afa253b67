//! The limit of open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::warn;

/// Raises the soft limit of open files to the hard limit, and returns the resulting limit.
pub fn descriptors_max() -> usize {
    let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => {
            let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
            raised.map_or(soft, |()| hard)
        }
        Ok((soft, _)) => soft,
        // The unit's filter of system calls may forbid `getrlimit`. `/proc` has the same answer.
        Err(error) => std::fs::read_to_string("/proc/self/limits")
            .ok()
            .and_then(|limits| soft_limit(&limits))
            .unwrap_or_else(|| {
                warn!(%error, "cannot read the limit of open files; 1024 is assumed");
                1024
            }),
    };
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// Returns the soft limit of open files from the text of `/proc/PID/limits`.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[test]
fn proc_has_the_limit_that_the_system_call_gives() {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("Linux has it");
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    assert_eq!(soft_limit(&limits), Some(soft));
}
