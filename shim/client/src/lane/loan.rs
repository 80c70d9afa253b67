//! Loans of credit, on which small work requests go before they are reported to the daemon.

use laxity_shm::layout::{CREDIT_WHOLE, attention};
use laxity_shm::record::Flow;
use laxity_shm::region::HeaderRef;
use laxity_shm::sleep::lately_ns;

use super::Lane;
use super::unsent::Unsent;

/// Divisor of the credit at hand that gives the size of a loan.
const LOAN_SHARE: u64 = 4;
/// Longest time that a loan is valid, in nanoseconds, and so the longest delay of a report.
const LOAN_NS: u64 = 10_000_000;

/// Credit for work requests that are reported later, see [`Lane::lend`].
#[derive(Debug)]
pub struct Loan {
    header: HeaderRef,
    /// Number of the binding that made the loan.
    seat: u64,
    port: usize,
    bytes: u64,
    until_ns: u64,
}

impl Loan {
    /// Returns the size of the loan in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reports whether the loan is valid: nothing waits on any port, the daemon schedules, and the
    /// loan is not older than [`LOAN_NS`].
    #[inline]
    pub fn holds(&self) -> bool {
        self.header.credit_stages() & CREDIT_WHOLE != 0
            && self.header.attention() & attention::NOT_ENFORCED == 0
            && lately_ns() < self.until_ns
    }
}

impl Lane {
    /// Makes a loan of the credit at hand, of `most` bytes at most, for small work requests like
    /// `flow`. They go before they are reported, while nothing waits on any port. [`Lane::repay`]
    /// reports them as one flow.
    #[must_use]
    pub fn lend(&mut self, flow: &Flow, most: u64) -> Option<Loan> {
        // With loans the lane sends few records, so it would notice a lost daemon late.
        let now = lately_ns();
        self.notice_hangup_at(now);
        let seat = self.seat;
        let binding = self.binding.as_mut()?;
        let bytes = most.min(binding.credit.left / LOAN_SHARE);
        if flow.key() != binding.credit.key || bytes == 0 {
            return None;
        }
        let loan = Loan {
            header: binding.header.clone(),
            seat,
            port: binding.credit.port,
            bytes,
            until_ns: now + LOAN_NS,
        };
        loan.holds().then(|| {
            binding.credit.left -= bytes;
            loan
        })
    }

    /// Reports `flow`, which went on a loan and is complete, and returns the rest of the loan to
    /// the credit. If the loan's daemon is gone and did not hand over, the bytes count as bypassed.
    pub fn repay(&mut self, loan: &Loan, flow: &Flow) {
        let is_scheduled = self.binding.is_some() && self.seat == loan.seat;
        if is_scheduled || self.was_handed_over(loan.seat) {
            self.counters.scheduled_bytes.add(flow.bytes);
        }
        let Some(binding) = self.binding.as_mut().filter(|_| self.seat == loan.seat) else {
            if flow.bytes > 0 && !self.was_handed_over(loan.seat) {
                let _ = self.bypassed(flow.bytes);
            }
            return;
        };
        let rest = loan.bytes.saturating_sub(flow.bytes);
        binding.credit.give_back(loan.port, rest);
        if flow.bytes > 0 {
            self.unsent.push_back(Unsent::Repay(*flow));
            self.send_unsent();
            self.hold_back_credit();
        }
    }
}
