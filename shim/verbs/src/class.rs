//! The traffic class of a queue pair. It is set once, at INIT→RTR, from the stage that the job's
//! profile gives queue pairs.
//!
//! The class is part of the address vector, so an unmodified program allows one class per queue
//! pair. Where both ends have this library and the secret of their job, a program's queue pair may
//! be the first of several ([`crate::bundle`]).
//!
//! InfiniBand queues packets by service level instead. One is set only where the host's operator
//! names some (`[levels] sl`), because a subnet may route by them.

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use laxity_client::{Stage, Verdict};
use laxity_ibverbs::{ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state};
use laxity_job::Job;

use crate::report;
use crate::{bundle, lanes};

const DEVICES: &str = "/sys/class/infiniband";

/// Reports whether a change of a queue pair contains the address vector and the move to RTR.
fn connects(attr: &ibv_qp_attr, mask: i32) -> bool {
    let wanted = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_AV;
    mask as u32 & wanted == wanted && attr.qp_state == ibv_qp_state::IBV_QPS_RTR
}

/// Reports whether a change connects a queue pair, and gives the peer's address as a GID.
pub(crate) fn has_address(attr: &ibv_qp_attr, mask: i32) -> bool {
    connects(attr, mask) && attr.ah_attr.is_global != 0
}

/// Sets the service level of a queue pair that connects through an InfiniBand port. One that is set
/// already stays: the program chose it, or the subnet manager.
///
/// # Safety
/// `qp` is a live queue pair.
pub(crate) unsafe fn apply_service_level(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: i32) {
    if !connects(attr, mask) || attr.ah_attr.sl != 0 {
        return;
    }
    let stage = Job::of_this_process().profile.qp.stage;
    let Some(sl) = lanes::client().sl_of(stage) else { return };
    // SAFETY: libibverbs keeps a queue pair's context and device as long as the queue pair lives,
    // and its device names end with a zero.
    let device = unsafe { CStr::from_ptr((*(*(*qp).context).device).name.as_ptr()) };
    let device = Path::new(DEVICES).join(std::ffi::OsStr::from_bytes(device.to_bytes()));
    if is_infiniband(&device, attr.ah_attr.port_num) {
        attr.ah_attr.sl = sl;
    }
}

/// Reports whether the link layer of a device's port is InfiniBand, as sysfs says.
fn is_infiniband(device: &Path, port: u8) -> bool {
    fs::read_to_string(device.join(format!("ports/{port}/link_layer")))
        .is_ok_and(|layer| layer.trim() == "InfiniBand")
}

/// Sets the class of a queue pair if this change contains its address vector, and if the daemon's
/// marking and the host's NICs allow it ([`laxity_client::Verdict`]).
pub(crate) fn apply(attr: &mut ibv_qp_attr, mask: i32) {
    if !has_address(attr, mask) {
        return;
    }
    let class = &mut attr.ah_attr.grh.traffic_class;
    let queue_pairs = &Job::of_this_process().profile.qp;
    let is_pin = queue_pairs
        .is_pin(*class, |name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    if let Some(verdict) = lanes::client().class_of(queue_pairs.stage, *class, is_pin) {
        if let Some(why) = reason(verdict) {
            warn_once(*class, why);
        }
        *class = verdict.class(*class);
    }
    report::note_dscp(*class >> 2);
}

/// Returns the class of each stage for a queue pair that this change connects, and the class that
/// [`apply`] gives it. Stages whose class it may not have get its own. Returns `None` without a
/// daemon that marks.
pub(crate) fn of_stages(attr: &ibv_qp_attr, mask: i32) -> Option<([u8; Stage::ALL.len()], u8)> {
    if !bundle::is_on() || !has_address(attr, mask) {
        return None;
    }
    let class = attr.ah_attr.grh.traffic_class;
    let queue_pairs = &Job::of_this_process().profile.qp;
    let is_pin = queue_pairs
        .is_pin(class, |name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    let of = |stage| {
        lanes::client().class_of(stage, class, is_pin).map(|verdict| match verdict {
            Verdict::Change(wanted) => Some(wanted),
            _ => None,
        })
    };
    let own = of(queue_pairs.stage)?.unwrap_or(class);
    Some((Stage::ALL.map(|stage| of(stage).flatten().unwrap_or(own)), own))
}

/// Returns the reason why a class that nobody chose stays, or `None` if it changes or may stay.
const fn reason(verdict: Verdict) -> Option<&'static str> {
    match verdict {
        Verdict::Unlike => Some("the NIC treats it differently from the class of its stage"),
        Verdict::Unknown => Some("it is unknown how the NIC treats it and the class of its stage"),
        Verdict::Change(_) | Verdict::Off | Verdict::Chosen => None,
    }
}

/// Prints the first refusal of a process. All queue pairs of a process have the same reason.
fn warn_once(class: u8, why: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    // Relaxed, because only one thread has to print.
    if !WARNED.swap(true, Ordering::Relaxed) {
        eprintln!("laxity: queue pairs keep class {class}: {why} (laxity doctor says more)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_class_that_nobody_chose_and_that_must_stay_is_worth_a_warning() {
        for (verdict, warns) in [
            (Verdict::Change(136), false),
            (Verdict::Chosen, false),
            (Verdict::Off, false),
            (Verdict::Unlike, true),
            (Verdict::Unknown, true),
        ] {
            assert_eq!(reason(verdict).is_some(), warns, "{verdict:?}");
        }
    }

    #[test]
    fn a_port_is_of_infiniband_only_if_sysfs_says_so() {
        let device = tempfile::tempdir().unwrap();
        for (port, layer) in [(1, "InfiniBand\n"), (2, "Ethernet\n"), (3, "Unspecified\n")] {
            let folder = device.path().join(format!("ports/{port}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("link_layer"), layer).unwrap();
        }
        assert_eq!(
            [1, 2, 3, 4].map(|p| is_infiniband(device.path(), p)),
            [true, false, false, false]
        );
    }

    #[test]
    fn only_the_change_to_rtr_with_an_address_sets_a_class() {
        // SAFETY: plain data.
        let mut attr: ibv_qp_attr = unsafe { core::mem::zeroed() };
        let mask = (ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_AV) as i32;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        assert!(!has_address(&attr, mask), "no global route");
        assert!(connects(&attr, mask), "InfiniBand needs none inside a subnet");
        attr.ah_attr.is_global = 1;
        assert!(has_address(&attr, mask));
        assert!(!has_address(&attr, ibv_qp_attr_mask::IBV_QP_STATE as i32));
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        assert!(!has_address(&attr, mask));
    }
}
