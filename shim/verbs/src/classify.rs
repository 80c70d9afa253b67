//! What a work request is for (architecture §4.1): what the thread says, else what is known of its
//! memory, else what its opcode is for in this kind of job.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::collections::HashMap;
use std::time::Duration;

use laxity_client::{Direction, Flow, Stage, memory, scope};
use laxity_ibverbs::{ibv_send_wr, ibv_wr_opcode as op};
use laxity_shm::sleep::now_ns;
use parking_lot::Mutex;

use crate::settings::Settings;
use crate::{lanes, work};

/// First sights of requests. A pointer, so that a forked child can leave behind a lock that is
/// locked.
static SIGHTS: AtomicPtr<Mutex<HashMap<u64, u64>>> = AtomicPtr::new(ptr::null_mut());
/// Requests whose first sight is remembered.
const SIGHTS_MAX: usize = 1 << 16;

/// In a forked child.
pub(crate) fn abandon() {
    SIGHTS.store(ptr::null_mut(), Ordering::Relaxed);
}

/// The flow that a work request is, to or from `peer` ([`laxity_client::peers`], 0 if unknown);
/// `None` if nothing of it goes over the wire. It names no NIC: the number is asked for when the
/// flow is submitted.
///
/// # Safety
/// `wr` is as a caller of `ibv_post_send` makes it.
#[inline]
pub(crate) unsafe fn flow(wr: &ibv_send_wr, peer: u8) -> Option<Flow> {
    let settings = Settings::get();
    let stages = &settings.profile.stage;
    // SAFETY: upheld by the caller.
    let sges = unsafe { work::sges(wr) };
    let (stage, direction, bytes) = match wr.opcode {
        op::IBV_WR_RDMA_WRITE | op::IBV_WR_RDMA_WRITE_WITH_IMM => {
            (stages.write, Direction::Egress, work::length(sges))
        }
        // The data come in, so it is the ingress of this host that they load.
        op::IBV_WR_RDMA_READ => (stages.read, Direction::Ingress, work::length(sges)),
        op::IBV_WR_SEND | op::IBV_WR_SEND_WITH_IMM | op::IBV_WR_SEND_WITH_INV => {
            (stages.send, Direction::Egress, work::length(sges))
        }
        op::IBV_WR_ATOMIC_CMP_AND_SWP
        | op::IBV_WR_ATOMIC_FETCH_AND_ADD
        | op::IBV_WR_ATOMIC_WRITE => (stages.atomic, Direction::Egress, 8),
        _ => return None,
    };
    let near = sges.first().and_then(|sge| memory::at(sge.addr));
    let said = match (scope::current(), near) {
        (None, None) => scope::Scope::default(),
        (Some(scope), None) | (None, Some(scope)) => scope,
        (Some(scope), Some(memory)) => scope.within(memory),
    };
    let stage = said.stage.unwrap_or(stage);
    Some(Flow {
        stage,
        direction,
        nic: u8::MAX,
        receiver_bound: false,
        layer: said.layer.unwrap_or(0),
        whole: true,
        // Who sends matters where the sender's daemon doesn't see it.
        peer: match direction {
            Direction::Ingress => peer,
            Direction::Egress => 0,
        },
        bytes,
        batch: said.batch,
        request: said.request,
        deadline_ns: match settings.slo_ttft {
            Some(slo) if said.deadline_ns == 0 && matches!(stage, Stage::KvReuse | Stage::P2d) => {
                due(said.request, slo)
            }
            _ => said.deadline_ns,
        },
    })
}

/// When something is due that has an objective and no deadline: counted from the first sight of its
/// request; from now if it has none.
fn due(request: u64, objective: Duration) -> u64 {
    let objective = u64::try_from(objective.as_nanos()).unwrap_or(u64::MAX);
    let now = now_ns();
    if request == 0 {
        return now.saturating_add(objective);
    }
    let mut sights = lanes::get_or_leak(&SIGHTS, Mutex::default).lock();
    let is_over = |seen: u64| now.saturating_sub(seen) >= objective.saturating_mul(2);
    if sights.len() >= SIGHTS_MAX {
        // Those that are long due. If that frees nothing, the job has more requests than can be
        // told apart, and each counts from now.
        sights.retain(|_, seen| !is_over(*seen));
        if sights.len() >= SIGHTS_MAX {
            return now.saturating_add(objective);
        }
    }
    let seen = sights.entry(request).or_insert(now);
    // An engine that uses its numbers again has another request there by now.
    if is_over(*seen) {
        *seen = now;
    }
    seen.saturating_add(objective)
}
