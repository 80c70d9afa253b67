//! QoS of an InfiniBand subnet, as options of OpenSM (`doc/qos-config.txt` of linux-rdma/opensm):
//! service level → virtual lane, and the arbitration between lanes.
//!
//! The arbitration has no strict order among more than two lanes. So the lanes above the lowest are
//! in the table of high priority. Each has four times the weight of the next lower one, but at
//! least a weight of 1. The lowest lane sends when those are idle, and one packet after
//! [`HIGH_LIMIT`] · 4 KiB of the others.

use crate::levels::NamedLevel;

/// `qos_high_limit`, in units of 4 KiB: 256 KiB.
const HIGH_LIMIT: u8 = 64;
const SERVICE_LEVELS: u8 = 16;
/// Weights of lanes, from the highest, in units of 64 bytes.
const WEIGHTS: [u8; 8] = [255, 64, 16, 4, 1, 1, 1, 1];

/// Prints the options for at most `lanes_max` lanes. `levels` are those with a service level, the
/// highest first, at least one.
pub(super) fn opensm(levels: &[NamedLevel], lanes_max: usize) -> String {
    let mut order: Vec<u8> = Vec::new();
    for (_, sl) in levels {
        if !order.contains(sl) {
            order.push(*sl);
        }
    }
    let lanes = order.len().min(lanes_max);
    let lane_at = |at: usize| lanes - 1 - at * lanes / order.len();
    let lane_of = |sl: u8| order.iter().position(|known| *known == sl).map(lane_at);
    // Traffic of a service level that no level has goes where unmarked traffic goes, or below all.
    let unmarked = lane_of(0).unwrap_or(0);
    let lane = |sl: u8| lane_of(sl).unwrap_or(unmarked).to_string();
    let list: Vec<String> = (0..SERVICE_LEVELS).map(lane).collect();
    let mut high: Vec<String> =
        (1..lanes).rev().zip(WEIGHTS).map(|(lane, weight)| format!("{lane}:{weight}")).collect();
    if high.is_empty() {
        high.push("0:1".to_owned());
    }
    let names: Vec<String> = levels.iter().map(|(name, sl)| format!("{name} {sl}")).collect();
    format!(
        "# Service levels: {}\nqos TRUE\nqos_max_vls {}\nqos_high_limit {HIGH_LIMIT}\n\
         qos_vlarb_high {}\nqos_vlarb_low 0:64\nqos_sl2vl {}\n",
        names.join(", "),
        lanes.next_power_of_two(),
        high.join(","),
        list.join(",")
    )
}
