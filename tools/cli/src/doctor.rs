//! `laxity doctor`: finds out why jobs on this host are not scheduled.
//!
//! Most checks are functions from what is on the host (a [`Root`] and the daemon's answers) to
//! [`Finding`]s. Only this file asks the daemon and prints.

mod classes;
mod cluster;
pub(crate) mod fabric;
pub(crate) mod finding;
mod kernel;
pub(crate) mod levels;
mod limits;
pub(crate) mod map;
mod paths;
mod processes;
pub(crate) mod qos;
pub(crate) mod root;
mod service;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use laxity_nic::DcbError;
use serde::Serialize;

use self::finding::{Finding, Severity};
use self::map::{DaemonReply, Row, Sources};
use self::root::Root;
use crate::class_variables;
use crate::cluster::client::CoordinatorArgs;
use crate::cluster::error::ClusterError;
use crate::host::Endpoint;
use crate::registration;
use laxity_cli::library;

pub(crate) const HELP: &str = "\
Checks RDMA devices with their GIDs and their trust in DSCP, the daemon, the preload library, job \
profiles, traffic classes that libraries set by themselves, limits, the kernel, and processes \
whose transfers Laxity can't see. It changes nothing. Run it as root to check the processes of \
all users.

The output begins with a map of the traffic. For each process that uses RDMA, the map has the \
paths and the class of each path. It also shows whether Laxity schedules the path, another program \
marked it, the daemon only measures it, or nothing sees it.

With --cluster, the command asks the coordinator instead, and compares the hosts that the \
coordinator knows: releases, clocks, classes of the levels, hosts that mark nothing, and hosts \
that send no reports. The coordinator does not know a host that never connected, so name it with \
--expect.

Exit status: 0 if there is no error (there may be warnings), 1 if there is an error.";

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Compare the hosts that the coordinator knows, instead of checking this host
    #[arg(long)]
    cluster: bool,
    /// A host that should be connected to the coordinator; may be repeated
    #[arg(long, value_name = "HOST", requires = "cluster")]
    expect: Vec<String>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", env = laxity_wire::control::SOCKET_ENV,
          default_value = laxity_wire::control::SOCKET_DEFAULT)]
    control: PathBuf,
    /// Registration socket of the daemon [default: $LAXITY_SOCKET, or /run/laxity/laxityd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Preload library [default: $LAXITY_LIBRARY, or where it is installed]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Folder with copies of another host's /sys, /proc and /etc, and with outputs of that host's
    /// tools in sos_commands, such as sos_commands/laxity/mlnx_qos_-i_eth0
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    root: PathBuf,
}

/// The output of `--json`. Fields may be added.
#[derive(Serialize)]
struct DoctorReport<'a> {
    version: &'static str,
    worst: Severity,
    findings: &'a [Finding],
    processes: &'a [Row],
}

/// Runs all checks and prints the findings. Returns failure if there is an error.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode, ClusterError> {
    let (findings, processes) = match args.cluster {
        true => (cluster::examine(&args.coordinator, &args.expect)?, Vec::new()),
        false => examine(args),
    };
    let worst = findings.iter().map(|f| f.severity).max().unwrap_or(Severity::Ok);
    let version = env!("CARGO_PKG_VERSION");
    let report = DoctorReport { version, worst, findings: &findings, processes: &processes };
    args.coordinator.tell(&report, || {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let findings = finding::page(&findings, io::stdout().is_terminal() && !plain);
        match args.cluster {
            true => findings,
            false => format!("{}\n{findings}", map::page(&processes)),
        }
    })?;
    Ok(if worst == Severity::Error { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn examine(args: &DoctorArgs) -> (Vec<Finding>, Vec<Row>) {
    let root = Root::new(&args.root);
    let endpoint = Endpoint::new(args.control.clone(), args.coordinator.timeout_ms);
    let answer = endpoint.connect().and_then(|mut daemon| daemon.status());
    let status = answer.as_ref().ok();
    let socket = registration::socket(args.socket.as_deref());
    let ports = fabric::ports(&root);
    let seen = processes::scan(&root);
    let daemon = DaemonReply::of(&answer, &root);
    let rows = map::rows(&Sources::new(&root, &ports, daemon), &seen);
    let ask = |program: &str, arguments: &[&str]| root.ask(program, arguments);

    let mut findings = fabric::devices(&ports, status);
    findings.extend(fabric::gids(&root, &ports));
    // The kernel describes this host, and not another one whose files are below `root`.
    let query = |interface: &str| {
        if root.is_real() { laxity_nic::query(interface) } else { Err(DcbError::Unsupported) }
    };
    findings.extend(levels::priorities(&root, &ports, status, &query, &ask));
    let map = |interface: &str| {
        let maps = qos::settings(&root, interface, &query, &ask).maps;
        maps.into_iter().next().ok_or(DcbError::Unsupported)
    };
    findings.extend(fabric::forced_class(&root, &ports));
    findings.extend(service::daemon(&answer));
    findings.extend(root.is_real().then(service::configuration).flatten());
    let attached = registration::attach(&socket, "laxity doctor");
    findings.push(service::registration(&socket, attached.as_ref().err()));
    let treatments = || laxity_nic::treatments(root.path(), |_| true, &map);
    let rules = class_variables::rules(attached.ok(), treatments);
    findings.push(service::library(&library::find(args.library.as_deref())));
    findings.extend(service::profiles());
    findings.extend(processes::coverage(&seen, status));
    findings.extend(map::bypasses(&rows));
    findings.extend(classes::table(&seen));
    let layers = fabric::layers(&ports);
    findings.extend(rules.iter().flat_map(|rules| classes::compared(&seen, layers, rules)));
    findings.extend(classes::inverted(&seen, status));
    findings.extend(limits::memlock(&root, &seen, !ports.is_empty()));
    findings.extend(kernel::kernel(&root, &kernel::try_out()));
    (findings, rows)
}
