//! What goes before the daemon hears of it: small work requests while nothing waits on any port.
//!
//! A record for each would cost more than the post, and tells a daemon that has nothing to decide
//! nothing. So one of them stands for those before it, with their bytes. How far the daemon may be
//! behind is bounded, in bytes and in work requests; and it is told of each again as soon as something
//! waits anywhere.

use laxity_client::{Flow, Lane, Leave, memory, scope};
use rdma_sys::{ibv_send_wr, ibv_wr_opcode};

use crate::work;

/// Bytes of a queue pair that the daemon may not know of: little against the window of any port that
/// RDMA runs on.
const BYTES: u64 = 64 << 10;
/// Work requests of a queue pair that it may not know of.
const REQUESTS: u32 = 256;
/// Larger ones are told of one by one.
const SMALL: u64 = 8 << 10;

/// What of a queue pair went ahead, and may.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    leave: Option<Leave>,
    /// Those that `leave` is for.
    opcode: ibv_wr_opcode::Type,
    /// What is left of it.
    bytes: u64,
    requests: u32,
    /// All that went, as one flow. Its `bytes` are 0 if there is nothing to tell.
    untold: Flow,
}

impl Ahead {
    /// Whether a work request may go ahead; its bytes. It is not compared with the flow that the leave
    /// was for, since that takes as long as telling: where threads and memory say nothing, the
    /// opcode says it all.
    ///
    /// # Safety
    /// As for [`work::sges`].
    #[inline]
    pub(super) unsafe fn takes(&self, wr: &ibv_send_wr) -> Option<u64> {
        let leave = self.leave.as_ref()?;
        // SAFETY: upheld by the caller.
        let bytes = work::length(unsafe { work::sges(wr) });
        let may = self.opcode == wr.opcode
            && bytes <= self.bytes
            && bytes <= SMALL
            && self.requests > 0
            && leave.holds()
            && memory::is_silent()
            && scope::is_silent();
        may.then_some(bytes)
    }

    /// It went.
    #[inline]
    pub(super) fn went(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.requests -= 1;
        self.untold.bytes += bytes;
    }

    /// The flow that tells of `flow` and of what went ahead of it, if it can stand for that.
    pub(super) fn told_with(&self, flow: &Flow) -> Flow {
        let alike = is_anonymous(flow) && flow.key() == self.untold.key();
        let bytes = if alike { self.untold.bytes } else { 0 };
        Flow {
            bytes: flow.bytes + bytes,
            ..*flow
        }
    }

    /// `flow` was permitted as a work request of `opcode`, and `told` with it: more may follow. What was
    /// not told is kept until something can stand for it.
    pub(super) fn follow(
        &mut self,
        lane: &Lane,
        opcode: ibv_wr_opcode::Type,
        flow: &Flow,
        told: bool,
    ) {
        if told {
            self.untold.bytes = 0;
        }
        self.leave = None;
        if self.untold.bytes > 0 || flow.bytes > SMALL || !is_anonymous(flow) {
            return;
        }
        if let Some((leave, bytes)) = lane.leave_ahead(flow) {
            self.leave = Some(leave);
            self.opcode = opcode;
            self.bytes = bytes.min(BYTES);
            self.requests = REQUESTS;
            self.untold = Flow { bytes: 0, ..*flow };
        }
    }

    /// What is to be told at the end, if anything.
    pub(super) fn end(&mut self) -> Option<Flow> {
        let untold = core::mem::take(self).untold;
        (untold.bytes > 0).then_some(untold)
    }
}

/// Nobody says whose it is or when it is due: it is like any other of its key.
const fn is_anonymous(flow: &Flow) -> bool {
    flow.batch == 0 && flow.request == 0 && flow.deadline_ns == 0
}
