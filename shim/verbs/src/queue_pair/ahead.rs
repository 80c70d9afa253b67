//! Small work requests that go before they are reported, while nothing waits on any port.
//!
//! A record for each would cost more than the post, and the daemon has nothing to decide then. The
//! work requests use a loan of the lane's credit. They are reported as one flow when the loan is
//! used up or its time is over. The unreported part is bounded in bytes, in work requests and in
//! time. As soon as something waits anywhere, each is reported by itself again.

use laxity_client::{Flow, Lane, Loan, memory, scope};
use laxity_ibverbs::{ibv_send_wr, ibv_wr_opcode};

use crate::work;

/// Maximum unreported bytes of a queue pair, which is little beside the window of any RDMA port.
const BYTES: u64 = 64 << 10;
/// Maximum number of unreported work requests of a queue pair.
const REQUESTS: u32 = 256;
/// Largest work request that is reported together with others, in bytes.
const SMALL: u64 = 8 << 10;

/// The loan of a queue pair and the work requests that used it.
#[derive(Debug, Default)]
pub(super) struct QueuePairLoan {
    loan: Option<Loan>,
    opcode: ibv_wr_opcode::Type,
    /// Bytes and work requests left in the loan.
    bytes: u64,
    requests: u32,
    /// All unreported work requests, as one flow.
    unreported: Flow,
}

impl QueuePairLoan {
    /// Returns the bytes of a work request if it may go ahead. Its flow is not compared with that
    /// of the loan, since that takes as long as a report. If neither thread nor memory has hints,
    /// the opcode decides alone.
    ///
    /// # Safety
    /// The conditions of [`work::sges`] hold.
    #[inline]
    pub(super) unsafe fn takes(&self, wr: &ibv_send_wr) -> Option<u64> {
        let loan = self.loan.as_ref()?;
        let may = self.opcode == wr.opcode
            && self.requests > 0
            && memory::is_silent()
            && scope::is_silent()
            && loan.holds();
        if !may {
            return None;
        }
        // SAFETY: upheld by the caller. A loan is for an opcode that moves these bytes.
        let bytes = work::length(unsafe { work::sges(wr) });
        (bytes <= SMALL && bytes <= self.bytes).then_some(bytes)
    }

    /// Counts a work request that went ahead.
    #[inline]
    pub(super) fn went(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.requests -= 1;
        self.unreported.bytes += bytes;
    }

    /// Reports the work requests that went ahead, and ends the loan.
    pub(super) fn repay(&mut self, lane: &mut Lane) {
        if let Some(loan) = self.loan.take() {
            lane.repay(&loan, &self.unreported);
        }
    }

    /// Takes a loan after `flow` was permitted as a work request of `opcode`.
    pub(super) fn follow(&mut self, lane: &mut Lane, opcode: ibv_wr_opcode::Type, flow: &Flow) {
        let by_opcode = memory::is_silent() && scope::is_silent() && flow.deadline_ns == 0;
        if self.loan.is_some() || flow.bytes > SMALL || !by_opcode {
            return;
        }
        if let Some(loan) = lane.lend(flow, BYTES) {
            self.opcode = opcode;
            self.bytes = loan.bytes();
            self.requests = REQUESTS;
            self.unreported = Flow { bytes: 0, ..*flow };
            self.loan = Some(loan);
        }
    }

    /// Reports whether there is a loan that may not be used any more.
    pub(super) fn is_over(&self) -> bool {
        self.loan.as_ref().is_some_and(|loan| !loan.holds())
    }

    /// Reports whether there is no loan, so that everything is reported.
    pub(super) const fn is_idle(&self) -> bool {
        self.loan.is_none()
    }
}
