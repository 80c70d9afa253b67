//! Finds processes that use RDMA, and transfers that Laxity can't see.
//!
//! A process's mappings show its libraries. An open `/dev/infiniband/uverbs*` shows that it uses
//! them. Only root can look into processes of other users.

use std::collections::BTreeMap;

use laxity_wire::Status;

use super::finding::Finding;
use super::root::Root;
use crate::class_table::{VARIABLES, Variable};

/// A process with an RDMA library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// Whether it has an RDMA device open.
    pub(crate) uses_rdma: bool,
    /// Whether it has loaded liblaxity.so.
    pub(crate) preloaded: bool,
    pub(crate) nccl: bool,
    pub(crate) ucx: bool,
    pub(crate) mooncake: bool,
    /// Whether it has UCX's InfiniBand module and the mlx5 provider, so that UCX may build work
    /// requests.
    pub(crate) ucx_mlx5: bool,
    /// Whether it has a library with which GPUs write the NIC's doorbell registers.
    pub(crate) gpu_initiated: bool,
    /// The rows of [`VARIABLES`] for the libraries that it has loaded.
    pub(crate) class_variables: Vec<&'static Variable>,
    /// The values of `UCX_TLS` and of [`VARIABLES`] that are set.
    pub(crate) variables: BTreeMap<String, String>,
}

impl Process {
    pub(crate) fn subject(&self) -> String {
        format!("{} ({})", self.pid, self.name)
    }
}

/// The result of a scan of the host's processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) processes: Vec<Process>,
    /// Number of processes that this user may not look into.
    pub(crate) unreadable: usize,
}

/// Finds all processes with an RDMA library.
pub(crate) fn scan(root: &Root) -> Seen {
    let mut seen = Seen::default();
    for pid in root.names("/proc").iter().filter_map(|name| name.parse().ok()) {
        match root.bytes(&format!("/proc/{pid}/maps")) {
            Some(maps) => {
                seen.processes.extend(process(root, pid, &String::from_utf8_lossy(&maps)));
            }
            // The process may have ended meanwhile.
            None if root.has(&format!("/proc/{pid}")) => seen.unreadable += 1,
            None => {}
        }
    }
    seen
}

fn process(root: &Root, pid: u32, maps: &str) -> Option<Process> {
    // Python wheels have libraries such as libucp-1a2b3c.so.0, so only the start of a name counts.
    let has = |beginning: &str| maps.contains(&format!("/{beginning}"));
    let fds = format!("/proc/{pid}/fd");
    let is_device = |fd: &String| {
        root.link(&format!("{fds}/{fd}")).is_some_and(|to| to.starts_with("/dev/infiniband/uverbs"))
    };
    let verbs = has("libibverbs");
    let uses_rdma = root.names(&fds).iter().any(is_device);
    let process = Process {
        pid,
        name: root.text(&format!("/proc/{pid}/comm")).unwrap_or_default(),
        uses_rdma,
        preloaded: has("liblaxity.so"),
        nccl: has("libnccl.so") || has("libnccl-"),
        ucx: has("libucp"),
        mooncake: has("libtransfer_engine") || has("mooncake/"),
        ucx_mlx5: has("libuct_ib") && has("libmlx5"),
        gpu_initiated: has("libnvshmem") || has("nvshmem_transport_ibgda"),
        class_variables: VARIABLES.iter().filter(|variable| variable.is_loaded(maps)).collect(),
        variables: variables(root, pid),
    };
    let relevant = verbs || uses_rdma || !process.class_variables.is_empty();
    relevant.then_some(process)
}

fn variables(root: &Root, pid: u32) -> BTreeMap<String, String> {
    let bytes = root.bytes(&format!("/proc/{pid}/environ")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let matters = |name: &str| name == "UCX_TLS" || VARIABLES.iter().any(|row| row.name == name);
    text.split('\0')
        .filter_map(|entry| entry.split_once('='))
        .filter(|(name, value)| matters(name) && !value.is_empty())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Reports processes whose transfers Laxity does not see.
pub(crate) fn coverage(seen: &Seen, status: Option<&Status>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut covered = 0;
    for process in &seen.processes {
        let attached = |status: &Status| status.clients.iter().any(|c| c.pid == process.pid);
        let attached = status.map(attached);
        if !process.preloaded && attached != Some(true) {
            findings.extend(uncovered(process));
        } else if process.uses_rdma && attached == Some(false) {
            let detached = Finding::warn(
                "coverage",
                "liblaxity.so is in it, but it is not \
                attached",
            )
            .about(process.subject())
            .because("its traffic goes out unscheduled")
            .action(
                "look for lines of laxity on its standard error, and see the findings \
                    about the daemon",
            );
            findings.push(detached);
        } else {
            covered += 1;
        }
        findings.extend(bypasses(process));
    }
    if covered > 0 {
        let found = format!("{covered} processes with RDMA libraries are under Laxity");
        findings.push(Finding::ok("coverage", found));
    } else if seen.processes.is_empty() {
        findings.push(Finding::ok("coverage", "no process has an RDMA library in it"));
    }
    if seen.unreadable > 0 {
        let found = format!("{} processes could not be looked into", seen.unreadable);
        let unread = Finding::info("coverage", found)
            .because("processes of other users may use RDMA too")
            .action("run it as root, in the pid namespace of the host");
        findings.push(unread);
    }
    findings
}

fn uncovered(process: &Process) -> Option<Finding> {
    let command = format!("laxity run --profile {} -- …", profile(process));
    if process.uses_rdma {
        let finding = Finding::warn("coverage", "it uses RDMA, and liblaxity.so is not in it")
            .about(process.subject())
            .because(
                "its transfers compete with those that Laxity orders, and at the class that \
                it chose itself",
            )
            .action(format!("start it with: {command}"));
        return Some(finding);
    }
    let finding = Finding::info(
        "coverage",
        "it could use RDMA (no device is open), and liblaxity.so is not in it",
    )
    .about(process.subject())
    .action(format!("if it moves KV cache or runs collectives: {command}"));
    Some(finding)
}

/// Returns the profile that fits the process. Mooncake comes first: with NCCL's profile its
/// transfers would count as collectives, which costs more than the opposite mistake.
fn profile(process: &Process) -> &'static str {
    match process {
        Process { mooncake: true, .. } => "mooncake",
        Process { ucx: true, .. } => "ucx",
        Process { nccl: true, .. } => "nccl",
        _ => "default",
    }
}

/// Reports transfers that no verbs library sees, even if it is preloaded.
fn bypasses(process: &Process) -> Vec<Finding> {
    let mut findings = Vec::new();
    let transports = process.variables.get("UCX_TLS");
    if process.uses_rdma && process.ucx_mlx5 && transports.is_none_or(|tls| allows_mlx5(tls)) {
        let finding =
            Finding::warn("bypass-verbs", "UCX on mlx5 builds its work requests itself (DEVX)")
                .about(process.subject())
                .because(
                    "no verbs library sees them, liblaxity.so neither: they go out unscheduled",
                )
                .action("start it with UCX_TLS=rc_verbs,ud_verbs,self,sm,cuda");
        findings.push(finding);
    }
    if process.gpu_initiated {
        let finding = Finding::info(
            "bypass-verbs",
            "NVSHMEM is in it: GPUs may ring the NIC's \
            doorbells themselves (IBGDA)",
        )
        .about(process.subject())
        .because(
            "such transfers pass no library on the host, so nothing can order them; their \
                class can still be set",
        );
        findings.push(finding);
    }
    findings
}

/// Reports whether a value of UCX_TLS allows UCX's own mlx5 transports. A value that starts with
/// `^` lists the excluded ones.
fn allows_mlx5(tls: &str) -> bool {
    let (excluding, list) = match tls.strip_prefix('^') {
        Some(list) => (true, list),
        None => (false, tls),
    };
    let own = |name: &str| {
        let name = name.trim();
        matches!(name, "all" | "ib" | "rc" | "ud" | "dc")
            || name.ends_with("_x")
            || name.ends_with("_mlx5")
    };
    excluding || list.split(',').any(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lists_of_verbs_transports_keep_ucx_on_verbs() {
        for own in ["all", "rc,cuda", "rc_x,sm", "^tcp", "dc_mlx5"] {
            assert!(allows_mlx5(own), "{own}");
        }
        for verbs in ["rc_verbs,ud_verbs,self,sm", "tcp", "rc_v"] {
            assert!(!allows_mlx5(verbs), "{verbs}");
        }
    }
}
