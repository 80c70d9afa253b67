//! What is wrong in a cluster and what to do, from what its coordinator knows: for `laxity doctor
//! --cluster` and for the coordinator's page. Hosts are compared with each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::finding::Finding;
use crate::v1::{HostSettings, HostStatus, ListHostsResponse, TenantStatus};
use crate::view::direction;

/// A clock that differs by more than this, in seconds, makes logs and certificates misleading.
const CLOCK_S_MAX: f64 = 1.0;
/// Share of a port, in percent, from which traffic without permits is worth a look.
const FOREIGN_PERCENT_MIN: u64 = 10;
/// Age above which a refusal is not reported.
const REFUSAL_NS_MAX: u64 = 600_000_000_000;
/// Silence after which a host that sent no goodbye counts as [`HostAbsence::LongGone`].
const GONE_NS_MIN: u64 = 4 * 3600 * 1_000_000_000;
const NAMES_MAX: usize = 8;

/// Why a host that operators did not drain has no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAbsence {
    /// Its stream ended recently without a goodbye: the daemon, the host or the network failed.
    Lost,
    /// Its stream ended without a goodbye, so long ago that the host may have been removed.
    LongGone,
    /// Somebody stopped its daemon.
    Stopped,
}

impl HostAbsence {
    /// Returns why a host is away. `None` if it is connected or drained.
    #[must_use]
    pub fn of(host: &HostStatus) -> Option<Self> {
        match host {
            HostStatus { connected: true, .. } | HostStatus { drained: true, .. } => None,
            HostStatus { left: true, .. } => Some(Self::Stopped),
            HostStatus { silent_ns: Some(ns), .. } if *ns >= GONE_NS_MIN => Some(Self::LongGone),
            _ => Some(Self::Lost),
        }
    }
}

/// Judges a coordinator's hosts and tenants. `shared_budget` is the policy's drop budget, if it is
/// known, and `expect` names hosts that have to be connected.
#[must_use]
pub fn compared(
    told: &ListHostsResponse,
    shared_budget: Option<u32>,
    expect: &[String],
) -> Vec<Finding> {
    if !told.leading {
        // Whoever expects hosts, such as a script, must not take this for success.
        let unseen = (!expect.is_empty()).then(|| {
            Finding::error("connected", format!("not seen from here: {}", names(expect)))
                .action("ask the leader")
        });
        return [standby(told)].into_iter().chain(unseen).collect();
    }
    let hosts = &told.hosts;
    let connected: Vec<&HostStatus> = hosts.iter().filter(|host| host.connected).collect();
    let mut found = missing(hosts, &connected, expect);
    found.extend(refused(hosts));
    found.push(releases(&connected));
    let said = || connected.iter().filter_map(|host| Some((*host, host.settings.as_ref()?)));
    found.push(classes(said()));
    found.push(unmarked(said()));
    found.push(clocks(said()));
    found.push(foreign(&connected));
    found.extend(budgets(&told.tenants, shared_budget));
    found.extend(drained(hosts));
    let mute = connected.iter().filter(|host| host.settings.is_none() && !host.drained);
    let mute: Vec<&str> = mute.map(|host| host.host.as_str()).collect();
    if !mute.is_empty() {
        found.push(
            Finding::info(
                "settings",
                format!("{} reported neither classes nor clock", names(&mute)),
            )
            .because("their release does not, or they have just connected")
            .action("upgrade laxityd there, if this stays for a minute"),
        );
    }
    found
}

fn standby(told: &ListHostsResponse) -> Finding {
    let leader = &told.leader;
    if leader.is_empty() {
        return Finding::error("leader", "no coordinator leads, as far as this one knows")
            .because("without a leader each host orders by itself")
            .action(
                "`systemctl status laxity-coordinator` on each coordinator's host; its log says \
                 whether etcd answers",
            );
    }
    Finding::warn("leader", format!("this coordinator stands by: {leader} leads"))
        .because("only the leader knows hosts, batches and what is wrong with them")
        .action("ask the leader: its page, or `laxity cluster --endpoint`")
}

/// Returns findings about hosts that are gone, never came, or send no reports.
fn missing(hosts: &[HostStatus], connected: &[&HostStatus], expect: &[String]) -> Vec<Finding> {
    let here: BTreeSet<&str> = connected.iter().map(|host| host.host.as_str()).collect();
    let away = |why| hosts.iter().filter(move |host| HostAbsence::of(host) == Some(why));
    let named = |host: &HostStatus| since(&host.host, host.silent_ns);
    let lost = away(HostAbsence::Lost).map(|host| (host.host.as_str(), named(host)));
    let wanted = expect.iter().map(String::as_str).filter(|name| !here.contains(name));
    let mut gone: BTreeMap<&str, String> = wanted.map(|name| (name, name.to_owned())).collect();
    gone.extend(lost);
    let mut found = Vec::new();
    if gone.is_empty() {
        found.push(Finding::ok("connected", format!("{} hosts", connected.len())));
    } else {
        found.push(
            Finding::error("connected", format!("not connected: {}", names(gone.values())))
                .because(
                    "their daemons order by themselves, and the cluster order lacks their work",
                )
                .action(
                    "`systemctl status laxityd` there; if it runs, the third line of `laxity \
                     status` says why",
                ),
        );
    }
    let is_wanted = |host: &&HostStatus| expect.contains(&host.host);
    let of = |why| away(why).filter(|it| !is_wanted(it)).map(named).collect::<Vec<String>>();
    let (long, stopped) = (of(HostAbsence::LongGone), of(HostAbsence::Stopped));
    if !long.is_empty() {
        found.push(
            Finding::warn("gone", format!("gone for long: {}", names(&long)))
                .because("their streams ended without a goodbye, and did not come back")
                .action(
                    "`laxity cluster forget HOST` if somebody removed the host; else \
                     `systemctl status laxityd` there",
                ),
        );
    }
    if !stopped.is_empty() {
        found.push(
            Finding::warn("stopped", format!("stopped: {}", names(&stopped)))
                .because("somebody stopped their daemons, so traffic there goes out unscheduled")
                .action(
                    "`systemctl start laxityd` there; `laxity cluster forget HOST` if somebody \
                     removed the host",
                ),
        );
    }
    let silent: Vec<&str> =
        connected.iter().filter(|host| host.reports == 0).map(|host| host.host.as_str()).collect();
    if !silent.is_empty() {
        found.push(
            Finding::warn("reports", format!("connected and never reported: {}", names(silent)))
                .because("the order between hosts does not consider their work")
                .action("`laxity doctor` there"),
        );
    }
    found
}

/// Finds hosts of which something was refused lately.
fn refused(hosts: &[HostStatus]) -> Option<Finding> {
    let lately = |host: &&HostStatus| host.refused_ns.is_some_and(|age| age <= REFUSAL_NS_MAX);
    let text = |host: &HostStatus| {
        let counts = [(host.refused_events, "event"), (host.refused_hellos, "Hello")];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let plural = |count| if count == 1 { "" } else { "s" };
        let text = |&(count, what): &(u64, &str)| format!("{count} {what}{}", plural(count));
        let counts: Vec<String> = counts.map(text).collect();
        format!("{} of {}", counts.join(" and "), host.host)
    };
    let all: Vec<String> = hosts.iter().filter(lately).map(text).collect();
    (!all.is_empty()).then(|| {
        Finding::warn("refused", format!("refused, some of it lately: {}", names(&all)))
            .because(
                "the order does not consider refused events, nor a host whose Hello is refused",
            )
            .action(
                "raise `[limits]` of the coordinator; many Hellos: its daemon restarts in a loop, \
                 or two hosts have one name (`journalctl -u laxityd` there)",
            )
    })
}

fn drained(hosts: &[HostStatus]) -> Option<Finding> {
    let drained = hosts.iter().filter(|host| host.drained);
    let age = |host: &HostStatus| host.drain.as_ref().map(|drain| drain.age_ns);
    let all: Vec<String> = drained.map(|host| since(&host.host, age(host))).collect();
    (!all.is_empty()).then(|| {
        Finding::info("drained", format!("drained: {}", names(&all)))
            .because("an operator drained them, so their daemons order by themselves")
            .action("`laxity cluster drain HOST --undo` takes a host back into the order")
    })
}

/// Finds drop budgets that are used up. A budget of 0 is a choice to prune nothing, and no finding.
fn budgets(tenants: &[TenantStatus], shared: Option<u32>) -> Vec<Finding> {
    let is_full = |pruned: u32, budget: u32| budget > 0 && pruned >= budget;
    let own = tenants.iter().filter_map(|it| Some((it, it.drop_budget?)));
    let own = own.filter(|(it, budget)| is_full(it.pruned, *budget));
    let own: Vec<String> = own.map(|(it, budget)| format!("{} ({budget})", it.tenant)).collect();
    let sharing = tenants.iter().filter(|it| it.drop_budget.is_none());
    let pruned: u32 = sharing.map(|it| it.pruned).fold(0, u32::saturating_add);
    let full = |found: String, action| {
        Finding::warn("drop budget", found)
            .because("no more requests are pruned, so late ones delay those that could be in time")
            .action(action)
    };
    let mut found = Vec::new();
    if let Some(budget) = shared.filter(|&budget| is_full(pruned, budget)) {
        found.push(full(
            format!("the shared drop budget of {budget} is used up"),
            "`laxity cluster batches --in-trouble` shows the late batches; `laxity cluster policy \
             set drop_budget=…` raises it",
        ));
    }
    if !own.is_empty() {
        found.push(full(
            format!("tenants that used up their drop budget: {}", names(&own)),
            "raise `drop_budget` of the `[[tenant]]`, then `systemctl restart laxity-coordinator`",
        ));
    }
    found
}

fn releases(connected: &[&HostStatus]) -> Finding {
    let by_release = grouped(connected.iter().map(|host| (host.software.clone(), *host)));
    if by_release.len() < 2 {
        return Finding::ok("releases", listed(&by_release));
    }
    Finding::warn("releases", format!("releases differ: {}", listed(&by_release)))
        .because("a client more than one release apart from its daemon runs unscheduled")
        .action("finish the upgrade: `apt install` the newest release there")
}

type Said<'a> = (&'a HostStatus, &'a HostSettings);

fn classes<'a>(said: impl Iterator<Item = Said<'a>>) -> Finding {
    let by_classes = grouped(said.map(|(host, it)| (format!("DSCP {:?}", it.level_dscp), host)));
    if by_classes.len() < 2 {
        return Finding::ok("classes", listed(&by_classes));
    }
    Finding::error("classes", format!("levels differ: {}", listed(&by_classes)))
        .because("switches queue by DSCP, so a level of one host is another level of the other")
        .action("write the same `[levels]` on all hosts, then `laxity reload`")
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
    Finding::warn("marking", format!("traffic is unmarked: {}", listed(&by_reason)))
        .because("unmarked traffic goes above what can wait on other hosts")
        .action("`laxity enforce on` or `laxity bypass off` there, or set `marking`")
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
    Finding::warn("clocks", format!("clocks differ from the coordinator's: {list}"))
        .because("certificates and logs go by the clock; the order between hosts does not")
        .action("`chronyc tracking` there, or `timedatectl`; then restart that service")
}

/// Finds ports with much traffic that no daemon permits. The daemons already subtract it from the
/// ports' rates.
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
    Finding::warn("foreign traffic", format!("foreign traffic: {}", names(&shares)))
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

/// Returns the groups as text. The hosts of the largest groups are only counted.
fn listed(groups: &BTreeMap<String, Vec<&str>>) -> String {
    let most = groups.values().map(Vec::len).max().unwrap_or(0);
    let text = |(key, hosts): (&String, &Vec<&str>)| match hosts.len() {
        count if count == most && count > 1 => format!("{key} on {count} hosts"),
        _ => format!("{key} on {}", names(hosts.iter().copied())),
    };
    match groups.is_empty() {
        true => "no host has said".to_owned(),
        false => joined(&groups.iter().map(text).collect::<Vec<_>>(), "; "),
    }
}

/// Returns a host's name and how long its state has lasted, if that is known.
fn since(host: &str, age_ns: Option<u64>) -> String {
    let Some(s) = age_ns.map(|ns| ns / 1_000_000_000) else { return host.to_owned() };
    match s {
        0..120 => format!("{host} (for {s} s)"),
        120..7200 => format!("{host} (for {} min)", s / 60),
        7200..172_800 => format!("{host} (for {} h)", s / 3600),
        _ => format!("{host} (for {} days)", s / 86_400),
    }
}

fn names<'a>(hosts: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>) -> String {
    joined(&hosts.into_iter().map(AsRef::as_ref).collect::<Vec<_>>(), ", ")
}

/// Joins the first [`NAMES_MAX`] texts, and says how many more there are.
fn joined<T: AsRef<str>>(all: &[T], between: &str) -> String {
    let shown: Vec<&str> = all.iter().take(NAMES_MAX).map(AsRef::as_ref).collect();
    let shown = shown.join(between);
    match all.len().saturating_sub(NAMES_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;
    use crate::v1::{DrainNote, PortStatus};

    const MINUTE_NS: u64 = 60_000_000_000;

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

    fn tenant(name: &str, pruned: u32, drop_budget: Option<u32>) -> TenantStatus {
        TenantStatus { tenant: name.into(), pruned, drop_budget, ..TenantStatus::default() }
    }

    /// Returns what the leader says of these hosts.
    fn told(hosts: Vec<HostStatus>) -> ListHostsResponse {
        ListHostsResponse { hosts, leading: true, ..ListHostsResponse::default() }
    }

    fn of<'a>(found: &'a [Finding], id: &str) -> &'a Finding {
        found.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("{id}: {found:?}"))
    }

    #[test]
    fn hosts_that_agree_are_well() {
        let mut calm = told(vec![host("a"), host("b")]);
        calm.hosts[0].refused_events = 3;
        calm.hosts[0].refused_ns = Some(11 * MINUTE_NS);
        calm.tenants = vec![tenant("x", 1, Some(2)), tenant("y", 3, None), tenant("z", 0, Some(0))];
        let found = compared(&calm, Some(4), &["a".into()]);
        assert!(found.iter().all(|it| it.severity == Severity::Ok), "{found:?}");
        assert!(found.iter().all(|it| it.action.is_empty()), "{found:?}");
    }

    /// Returns a cluster with each kind of trouble.
    fn troubled() -> ListHostsResponse {
        let mut old = host("old");
        old.software = "laxityd 0.0.9".into();
        let gone = HostStatus {
            host: "gone".into(),
            silent_ns: Some(5 * MINUTE_NS),
            ..HostStatus::default()
        };
        let shared = PortStatus {
            port: "mlx5_0".into(),
            rate_bytes_per_s: 7_500_000_000,
            foreign_bytes_per_s: 5_000_000_000,
            ..PortStatus::default()
        };
        let greedy = HostStatus {
            refused_events: 7,
            refused_hellos: 2,
            refused_ns: Some(9 * MINUTE_NS),
            ..host("greedy")
        };
        let drain = DrainNote { age_ns: 3 * MINUTE_NS, ..DrainNote::default() };
        let away = HostStatus {
            host: "away".into(),
            drained: true,
            drain: Some(drain),
            ..HostStatus::default()
        };
        let mut all = told(vec![
            host("a"),
            host("b"),
            old,
            gone,
            away,
            greedy,
            HostStatus { reports: 0, ..host("silent") },
            changed("dscp", |it| it.level_dscp[1] = 35),
            changed("watcher", |it| it.mode = "observe".into()),
            changed("plain", |it| it.marking = "off".into()),
            changed("open", |it| it.bypass = true),
            changed("late", |it| it.clock_ahead_ns = -90_000_000_000),
            HostStatus { ports: vec![shared], ..host("shared") },
            HostStatus { settings: None, ..host("mute") },
        ]);
        all.tenants = vec![tenant("red", 2, Some(2)), tenant("blue", 1, None)];
        all
    }

    #[test]
    fn each_kind_of_trouble_is_found_and_names_its_host_and_what_to_do() {
        let found = compared(&troubled(), None, &["never".into()]);
        let expected = [
            (
                "connected",
                Severity::Error,
                &["gone (for 5 min), never"][..],
                "systemctl status laxityd",
            ),
            ("reports", Severity::Warn, &["silent"], "laxity doctor"),
            ("refused", Severity::Warn, &["7 events and 2 Hellos of greedy"], "[limits]"),
            ("releases", Severity::Warn, &["laxityd 0.0.9 on old"], "upgrade"),
            ("classes", Severity::Error, &["35, 26, 8] on dscp"], "[levels]"),
            (
                "marking",
                Severity::Warn,
                &["observe on watcher", "off\" on plain", "bypassed on open"],
                "laxity enforce on",
            ),
            ("clocks", Severity::Warn, &["late by -90.0 s"], "chronyc"),
            ("foreign traffic", Severity::Warn, &["40 % of mlx5_0", "of shared"], "laxity doctor"),
            ("drop budget", Severity::Warn, &["red (2)"], "systemctl restart"),
            ("drained", Severity::Info, &["away (for 3 min)"], "--undo"),
            ("settings", Severity::Info, &["mute"], "upgrade"),
        ];
        for (id, severity, words, remedy) in expected {
            let finding = of(&found, id);
            assert_eq!(finding.severity, severity, "{finding:?}");
            for word in words {
                assert!(finding.found.contains(word), "{word}: {finding:?}");
            }
            assert!(!finding.why.is_empty() && finding.action.contains(remedy), "{finding:?}");
        }
        assert_eq!(found.len(), expected.len(), "{found:?}");
    }

    #[test]
    fn tenants_that_share_the_budget_use_it_up_together() {
        let mut all = told(vec![host("a")]);
        all.tenants = vec![tenant("x", 3, None), tenant("y", 1, None), tenant("z", 9, Some(10))];
        let found = compared(&all, Some(4), &[]);
        assert!(of(&found, "drop budget").found.contains("shared drop budget of 4"), "{found:?}");
    }

    #[test]
    fn a_standby_says_only_who_leads() {
        let mut all = troubled();
        all.leading = false;
        all.leader = "coord2:7471".into();
        let found = compared(&all, None, &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].severity == Severity::Warn && found[0].found.contains("coord2:7471 leads")
        );
        let found = compared(&all, None, &["a".to_owned()]);
        assert_eq!(of(&found, "connected").severity, Severity::Error, "{found:?}");
        all.leader.clear();
        let found = compared(&all, None, &[]);
        assert!(found[0].severity == Severity::Error && found[0].action.contains("etcd"));
    }

    #[test]
    fn only_a_host_that_was_lost_lately_is_an_error() {
        let away = |name: &str, left, minutes: u64| HostStatus {
            connected: false,
            left,
            silent_ns: Some(minutes * MINUTE_NS),
            ..host(name)
        };
        let hosts = vec![host("a"), away("stopped", true, 1), away("removed", false, 240)];
        let found = compared(&told(hosts.clone()), None, &[]);
        assert_eq!(of(&found, "connected").severity, Severity::Ok);
        let stopped = of(&found, "stopped");
        assert_eq!(stopped.severity, Severity::Warn, "{stopped:?}");
        assert!(stopped.found.contains("stopped (for 60 s)"), "{stopped:?}");
        let gone = of(&found, "gone");
        assert_eq!(gone.severity, Severity::Warn);
        assert!(gone.found.ends_with("removed (for 4 h)"), "{gone:?}");
        assert!(gone.action.contains("laxity cluster forget"), "{gone:?}");

        let lost = [hosts.clone(), vec![away("lost", false, 239)]].concat();
        let found = compared(&told(lost), None, &[]);
        let lost = of(&found, "connected");
        assert_eq!((lost.severity, lost.found.contains("removed")), (Severity::Error, false));
        let found = compared(&told(hosts), None, &["stopped".into(), "removed".into()]);
        assert_eq!(of(&found, "connected").severity, Severity::Error, "they are expected");
        assert!(found.iter().all(|it| !["stopped", "gone"].contains(&it.id)), "{found:?}");
    }

    #[test]
    fn a_drained_host_is_meant_to_be_away() {
        let away = HostStatus { host: "away".into(), drained: true, ..HostStatus::default() };
        let found = compared(&told(vec![host("a"), away]), None, &[]);
        assert_eq!(of(&found, "connected").severity, Severity::Ok);
    }

    #[test]
    fn hosts_beyond_a_few_are_counted() {
        let hosts = (0..1000).map(|n| HostStatus { connected: false, ..host(&format!("{n:04}")) });
        let found = compared(&told(hosts.collect()), None, &[]);
        let text = &of(&found, "connected").found;
        assert!(text.ends_with("0007 and 992 more") && text.len() < 200, "{text}");
        let odd = |n: usize| HostStatus { software: format!("v{n:04}"), ..host("h") };
        let found = compared(&told((0..1000).map(odd).collect()), None, &[]);
        let text = &of(&found, "releases").found;
        assert!(text.ends_with("v0007 on h and 992 more") && text.len() < 200, "{text}");
    }
}
