//! Settings from the environment. They are read once, at the first `init`.
//!
//! They comprise Laxity's own variables and those of NCCL that mean the same here. An unusable
//! value is logged and replaced by the default, because it must not stop a job. As with NCCL, a
//! named network or interface that doesn't exist is an error (`LAXITY_NET`, `NCCL_SOCKET_IFNAME`).

use std::time::Duration;

use laxity_client::Stage;
use laxity_job::Environment;

use crate::log;
use crate::verbs::VerbsOptions;

/// Largest number of sockets per connection and class.
const SOCKETS_MAX: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// RDMA if a device is usable, otherwise TCP sockets.
    #[default]
    Auto,
    Tcp,
    Verbs,
}

/// Whether to send without a copy into the kernel (`MSG_ZEROCOPY`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// Sends large messages without a copy, until the kernel reports copies.
    #[default]
    Auto,
    /// Sends all messages with a copy.
    Off,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageRule {
    /// Name of the communicator. A `*` at the end matches any suffix.
    pub pattern: String,
    pub stage: Stage,
}

impl StageRule {
    /// Reports whether the rule applies to a communicator of this name.
    pub fn fits(&self, name: &str) -> bool {
        match self.pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == self.pattern,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// `LAXITY_NET`: the network to use.
    pub network: Network,
    /// Number of sockets per connection and class: `LAXITY_NSOCKS`, else `NCCL_SOCKET_NTHREADS` ×
    /// `NCCL_NSOCKS_PERTHREAD`, else 1.
    pub sockets: usize,
    /// `LAXITY_ZEROCOPY`: whether to send without a copy.
    pub zero_copy: ZeroCopy,
    /// `LAXITY_NCCL_WAIT_MS`: longest wait of one message for its permit. It is short, because a
    /// GPU kernel spins meanwhile.
    pub wait_max: Duration,
    /// `LAXITY_NCCL_STAGES`: rules as `name=stage,prefix*=stage`.
    pub stages: Vec<StageRule>,
    /// `NCCL_SOCKET_IFNAME`: the list of interfaces, not parsed.
    pub interfaces: Option<String>,
    /// `NCCL_SOCKET_FAMILY`: the IP version, 4 or 6.
    pub family: Option<u8>,
    /// `NCCL_COMM_ID`: the address of the communicator's root.
    pub comm_id: Option<String>,
    /// `NCCL_IB_DISABLE`: whether RDMA is disabled.
    pub verbs_disabled: bool,
    /// The other `NCCL_IB_*` variables.
    pub rdma: VerbsOptions,
    /// `LAXITY_NCCL_EVENTS`: whether to ask NCCL's profiler interface which collective each send
    /// belongs to.
    pub events: bool,
    /// `LAXITY_RMA`: whether NCCL's one-sided operations use this plugin.
    pub one_sided: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self::read(&mut Environment::new(&|_| None))
    }
}

/// Parses rules of the form `name=stage,prefix*=stage`.
pub fn stage_rules(text: &str) -> Result<Vec<StageRule>, String> {
    let rule = |part: &str| {
        let (pattern, stage) =
            part.split_once('=').ok_or_else(|| format!("`{part}` is not NAME=STAGE"))?;
        let stage = stage.trim();
        let stage = Stage::from_name(stage).ok_or_else(|| {
            let names = Stage::ALL.map(Stage::name).join(", ");
            format!("`{stage}` is no stage: {names}")
        })?;
        Ok(StageRule { pattern: pattern.trim().to_owned(), stage })
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(rule).collect()
}

impl Settings {
    /// Returns the settings of the environment. Logs values that can't be used.
    pub fn from_env() -> Self {
        let mut from = Environment::of_this_process();
        let settings = Self::read(&mut from);
        for problem in from.into_problems() {
            log::warn(&problem);
        }
        settings
    }

    fn read(from: &mut Environment<'_>) -> Self {
        let mut number = |name, holds| from.number::<u64>(name, "at least 0", holds);
        let threads = number("NCCL_SOCKET_NTHREADS", "1 socket");
        let each = number("NCCL_NSOCKS_PERTHREAD", "1 socket");
        let product = threads.zip(each).map(|(n, each)| n.saturating_mul(each));
        let sockets = number("LAXITY_NSOCKS", "as many as NCCL's variables say").or(product);
        let wait_ms = number("LAXITY_NCCL_WAIT_MS", "200");
        let disable = number("NCCL_IB_DISABLE", "0");
        let modes = [("auto", ZeroCopy::Auto), ("off", ZeroCopy::Off), ("0", ZeroCopy::Off)];
        let networks = [("auto", Network::Auto), ("tcp", Network::Tcp), ("verbs", Network::Verbs)];
        let switch = [("on", true), ("1", true), ("off", false), ("0", false)];
        let off_or_on = [("off", false), ("0", false), ("on", true), ("1", true)];
        Self {
            network: from.choice("LAXITY_NET", &networks),
            sockets: usize::try_from(sockets.unwrap_or(1))
                .map_or(SOCKETS_MAX, |sockets| sockets.clamp(1, SOCKETS_MAX)),
            zero_copy: from.choice("LAXITY_ZEROCOPY", &modes),
            wait_max: Duration::from_millis(wait_ms.unwrap_or(200)),
            stages: from
                .parsed("LAXITY_NCCL_STAGES", "no declared communicators", stage_rules)
                .unwrap_or_default(),
            interfaces: from.text("NCCL_SOCKET_IFNAME"),
            family: match from.text("NCCL_SOCKET_FAMILY").as_deref() {
                Some("AF_INET") => Some(4),
                Some("AF_INET6") => Some(6),
                _ => None,
            },
            comm_id: from.text("NCCL_COMM_ID"),
            verbs_disabled: disable.is_some_and(|value| value != 0),
            rdma: VerbsOptions::from(|name| from.text(name)),
            events: from.choice("LAXITY_NCCL_EVENTS", &switch),
            one_sided: from.choice("LAXITY_RMA", &off_or_on),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Settings {
        said_of(pairs).0
    }

    /// Returns the settings, and the log messages about unusable values.
    fn said_of(pairs: &[(&str, &str)]) -> (Settings, Vec<String>) {
        let get = |name: &str| {
            let found = pairs.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let mut from = Environment::new(&get);
        (Settings::read(&mut from), from.into_problems())
    }

    #[test]
    fn what_cannot_be_used_is_said_and_the_default_holds() {
        let names = [
            "NCCL_SOCKET_NTHREADS", "LAXITY_NSOCKS", "LAXITY_NCCL_WAIT_MS", "LAXITY_NET",
            "LAXITY_ZEROCOPY", "LAXITY_NCCL_STAGES", "LAXITY_NCCL_EVENTS", "LAXITY_RMA",
        ];
        let (settings, problems) = said_of(&names.map(|name| (name, "what")));
        assert_eq!(problems.len(), names.len(), "{problems:?}");
        for (problem, name) in problems.iter().zip(names) {
            assert!(problem.starts_with(&format!("{name} is `what`: ")), "{problem}");
        }
        assert!(settings.events && !settings.one_sided && settings.network == Network::Auto);
        assert!(of(&[("LAXITY_RMA", "1")]).one_sided);
    }

    #[test]
    fn nccls_own_socket_counts_are_honoured_and_bounded() {
        let product = [("NCCL_SOCKET_NTHREADS", "2"), ("NCCL_NSOCKS_PERTHREAD", "4")];
        assert_eq!(of(&product).sockets, 8);
        assert_eq!(of(&product[..1]).sockets, 1);
        assert_eq!(of(&[("LAXITY_NSOCKS", "1000")]).sockets, SOCKETS_MAX);
        assert_eq!(of(&[("LAXITY_NSOCKS", "0")]).sockets, 1);
        assert_eq!(of(&[("LAXITY_NSOCKS", "many")]).sockets, 1);
    }

    #[test]
    fn communicators_are_declared_by_name_or_by_the_beginning_of_one() {
        let rules = of(&[("LAXITY_NCCL_STAGES", "kv_p2p=p2d, prefix_*=kv_reuse")]).stages;
        let stage = |name: &str| rules.iter().find(|rule| rule.fits(name)).map(|rule| rule.stage);
        assert_eq!(stage("kv_p2p"), Some(Stage::P2d));
        assert_eq!(stage("kv_p2p_2"), None);
        assert_eq!(stage("prefix_7"), Some(Stage::KvReuse));
        assert_eq!(stage("tp"), None);
    }

    #[test]
    fn a_rule_that_is_none_is_refused_with_what_may_stand_there() {
        assert!(stage_rules("kv").unwrap_err().contains("NAME=STAGE"));
        assert!(stage_rules("kv=fast").unwrap_err().contains("kv_reuse"));
        assert!(of(&[("LAXITY_NCCL_STAGES", "kv=fast")]).stages.is_empty());
    }
}
