//! The machine: its description, and the two cores that the measured pair runs on.

use std::fmt;
use std::fs;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

use crate::error::{BenchError, Result};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
    /// Whether a hypervisor runs below the kernel.
    pub(crate) virtualised: bool,
    pub(crate) clock: String,
    pub(crate) load: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cores {
    pub(crate) near: usize,
    /// Core of the other side (daemon, peer), or `None` on a machine with one core.
    pub(crate) far: Option<usize>,
    pub(crate) all: Vec<usize>,
}

impl Machine {
    pub(crate) fn probe(clock: String, cores: &Cores) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo
                .lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        let kernel = nix::sys::utsname::uname().map(|name| {
            format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy())
        });
        Self {
            cpu: field("model name")
                .or_else(|| field("CPU part"))
                .unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: cores.all.len(),
            kernel: kernel.unwrap_or_else(|_| "unknown".to_owned()),
            virtualised: field("flags")
                .is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
            clock,
            load: fs::read_to_string("/proc/loadavg")
                .ok()
                .and_then(|text| text.split_whitespace().next().map(ToOwned::to_owned))
                .unwrap_or_default(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "machine  {}, {} core{}{}, {}, load {}",
            self.cpu,
            self.cores,
            if self.cores == 1 { "" } else { "s" },
            if self.virtualised { " (virtual)" } else { "" },
            self.kernel,
            self.load
        )?;
        write!(f, "clock    {}", self.clock)
    }
}

impl Cores {
    /// Chooses the first permitted core and the first other one that isn't its hyper-thread
    /// sibling. `wanted` overrides the choice.
    pub(crate) fn choose(wanted: Option<&[usize]>) -> Result<Self> {
        let mask = sched_getaffinity(Pid::from_raw(0))
            .map_err(BenchError::system("read the CPU affinity"))?;
        let allowed: Vec<usize> =
            (0..CpuSet::count()).filter(|cpu| mask.is_set(*cpu).unwrap_or(false)).collect();
        let (near, far) = match wanted {
            Some([near, far]) if near != far => (*near, Some(*far)),
            Some([near]) => (*near, None),
            Some(_) => {
                let why = "--cores takes one core, or two different ones: --cores 0,1";
                return Err(BenchError::Failed(why.to_owned()));
            }
            None => {
                let Some(near) = allowed.first().copied() else {
                    return Err(BenchError::Failed("no CPU is allowed".to_owned()));
                };
                let list =
                    format!("/sys/devices/system/cpu/cpu{near}/topology/thread_siblings_list");
                let siblings = parse_cpu_list(&fs::read_to_string(list).unwrap_or_default());
                let others = || allowed.iter().copied().filter(|cpu| *cpu != near);
                (near, others().find(|cpu| !siblings.contains(cpu)).or_else(|| others().next()))
            }
        };
        for cpu in [Some(near), far].into_iter().flatten() {
            if !allowed.contains(&cpu) {
                let why =
                    format!("core {cpu} is not among those this process may use: {allowed:?}");
                return Err(BenchError::Failed(why));
            }
        }
        let mut all = vec![near];
        all.extend(allowed.iter().copied().filter(|cpu| *cpu != near && Some(*cpu) != far));
        all.extend(far);
        Ok(Self { near, far, all })
    }
}

/// Parses the kernel's `0-3,8` notation.
fn parse_cpu_list(list: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last);
        }
    }
    cpus
}

pub(crate) fn pin_thread(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).map_err(BenchError::system(format!("core {cpu}")))?;
    sched_setaffinity(Pid::from_raw(0), &set)
        .map_err(BenchError::system(format!("pin to core {cpu}")))
}

/// Runs `start` with the affinity of this program's start, then pins the thread again. A new
/// process inherits the mask, and the daemon must have all cores as in normal operation.
pub(crate) fn with_all_cores<T>(cores: &Cores, start: impl FnOnce() -> Result<T>) -> Result<T> {
    let pinned =
        sched_getaffinity(Pid::from_raw(0)).map_err(BenchError::system("read the CPU affinity"))?;
    let mut all = CpuSet::new();
    for cpu in &cores.all {
        all.set(*cpu).map_err(BenchError::system("name all cores"))?;
    }
    sched_setaffinity(Pid::from_raw(0), &all).map_err(BenchError::system("undo the pinning"))?;
    let started = start();
    sched_setaffinity(Pid::from_raw(0), &pinned).map_err(BenchError::system("pin again"))?;
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_cpu_lists_are_read() {
        assert_eq!(parse_cpu_list("0-2,8\n"), vec![0, 1, 2, 8]);
        assert_eq!(parse_cpu_list("5"), vec![5]);
        assert!(parse_cpu_list("").is_empty());
    }

    #[test]
    fn two_equal_cores_are_refused() {
        assert!(Cores::choose(Some(&[0, 0])).is_err());
    }
}
