//! Fuzzes the texts that operators and users write: configurations, profiles, settings of the
//! command line, quantities, and the state that a coordinator saves in etcd.
//!
//! The first byte selects the parser. The error for a refused text names the place and the problem.
//! An accepted text is within the documented limits, is written and read back as itself, and the
//! parts that it configures can be made.

use std::path::PathBuf;

use laxity_coordinator::cluster::durable::Durable;
use laxity_coordinator::cluster::{Cluster, ClusterPolicy, ClusterSettings};
use laxity_coordinator::config::Config as CoordinatorConfig;
use laxity_daemon::config::{Config, ConfigError, NICS_MAX};
use laxity_daemon::driver::hints::Hints;
use laxity_daemon::driver::ports;
use laxity_job::{Origin, Profile, ProfileError};
use laxity_policy::{PolicyKind, Time};
use laxity_quantity::{Bytes, Nanos, Rate};

use crate::Input;

/// The name of the text in messages.
const NAME: &str = "the-file";
const NOW: Time = Time(1 << 40);

/// Checks that the text has this line. An empty text has one line.
fn check_line(text: &str, line: usize) {
    let lines = text.matches('\n').count() + 1;
    assert!((1..=lines).contains(&line), "line {line} of {lines}");
}

fn check_daemon(config: &Config) {
    assert!((1..=NICS_MAX).contains(&config.nic.len()));
    let levels = &config.levels;
    assert_eq!(levels.dscp.len(), usize::from(levels.count));
    assert!(levels.dscp.iter().all(|dscp| *dscp < 64) && levels.scavenger_dscp < 64);
    assert!(levels.sl.is_empty() || levels.sl.len() == levels.dscp.len());
    for path in [&config.socket, &config.control] {
        assert!((1..=107).contains(&path.as_os_str().len()));
    }
    assert!(config.slo_ttft.is_none_or(|slo| slo.0 > 0));
    for nic in &config.nic {
        let link = config.link(nic);
        assert_eq!(link.validate(), Ok(()));
        assert!(link.rate > 0 && (1..=link.window_bytes).contains(&link.chunk_bytes));
        assert!(link.threshold_scale.is_finite() && link.threshold_base.is_finite());
    }
    // The scheduler must accept what the check accepted.
    let mut made = Vec::new();
    ports::configure(&mut made, NOW, config).expect("valid");
    assert_eq!(made.len(), 2 * config.nic.len());
    Hints::new(NOW, config).expect("valid");
    let shown = config.to_toml();
    let again = Config::parse(&shown, "shown").unwrap_or_else(|error| panic!("{error}\n{shown}"));
    let retired = config.retired.clone();
    assert_eq!(Config { retired, ..again }, *config, "{shown}");
    assert_eq!(config.needs_restart(config), [""; 0]);
    assert_eq!(config.reloaded_over(config), *config);
    assert!(config.warnings().iter().all(|warning| warning.contains(": ")));
}

fn daemon(text: &str) {
    match Config::parse(text, NAME) {
        Ok(config) => check_daemon(&config),
        Err(ConfigError::File { origin, line, problem, excerpt }) => {
            assert!(origin == NAME && !problem.trim().is_empty(), "{problem}");
            check_line(text, line);
            let written = text.lines().nth(line - 1).unwrap_or_default();
            assert!(excerpt.trim_end_matches('\n').ends_with(written), "{excerpt}");
        }
        Err(other) => panic!("the text is no file: {other}"),
    }
}

/// Applies `--set` to the defaults, one assignment for each line.
fn assignments(text: &str) {
    let sets: Vec<String> = text.lines().map(str::to_owned).collect();
    match Config::default().with_assignments(&sets) {
        Ok(config) => check_daemon(&config),
        Err(ConfigError::Set { assignment, problem }) => {
            assert!(sets.contains(&assignment) && !problem.trim().is_empty());
        }
        Err(other) => panic!("no file was read: {other}"),
    }
}

fn coordinator(text: &str) {
    let config = match CoordinatorConfig::parse(text, NAME) {
        Ok(config) => config,
        Err(error) => {
            let error = error.to_string();
            let problem = error.strip_prefix(NAME).and_then(|rest| rest.strip_prefix(": "));
            assert!(problem.is_some_and(|problem| !problem.trim().is_empty()), "{error}");
            return;
        }
    };
    let limits = &config.limits;
    assert!(limits.hosts_max > 0 && limits.connections_max > 0 && limits.message_bytes_max >= 4096);
    assert!(config.heartbeat.0 > 0 && config.tenant.iter().all(|it| !it.hosts.is_empty()));
    let policy = config.cluster_policy().expect("it was checked");
    let cluster = Cluster::new(NOW, config.settings(), policy, 1).expect("valid");
    assert_eq!(cluster.audit(), Ok(()));
    let shown = config.to_toml();
    let again = CoordinatorConfig::parse(&shown, "shown");
    let again = again.unwrap_or_else(|error| panic!("{error}\n{shown}"));
    let retired = config.retired.clone();
    assert_eq!(CoordinatorConfig { retired, ..again }, config, "{shown}");
    assert_eq!(config.needs_restart(&config), [""; 0]);
}

fn profile(text: &str) {
    let origin = Origin::File(PathBuf::from(NAME));
    match Profile::parse("p", origin.clone(), text) {
        Ok(profile) => {
            assert!(profile.name == "p" && profile.origin == origin);
            assert!(profile.slo_ttft.is_none_or(|slo| !slo.is_zero()));
            let variables = &profile.qp.pin_variables;
            assert!(variables.iter().all(|it| !it.is_empty() && !it.contains(['=', '\0'])));
            let default = profile.qp.default_traffic_class;
            assert!(!profile.qp.is_pin(default, |_| false));
            assert!(profile.qp.is_pin(default.wrapping_add(1), |_| false));
        }
        Err(ProfileError::Malformed { origin: named, line, problem, .. }) => {
            assert!(named == origin && !problem.trim().is_empty());
            check_line(text, line);
        }
        Err(other) => panic!("the text is no file: {other}"),
    }
}

fn quantities(text: &str) {
    macro_rules! quantity {
        ($of:ty) => {
            match text.parse::<$of>() {
                Ok(value) => {
                    assert_eq!(value.to_string().parse(), Ok(value));
                    assert!(!value.about().is_empty());
                }
                Err(error) => assert!(error.to_string().contains(text)),
            }
        };
    }
    quantity!(Bytes);
    quantity!(Rate);
    quantity!(Nanos);
    match text.parse::<PolicyKind>() {
        Ok(kind) => assert_eq!(kind.name(), text),
        Err(error) => assert!(error.to_string().contains(text)),
    }
}

/// Returns what `cluster` would save, without the times, which depend on the clock.
fn saved(cluster: &Cluster) -> serde_json::Value {
    fn forget_times(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Object(fields) => {
                fields.remove("unix_ms");
                fields.values_mut().for_each(forget_times);
            }
            serde_json::Value::Array(items) => items.iter_mut().for_each(forget_times),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(cluster.durable(NOW, None)).expect("plain data");
    forget_times(&mut value);
    value
}

fn state(bytes: &[u8]) {
    let new = || {
        let settings = ClusterSettings::default();
        Cluster::new(NOW, settings, ClusterPolicy::default(), 1).expect("valid")
    };
    let Ok(read) = serde_json::from_slice::<Durable>(bytes) else { return };
    let mut cluster = new();
    let before = saved(&cluster);
    match cluster.restore(NOW, read) {
        Ok(()) => {
            let text = serde_json::to_vec(&cluster.durable(NOW, None)).expect("plain data");
            let mut next = new();
            let again = serde_json::from_slice(&text).expect("as written");
            next.restore(NOW, again).expect("it was in force");
            assert_eq!(saved(&next), saved(&cluster), "the next leader knows the same");
        }
        Err(problem) => {
            assert!(!problem.is_empty());
            assert_eq!(saved(&cluster), before, "nothing of it is in force");
        }
    }
    assert_eq!(cluster.audit(), Ok(()));
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = input.byte();
    let rest = input.take(usize::MAX);
    // Readers of files refuse what is not UTF-8 before they parse it.
    let text = String::from_utf8_lossy(rest);
    match kind % 6 {
        0 => daemon(&text),
        1 => assignments(&text),
        2 => coordinator(&text),
        3 => profile(&text),
        4 => quantities(&text),
        _ => state(rest),
    }
}

/// Returns a sample of a configuration without its comments, so that it fits into an input.
fn without_comments(sample: &str) -> String {
    let lines = sample.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.flat_map(|line| [line, "\n"]).collect()
}

const NICS: &str = include_str!("texts/nics.toml");
const TENANTS: &str = include_str!("texts/tenants.toml");

const SAVED: &str = r#"{"revisions":[{"number":3,"policy":"laxity","drop_budget":7,"author":"ann",
"comment":"less","unix_ms":5}],"drained":["h1"],"drains":{"h1":{"author":"ann","comment":"fan"}}}"#;

pub fn seeds() -> Vec<Vec<u8>> {
    let with = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let mut seeds = vec![
        with(0, &without_comments(include_str!("../../../dist/laxityd.toml"))),
        with(0, &without_comments(include_str!("../../../dist/packaged/laxityd.toml"))),
        with(0, NICS),
        with(0, "[tuning]\nmlu = \"per_flow\"\n[coordinator]\nfetch_wait_max = \"1s\"\n"),
        with(1, "nic.0.rate=25Gbit\nscheduler.spin_us=0\nlevels.dscp=[8, 8]\nlevels.count=2"),
        with(1, "slo_ttft=500ms\nweb.names=[\"a\"]\ncoordinator.endpoint=http://127.0.0.1:7471"),
        with(2, &without_comments(include_str!("../../../dist/laxity-coordinator.toml"))),
        with(2, &without_comments(include_str!("../../../dist/packaged/coordinator.toml"))),
        with(2, TENANTS),
        with(3, "slo_ttft = \"500ms\"\nmode = \"observe\"\n[stage]\nwrite = \"kv_reuse\"\n"),
        // These are at the limits. A mutation of the others seldom is.
        with(0, "slo_ttft = \"0ms\"\n[[nic]]\nname = \"a\"\nrate = 0\n"),
        with(0, "[levels]\ncount = 1\ndscp = [63]\nscavenger_dscp = 63\n"),
        with(2, "heartbeat = \"10ms\"\n[limits]\nhosts_max = 0\nmessage_bytes_max = 4095\n"),
        with(3, "slo_ttft = \"0ms\"\n"),
        with(3, "[qp]\ndefault_traffic_class = 256\npin_variables = [\"\"]\n"),
        with(4, "12.5GB/s"),
        with(4, "0.5us"),
        with(4, "1.5 KiB"),
        with(5, SAVED),
    ];
    let profiles = [
        include_str!("../../../shim/job/profiles/default.toml"),
        include_str!("../../../shim/job/profiles/nccl.toml"),
        include_str!("../../../shim/job/profiles/wide-ep.toml"),
    ];
    seeds.extend(profiles.map(|text| with(3, &without_comments(text))));
    seeds
}
