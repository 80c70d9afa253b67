//! `laxity doctor --cluster`: compares the hosts that the coordinator knows.

use std::collections::{BTreeMap, BTreeSet};

use laxity_wire::v1::{HostSettings, HostStatus, ListHostsRequest};
use laxity_wire::view::direction;

use super::finding::Finding;
use crate::cluster::client::CoordinatorArgs;
use crate::cluster::error::ClusterError;

/// A clock that differs by more than this, in seconds, makes logs and certificates misleading.
const CLOCK_S_MAX: f64 = 1.0;
/// Share of a port, in percent, from which traffic without permits is worth a look.
const FOREIGN_PERCENT_MIN: u64 = 10;
const NAMES_MAX: usize = 8;

/// Asks the coordinator, and compares its hosts with each other and with those in `expect`.
pub(super) fn examine(
    coordinator: &CoordinatorArgs,
    expect: &[String],
) -> Result<Vec<Finding>, ClusterError> {
    let told = coordinator.ask(async |operator| operator.list_hosts(ListHostsRequest {}).await)?;
    let mut found = compared(&told.hosts, expect);
    if !told.leading {
        let what = "this coordinator does not lead, so it knows no hosts";
        let action = "ask the leader: its address is in the log of any coordinator";
        found.insert(0, Finding::warn("leader", what).action(action));
    }
    Ok(found)
}

fn compared(hosts: &[HostStatus], expect: &[String]) -> Vec<Finding> {
    let connected: Vec<&HostStatus> = hosts.iter().filter(|host| host.connected).collect();
    let mut found = missing(hosts, &connected, expect);
    found.push(releases(&connected));
    let said = || connected.iter().filter_map(|host| Some((*host, host.settings.as_ref()?)));
    found.push(classes(said()));
    found.push(unmarked(said()));
    found.push(clocks(said()));
    found.push(foreign(&connected));
    let mute: Vec<&str> = connected
        .iter()
        .filter(|host| host.settings.is_none() && !host.drained)
        .map(|host| host.host.as_str())
        .collect();
    if !mute.is_empty() {
        found.push(
            Finding::info("settings", format!("{} said nothing of classes or clock", names(&mute)))
                .because("their release does not, or they have just connected"),
        );
    }
    found
}

/// Returns findings about hosts that are gone, never came, or send no reports.
fn missing(hosts: &[HostStatus], connected: &[&HostStatus], expect: &[String]) -> Vec<Finding> {
    let here: BTreeSet<&str> = connected.iter().map(|host| host.host.as_str()).collect();
    let wanted = expect.iter().map(String::as_str);
    let known = hosts.iter().filter(|host| !host.drained).map(|host| host.host.as_str());
    let gone: BTreeSet<&str> = wanted.chain(known).filter(|name| !here.contains(name)).collect();
    let mut found = Vec::new();
    if gone.is_empty() {
        found.push(Finding::ok("connected", format!("{} hosts", connected.len())));
    } else {
        found.push(
            Finding::error("connected", format!("{} not connected", names(gone)))
                .because("their daemons order by themselves, and others plan without them")
                .action("run `laxity status` there: its third line says why"),
        );
    }
    let silent: Vec<&str> =
        connected.iter().filter(|host| host.reports == 0).map(|host| host.host.as_str()).collect();
    if !silent.is_empty() {
        found.push(
            Finding::warn("reports", format!("{} connected and never reported", names(silent)))
                .action("run `laxity doctor` there"),
        );
    }
    found
}

fn releases(connected: &[&HostStatus]) -> Finding {
    let by_release = grouped(connected.iter().map(|host| (host.software.clone(), *host)));
    if by_release.len() < 2 {
        return Finding::ok("releases", listed(&by_release));
    }
    Finding::warn("releases", listed(&by_release))
        .because("a client more than one release apart from its daemon runs unscheduled")
        .action("finish the upgrade")
}

type Said<'a> = (&'a HostStatus, &'a HostSettings);

fn classes<'a>(said: impl Iterator<Item = Said<'a>>) -> Finding {
    let by_classes = grouped(said.map(|(host, it)| (format!("DSCP {:?}", it.level_dscp), host)));
    if by_classes.len() < 2 {
        return Finding::ok("classes", listed(&by_classes));
    }
    Finding::error("classes", listed(&by_classes))
        .because("switches queue by DSCP, so a level of one host is another level of the other")
        .action("write the same [levels] on all hosts, then `laxity reload`")
}

fn unmarked<'a>(said: impl Iterator<Item = Said<'a>>) -> Finding {
    let why = |it: &HostSettings| match (it.bypass, it.mode.as_str(), it.marking.as_str()) {
        (true, ..) => Some("bypassed".to_owned()),
        (_, "enforce", "off") => Some("marking = \"off\"".to_owned()),
        (_, "enforce", _) => None,
        (_, mode, _) => Some(format!("mode {mode}")),
    };
    let by_reason = grouped(said.filter_map(|(host, it)| Some((why(it)?, host))));
    if by_reason.is_empty() {
        return Finding::ok("marking", "no host has its traffic unmarked");
    }
    Finding::warn("marking", listed(&by_reason))
        .because("unmarked traffic goes above what can wait on other hosts")
        .action("`laxity enforce on` or `laxity bypass off` there, or set marking")
}

fn clocks<'a>(said: impl Iterator<Item = Said<'a>>) -> Finding {
    let off = |it: &HostSettings| it.clock_ahead_ns as f64 / 1e9;
    let wrong: Vec<String> = said
        .filter(|(_, it)| it.clock_ns != 0 && off(it).abs() > CLOCK_S_MAX)
        .map(|(host, it)| format!("{} by {:+.1} s", host.host, off(it)))
        .collect();
    if wrong.is_empty() {
        return Finding::ok("clocks", "within a second of the coordinator's");
    }
    let list = names(wrong.iter().map(String::as_str));
    Finding::warn("clocks", format!("{list} off from the coordinator's"))
        .because("certificates and logs go by the clock; the order between hosts does not")
        .action("check chrony or systemd-timesyncd there")
}

/// Finds ports that carry much that no daemon permits. A port's rate is already lower by it.
fn foreign(connected: &[&HostStatus]) -> Finding {
    let ports = connected.iter().flat_map(|host| host.ports.iter().map(move |port| (host, port)));
    let shares = ports.filter_map(|(host, port)| {
        let others = port.foreign_bytes_per_s;
        let all = others.saturating_add(port.rate_bytes_per_s).max(1);
        let percent = (u128::from(others) * 100 / u128::from(all)) as u64;
        let name = format!("{} {}", port.port, direction(port.direction));
        (percent >= FOREIGN_PERCENT_MIN).then(|| format!("{percent} % of {name} of {}", host.host))
    });
    let shares: Vec<String> = shares.collect();
    if shares.is_empty() {
        let well = format!("below {FOREIGN_PERCENT_MIN} % of each port");
        return Finding::ok("foreign traffic", well);
    }
    Finding::warn("foreign traffic", names(&shares))
        .because("its bytes pass without a permit, so Laxity only makes room for them")
        .action("`laxity doctor` there says which process sends past Laxity, and by which path")
}

fn grouped<'a>(
    pairs: impl Iterator<Item = (String, &'a HostStatus)>,
) -> BTreeMap<String, Vec<&'a str>> {
    let mut groups: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (key, host) in pairs {
        groups.entry(key).or_default().push(&host.host);
    }
    groups
}

/// Returns all groups. The hosts of the largest are only counted.
fn listed(groups: &BTreeMap<String, Vec<&str>>) -> String {
    let most = groups.values().map(Vec::len).max().unwrap_or(0);
    let text = |(key, hosts): (&String, &Vec<&str>)| match hosts.len() {
        count if count == most && count > 1 => format!("{key} on {count} hosts"),
        _ => format!("{key} on {}", names(hosts.iter().copied())),
    };
    match groups.is_empty() {
        true => "no host has said".to_owned(),
        false => groups.iter().map(text).collect::<Vec<_>>().join("; "),
    }
}

fn names<'a>(hosts: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>) -> String {
    let all: Vec<&str> = hosts.into_iter().map(AsRef::as_ref).collect();
    match all.len().saturating_sub(NAMES_MAX) {
        0 => all.join(", "),
        more => format!("{} and {more} more", all[..NAMES_MAX].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use laxity_wire::v1::PortStatus;

    use super::super::finding::Severity;
    use super::*;

    fn host(name: &str) -> HostStatus {
        let settings = HostSettings {
            level_dscp: vec![46, 34, 26, 8],
            marking: "preserve".into(),
            mode: "enforce".into(),
            clock_ns: 1,
            clock_ahead_ns: 20_000_000,
            ..HostSettings::default()
        };
        HostStatus {
            host: name.into(),
            connected: true,
            software: "laxityd 0.1.0".into(),
            reports: 1,
            settings: Some(settings),
            ..HostStatus::default()
        }
    }

    fn changed(name: &str, change: impl FnOnce(&mut HostSettings)) -> HostStatus {
        let mut host = host(name);
        change(host.settings.as_mut().expect("settings"));
        host
    }

    fn worst<'a>(found: &'a [Finding], id: &str) -> &'a Finding {
        found.iter().find(|finding| finding.id == id).expect("a finding")
    }

    #[test]
    fn hosts_that_agree_are_well() {
        let found = compared(&[host("a"), host("b")], &["a".into()]);
        assert!(found.iter().all(|it| it.severity == Severity::Ok), "{found:?}");
    }

    #[test]
    fn each_difference_is_found_and_names_its_host() {
        let mut old = host("old");
        old.software = "laxityd 0.0.9".into();
        let gone = HostStatus { host: "gone".into(), ..HostStatus::default() };
        let mut silent = host("silent");
        silent.reports = 0;
        let shared = PortStatus {
            port: "mlx5_0".into(),
            rate_bytes_per_s: 7_500_000_000,
            foreign_bytes_per_s: 5_000_000_000,
            ..PortStatus::default()
        };
        let hosts = [
            host("a"),
            host("b"),
            old,
            gone,
            silent,
            changed("dscp", |it| it.level_dscp[1] = 35),
            changed("watcher", |it| it.mode = "observe".into()),
            changed("plain", |it| it.marking = "off".into()),
            changed("open", |it| it.bypass = true),
            changed("late", |it| it.clock_ahead_ns = -90_000_000_000),
            HostStatus { ports: vec![shared], ..host("shared") },
            HostStatus { settings: None, ..host("mute") },
        ];
        let found = compared(&hosts, &["never".into()]);
        for (id, severity, words) in [
            ("connected", Severity::Error, &["gone, never"][..]),
            ("reports", Severity::Warn, &["silent"]),
            ("releases", Severity::Warn, &["laxityd 0.0.9 on old"]),
            ("classes", Severity::Error, &["35, 26, 8] on dscp"]),
            (
                "marking",
                Severity::Warn,
                &["observe on watcher", "off\" on plain", "bypassed on open"],
            ),
            ("clocks", Severity::Warn, &["late by -90.0 s"]),
            ("foreign traffic", Severity::Warn, &["40 % of mlx5_0", "of shared"]),
            ("settings", Severity::Info, &["mute"]),
        ] {
            let finding = worst(&found, id);
            assert_eq!(finding.severity, severity, "{finding:?}");
            for word in words {
                assert!(finding.found.contains(word), "{word}: {finding:?}");
            }
        }
    }

    #[test]
    fn a_drained_host_is_meant_to_be_away() {
        let away = HostStatus { host: "away".into(), drained: true, ..HostStatus::default() };
        let found = compared(&[host("a"), away], &[]);
        assert_eq!(worst(&found, "connected").severity, Severity::Ok);
    }
}
