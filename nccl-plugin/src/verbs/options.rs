//! NCCL's variables for RDMA that mean the same here. As with NCCL, an unusable value is logged and
//! replaced by the default.

use crate::log;
use crate::wanted::Wanted;

/// The values of NCCL's variables for RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// `NCCL_IB_HCA`: the devices to use.
    pub(super) wanted: Wanted,
    /// `NCCL_IB_HCA` as it was written, for messages.
    pub(super) hca: Option<String>,
    /// `NCCL_IB_GID_INDEX`: the entry of the GID table. Without it, the best one is used.
    pub(super) gid_index: Option<u8>,
    /// `NCCL_IB_TIMEOUT`: exponent of the timeout of an acknowledgement, 4.096 µs × 2^`timeout`.
    pub(super) timeout: u8,
    /// `NCCL_IB_RETRY_CNT`: number of retries.
    pub(super) retries: u8,
    /// `NCCL_IB_SL`: the service level on InfiniBand. Without it, the daemon's holds.
    pub(super) service_level: Option<u8>,
    /// `NCCL_IB_TC`: the traffic class that an operator pinned for all connections.
    pub(super) traffic_class: Option<u8>,
    /// `NCCL_IB_PKEY`: index of the partition key.
    pub(super) pkey_index: u16,
    /// `NCCL_IB_PCI_RELAXED_ORDERING`: whether writes into memory may be reordered.
    pub(super) relaxed_ordering: bool,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self::from(|_| None)
    }
}

impl VerbsOptions {
    /// Returns the options. `get` returns the value of each variable.
    pub fn from(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str, max: i64, default: i64| -> i64 {
            let Some(text) = get(name) else { return default };
            match text.trim().parse::<i64>() {
                // In NCCL, -1 means the default.
                Ok(-1) => default,
                Ok(value) if (0..=max).contains(&value) => value,
                _ => {
                    log::warn(&format!(
                        "{name}={text} is no number from 0 to {max}; {default} is used"
                    ));
                    default
                }
            }
        };
        let hca = get("NCCL_IB_HCA");
        let (wanted, problems) = hca.as_deref().map(Wanted::parse).unwrap_or_default();
        for problem in problems {
            log::warn(&format!("NCCL_IB_HCA: {problem}"));
        }
        Self {
            wanted,
            hca,
            gid_index: u8::try_from(number("NCCL_IB_GID_INDEX", 255, -1)).ok(),
            timeout: number("NCCL_IB_TIMEOUT", 31, 20) as u8,
            retries: number("NCCL_IB_RETRY_CNT", 7, 7) as u8,
            service_level: u8::try_from(number("NCCL_IB_SL", 15, -1)).ok(),
            traffic_class: u8::try_from(number("NCCL_IB_TC", 255, -1)).ok(),
            pkey_index: number("NCCL_IB_PKEY", 65535, 0) as u16,
            relaxed_ordering: number("NCCL_IB_PCI_RELAXED_ORDERING", 2, 2) != 0,
        }
    }

    /// Returns the DSCP of all connections, if an operator pinned one. It stays unchanged, because
    /// its priority may be the only lossless one.
    pub fn pinned_dscp(&self) -> Option<u8> {
        self.traffic_class.map(|class| class >> 2)
    }

    /// Returns the traffic class of a queue pair for messages of this DSCP. A pin keeps all eight
    /// bits.
    pub(super) fn class_of(&self, dscp: u8) -> u8 {
        match self.traffic_class {
            Some(pinned) if pinned >> 2 == dscp => pinned,
            _ => dscp << 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> VerbsOptions {
        VerbsOptions::from(|name| {
            let found = pairs.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn nccls_numbers_are_taken_within_their_bounds() {
        let options = of(&[
            ("NCCL_IB_TIMEOUT", "14"),
            ("NCCL_IB_RETRY_CNT", "3"),
            ("NCCL_IB_SL", "5"),
            ("NCCL_IB_GID_INDEX", "3"),
            ("NCCL_IB_PCI_RELAXED_ORDERING", "0"),
        ]);
        assert_eq!((options.timeout, options.retries, options.service_level), (14, 3, Some(5)));
        assert_eq!((options.gid_index, options.relaxed_ordering), (Some(3), false));
    }

    #[test]
    fn a_pinned_class_is_kept_exactly() {
        let pinned = of(&[("NCCL_IB_TC", "106")]);
        assert_eq!(pinned.pinned_dscp(), Some(26));
        assert_eq!(pinned.class_of(26), 106);
        assert_eq!(pinned.class_of(34), 136, "the peer's class, not ours");
        assert_eq!(of(&[("NCCL_IB_TC", "0")]).pinned_dscp(), Some(0));
        for unset in ["-1", "256", "high"] {
            assert_eq!(of(&[("NCCL_IB_TC", unset)]).pinned_dscp(), None);
        }
    }

    #[test]
    fn what_is_out_of_bounds_or_no_number_is_as_if_it_were_not_set() {
        let bad = [
            ("NCCL_IB_TIMEOUT", "32"),
            ("NCCL_IB_RETRY_CNT", "many"),
            ("NCCL_IB_SL", "-3"),
            ("NCCL_IB_GID_INDEX", "-1"),
        ];
        assert_eq!(of(&bad), VerbsOptions::default());
        assert_eq!(of(&[]), VerbsOptions::default());
    }
}
