//! The stage and other attributes of a work request (architecture §4.1). The thread's scope comes
//! first, then the facts about its memory, then the opcode's stage in the job's profile.

use laxity_client::hints::FirstSights;
use laxity_client::{Direction, Flow, Stage, memory, scope};
use laxity_ibverbs::{ibv_send_wr, ibv_wr_opcode as op};
use laxity_job::Job;
use laxity_job::fork::PerProcess;
use laxity_shm::sleep::now_ns;
use parking_lot::Mutex;

use crate::work;

static SIGHTS: PerProcess<Mutex<FirstSights>> = PerProcess::none();

/// Returns the flow of a work request to or from `peer` ([`laxity_client::peers`], 0 if unknown).
/// Returns `None` if no data goes over the wire. The flow's NIC is set later, when it is submitted.
///
/// # Safety
/// `wr` is as a caller of `ibv_post_send` makes it.
#[inline]
pub(crate) unsafe fn flow(wr: &ibv_send_wr, peer: u8) -> Option<Flow> {
    let job = Job::of_this_process();
    let stages = &job.profile.stage;
    // SAFETY: upheld by the caller.
    let sges = unsafe { work::sges(wr) };
    let (stage, direction, bytes) = match wr.opcode {
        op::IBV_WR_RDMA_WRITE | op::IBV_WR_RDMA_WRITE_WITH_IMM => {
            (stages.write, Direction::Egress, work::length(sges))
        }
        // The data of a READ arrive here, so they load this host's ingress port.
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
        layer: said.layer.unwrap_or(0),
        whole: true,
        peer,
        bytes,
        batch: said.batch,
        request: said.request,
        deadline_ns: match job.objective_ns() {
            objective
                if objective != 0
                    && said.deadline_ns == 0
                    && matches!(stage, Stage::KvReuse | Stage::P2d) =>
            {
                let mut sights = SIGHTS.get_or_make(Mutex::default).lock();
                sights.due(now_ns(), said.request, objective)
            }
            _ => said.deadline_ns,
        },
        ..Flow::default()
    })
}
