//! Checks of the daemon: whether it runs, admits this user, has this release and schedules.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use laxity_cli::library::LibraryError;
use laxity_cli::table::bytes;
use laxity_job::Profile;
use laxity_shm::registration::{Reason, RegistrationError};
use laxity_wire::{ControlError, PortStatus, Status};
use nix::unistd::geteuid;

use super::finding::Finding;
use crate::external::find;
use crate::host::overview::older_clients;

const START: &str =
    "systemctl enable --now laxityd; journalctl -u laxityd says why it does not start";

pub(crate) fn daemon(answer: &Result<Status, ControlError>) -> Vec<Finding> {
    match answer {
        Ok(status) => {
            let found = format!(
                "laxityd {} (pid {}), policy {}",
                status.version, status.pid, status.policy
            );
            let mut findings = vec![Finding::ok("daemon", found)];
            findings.push(version(&status.version, env!("CARGO_PKG_VERSION")));
            findings.push(switched(status));
            findings.extend(assumed_rates(status));
            findings.extend(clients(status));
            findings
        }
        // The daemon listens, but the mode of its socket excludes this user. It need not be down.
        Err(ControlError::Connect { path, cause })
            if cause.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            let found = format!("this user may not ask {}", path.display());
            let why = "mode, bypass and clients stay unknown here; jobs register elsewhere and are \
                not affected";
            vec![Finding::info("daemon", found).because(why).action("sudo laxity doctor")]
        }
        Err(error) => {
            let (why, action) = match error {
                ControlError::Connect { .. } => {
                    ("without a daemon everything goes out unscheduled", START)
                }
                _ => (
                    "an operator can neither look at it nor switch it off",
                    "systemctl restart laxityd (jobs go on unscheduled meanwhile)",
                ),
            };
            vec![Finding::error("daemon", error.to_string()).because(why).action(action)]
        }
    }
}

/// Checks the configuration that laxityd would start with. Only root can read all that it names.
pub(crate) fn configuration() -> Option<Finding> {
    let laxityd = find("laxityd".as_ref()).filter(|_| geteuid().is_root())?;
    let checked = Command::new(laxityd).arg("--check-config").stdin(Stdio::null()).output().ok()?;
    let said = String::from_utf8_lossy(&checked.stderr).trim().to_owned();
    Some(match checked.status.success() {
        true => Finding::ok("configuration", "laxityd would start with it"),
        false => Finding::error("configuration", said)
            .because("laxityd does not start with it; one that runs keeps what it read before")
            .action("correct it until `laxityd --check-config` accepts it, then `laxity reload`"),
    })
}

fn version(daemon: &str, cli: &str) -> Finding {
    if daemon == cli {
        return Finding::ok("version", format!("daemon and tools are both {cli}"));
    }
    Finding::warn("version", format!("the daemon is {daemon}, these tools are {cli}"))
        .because("clients of the previous or next release are scheduled, and others are not")
        .action("install one release everywhere; systemctl restart laxityd")
}

/// Returns a warning for each NIC whose rate nobody knows.
fn assumed_rates(status: &Status) -> impl Iterator<Item = Finding> {
    let is_assumed = |port: &&PortStatus| port.rate_assumed && port.direction == "egress";
    status.ports.iter().filter(is_assumed).map(|port| {
        let rate = bytes(port.rate_bytes_per_s);
        Finding::warn("rate", format!("the kernel knows no rate, {rate}/s is assumed"))
            .about(&port.name)
            .because("permits may be far above or below what the NIC sends")
            .action(format!(
                "check whether its link is up; or set rate in the [[nic]] of {} in \
                 /etc/laxity/laxityd.toml; systemctl reload laxityd",
                port.name
            ))
    })
}

fn switched(status: &Status) -> Finding {
    if status.bypass {
        return Finding::warn("mode", "bypassed")
            .because("an operator ran `laxity bypass on`: all traffic goes out unscheduled")
            .action("laxity bypass off");
    }
    let change = "laxity observe report, then laxity enforce on";
    match status.mode.as_str() {
        "enforce" => Finding::ok("mode", "enforce"),
        "observe" => Finding::info("mode", "observe")
            .because("transfers are accounted for, none is delayed")
            .action(change),
        mode => Finding::warn("mode", mode).because("nothing is scheduled").action(change),
    }
}

fn clients(status: &Status) -> Vec<Finding> {
    if status.clients.is_empty() {
        let none = Finding::info("clients", "no client is attached");
        return vec![
            none.action("laxity run --profile NAME -- COMMAND; to try it: laxity example-job"),
        ];
    }
    let mut names: Vec<&str> = status.clients.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let found = format!("{} attached: {}", status.clients.len(), names.join(", "));
    let mut findings = vec![Finding::ok("clients", found)];
    let older: Vec<String> = older_clients(status).collect();
    if !older.is_empty() {
        let found = format!("an older library than laxityd: {}", older.join(", "));
        let finding = Finding::info("clients", found)
            .because(
                "the release after this one may not understand it, and it would go unscheduled",
            )
            .action("restart these jobs with the library of this release before the next upgrade");
        findings.push(finding);
    }
    for client in &status.clients {
        let subject = format!("{} ({})", client.pid, client.name);
        if client.garbage_records > 0 || client.quarantined_lanes > 0 {
            let found = format!(
                "{} records of it made no sense, {} lanes are no longer read",
                client.garbage_records, client.quarantined_lanes
            );
            let finding = Finding::warn("clients", found)
                .about(subject)
                .because("transfers of those threads go out unscheduled")
                .action(
                    "restart it with the library of this release; the daemon's log has the records",
                );
            findings.push(finding);
        } else if client.mode == "off" {
            let finding = Finding::info("clients", "its mode is off").about(subject);
            findings.push(finding.because("it is attached, and its transfers are not scheduled"));
        }
    }
    findings
}

pub(crate) fn registration(socket: &Path, error: Option<&RegistrationError>) -> Finding {
    let shown = socket.display();
    let Some(error) = error else {
        return Finding::ok("registration", format!("{shown} admits this user"));
    };
    let finding = Finding::error("registration", format!("{shown}: {error}"))
        .because("jobs of this user go out unscheduled");
    finding.action(match error {
        RegistrationError::Rejected { reason: Reason::Forbidden, .. } => {
            "add its user or group to [access] in /etc/laxity/laxityd.toml; systemctl reload \
             laxityd"
        }
        RegistrationError::Rejected { reason: Reason::Full, .. } => {
            "raise scheduler.clients_max in /etc/laxity/laxityd.toml; systemctl reload laxityd"
        }
        RegistrationError::Version(_)
        | RegistrationError::Rejected { reason: Reason::Version, .. } => {
            "install one release everywhere; systemctl restart laxityd"
        }
        RegistrationError::System { source, .. }
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            "access.socket_mode in /etc/laxity/laxityd.toml, and the modes of the folders above \
             the socket"
        }
        RegistrationError::NoAnswer => "systemctl restart laxityd (it listens and does not answer)",
        _ => START,
    })
}

pub(crate) fn library(found: &Result<PathBuf, LibraryError>) -> Finding {
    match found {
        Ok(path) => Finding::ok("library", path.display().to_string()),
        Err(error) => Finding::warn("library", error.to_string()).because(
            "`laxity run` can't put a program under Laxity; programs that link \
                laxity_client don't need it",
        ),
    }
}

pub(crate) fn profiles() -> Vec<Finding> {
    let names = Profile::names();
    let broken = names.iter().filter_map(|name| Profile::load(name).err());
    let mut findings: Vec<Finding> = broken
        .map(|error| {
            Finding::error("profile", error.to_string()).because(
                "`laxity run` refuses it, and a running job that names it uses `default` instead",
            )
        })
        .collect();
    if findings.is_empty() {
        findings.push(Finding::ok("profile", names.join(", ")));
    }
    findings
}
