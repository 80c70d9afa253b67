//! The traffic class of a queue pair: set when it goes INIT→RTR, from the stage that its job's profile
//! gives queue pairs, for all its life.
//!
//! One class per queue pair is all that an unmodified program allows: the class is part of the address
//! vector. Per-message classes need one queue pair per class where both ends have this library; a
//! program's queue pair would then be the first of a bundle kept in [`crate::queue_pair`], chosen
//! from in `post_front`. Nothing here stands in the way of that.

use laxity_client::Stage;
use rdma_sys::{ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state};

use crate::lanes;
use crate::report;
use crate::settings::Settings;

/// The two lowest bits of a traffic class are ECN's.
const ECN: u8 = 0b11;

/// Whether a change of a queue pair carries the address vector with which it becomes ready to receive.
pub(crate) fn has_address(attr: &ibv_qp_attr, mask: i32) -> bool {
    let wanted = ibv_qp_attr_mask::IBV_QP_STATE.0 | ibv_qp_attr_mask::IBV_QP_AV.0;
    mask as u32 & wanted == wanted
        && attr.qp_state == ibv_qp_state::IBV_QPS_RTR
        && attr.ah_attr.is_global != 0
}

/// Gives a queue pair its class, if this change sets one.
pub(crate) fn apply(attr: &mut ibv_qp_attr, mask: i32) {
    if !has_address(attr, mask) {
        return;
    }
    let class = &mut attr.ah_attr.grh.traffic_class;
    let settings = Settings::get();
    let queue_pairs = &settings.profile.qp;
    let pinned = queue_pairs
        .is_pin(*class, |name| {
            std::env::var_os(name).is_some_and(|value| !value.is_empty())
        })
        .then_some(*class >> 2);
    if let Some(dscp) = chosen(dscp_of(queue_pairs.stage), pinned, rank) {
        *class = dscp << 2 | *class & ECN;
    }
    report::note_dscp(*class >> 2);
}

/// The DSCP to set; `None` leaves what the program set.
fn chosen(
    wanted: Option<u8>,
    pinned: Option<u8>,
    rank: impl Fn(u8) -> Option<usize>,
) -> Option<u8> {
    let wanted = wanted?;
    let Some(pinned) = pinned else {
        return Some(wanted);
    };
    // Never lower than what an operator pinned; and what the daemon does not know can't be compared.
    match (rank(wanted), rank(pinned)) {
        (Some(ours), Some(theirs)) if ours < theirs => Some(wanted),
        _ => None,
    }
}

/// The DSCP of a stage, `None` without a daemon.
fn dscp_of(stage: Stage) -> Option<u8> {
    let dscp = lanes::client().dscp_of(stage);
    (dscp != 0).then_some(dscp)
}

/// Which place a DSCP has among the levels, 0 the highest; `None` if no level has it.
fn rank(dscp: u8) -> Option<usize> {
    let client = lanes::client();
    let levels = (1..=16).chain([laxity_client::LEVEL_SCAVENGER]);
    levels
        .map(|level| client.dscp(level))
        .position(|of| of == dscp)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 46 above 34 above 10.
    fn place(dscp: u8) -> Option<usize> {
        [46, 34, 10].iter().position(|d| *d == dscp)
    }

    #[test]
    fn a_pinned_class_is_raised_but_never_lowered() {
        assert_eq!(chosen(Some(10), None, place), Some(10));
        assert_eq!(chosen(Some(34), Some(10), place), Some(34));
        assert_eq!(chosen(Some(10), Some(34), place), None);
        assert_eq!(chosen(Some(34), Some(34), place), None);
        // Unknown to the daemon.
        assert_eq!(chosen(Some(34), Some(26), place), None);
        assert_eq!(chosen(None, Some(34), place), None);
    }

    #[test]
    fn only_the_change_to_rtr_with_an_address_sets_a_class() {
        // SAFETY: plain data.
        let mut attr: ibv_qp_attr = unsafe { core::mem::zeroed() };
        let mask = (ibv_qp_attr_mask::IBV_QP_STATE.0 | ibv_qp_attr_mask::IBV_QP_AV.0) as i32;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        assert!(!has_address(&attr, mask), "no global route");
        attr.ah_attr.is_global = 1;
        assert!(has_address(&attr, mask));
        assert!(!has_address(&attr, ibv_qp_attr_mask::IBV_QP_STATE.0 as i32));
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        assert!(!has_address(&attr, mask));
    }
}
