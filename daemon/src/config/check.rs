//! What parses and still cannot be meant.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use laxity_quantity::Nanos;
use laxity_shm::layout::{LANES_MAX, SLOTS_MAX, SLOTS_MIN};
use laxity_shm::registration::SOCKET_PATH_MAX;

use super::{Config, NICS_MAX, NicConfig};
use crate::coordinator::channel::{self, Scheme};
use crate::coordinator::credentials;
use crate::coordinator::stream::own_host;

/// The slowest rate that a NIC is likely to have, in bytes per second: 10 Mbit/s.
const RATE_LIKELY_MIN: u64 = 1_250_000;

/// A value that parses and makes no sense: where, what, and what to put instead.
pub(super) struct Nonsense {
    pub(super) key: String,
    pub(super) problem: String,
}

impl Config {
    /// What is allowed and will not do what it says on this host.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let cpus = Path::new("/sys/devices/system/cpu");
        if let Some(cpu) = self.scheduler.cpu
            && cpus.exists()
            && !cpus.join(format!("cpu{cpu}")).exists()
        {
            warnings.push(format!(
                "scheduler.cpu: this host has no core {cpu}; the scheduler would run unpinned"
            ));
        }
        self.warn_of_access(&mut warnings);
        for (index, nic) in self.nic.iter().enumerate() {
            if nic.rate.0 < RATE_LIKELY_MIN {
                warnings.push(format!(
                    "nic.{index}.rate: {} is {} bytes per second; no NIC is that slow, and all \
                     traffic would wait. Write the unit, such as \"100Gbit\"",
                    nic.rate, nic.rate.0
                ));
            }
        }
        self.warn_of_coordinator(&mut warnings);
        warnings
    }

    fn warn_of_access(&self, warnings: &mut Vec<String>) {
        let mode = self.access.control_mode;
        if mode & 0o002 != 0 {
            warnings.push(format!(
                "access.control_mode: {mode:04o} lets every user of this host switch the \
                 scheduling off; write \"0660\", and add operators to the group of the socket"
            ));
        }
        let access = &self.access;
        let names_others = access.anyone || !access.uids.is_empty() || !access.gids.is_empty();
        if names_others && access.socket_mode & 0o022 == 0 {
            warnings.push(format!(
                "access.socket_mode: {:04o} keeps out all but root and the daemon's own user, \
                 though [access] names others; write \"0666\", since the daemon checks who they \
                 are",
                access.socket_mode
            ));
        }
    }

    /// The first value that makes no sense.
    pub(super) fn check(&self) -> Result<(), Nonsense> {
        let fail = |key: &str, problem: String| {
            Err(Nonsense {
                key: key.to_owned(),
                problem,
            })
        };
        if !self.metrics.is_empty() && self.metrics_address().is_none() {
            return fail(
                "metrics",
                format!("`{}` is not ADDRESS:PORT; use \"\" for none", self.metrics),
            );
        }
        for (key, path) in [("socket", &self.socket), ("control", &self.control)] {
            let length = path.as_os_str().len();
            if !(1..=SOCKET_PATH_MAX).contains(&length) {
                return fail(
                    key,
                    format!(
                        "{length} bytes long; the path of a socket has 1 and at most \
                         {SOCKET_PATH_MAX} bytes"
                    ),
                );
            }
        }
        if self.socket == self.control {
            return fail("control", "must be another path than `socket`".into());
        }
        if let Err(problem) = check_log(&self.log) {
            return fail("log", problem);
        }
        self.check_scheduler()?;
        for (key, mode) in [
            ("access.socket_mode", self.access.socket_mode),
            ("access.control_mode", self.access.control_mode),
        ] {
            if mode > 0o777 {
                return fail(key, format!("{mode:o} is not a file mode; write \"0660\""));
            }
        }
        self.check_levels()?;
        if self.slo_ttft == Some(Nanos(0)) {
            return fail(
                "slo_ttft",
                "must be more than zero; leave it out for none".into(),
            );
        }
        if self.tuning.completion_timeout == Nanos(0) {
            return fail(
                "tuning.completion_timeout",
                "must be more than zero: every permit would be written off at once".into(),
            );
        }
        self.check_coordinator()?;
        if self.nic.is_empty() || self.nic.len() > NICS_MAX {
            return fail(
                "nic",
                format!("{} NICs; give 1 to {NICS_MAX}", self.nic.len()),
            );
        }
        for (index, nic) in self.nic.iter().enumerate() {
            self.check_nic(index, nic)?;
        }
        Ok(())
    }

    fn check_scheduler(&self) -> Result<(), Nonsense> {
        let fail = |key: &str, problem: String| {
            Err(Nonsense {
                key: key.to_owned(),
                problem,
            })
        };
        let scheduler = &self.scheduler;
        if !(1..=LANES_MAX).contains(&scheduler.lanes) {
            return fail(
                "scheduler.lanes",
                format!("{} is not in 1..={LANES_MAX}", scheduler.lanes),
            );
        }
        if !(SLOTS_MIN..=SLOTS_MAX).contains(&scheduler.slots) {
            return fail(
                "scheduler.slots",
                format!("{} is not in {SLOTS_MIN}..={SLOTS_MAX}", scheduler.slots),
            );
        }
        if !(1..=16_384).contains(&scheduler.clients_max) {
            return fail(
                "scheduler.clients_max",
                format!("{} is not in 1..=16384", scheduler.clients_max),
            );
        }
        if let Some(share) = scheduler.clients_per_uid_max
            && !(1..=scheduler.clients_max).contains(&share)
        {
            return fail(
                "scheduler.clients_per_uid_max",
                format!(
                    "{share} is not in 1..={}, which is scheduler.clients_max",
                    scheduler.clients_max
                ),
            );
        }
        if scheduler.flows_per_client_max == 0 {
            return fail(
                "scheduler.flows_per_client_max",
                "must be at least 1".into(),
            );
        }
        if scheduler.spin_us > 1_000_000 {
            return fail(
                "scheduler.spin_us",
                "more than a second; did you mean less?".into(),
            );
        }
        Ok(())
    }

    fn check_coordinator(&self) -> Result<(), Nonsense> {
        let coordinator = &self.coordinator;
        let fail = |key: &str, problem: String| {
            Err(Nonsense {
                key: format!("coordinator.{key}"),
                problem,
            })
        };
        for (key, value, least_ms) in [
            ("order_age_limit", coordinator.order_age_limit, 10),
            ("fetch_wait_max", coordinator.fetch_wait_max, 1),
            ("backoff_min", coordinator.backoff_min, 1),
            ("backoff_max", coordinator.backoff_max, 1),
        ] {
            if value.0 < least_ms * 1_000_000 || value.0 > 3_600_000_000_000 {
                return fail(key, format!("{value} is not in {least_ms}ms..=60min"));
            }
        }
        if coordinator.backoff_max < coordinator.backoff_min {
            return fail("backoff_max", "is less than coordinator.backoff_min".into());
        }
        if coordinator.host.len() > 253 || coordinator.host.contains(char::is_control) {
            return fail(
                "host",
                "a host name has at most 253 bytes and no control characters".into(),
            );
        }
        let endpoint = &coordinator.endpoint;
        if endpoint.is_empty() {
            return Ok(());
        }
        let place = match channel::allow(endpoint, coordinator) {
            Ok(place) => place,
            Err(problem) => return fail("endpoint", problem),
        };
        let given = |path: &Path| !path.as_os_str().is_empty();
        if place.scheme == Scheme::Http
            && (given(&coordinator.ca) || given(&coordinator.cert) || given(&coordinator.key))
        {
            return fail(
                "endpoint",
                "http:// is without TLS, and there are certificates: write https://, or take ca, \
                 cert and key away"
                    .into(),
            );
        }
        if given(&coordinator.cert) != given(&coordinator.key) {
            let (there, missing) = match given(&coordinator.cert) {
                true => ("cert", "key"),
                false => ("key", "cert"),
            };
            return fail(there, format!("needs coordinator.{missing}, too"));
        }
        let name = &coordinator.server_name;
        if !name.is_empty() && !credentials::is_server_name(name) {
            return fail(
                "server_name",
                format!("`{name}` is neither a DNS name nor an address"),
            );
        }
        Ok(())
    }

    /// Checks the files that `[coordinator]` names, as the coordinator will.
    pub(super) fn check_certificates(&self) -> Result<(), Nonsense> {
        let coordinator = &self.coordinator;
        let Ok(place) = channel::place(&coordinator.endpoint) else {
            return Ok(());
        };
        if place.scheme == Scheme::Http {
            return Ok(());
        }
        match credentials::check(coordinator, &place.host, &own_host(coordinator)) {
            Ok(()) => Ok(()),
            Err(unusable) => Err(Nonsense {
                key: unusable.key.to_owned(),
                problem: unusable.problem,
            }),
        }
    }

    /// What is allowed of `[coordinator]` and not safe, or of no use.
    fn warn_of_coordinator(&self, warnings: &mut Vec<String>) {
        let coordinator = &self.coordinator;
        let Ok(place) = channel::place(&coordinator.endpoint) else {
            return;
        };
        if place.scheme == Scheme::Http {
            if !place.is_here && coordinator.insecure {
                warnings.push(format!(
                    "coordinator.insecure: speaking to the coordinator at {} WITHOUT TLS: whoever \
                     is in between can read reports and change orders; write https:// with ca, \
                     cert and key",
                    coordinator.endpoint
                ));
            }
            return;
        }
        if coordinator.insecure {
            warnings.push(
                "coordinator.insecure: has no effect with https://; take it away, so that it does \
                 not hold if the endpoint changes"
                    .into(),
            );
        }
        if coordinator.cert.as_os_str().is_empty() {
            warnings.push(
                "coordinator.cert: there is none, and laxity-coordinator with TLS lets nobody in \
                 without; `laxity certs --help` has an example"
                    .into(),
            );
        } else if let Ok(key) = std::fs::metadata(&coordinator.key)
            && key.mode() & 0o007 != 0
        {
            warnings.push(format!(
                "coordinator.key: every user of this host may use {}; chmod 0600, or 0640 with a \
                 group of the daemon's own",
                coordinator.key.display()
            ));
        }
    }

    fn check_levels(&self) -> Result<(), Nonsense> {
        let levels = &self.levels;
        let fail = |key: &str, problem: String| {
            Err(Nonsense {
                key: key.to_owned(),
                problem,
            })
        };
        if levels.dscp.len() != usize::from(levels.count) {
            return fail(
                "levels.dscp",
                format!(
                    "has {} entries for {} levels; give one per level, the highest first (levels \
                     may share a DSCP)",
                    levels.dscp.len(),
                    levels.count
                ),
            );
        }
        if let Some(dscp) = levels.dscp.iter().find(|dscp| **dscp > 63) {
            return fail("levels.dscp", format!("{dscp} is not in 0..=63"));
        }
        // A switch has one queue for a DSCP: what lies between two levels that share one would
        // have to be above and below it at once.
        for (row, dscp) in levels.dscp.iter().enumerate() {
            let before = &levels.dscp[..row];
            if let Some(first) = before.iter().position(|other| other == dscp)
                && before.last() != Some(dscp)
            {
                let (first, second) = (first + 1, row + 1);
                return fail(
                    "levels.dscp",
                    format!(
                        "P{first} and P{second} share {dscp} and levels between them do not; only \
                         adjacent levels may share a DSCP"
                    ),
                );
            }
        }
        let scavenger = levels.scavenger_dscp;
        if scavenger > 63 {
            return fail(
                "levels.scavenger_dscp",
                format!("{scavenger} is not in 0..=63"),
            );
        }
        if let Some(row) = levels.dscp.iter().position(|dscp| *dscp == scavenger)
            && levels.dscp.last() != Some(&scavenger)
        {
            return fail(
                "levels.scavenger_dscp",
                format!(
                    "{scavenger} is the DSCP of P{}; the scavenger may share that of the lowest \
                     level only",
                    row + 1
                ),
            );
        }
        Ok(())
    }

    fn check_nic(&self, index: usize, nic: &NicConfig) -> Result<(), Nonsense> {
        if let Some(other) = self.nic[..index]
            .iter()
            .position(|other| other.name == nic.name)
        {
            return Err(Nonsense {
                key: format!("nic.{index}.name"),
                problem: format!("`{}` is the name of NIC {other} already", nic.name),
            });
        }
        if nic.name.is_empty() || nic.name.contains(char::is_control) {
            return Err(Nonsense {
                key: format!("nic.{index}.name"),
                problem: "is a label of metrics: give it at least one character, and no control \
                    characters"
                    .into(),
            });
        }
        self.link(nic).validate().map_err(|invalid| Nonsense {
            key: match invalid.field {
                "rate" => format!("nic.{index}.rate"),
                "chunk_bytes" => format!("nic.{index}.chunk"),
                "window_bytes" => format!("nic.{index}.window"),
                "levels" => "levels.count".into(),
                field => format!("tuning.{field}"),
            },
            problem: invalid.problem,
        })
    }
}

/// Words that are a level by themselves. `EnvFilter` takes any other word for the name of a target,
/// which then is all that is logged: a misspelt level would silence the daemon.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

fn check_log(filter: &str) -> Result<(), String> {
    let known = LOG_LEVELS.join(", ");
    let bare = |part: &str| !part.contains(['=', '[']);
    if filter.trim().is_empty() {
        return Err(format!("is empty; the levels are {known}"));
    }
    for part in filter.split(',').map(str::trim).filter(|p| bare(p)) {
        let level = LOG_LEVELS.iter().any(|l| l.eq_ignore_ascii_case(part));
        if !level && !part.is_empty() {
            return Err(format!(
                "`{part}` is not a level; they are {known}. For a part of the daemon write \
                 TARGET=LEVEL"
            ));
        }
    }
    tracing_subscriber::EnvFilter::try_new(filter)
        .map(drop)
        .map_err(|error| format!("`{filter}`: {error}; the levels are {known}"))
}
