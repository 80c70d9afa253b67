//! Checks the values of the configuration.

use super::{Engine, LabConfig};
use crate::fabric;

/// An invalid value of [`LabConfig`].
#[derive(Debug, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidLab {
    pub field: &'static str,
    pub problem: String,
}

/// Whether a field is valid, its name, and what it must be.
type Rule = (bool, &'static str, &'static str);

/// Returns the error of the first rule that is not kept.
pub(crate) fn keep_all<P: Into<String>>(
    rules: impl IntoIterator<Item = (bool, &'static str, P)>,
) -> Result<(), InvalidLab> {
    match rules.into_iter().find(|(is_kept, ..)| !is_kept) {
        Some((_, field, problem)) => Err(InvalidLab { field, problem: problem.into() }),
        None => Ok(()),
    }
}

impl LabConfig {
    pub fn validate(&self) -> Result<(), InvalidLab> {
        let some =
            (!self.policies.is_empty(), "policies", "name at least one, `none` for instance");
        keep_all([some])?;
        keep_all(self.policies.iter().enumerate().map(|(i, policy)| {
            let is_first = !self.policies[..i].contains(policy);
            (is_first, "policies", format!("`{policy}` is listed twice"))
        }))?;
        self.check_engine()?;
        keep_all(self.run_rules().into_iter().chain(self.size_rules()))
    }

    /// Returns the rules of a run: whether each is kept, its field, and what the field must be.
    fn run_rules(&self) -> [Rule; 14] {
        [
            ((1..=8).contains(&self.units), "units", "must be 1 to 8"),
            (
                (2..=8).contains(&self.ranks) || (self.engine == Engine::Vllm && self.ranks == 1),
                "ranks",
                "must be 2 to 8: a collective needs peers (with vLLM 1, too)",
            ),
            ((1..=8).contains(&self.decodes), "decodes", "must be 1 to 8"),
            ((10..=2000).contains(&self.port_mbit), "port_mbit", "must be 10 to 2000"),
            (
                (0.5..=3600.0).contains(&self.duration_s),
                "duration_s",
                "must be 0.5 to 3600 seconds",
            ),
            ((0.0..=600.0).contains(&self.drain_s), "drain_s", "must be 0 to 600"),
            (self.load > 0.0 && self.load <= 5.0, "load", "must be above 0, at most 5"),
            (
                self.requests_per_second.is_none_or(|r| r > 0.0 && r <= 10_000.0),
                "requests_per_second",
                "must be above 0",
            ),
            ((1.0..=1e6).contains(&self.slo_scale), "slo_scale", "must be 1 to 1000000"),
            (
                self.kill_daemon_at.is_none_or(|at| (0.0..=self.duration_s).contains(&at)),
                "kill_daemon_at",
                "must lie between 0 and duration_s, while requests arrive",
            ),
            (
                self.kill_coordinator_at
                    .is_none_or(|at| self.coordinator && (0.0..=self.duration_s).contains(&at)),
                "kill_coordinator_at",
                "needs `coordinator`, and must lie between 0 and duration_s",
            ),
            ((0.0..=1.0).contains(&self.victim_share), "victim_share", "must be 0 to 1"),
            ((0.0..=0.95).contains(&self.foreign), "foreign", "must be 0 to 0.95"),
            (self.foreign_dscp() <= 63, "foreign_dscp", "must be 0 to 63"),
        ]
    }

    fn size_rules(&self) -> [Rule; 14] {
        let model = &self.model;
        [
            (self.tokens_max >= 64, "tokens_max", "must be at least 64"),
            (self.chunk_bytes >= 1024, "chunk_bytes", "must be at least 1024"),
            (self.window_bytes >= self.chunk_bytes, "window_bytes", "is less than a chunk"),
            (
                self.peer_window_bytes.is_none_or(|bytes| bytes == 0 || bytes >= self.chunk_bytes),
                "peer_window_bytes",
                "is less than a chunk, and not 0",
            ),
            (self.socket_buffer_bytes >= 8192, "socket_buffer_bytes", "must be at least 8192"),
            ((1..=64).contains(&model.layers), "model.layers", "must be 1 to 64"),
            (
                (0.0..=1e9).contains(&model.layer_base_us),
                "model.layer_base_us",
                "must be 0 to 1000000000",
            ),
            (
                model.layer_token_us > 0.0 && model.layer_token_us <= 1e9,
                "model.layer_token_us",
                "must be above 0",
            ),
            (model.batch_tokens > 0, "model.batch_tokens", "must be above 0"),
            (model.reference_tokens > 0, "model.reference_tokens", "must be above 0"),
            (
                model.comm_share > 0.0 && model.comm_share < 1.0,
                "model.comm_share",
                "must lie between 0 and 1",
            ),
            (model.collective_to_kv > 0.0, "model.collective_to_kv", "must be above 0"),
            (
                (2..=16).contains(&self.level_dscp.len()),
                "level_dscp",
                "needs one DSCP for each of 2 to 16 levels",
            ),
            (
                fabric::classes(&self.level_dscp, self.scavenger_dscp).is_some(),
                "level_dscp",
                "at most 6 different DSCPs, each below 64, none of them 0 or 48, falling into \
                 classes that never rise again from one level to the next",
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_of_each_engine_are_valid_and_come_back_from_their_own_toml() {
        for config in
            [LabConfig::default(), LabConfig::timed(), LabConfig::real(), LabConfig::vllm()]
        {
            config.validate().unwrap();
            let again: LabConfig = toml::from_str(&config.to_toml().unwrap()).unwrap();
            assert_eq!(again, config);
        }
    }

    #[test]
    fn a_nonsense_value_is_named() {
        let config = LabConfig { ranks: 1, ..LabConfig::default() };
        assert!(config.validate().unwrap_err().to_string().starts_with("ranks"));
        let config = LabConfig { level_dscp: vec![0, 1], ..LabConfig::default() };
        assert!(config.validate().unwrap_err().to_string().starts_with("level_dscp"));
    }
}
