//! Checks of values that parse but can't work.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use laxity_policy::config::{BATCHES_MAX, REQUESTS_MAX};
use laxity_quantity::Nanos;
use laxity_shm::layout::{LANES_MAX, SLOTS_MAX, SLOTS_MIN};
use laxity_shm::registration::SOCKET_PATH_MAX;

use super::{Config, NICS_MAX};
use crate::coordinator::addresses::own_host;
use crate::coordinator::channel::{self, Scheme};
use crate::coordinator::credentials;

/// An invalid value that could be parsed: its key, the problem and the remedy.
pub(super) struct InvalidValue {
    pub(super) key: String,
    pub(super) problem: String,
}

type Checked = Result<(), InvalidValue>;

/// Returns an error with `problem` for `key`, unless `right`.
fn ensure<P: Into<String>>(right: bool, key: &str, problem: impl FnOnce() -> P) -> Checked {
    if right {
        return Ok(());
    }
    Err(InvalidValue { key: key.to_owned(), problem: problem().into() })
}

fn within<T: Copy + PartialOrd + Display>(
    key: &str,
    value: T,
    range: RangeInclusive<T>,
) -> Checked {
    let (least, most) = (range.start(), range.end());
    let problem = || format!("{value} is not in {least}..={most}");
    ensure(range.contains(&value), key, problem)
}

impl Config {
    /// Returns warnings about values that are allowed, but unsafe, unlikely or without effect on
    /// this host.
    pub fn warnings(&self) -> Vec<String> {
        let gone =
            |key| format!("{key}: this release has no such key, so it does nothing; remove it");
        let mut warnings: Vec<String> = self.retired.iter().map(gone).collect();
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
            warnings.extend(nic.warn_of_rate(index));
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

    /// Checks all values. Returns the first invalid one.
    pub(super) fn check(&self) -> Checked {
        let metrics = &self.metrics;
        ensure(metrics.is_empty() || self.metrics_address().is_some(), "metrics", || {
            format!("`{metrics}` is not ADDRESS:PORT; use \"\" for none")
        })?;
        self.web
            .check("127.0.0.1:7476")
            .or_else(|problem| ensure(false, "web.listen", || problem))?;
        for (key, path) in [("socket", &self.socket), ("control", &self.control)] {
            let length = path.as_os_str().len();
            ensure((1..=SOCKET_PATH_MAX).contains(&length), key, || {
                format!(
                    "{length} bytes long; the path of a socket has 1 and at most \
                     {SOCKET_PATH_MAX} bytes"
                )
            })?;
        }
        ensure(self.socket != self.control, "control", || "must be another path than `socket`")?;
        laxity_listen::check_filter(&self.log)
            .or_else(|problem| ensure(false, "log", || problem))?;
        self.check_scheduler()?;
        for (key, mode) in [
            ("access.socket_mode", self.access.socket_mode),
            ("access.control_mode", self.access.control_mode),
        ] {
            ensure(mode <= 0o777, key, || format!("{mode:o} is not a file mode; write \"0660\""))?;
        }
        self.check_levels()?;
        let right = self.slo_ttft != Some(Nanos(0));
        ensure(right, "slo_ttft", || "must be more than zero; leave it out for none")?;
        within("residual.assured_permille", self.residual.assured_permille, 1..=1000)?;
        let timeout = self.tuning.completion_timeout;
        ensure(
            timeout != Nanos(0),
            "tuning.completion_timeout",
            || "must be more than zero: every permit would be written off at once",
        )?;
        self.check_coordinator()?;
        let nics = self.nic.len();
        ensure((1..=NICS_MAX).contains(&nics), "nic", || {
            format!("{nics} NICs; give 1 to {NICS_MAX}")
        })?;
        (0..nics).try_for_each(|index| self.check_nic(index))
    }

    fn check_scheduler(&self) -> Checked {
        let scheduler = &self.scheduler;
        within("scheduler.lanes", scheduler.lanes, 1..=LANES_MAX)?;
        within("scheduler.slots", scheduler.slots, SLOTS_MIN..=SLOTS_MAX)?;
        for (key, value, most) in [
            ("flows_per_domain_max", scheduler.flows_per_domain_max, 1 << 24),
            ("batches_per_domain_max", scheduler.batches_per_domain_max, BATCHES_MAX),
            ("requests_per_domain_max", scheduler.requests_per_domain_max, REQUESTS_MAX),
        ] {
            within(&format!("scheduler.{key}"), value, 1..=most)?;
        }
        let clients_max = scheduler.clients_max;
        within("scheduler.clients_max", clients_max, 1..=16_384)?;
        if let Some(share) = scheduler.clients_per_uid_max {
            let right = (1..=clients_max).contains(&share);
            ensure(right, "scheduler.clients_per_uid_max", || {
                format!("{share} is not in 1..={clients_max}, which is scheduler.clients_max")
            })?;
        }
        let flows_max = scheduler.flows_per_client_max;
        ensure(flows_max > 0, "scheduler.flows_per_client_max", || "must be at least 1")?;
        let right = scheduler.spin_us <= 1_000_000;
        ensure(right, "scheduler.spin_us", || "more than a second; did you mean less?")
    }

    fn check_coordinator(&self) -> Checked {
        let coordinator = &self.coordinator;
        for (key, value, least_ms) in [
            ("order_age_limit", coordinator.order_age_limit, 10),
            ("backoff_min", coordinator.backoff_min, 1),
            ("backoff_max", coordinator.backoff_max, 1),
        ] {
            let right = (least_ms * 1_000_000..=3_600_000_000_000).contains(&value.0);
            ensure(right, &format!("coordinator.{key}"), || {
                format!("{value} is not in {least_ms}ms..=60min")
            })?;
        }
        let ascend = coordinator.backoff_min <= coordinator.backoff_max;
        ensure(ascend, "coordinator.backoff_max", || "is less than coordinator.backoff_min")?;
        let host = &coordinator.host;
        let right = host.len() <= 253 && !host.contains(char::is_control);
        ensure(
            right,
            "coordinator.host",
            || "a host name has at most 253 bytes and no control characters",
        )?;
        if coordinator.endpoint.is_empty() {
            return Ok(());
        }
        let place = match channel::allow(&coordinator.endpoint, coordinator) {
            Ok(place) => place,
            Err(problem) => return ensure(false, "coordinator.endpoint", || problem),
        };
        let files = [&coordinator.ca, &coordinator.cert, &coordinator.key];
        let [ca, cert, key] = files.map(|path| !path.as_os_str().is_empty());
        let right = place.scheme == Scheme::Https || !(ca || cert || key);
        ensure(right, "coordinator.endpoint", || {
            "http:// is without TLS, and there are certificates: write https://, or take ca, \
             cert and key away"
        })?;
        ensure(key || !cert, "coordinator.cert", || "needs coordinator.key, too")?;
        ensure(cert || !key, "coordinator.key", || "needs coordinator.cert, too")?;
        let name = &coordinator.server_name;
        let right = name.is_empty() || credentials::is_server_name(name);
        ensure(right, "coordinator.server_name", || {
            format!("`{name}` is neither a DNS name nor an address")
        })
    }

    /// Checks the files that `[coordinator]` names, as the coordinator does.
    pub(super) fn check_certificates(&self) -> Checked {
        let coordinator = &self.coordinator;
        let Ok(place) = channel::place(&coordinator.endpoint) else { return Ok(()) };
        if place.scheme == Scheme::Http {
            return Ok(());
        }
        credentials::check(coordinator, &place.host, &own_host(coordinator))
            .or_else(|unusable| ensure(false, unusable.key, || unusable.problem))
    }

    /// Adds warnings about values of `[coordinator]` that are unsafe or have no effect.
    fn warn_of_coordinator(&self, warnings: &mut Vec<String>) {
        let coordinator = &self.coordinator;
        let Ok(place) = channel::place(&coordinator.endpoint) else { return };
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

    fn check_levels(&self) -> Checked {
        let levels = &self.levels;
        let given = levels.dscp.len();
        ensure(given == usize::from(levels.count), "levels.dscp", || {
            format!(
                "has {given} entries for {} levels; give one per level, the highest first (levels \
                 may share a DSCP)",
                levels.count
            )
        })?;
        for &dscp in &levels.dscp {
            within("levels.dscp", dscp, 0..=63)?;
        }
        // A switch has one queue per DSCP. A level between two that share one would have to be
        // above and below that queue.
        for (row, dscp) in levels.dscp.iter().enumerate() {
            let before = &levels.dscp[..row];
            if let Some(first) = before.iter().position(|other| other == dscp) {
                let (first, second) = (first + 1, row + 1);
                ensure(before.last() == Some(dscp), "levels.dscp", || {
                    format!(
                        "P{first} and P{second} share {dscp} and levels between them do not; only \
                         adjacent levels may share a DSCP"
                    )
                })?;
            }
        }
        let services = levels.sl.len();
        ensure(services == 0 || services == given, "levels.sl", || {
            format!(
                "has {services} entries for {given} levels; give one per level, the highest \
                 first, or none (levels may share one)"
            )
        })?;
        for &sl in &levels.sl {
            within("levels.sl", sl, 0..=15)?;
        }
        let scavenger = levels.scavenger_dscp;
        within("levels.scavenger_dscp", scavenger, 0..=63)?;
        if let Some(row) = levels.dscp.iter().position(|dscp| *dscp == scavenger) {
            let is_lowest = levels.dscp.last() == Some(&scavenger);
            ensure(is_lowest, "levels.scavenger_dscp", || {
                format!(
                    "{scavenger} is the DSCP of P{}; the scavenger may share that of the lowest \
                     level only",
                    row + 1
                )
            })?;
        }
        Ok(())
    }

    fn check_nic(&self, index: usize) -> Checked {
        let (nic, name) = (&self.nic[index], format!("nic.{index}.name"));
        let mut before = self.nic[..index].iter();
        if let Some(other) = before.position(|other| other.name == nic.name) {
            return ensure(false, &name, || {
                format!("`{}` is the name of NIC {other} already", nic.name)
            });
        }
        let right = !nic.name.is_empty() && !nic.name.contains(char::is_control);
        ensure(
            right,
            &name,
            || "is a label of metrics: give it at least one character, and no control characters",
        )?;
        self.link(nic).validate().map_err(|invalid| InvalidValue {
            key: match invalid.field {
                "rate" => format!("nic.{index}.rate"),
                "chunk_bytes" => format!("nic.{index}.chunk"),
                "window_bytes" => format!("nic.{index}.window"),
                "peer_window_bytes" => format!("nic.{index}.peer_window"),
                "levels" => "levels.count".into(),
                field => format!("tuning.{field}"),
            },
            problem: invalid.problem,
        })
    }
}
