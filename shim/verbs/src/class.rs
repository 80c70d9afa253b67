//! The traffic class of a queue pair. It is set once, at INIT→RTR, from the stage that the job's
//! profile gives queue pairs.
//!
//! The class is part of the address vector, so an unmodified program allows one class per queue
//! pair. Per-message classes need one queue pair per class where both ends have this library. A
//! program's queue pair would then be the first of several in [`crate::queue_pair`], and
//! `post_front` would choose one.

use laxity_client::Stage;
use laxity_ibverbs::{ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state};
use laxity_job::Job;

use crate::lanes;
use crate::report;

/// The two lowest bits of a traffic class, which belong to ECN.
const ECN: u8 = 0b11;

/// Reports whether a change of a queue pair contains the address vector and the move to RTR.
pub(crate) fn has_address(attr: &ibv_qp_attr, mask: i32) -> bool {
    let wanted = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_AV;
    mask as u32 & wanted == wanted
        && attr.qp_state == ibv_qp_state::IBV_QPS_RTR
        && attr.ah_attr.is_global != 0
}

/// Sets the class of a queue pair if this change contains its address vector.
pub(crate) fn apply(attr: &mut ibv_qp_attr, mask: i32) {
    if !has_address(attr, mask) {
        return;
    }
    let class = &mut attr.ah_attr.grh.traffic_class;
    let queue_pairs = &Job::of_this_process().profile.qp;
    let is_pin = queue_pairs
        .is_pin(*class, |name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    *class = chosen(*class, is_pin, || dscp_of(queue_pairs.stage));
    report::note_dscp(*class >> 2);
}

/// Returns the class to set for a queue pair to which the program gave `class`.
///
/// A pin stays unchanged, with all eight bits. Its priority may be the only lossless one, and the
/// priority of a higher class may drop packets.
fn chosen(class: u8, is_pin: bool, wanted: impl FnOnce() -> Option<u8>) -> u8 {
    if is_pin {
        return class;
    }
    wanted().map_or(class, |dscp| dscp << 2 | class & ECN)
}

/// Returns the DSCP of a stage, or `None` without a daemon.
fn dscp_of(stage: Stage) -> Option<u8> {
    let dscp = lanes::client().dscp_of(stage);
    (dscp != 0).then_some(dscp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_class_is_kept_and_any_other_is_the_stages_own() {
        // The lossless priority of many networks, below and above the stage's class.
        for (pinned, wanted) in [(106, 34), (106, 10), (0, 34), (184, 0)] {
            assert_eq!(chosen(pinned, true, || Some(wanted)), pinned);
        }
        assert_eq!(chosen(0, false, || Some(34)), 136);
        assert_eq!(chosen(0b10, false, || Some(34)), 138, "ECN is the network's");
        assert_eq!(chosen(106, false, || None), 106, "nobody schedules");
    }

    #[test]
    fn only_the_change_to_rtr_with_an_address_sets_a_class() {
        // SAFETY: plain data.
        let mut attr: ibv_qp_attr = unsafe { core::mem::zeroed() };
        let mask = (ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_AV) as i32;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        assert!(!has_address(&attr, mask), "no global route");
        attr.ah_attr.is_global = 1;
        assert!(has_address(&attr, mask));
        assert!(!has_address(&attr, ibv_qp_attr_mask::IBV_QP_STATE as i32));
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        assert!(!has_address(&attr, mask));
    }
}
