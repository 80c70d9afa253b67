//! Finds processes that use RDMA, and those that Laxity can't see.
//!
//! A process's mappings show its libraries. An open `/dev/infiniband/uverbs*` shows that it uses
//! them. Only root can look into processes of other users.

use std::collections::{BTreeMap, BTreeSet};

use laxity_wire::Status;
use serde::Deserialize;

use super::finding::Finding;
use super::root::Root;
use crate::class_table::{VARIABLES, Variable};

/// Beginnings of the names of files that show which way a process's transfers take, besides those
/// of [`VARIABLES`]. Wheels have names such as libucp-1a2b3c.so.0, so only the beginning counts.
const LIBRARIES: [&str; 16] = [
    "_laxity.", "libefa", "libfabric", "libibverbs", "liblaxity.so", "liblaxity_", "libmlx5",
    "libnccl", "libnixl", "libnvshmem", "libplugin_", "librccl", "libucp", "libuct_", "mooncake/",
    "nvshmem_transport_",
];

const CHOICES: [&str; 10] = [
    "FI_PROVIDER", "LAXITY_NIXL", "LAXITY_RMA", "NCCL_GIN_ENABLE", "NCCL_GIN_TYPE",
    "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_RMA_PLUGIN", "NVSHMEM_IB_ENABLE_IBGDA", "UCX_TLS",
];

/// The kind of NIC that a process uses, as far as it decides about the way of its transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NicKind {
    Mlx5,
    Efa,
    #[default]
    Other,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) uses_rdma: bool,
    pub(crate) is_idle: bool,
    pub(crate) devices: Vec<String>,
    pub(crate) nic: NicKind,
    /// The files of RDMA libraries in it, from the beginning that is known.
    pub(crate) libraries: BTreeSet<String>,
    pub(crate) preloaded: bool,
    pub(crate) gin_thread: bool,
    pub(crate) class_variables: Vec<&'static Variable>,
    pub(crate) variables: BTreeMap<String, String>,
}

impl Process {
    pub(crate) fn subject(&self) -> String {
        format!("{} ({})", self.pid, self.name)
    }

    pub(crate) fn has(&self, beginning: &str) -> bool {
        self.libraries.iter().any(|file| file.starts_with(beginning))
    }

    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

/// The result of a scan of the host's processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessScan {
    pub(crate) processes: Vec<Process>,
    /// Pid and name of each process that this user may not look into.
    pub(crate) unreadable: Vec<(u32, String)>,
}

pub(crate) fn scan(root: &Root) -> ProcessScan {
    let mut seen = ProcessScan::default();
    for pid in root.names("/proc").iter().filter_map(|name| name.parse().ok()) {
        let name = || root.text(&format!("/proc/{pid}/comm")).unwrap_or_default();
        // Threads of the kernel and zombies have neither a command line nor a mapping.
        let is_gone = || root.bytes(&format!("/proc/{pid}/cmdline")).is_some_and(|c| c.is_empty());
        match root.bytes(&format!("/proc/{pid}/maps")) {
            Some(maps) => {
                seen.processes.extend(process(root, pid, name(), &String::from_utf8_lossy(&maps)));
            }
            // The process may have ended meanwhile.
            None if root.has(&format!("/proc/{pid}")) && !is_gone() => {
                seen.unreadable.push((pid, name()));
            }
            None => {}
        }
    }
    seen
}

fn process(root: &Root, pid: u32, name: String, maps: &str) -> Option<Process> {
    let libraries = libraries(maps);
    let class_variables: Vec<_> = VARIABLES.iter().filter(|row| row.is_loaded(maps)).collect();
    let fds = format!("/proc/{pid}/fd");
    let opened = |fd: &String| {
        root.link(&format!("{fds}/{fd}"))?.strip_prefix("/dev/infiniband/").map(str::to_owned)
    };
    let files = root.names(&fds);
    let mut opened: Vec<String> = files.iter().filter_map(opened).collect();
    opened.retain(|device| device.starts_with("uverbs"));
    opened.sort();
    opened.dedup();
    let device = |uverbs: &String| {
        let file = format!("/sys/class/infiniband_verbs/{uverbs}/ibdev");
        root.text(&file).unwrap_or_else(|| uverbs.clone())
    };
    let tasks = format!("/proc/{pid}/task");
    let is_gin = |thread: &String| {
        let name = root.text(&format!("{tasks}/{thread}/comm"));
        name.is_some_and(|name| name.starts_with("NCCL GIN"))
    };
    let mut process = Process {
        pid,
        name,
        uses_rdma: !opened.is_empty(),
        is_idle: opened.is_empty() && !files.is_empty(),
        devices: opened.iter().map(device).collect(),
        preloaded: libraries.iter().any(|file| file.starts_with("liblaxity.so")),
        gin_thread: maps.contains("/libnccl") && root.names(&tasks).iter().any(is_gin),
        class_variables,
        libraries,
        ..Process::default()
    };
    let verbs = process.has("libibverbs");
    if !verbs && !process.uses_rdma && process.class_variables.is_empty() {
        return None;
    }
    process.variables = variables(root, pid);
    process.nic = nic(root, &process);
    Some(process)
}

/// Returns the parts of mapped paths from the known beginning of a library's name to the end.
fn libraries(maps: &str) -> BTreeSet<String> {
    let paths: BTreeSet<&str> =
        maps.lines().filter_map(|line| Some(&line[line.find('/')?..])).collect();
    let of_table = VARIABLES.iter().flat_map(|row| row.loaded.iter().map(String::as_str));
    let known: BTreeSet<String> =
        LIBRARIES.into_iter().chain(of_table).map(|beginning| format!("/{beginning}")).collect();
    let of_path = |path: &str| {
        let at = known.iter().filter_map(|beginning| path.rfind(beginning.as_str())).max()?;
        let file = &path[at + 1..];
        Some(file.strip_suffix(" (deleted)").unwrap_or(file).to_owned())
    };
    paths.into_iter().filter_map(of_path).collect()
}

/// Determines the NIC of a process by the driver of its devices, or else of the host's. Without
/// devices it uses the loaded libraries, although libibverbs may load the providers of all NICs.
fn nic(root: &Root, process: &Process) -> NicKind {
    const CLASS: &str = "/sys/class/infiniband";
    // Names such as rocep1s0 say nothing about the driver.
    const NAMES: [&str; 6] = ["bnxt_re", "efa", "irdma", "mlx5", "rxe", "siw"];
    let driver = |device: &String| {
        if let Some(path) = root.link(&format!("{CLASS}/{device}/device/driver")) {
            return path.rsplit('/').next().map(str::to_owned);
        }
        let layer = root.text(&format!("{CLASS}/{device}/ports/1/link_layer"));
        match layer.as_deref() {
            Some("Unspecified") => Some("efa".to_owned()),
            _ => NAMES.iter().any(|name| device.starts_with(name)).then(|| device.clone()),
        }
    };
    let known = |devices: &[String]| devices.iter().filter_map(driver).collect::<Vec<String>>();
    let mut drivers = known(&process.devices);
    if drivers.is_empty() {
        drivers = known(&root.names(CLASS));
    }
    let is = |beginning: &str| drivers.iter().any(|driver| driver.starts_with(beginning));
    let unknown = drivers.is_empty();
    let asks_efa = process.variable("FI_PROVIDER").is_some_and(|it| it.contains("efa"));
    if is("efa") || unknown && asks_efa {
        NicKind::Efa
    } else if is("mlx5") || unknown && process.has("libmlx5") {
        NicKind::Mlx5
    } else if unknown && process.has("libefa") {
        NicKind::Efa
    } else {
        NicKind::Other
    }
}

fn variables(root: &Root, pid: u32) -> BTreeMap<String, String> {
    let bytes = root.bytes(&format!("/proc/{pid}/environ")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let matters = |name: &str| CHOICES.contains(&name) || VARIABLES.iter().any(|r| r.reads(name));
    text.split('\0')
        .filter_map(|entry| entry.split_once('='))
        .filter(|(name, value)| matters(name) && !value.is_empty())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// How many queue pairs of each type each process has, as far as the kernel knows them. The kernel
/// knows no queue pair that a library made by DEVX.
pub(crate) type QueuePairs = BTreeMap<u32, BTreeMap<String, usize>>;

/// Parses the output of `rdma -j res show qp`. Queue pairs of the kernel have no pid.
pub(crate) fn queue_pairs(json: &str) -> QueuePairs {
    #[derive(Deserialize)]
    struct QueuePair {
        #[serde(rename = "type")]
        kind: String,
        pid: Option<u32>,
    }
    let rows: Vec<QueuePair> = serde_json::from_str(json).unwrap_or_default();
    let mut found = QueuePairs::new();
    for QueuePair { kind, pid } in rows {
        if let Some(pid) = pid {
            *found.entry(pid).or_default().entry(kind).or_default() += 1;
        }
    }
    found
}

/// Reports processes whose transfers Laxity does not see.
pub(crate) fn coverage(seen: &ProcessScan, status: Option<&Status>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut covered = 0;
    for process in &seen.processes {
        let attached = |status: &Status| status.clients.iter().any(|c| c.pid == process.pid);
        let attached = status.map(attached);
        if !process.preloaded && attached != Some(true) {
            findings.extend(uncovered(process));
        } else if process.uses_rdma && attached == Some(false) {
            let detached =
                Finding::warn("coverage", "liblaxity.so is in it, but it is not attached")
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
    }
    if covered > 0 {
        let found = format!("{covered} processes with RDMA libraries are under Laxity");
        findings.push(Finding::ok("coverage", found));
    } else if seen.processes.is_empty() {
        findings.push(Finding::ok("coverage", "no process has an RDMA library in it"));
    }
    if !seen.unreadable.is_empty() {
        let found = format!("{} processes could not be read", seen.unreadable.len());
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
                "its transfers compete with those that Laxity orders, in a class that it \
                chose itself",
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
    const FITTING: [(&str, &str); 6] = [
        ("libtransfer_engine", "mooncake"),
        ("mooncake/", "mooncake"),
        ("libnixl", "nixl"),
        ("libucp", "ucx"),
        ("libnccl", "nccl"),
        ("librccl", "nccl"),
    ];
    let found = FITTING.iter().find(|(library, _)| process.has(library));
    found.map_or("default", |(_, profile)| profile)
}
