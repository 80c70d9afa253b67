//! Tenants: sets of hosts that share ids (`[[tenant]]` of the configuration).

use serde::{Deserialize, Serialize};

use laxity_policy::prune::MEMBERS_MAX;

use crate::nonsense::Nonsense;

/// A set of hosts whose batches and requests share ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    pub name: String,
    /// Patterns of the names of its hosts. `*` stands for any characters.
    pub hosts: Vec<String>,
    /// Whether its hosts may add requests with deadlines to every batch that they take part in.
    #[serde(default)]
    pub trust_members: bool,
    /// Maximum number of its requests that are pruned at a time. By default it shares
    /// `policy.drop_budget` with the other tenants that have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop_budget: Option<usize>,
}

/// All tenants. Without any, all hosts belong to one tenant, `default`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenants(Vec<TenantConfig>);

const TENANTS_MAX: usize = 1024;

impl Tenants {
    /// Creates the table of these tenants. A host belongs to the first tenant that matches its
    /// name.
    pub fn new(configured: Vec<TenantConfig>) -> Self {
        Self(configured)
    }

    pub(crate) fn check(configured: &[TenantConfig]) -> Result<(), Nonsense> {
        if configured.len() > TENANTS_MAX {
            let problem = format!("{} exceed {TENANTS_MAX}", configured.len());
            return Err(Nonsense::new("tenant", problem));
        }
        for (index, tenant) in configured.iter().enumerate() {
            let key = |field: &str| format!("tenant.{index}.{field}");
            if tenant.name.is_empty() {
                return Err(Nonsense::new(&key("name"), "must not be empty".into()));
            }
            if configured[..index].iter().any(|other| other.name == tenant.name) {
                let problem = format!("`{}` is another tenant's, too", tenant.name);
                return Err(Nonsense::new(&key("name"), problem));
            }
            if tenant.hosts.is_empty() {
                let problem = "names no host; write patterns such as \"prefill-*\"".into();
                return Err(Nonsense::new(&key("hosts"), problem));
            }
            if let Some(budget) = tenant.drop_budget.filter(|&budget| budget > MEMBERS_MAX) {
                let problem = format!("{budget} exceeds {MEMBERS_MAX}");
                return Err(Nonsense::new(&key("drop_budget"), problem));
            }
        }
        Ok(())
    }

    pub(crate) fn of(&self, host: &str) -> Option<u16> {
        if self.0.is_empty() {
            return Some(0);
        }
        let matches = |tenant: &TenantConfig| tenant.hosts.iter().any(|p| matches(p, host));
        self.0.iter().position(matches).map(|index| index as u16)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len().max(1)
    }

    /// Returns each tenant's own drop budget, or `None`, in the order of the tenants.
    pub(crate) fn drop_budgets(&self) -> Vec<Option<usize>> {
        self.0.iter().map(|tenant| tenant.drop_budget).collect()
    }

    pub(crate) fn name(&self, tenant: u16) -> &str {
        let known = self.0.get(usize::from(tenant));
        known.map_or("default", |tenant| tenant.name.as_str())
    }

    pub(crate) fn trusts_members(&self, tenant: u16) -> bool {
        let known = self.0.get(usize::from(tenant));
        known.is_some_and(|tenant| tenant.trust_members)
    }
}

/// Reports whether `pattern` matches `name`. `*` stands for any characters.
fn matches<'a>(pattern: &str, name: &'a str) -> bool {
    let Some((start, parts)) = pattern.split_once('*') else { return pattern == name };
    let (middle, end) = parts.rsplit_once('*').unwrap_or(("", parts));
    // The first place of each part leaves the most for the next one.
    let after = |rest: &'a str, part: &str| Some(&rest[rest.find(part)? + part.len()..]);
    let rest = name.strip_prefix(start).and_then(|rest| middle.split('*').try_fold(rest, after));
    rest.is_some_and(|rest| rest.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("prefill-*", "prefill-7", true),
            ("prefill-*", "decode-7", false),
            ("*-a-*", "x-a-a-y", true),
            ("a*b", "acbc", false),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_first_tenant_that_matches_has_the_host() {
        let tenant = |name: &str, host: &str| TenantConfig {
            name: name.into(),
            hosts: vec![host.into()],
            ..TenantConfig::default()
        };
        let tenants = Tenants::new(vec![tenant("a", "a-*"), tenant("rest", "a*")]);
        assert_eq!(tenants.of("a-1"), Some(0));
        assert_eq!(tenants.of("ab"), Some(1));
        assert_eq!(tenants.of("c"), None);
        assert_eq!(Tenants::default().of("c"), Some(0));
    }
}
