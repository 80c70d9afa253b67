//! The configuration: a TOML file, its check, and what a reload changes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use laxity_listen::LogFormat;
use laxity_listen::page::WebConfig;
use laxity_policy::Span;
use laxity_quantity::Nanos;
use laxity_wire::v1;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cluster::{ClusterPolicy, ClusterSettings, PolicyError};
use crate::election::config::EtcdConfig;
use crate::limits::Limits;
pub use crate::nonsense::Nonsense;
use crate::tenants::{TenantConfig, Tenants};
use crate::tls::{TlsConfig, TlsError};

/// The file that is read if no other is named. It may be missing.
pub const FILE_DEFAULT: &str = "/etc/laxity/coordinator.toml";

/// A configuration that cannot be used. The text names the place and what to do.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {cause}", path = .path.display())]
    Read {
        path: PathBuf,
        /// Not a source, since the text includes it.
        cause: laxity_files::ReadError,
    },
    #[error("{origin}: {problem}\nfix it, then test with `laxity-coordinator --check`")]
    Text {
        origin: String,
        /// The problem, with its line or key.
        problem: String,
    },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{0}; fix the file, or name another one")]
    Etcd(laxity_credentials::Unusable),
    #[error("{origin}: {nonsense}; fix it, then test with `laxity-coordinator --check`")]
    Nonsense {
        /// The file or the command line.
        origin: String,
        nonsense: Nonsense,
    },
}

/// The configuration of a coordinator. `dist/laxity-coordinator.toml` explains each key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub listen: SocketAddr,
    pub insecure: bool,
    pub metrics: String,
    pub log: String,
    pub log_format: LogFormat,
    pub heartbeat: Nanos,
    pub host_grace: Nanos,
    pub order_age_max: Nanos,
    pub policy: PolicyConfig,
    pub web: WebConfig,
    pub limits: Limits,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Without it, this is the only coordinator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdConfig>,
    pub tenant: Vec<TenantConfig>,
    /// Keys of the file that only older releases knew.
    #[serde(skip)]
    pub retired: Vec<String>,
}

/// Keys of earlier builds that had no useful effect. A file with one is valid, with a warning.
const RETIRED: [&str; 2] = ["policy.fetches_per_port", "policy.fetch_lease"];

/// The initial policy. See [`ClusterPolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    pub name: String,
    pub drop_budget: usize,
    pub debounce: Nanos,
    pub rank_margin: Nanos,
    /// Weight of each finished batch in the correction of estimates, in thousandths. If it is not
    /// set, the policy `name` decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correction_permille: Option<u16>,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        let policy = ClusterPolicy::default();
        Self {
            name: policy.policy.to_string(),
            drop_budget: policy.drop_budget,
            debounce: Nanos(policy.debounce.0),
            rank_margin: Nanos(policy.rank_margin.0),
            correction_permille: None,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7471)),
            insecure: false,
            metrics: String::new(),
            log: "info".into(),
            log_format: LogFormat::default(),
            heartbeat: Nanos(1_000_000_000),
            host_grace: Nanos(2_000_000_000),
            order_age_max: Nanos(5_000_000_000),
            policy: PolicyConfig::default(),
            web: WebConfig::default(),
            limits: Limits::default(),
            tls: None,
            etcd: None,
            tenant: Vec::new(),
            retired: Vec::new(),
        }
    }
}

impl Config {
    /// Reads `path`. Without a path, it reads the default file, or uses the defaults if there is
    /// none.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let path = match path {
            Some(path) => path,
            None if Path::new(FILE_DEFAULT).exists() => Path::new(FILE_DEFAULT),
            None => return Ok(Self::default()),
        };
        let read = laxity_files::read_to_string(path, laxity_files::CONFIG_BYTES_MAX);
        let text = read.map_err(|cause| ConfigError::Read { path: path.to_owned(), cause })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses and checks `text`. Errors name it `origin`.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let (known, retired) = laxity_files::without_retired(text, &RETIRED);
        let mut config: Self = toml::from_str(&known).map_err(|error| ConfigError::Text {
            origin: origin.to_owned(),
            problem: error.to_string(),
        })?;
        config.retired = retired;
        config
            .check()
            .map_err(|nonsense| ConfigError::Nonsense { origin: origin.to_owned(), nonsense })?;
        Ok(config)
    }

    pub fn check(&self) -> Result<(), Nonsense> {
        if !self.metrics.is_empty() && self.metrics_address().is_none() {
            let problem = format!("`{}` is no address; write 127.0.0.1:9472", self.metrics);
            return Err(Nonsense::new("metrics", problem));
        }
        laxity_listen::check_filter(&self.log).map_err(|problem| Nonsense::new("log", problem))?;
        if !self.listen.ip().is_loopback() && !self.insecure && self.tls.is_none() {
            let problem = format!(
                "{} is reachable from other hosts, and there is no [tls]; write it, listen on \
                 127.0.0.1, or set insecure = true if nobody hostile can reach it",
                self.listen
            );
            return Err(Nonsense::new("listen", problem));
        }
        for (key, value, least_ms) in [
            ("heartbeat", self.heartbeat, 10),
            ("host_grace", self.host_grace, 0),
            ("order_age_max", self.order_age_max, 10),
        ] {
            if value.0 < least_ms * 1_000_000 || value.0 > 3_600_000_000_000 {
                let problem = format!("{value} is not in {least_ms}ms..=60min");
                return Err(Nonsense::new(key, problem));
            }
        }
        if let Some(etcd) = &self.etcd {
            etcd.check().map_err(|(key, problem)| Nonsense::new(key, problem))?;
        }
        self.web.check("127.0.0.1:7473").map_err(|problem| Nonsense::new("web.listen", problem))?;
        self.limits.check()?;
        Tenants::check(&self.tenant)?;
        self.cluster_policy().map(|_| ())
    }

    /// Reads and checks the certificates, as peers will check them. [`Config::check`] does not.
    pub fn check_files(&self) -> Result<(), ConfigError> {
        if let Some(tls) = &self.tls {
            tls.check(&self.tls_names())?;
        }
        if let Some(etcd) = &self.etcd {
            etcd.check_files().map_err(ConfigError::Etcd)?;
        }
        Ok(())
    }

    /// Returns the host name of `etcd.advertise`, to which coordinators direct daemons.
    pub(crate) fn tls_names(&self) -> Vec<&str> {
        let advertised = self.etcd.as_ref().and_then(EtcdConfig::advertised_host);
        advertised.into_iter().collect()
    }

    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.parse().ok()
    }

    pub fn cluster_policy(&self) -> Result<ClusterPolicy, Nonsense> {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let named = v1::Policy {
            policy: Some(self.policy.name.clone()),
            drop_budget: Some(number(self.policy.drop_budget)),
            debounce_ns: Some(self.policy.debounce.0),
            rank_margin_ns: Some(self.policy.rank_margin.0),
            correction_permille: self.policy.correction_permille.map(u32::from),
        };
        ClusterPolicy::default().with(&named).map_err(|error| match error {
            PolicyError::Invalid { field: "policy", problem } => {
                Nonsense::new("policy.name", problem)
            }
            PolicyError::Invalid { field, problem } => {
                Nonsense::new(&format!("policy.{field}"), problem)
            }
            PolicyError::Stale { .. } => Nonsense::new("policy", error.to_string()),
        })
    }

    pub fn settings(&self) -> ClusterSettings {
        ClusterSettings {
            limits: self.limits.clone(),
            tenants: Tenants::new(self.tenant.clone()),
            heartbeat: Span(self.heartbeat.0),
            host_grace: Span(self.host_grace.0),
            order_age_max: Span(self.order_age_max.0),
        }
    }

    /// Returns the keys that differ from `running` and take effect only after a restart. The policy
    /// is one of them, so that a reload does not undo what operators set.
    pub fn needs_restart(&self, running: &Self) -> Vec<&'static str> {
        [
            ("listen", self.listen != running.listen),
            ("insecure", self.insecure != running.insecure),
            ("metrics", self.metrics != running.metrics),
            ("log_format", self.log_format != running.log_format),
            ("policy", self.policy != running.policy),
            ("web", self.web != running.web),
            ("limits", self.limits != running.limits),
            ("tls", self.tls.is_some() != running.tls.is_some()),
            ("etcd", self.etcd != running.etcd),
            ("tenant", self.tenant != running.tenant),
        ]
        .into_iter()
        .filter_map(|(key, differs)| differs.then_some(key))
        .collect()
    }

    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be shown: {error}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_kept_over_an_upgrade_is_read_and_its_old_keys_are_named() {
        let config =
            Config::parse("[policy]\nname = \"mfs\"\nfetches_per_port = 2\n", "x").unwrap();
        assert_eq!(config.retired, ["policy.fetches_per_port"]);
        assert_eq!(config.policy.name, "mfs");
    }

    #[test]
    fn what_is_shown_reads_back_as_the_same() {
        let config = Config {
            tenant: vec![TenantConfig {
                name: "a".into(),
                hosts: vec!["a-*".into()],
                trust_members: true,
                drop_budget: Some(8),
            }],
            ..Config::default()
        };
        assert_eq!(Config::parse(&config.to_toml(), "test").expect("valid"), config);
    }

    #[test]
    fn other_hosts_are_served_without_tls_only_if_that_is_asked_for() {
        let error = Config::parse("listen = \"0.0.0.0:7471\"", "f").expect_err("refused");
        assert!(error.to_string().contains("insecure = true"), "{error}");
        let asked = "listen = \"0.0.0.0:7471\"\ninsecure = true";
        assert!(Config::parse(asked, "f").is_ok());
    }

    #[test]
    fn the_sample_says_the_defaults_and_all_of_it_is_understood() {
        let sample = include_str!("../../dist/laxity-coordinator.toml");
        assert_eq!(Config::parse(sample, "sample").expect("valid"), Config::default());
        let setting = |line: &str| {
            let said = line.strip_prefix("# ")?;
            let known = said.starts_with('[') || said.contains(" = ");
            known.then(|| said.to_owned())
        };
        let with_all: Vec<String> =
            sample.lines().map(|line| setting(line).unwrap_or_else(|| line.to_owned())).collect();
        let all = Config::parse(&with_all.join("\n"), "sample").expect("valid");
        assert!(all.tls.is_some() && all.etcd.is_some() && all.tenant.len() == 1);
        let keys = |text: &str| {
            let keys = text.lines().filter_map(|line| line.split_once(" = "));
            let mut keys: Vec<String> = keys.map(|(key, _)| key.to_owned()).collect();
            keys.sort_unstable();
            keys
        };
        assert_eq!(keys(&with_all.join("\n")), keys(&all.to_toml()));
    }

    #[test]
    fn nonsense_is_named_with_its_key() {
        for (text, key) in [
            ("metrics = \"x\"", "metrics"),
            ("log = \"inf\"", "log"),
            ("heartbeat = \"1ms\"", "heartbeat"),
            ("[web]\nlisten = \"0.0.0.0:1\"", "web.listen"),
            ("[policy]\nname = \"edf\"", "policy.name"),
            ("[policy]\nname = \"best\"", "policy.name"),
            ("[policy]\ncorrection_permille = 1001", "policy.correction_permille"),
            ("[policy]\ndebounce = \"2min\"", "policy.debounce"),
            ("[limits]\nhosts_max = 0", "limits.hosts_max"),
            ("[etcd]\nendpoints = []\nadvertise = \"a\"", "etcd.endpoints"),
            ("[etcd]\nendpoints = [\"http://a\"]\nadvertise = \"a\"\nttl = \"1s\"", "etcd.ttl"),
            ("[[tenant]]\nname = \"a\"\nhosts = []", "tenant.0.hosts"),
            (
                "[[tenant]]\nname = \"a\"\nhosts = [\"*\"]\ndrop_budget = 9999999",
                "tenant.0.drop_budget: 9999999 exceeds 524288",
            ),
            ("[[tenant]]\nname = \"a\"\nhosts = [\"*\"]\ndrop_budget = -1", "line 4"),
            ("colour = 1", "colour"),
        ] {
            let error = Config::parse(text, "f").expect_err(text).to_string();
            assert!(error.contains(key), "{text}: {error}");
        }
    }
}
