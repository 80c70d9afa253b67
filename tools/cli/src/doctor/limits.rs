//! Checks of the limit on locked memory, because RDMA locks the buffers that it registers.

use laxity_cli::table::bytes as shown;

use super::finding::{Finding, Severity};
use super::processes::ProcessScan;
use super::root::Root;

/// Limit below which an engine's KV cache can't be registered, in bytes. Most hosts with RDMA NICs
/// have no limit.
const ENOUGH_BYTES: u64 = 16 << 30;
const CAP_IPC_LOCK: u32 = 14;

/// Checks RLIMIT_MEMLOCK of this shell, of processes that use RDMA, and of later ones.
pub(crate) fn memlock(root: &Root, seen: &ProcessScan, has_devices: bool) -> Vec<Finding> {
    let mut findings = vec![own(root, has_devices)];
    for process in seen.processes.iter().filter(|process| process.uses_rdma) {
        let pid = process.pid.to_string();
        if let Some(bytes) = limit(root, &pid).filter(|_| !may_lock(root, &pid))
            && bytes < ENOUGH_BYTES
        {
            let finding = Finding::warn("memlock", format!("it may lock {}", shown(bytes)))
                .about(process.subject())
                .because("registering more memory than that fails, with ENOMEM")
                .action(
                    "LimitMEMLOCK=infinity in its systemd unit, or --ulimit memlock=-1 for its \
                    container",
                );
            findings.push(finding);
        }
    }
    findings.extend(configured(root));
    findings
}

fn own(root: &Root, has_devices: bool) -> Finding {
    match limit(root, "self") {
        None => Finding::info("memlock", "the limit of this shell can't be read"),
        Some(u64::MAX) => Finding::ok("memlock", "unlimited in this shell"),
        Some(bytes) if bytes >= ENOUGH_BYTES => {
            Finding::ok("memlock", format!("{} in this shell", shown(bytes)))
        }
        Some(bytes) => {
            let lifted = may_lock(root, "self");
            let severity = match (lifted, has_devices) {
                (true, _) | (_, false) => Severity::Info,
                (false, true) => Severity::Warn,
            };
            let note = if lifted { ", which CAP_IPC_LOCK lifts" } else { "" };
            Finding::new("memlock", severity, format!("{} in this shell{note}", shown(bytes)))
                .because(if lifted {
                    "RDMA locks the memory that it registers: jobs without that capability (in \
                     containers, of other users) fail with ENOMEM beyond the limit"
                } else {
                    "RDMA locks the memory that it registers: jobs started from here fail with \
                     ENOMEM beyond the limit"
                })
                .action(
                    "ulimit -l unlimited; to keep it, `* - memlock unlimited` in \
                    /etc/security/limits.d/rdma.conf",
                )
        }
    }
}

/// Returns the soft limit in bytes, or `u64::MAX` if there is none.
fn limit(root: &Root, pid: &str) -> Option<u64> {
    let text = root.text(&format!("/proc/{pid}/limits"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

fn may_lock(root: &Root, pid: &str) -> bool {
    let status = root.text(&format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << CAP_IPC_LOCK) != 0)
}

/// Reports the limits of later processes: PAM's files and systemd's default.
fn configured(root: &Root) -> Vec<Finding> {
    let mut files = vec!["/etc/security/limits.conf".to_owned()];
    let folder = "/etc/security/limits.d";
    files.extend(root.names(folder).iter().map(|name| format!("{folder}/{name}")));
    files.push("/etc/systemd/system.conf".to_owned());
    let folder = "/etc/systemd/system.conf.d";
    files.extend(root.names(folder).iter().map(|name| format!("{folder}/{name}")));
    let mut findings = Vec::new();
    for file in files {
        let text = root.text(&file).unwrap_or_default();
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let says = line.starts_with("DefaultLimitMEMLOCK=")
                || matches!(words.as_slice(), [_, _, "memlock", _]);
            if says {
                findings.push(Finding::info("memlock-configured", line).about(file.clone()));
            }
        }
    }
    findings
}
