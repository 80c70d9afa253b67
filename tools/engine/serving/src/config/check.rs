//! Which values of the configuration are allowed.

use std::net::SocketAddr;

use super::{Config, ConfigError, Peers, Role, value};
use crate::schedule::places::Rule;

impl Config {
    /// Checks the values of all fields.
    ///
    /// # Errors
    /// Returns the first value that is not allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.model.check()?;
        if self.model.vocab < crate::endpoint::tokens::VOCAB_MIN {
            return Err(value(
                "model.vocab",
                self.model.vocab,
                format!(
                    "the endpoint's bytes and marks need {} tokens",
                    crate::endpoint::tokens::VOCAB_MIN
                ),
            ));
        }
        if self.kv.blocks == 0 || self.kv.block_tokens == 0 {
            return Err(value(
                "kv.blocks, kv.block_tokens",
                format!("{}, {}", self.kv.blocks, self.kv.block_tokens),
                "both at least 1",
            ));
        }
        if u64::from(self.kv.blocks) * u64::from(self.kv.block_tokens) > u64::from(u32::MAX) {
            return Err(value(
                "kv.blocks",
                self.kv.blocks,
                "times kv.block_tokens it has to stay below 2^32",
            ));
        }
        self.schedule.check()?;
        self.check_timing()?;
        self.check_limits()?;
        if let Some(dscp) = self.laxity.words_dscp.filter(|dscp| *dscp > 63) {
            return Err(value("laxity.words_dscp", dscp, "0 to 63"));
        }
        if let Some(rate) = self.laxity.rate_mbit
            && !(rate.is_finite() && rate > 0.0)
        {
            let wanted = "a positive number of Mbit/s, or leave it out";
            return Err(value("laxity.rate_mbit", rate, wanted));
        }
        self.check_peers()
    }

    fn check_timing(&self) -> Result<(), ConfigError> {
        let Some(timing) = &self.timing else {
            return if cfg!(feature = "compute") {
                Ok(())
            } else {
                let wanted = "this laxity-engine was built without a model that computes: give \
                              timing.layer_us, token_us, expert_us and row_us";
                Err(value("timing", "missing", wanted))
            };
        };
        for (field, time) in timing.all() {
            if !(0.0..=1e9).contains(&time) {
                return Err(value(field, time, "0 to 1000000000 microseconds"));
            }
        }
        if self.model.hidden < 2 {
            let wanted = "at least 2 with [timing]: a row begins with a number of 64 bits";
            return Err(value("model.hidden", self.model.hidden, wanted));
        }
        Ok(())
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        for (field, number) in
            [("limits.ttft_ms", limits.ttft_ms), ("limits.tpot_ms", limits.tpot_ms)]
        {
            if !(number.is_finite() && number > 0.0) {
                return Err(value(field, number, "a positive number of milliseconds"));
            }
        }
        if limits.requests_max == 0 || limits.output_max == 0 || limits.output_default == 0 {
            let all = format!(
                "{}, {}, {}",
                limits.requests_max, limits.output_max, limits.output_default
            );
            return Err(value(
                "limits.requests_max, output_max, output_default",
                all,
                "all at least 1",
            ));
        }
        Ok(())
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        let Some(peers) = &self.peers else {
            return match self.role {
                Role::Whole => Ok(()),
                Role::Prefill | Role::Decode => Err(value(
                    "role",
                    format!("{:?}", self.role).to_lowercase(),
                    "it needs [peers] with listen, and decode needs prefill, too",
                )),
            };
        };
        let fixed = |address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
        if !fixed(&peers.listen) {
            return Err(value(
                "peers.listen",
                peers.listen,
                "others know this process by it: give a real address and port",
            ));
        }
        if (self.role == Role::Decode) == peers.prefill.is_empty() {
            return Err(value(
                "peers.prefill",
                format!("{:?}", peers.prefill),
                "role = \"decode\" needs some, the other roles have none",
            ));
        }
        for (field, list) in [("peers.prefill", &peers.prefill), ("peers.reuse", &peers.reuse)] {
            if list.contains(&peers.listen) {
                return Err(value(field, peers.listen, "this process itself is none of its peers"));
            }
            if let Some(address) = list.iter().find(|address| !fixed(address)) {
                return Err(value(field, address, "give a real address and port"));
            }
        }
        if !peers.experts.is_empty() {
            if self.model.moe.is_none() {
                return Err(value(
                    "peers.experts",
                    format!("{:?}", peers.experts),
                    "the model has none (model.moe)",
                ));
            }
            if !peers.experts.contains(&peers.listen) {
                return Err(value(
                    "peers.experts",
                    format!("{:?}", peers.experts),
                    format!("this process ({}) has to be one of them", peers.listen),
                ));
            }
        }
        if peers.lockstep && (peers.experts.len() < 2 || self.timing.is_none()) {
            let wanted = "it needs two of peers.experts, and [timing]";
            return Err(value("peers.lockstep", true, wanted));
        }
        if let Some(plugin) = peers.nccl_plugin.as_ref().filter(|_| !peers.lockstep) {
            let wanted = "it carries exchanges of ranks in step only: set peers.lockstep";
            return Err(value("peers.nccl_plugin", plugin.display(), wanted));
        }
        if self.laxity.stall_ms == Some(0) {
            return Err(value("laxity.stall_ms", 0, "at least 1"));
        }
        if peers.patience_ms == 0 {
            return Err(value("peers.patience_ms", 0, "at least 1"));
        }
        check_dispatch(peers)
    }
}

fn check_dispatch(peers: &Peers) -> Result<(), ConfigError> {
    match peers.prefill_ns {
        None if peers.dispatch == Rule::Hyperflexis => Err(value(
            "peers.dispatch",
            peers.dispatch.name(),
            "it needs peers.prefill_ns, the time of a prompt on a prefill process",
        )),
        Some(all)
            if !all.iter().all(|part| part.is_finite() && *part >= 0.0)
                || all.iter().sum::<f64>() <= 0.0 =>
        {
            Err(value(
                "peers.prefill_ns",
                format!("{all:?}"),
                "three numbers of ns, none below 0 and not all 0",
            ))
        }
        _ => Ok(()),
    }
}
