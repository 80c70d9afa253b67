//! Checks that reject invalid scenarios.
//!
//! The types reject wrong names and texts. This module rejects numbers that do not fit together,
//! such as units that do not fill the prefill servers, or a window below a chunk.

use std::fmt;
use std::ops::RangeInclusive;

use laxity_policy::{Level, PolicyKind};

use super::{
    Arrivals, Cluster, Grants, ModelChoice, NetworkModel, Part, Policy, Scenario, Serving, Slo,
    SloKind, Source, Workload,
};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Invalid {
    /// The field as a plan names it, such as `model.tp`.
    pub field: &'static str,
    pub problem: String,
}

type Checked = Result<(), Invalid>;

fn fail(field: &'static str, problem: impl Into<String>) -> Checked {
    Err(Invalid { field, problem: problem.into() })
}

const TOKENS_MOST: u32 = 1 << 24;
/// Chunk sizes that are allowed, in bytes. Smaller chunks make simulations too slow.
const CHUNK_BYTES: RangeInclusive<u64> = 1 << 16..=1 << 36;
const WINDOW_BYTES_MOST: u64 = 1 << 40;

/// Rejects values outside of `allowed`. With such values arithmetic could overflow, or a run might
/// not end.
fn within<T: Copy + PartialOrd + fmt::Debug + fmt::Display>(
    field: &'static str,
    value: T,
    allowed: RangeInclusive<T>,
    unit: &str,
) -> Checked {
    if allowed.contains(&value) {
        return Ok(());
    }
    let (least, most) = (allowed.start(), allowed.end());
    fail(field, format!("{value:?} is not in {least}..={most}{unit}"))
}

/// Rejects values outside of `allowed`, except 0, which means "none".
fn within_or_zero(
    field: &'static str,
    value: f64,
    allowed: RangeInclusive<f64>,
    unit: &str,
) -> Checked {
    if value == 0.0 {
        return Ok(());
    }
    within(field, value, allowed, &format!("{unit}; 0 turns it off"))
}

fn at_least_one(field: &'static str, value: impl Into<u64>) -> Checked {
    if value.into() >= 1 {
        return Ok(());
    }
    fail(field, "0; at least 1 is needed")
}

impl Scenario {
    /// Checks each field, and that the fields fit together.
    /// Fails with the first invalid field. The text is for the author of the plan.
    pub fn validate(&self) -> Result<(), Invalid> {
        cluster(&self.cluster)?;
        model(&self.model, &self.cluster)?;
        serving(&self.serving, &self.cluster)?;
        slo(&self.slo)?;
        workload(&self.workload)?;
        network(&self.network)?;
        policy(&self.policy)
    }
}

impl Cluster {
    /// Returns the number of servers that prefill, a rounded share of all. The others decode.
    pub fn prefill_servers(&self) -> u32 {
        (f64::from(self.servers) * self.prefill_share).round() as u32
    }

    pub fn prefill_gpus(&self) -> u32 {
        self.prefill_servers() * self.gpus_per_server
    }
}

impl ModelChoice {
    pub fn ranks(&self) -> u32 {
        self.ep.max(self.sp).max(self.dp)
    }

    pub fn gpus(&self) -> u32 {
        self.tp * self.ranks()
    }
}

impl Source {
    pub const fn is_recorded(self) -> bool {
        match self {
            Self::Conversation | Self::Agent | Self::LongConversation | Self::LongAgent => false,
            Self::Mooncake | Self::Azure | Self::Qwen | Self::Burstgpt => true,
        }
    }
}

fn cluster(c: &Cluster) -> Checked {
    const SERVERS_MOST: u32 = 1 << 16;
    let why = ": one prefills, one decodes";
    within("cluster.servers", c.servers, 2..=SERVERS_MOST, why)?;
    within("cluster.gpus_per_server", c.gpus_per_server, 1..=256, "")?;
    if !(c.prefill_share > 0.0 && c.prefill_share < 1.0) {
        return fail(
            "cluster.prefill_share",
            format!("{} is not between 0 and 1", c.prefill_share),
        );
    }
    let prefill = c.prefill_servers();
    if prefill == 0 || prefill == c.servers {
        return fail(
            "cluster.prefill_share",
            format!(
                "{} of {} servers leaves no server for {}",
                c.prefill_share,
                c.servers,
                if prefill == 0 { "prefill" } else { "decode" }
            ),
        );
    }
    if c.gpu.is_empty() {
        return fail("cluster.gpu", "empty; a name or a file is needed");
    }
    within("cluster.nic_gbps", c.nic_gbps, 1e-3..=1e6, " Gb/s")?;
    within_or_zero("cluster.nvlink_gbytes", c.nvlink_gbytes, 1e-3..=1e6, " GB/s")?;
    at_least_one("cluster.servers_per_rack", c.servers_per_rack)?;
    within("cluster.oversubscription", c.oversubscription, 1e-3..=1e4, "")
}

fn model(m: &ModelChoice, c: &Cluster) -> Checked {
    if m.name.is_empty() {
        return fail("model.name", "empty; a name or a file is needed");
    }
    for (field, value) in
        [("model.tp", m.tp), ("model.ep", m.ep), ("model.sp", m.sp), ("model.dp", m.dp)]
    {
        within(field, value, 1..=65_536, "")?;
    }
    whole_groups("model.tp", m.tp, c)?;
    // One of `ep`, `sp` and `dp` splits a unit. The same ranks may split experts and requests.
    let split: Vec<&str> = [("ep", m.ep), ("sp", m.sp), ("dp", m.dp)]
        .into_iter()
        .filter(|&(_, ranks)| ranks > 1)
        .map(|(name, _)| name)
        .collect();
    if split.len() > 1 && !(split == ["ep", "sp"] && m.ep == m.sp) {
        return fail(
            match split[1] {
                "sp" => "model.sp",
                _ => "model.dp",
            },
            format!(
                "{} are both above 1; at most one of ep, sp and dp is, unless ep and sp are equal",
                split.join(" and ")
            ),
        );
    }
    let (unit, prefill) = (u64::from(m.tp) * u64::from(m.ranks()), u64::from(c.prefill_gpus()));
    if !prefill.is_multiple_of(unit) {
        return fail(
            "model.tp",
            format!(
                "units of tp · max(ep, sp, dp) = {unit} GPUs do not fill the {prefill} prefill \
                 GPUs \
                 ({} servers of {}): their number must be a multiple of {unit}",
                c.prefill_servers(),
                c.gpus_per_server
            ),
        );
    }
    let server = u64::from(c.gpus_per_server);
    if !unit.is_multiple_of(server) && !server.is_multiple_of(unit) {
        return fail(
            "model.tp",
            format!(
                "units of tp · max(ep, sp, dp) = {unit} GPUs would straddle servers of {server}: \
                 whole \
                 servers, or whole parts of one, are needed"
            ),
        );
    }
    within_or_zero("model.kv_bytes_per_value", m.kv_bytes_per_value, 0.25..=8.0, "")?;
    within("model.expert_skew", m.expert_skew, 0.0..=10.0, "")
}

/// Checks that a tensor-parallel group stays within a server and that groups fill the server.
fn whole_groups(field: &'static str, tp: u32, c: &Cluster) -> Checked {
    if tp == 0 || tp > c.gpus_per_server || !c.gpus_per_server.is_multiple_of(tp) {
        return fail(
            field,
            format!(
                "groups of {tp} GPUs do not fill a server of {}: a divisor of {} is needed",
                c.gpus_per_server, c.gpus_per_server
            ),
        );
    }
    Ok(())
}

fn serving(s: &Serving, c: &Cluster) -> Checked {
    at_least_one("serving.token_budget", s.token_budget)?;
    at_least_one("serving.requests_per_batch", s.requests_per_batch)?;
    within("serving.overlap_weight", s.overlap_weight, 0.0..=1e6, "")?;
    whole_groups("serving.decode_tp", s.decode_tp, c)
}

fn slo(s: &Slo) -> Checked {
    within("slo.factor", s.factor, 1e-3..=1e6, "")?;
    if s.kind == SloKind::Fixed {
        within("slo.fixed_ms", s.fixed_ms, 1e-3..=1e9, " ms")?;
    }
    within("slo.least_ms", s.least_ms, 0.0..=1e9, " ms")
}

fn workload(w: &Workload) -> Checked {
    match (&w.file, w.source.is_recorded()) {
        (None, true) => {
            return fail(
                "workload.file",
                format!("missing: the source `{}` reads a file", w.source),
            );
        }
        (Some(file), false) => {
            return fail(
                "workload.file",
                format!(
                    "`{}` is not read: the source `{}` is made up (mooncake, azure, qwen and \
                     burstgpt read files)",
                    file.display(),
                    w.source
                ),
            );
        }
        _ => {}
    }
    within("workload.rate_per_gpu", w.rate_per_gpu, 1e-6..=1e4, " a second")?;
    if w.arrivals == Arrivals::Recorded && !w.source.is_recorded() {
        return fail(
            "workload.arrivals",
            format!("`recorded`, but the source `{}` is made up; poisson or bursty", w.source),
        );
    }
    within("workload.burstiness", w.burstiness, 1e-2..=1e2, "")?;
    within("workload.seconds", w.seconds, 1e-3..=1e6, " s")?;
    if !(0.0..1.0).contains(&w.warm_up) {
        return fail(
            "workload.warm_up",
            format!("{} is not in 0..1: requests must be left to count", w.warm_up),
        );
    }
    within("workload.length_scale", w.length_scale, 1e-3..=1e3, "")?;
    within("workload.longest", w.longest, 1..=TOKENS_MOST, " tokens")
}

fn network(n: &NetworkModel) -> Checked {
    let most = Level::COUNT_MAX + 1;
    let why = ": at least one class and the scavenger";
    within("network.levels_on_wire", n.levels_on_wire, 2..=most, why)?;
    within("network.chunk_bytes", n.chunk_bytes, CHUNK_BYTES, " bytes")?;
    let windows = n.chunk_bytes..=WINDOW_BYTES_MOST;
    let why = " bytes: a window holds a chunk";
    within("network.window_bytes", n.window_bytes, windows.clone(), why)?;
    at_least_one("network.overcommit", n.overcommit)?;
    if n.peer_window_bytes != 0 {
        within("network.peer_window_bytes", n.peer_window_bytes, windows, " bytes, or 0")?;
    }
    within("network.collective_weight", n.collective_weight, 1e-3..=1e3, "")?;
    within("network.p2d_weight", n.p2d_weight, 1e-3..=1e3, "")?;
    within("network.latency_us", n.latency_us, 0.0..=1e7, " µs")?;
    within("network.ungoverned_share", n.ungoverned_share, 0.0..=0.95, "")?;
    within("network.ungoverned_period_ms", n.ungoverned_period_ms, 0.1..=1e4, " ms")?;
    let permille = n.residual_assured_permille;
    within("network.residual_assured_permille", permille, 1..=1000, " thousandths")
}

fn policy(p: &Policy) -> Checked {
    within("policy.levels", p.levels, 2..=Level::COUNT_MAX, "")?;
    within("policy.threshold_scale", p.threshold_scale, 1e-6..=1e6, "")?;
    within("policy.threshold_base", p.threshold_base, 1.001..=1e3, "")?;
    if !p.without.is_empty() && !matches!(p.kind, PolicyKind::Mfs | PolicyKind::Laxity) {
        return fail(
            "policy.without",
            format!("`{}` has no such parts; only mfs and laxity do", p.kind),
        );
    }
    for part in [Part::Mlu, Part::Rli, Part::Red, Part::Pruning] {
        if p.without.iter().filter(|&&p| p == part).count() > 1 {
            return fail("policy.without", "a part is named twice");
        }
    }
    if p.grants != Grants::Off && p.kind != PolicyKind::Fair {
        return fail(
            "policy.grants",
            format!("receivers grant instead of `{}`; policy.kind must be fair", p.kind),
        );
    }
    within("policy.debounce_ms", p.debounce_ms, 0.0..=1e6, " ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Scenario::default().validate().expect("the paper's set-up");
        let mut fixed = Scenario::default();
        (fixed.slo.kind, fixed.slo.fixed_ms) = (SloKind::Fixed, 1.0);
        fixed.validate().expect("one millisecond is one");
    }

    /// The field of each error, if it is not that of the first setting, behind `!`.
    const WRONG: &str = "
cluster.servers=1
cluster.gpus_per_server=0
cluster.prefill_share=1.0
cluster.prefill_share=0.001
cluster.prefill_share=nan
cluster.gpu=''
cluster.nic_gbps=0.0
cluster.nvlink_gbytes=inf
cluster.servers_per_rack=0
cluster.oversubscription=-1.0
model.name=''
model.tp=3
model.tp=16
cluster.servers=20 !model.tp
cluster.servers=24 model.ep=6 !model.tp
serving.overlap_weight=-1.0
network.overcommit=0
model.ep=0
model.sp=2
model.dp=2
model.expert_skew=-0.1
model.kv_bytes_per_value=9.0
serving.token_budget=0
serving.requests_per_batch=0
serving.decode_tp=0
slo.factor=0.0
slo.least_ms=-1.0
slo.fixed_ms=0.0 slo.kind='fixed'
workload.file='x'
workload.source='mooncake' !workload.file
workload.rate_per_gpu=0.0
workload.arrivals='recorded'
workload.warm_up=1.0
network.levels_on_wire=1
network.window_bytes=1
network.collective_weight=0.0
network.p2d_weight=-1.0
network.latency_us=-1.0
policy.grants='shortest'
network.ungoverned_share=1.0
network.ungoverned_period_ms=0.0
network.residual_assured_permille=1001
policy.levels=17
policy.threshold_base=1.0
policy.without=['red'] policy.kind='fair'
policy.without=['red','red']";

    #[test]
    fn each_field_has_its_range() {
        for row in WRONG.trim().lines() {
            let (settings, other) = row.split_once('!').unwrap_or((row, ""));
            let first = settings.split('=').next().unwrap_or_default();
            let field = if other.is_empty() { first } else { other };
            let scenario: Scenario = toml::from_str(&settings.trim().replace(' ', "\n"))
                .unwrap_or_else(|error| panic!("{row}: {error}"));
            let found = scenario.validate().expect_err("it makes no sense");
            assert_eq!(found.field, field, "{row}: {found}");
        }
    }

    #[test]
    fn a_unit_that_does_not_fill_the_prefill_servers_is_told_the_numbers() {
        let mut scenario = Scenario::default();
        scenario.cluster.servers = 20;
        let found = scenario.validate().expect_err("80 is no multiple of 32");
        assert!(found.problem.contains("32 GPUs"), "{found}");
        assert!(found.problem.contains("80 prefill GPUs"), "{found}");
    }
}
