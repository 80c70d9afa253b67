//! Credit that is lent: small work requests go on it before the daemon hears of them.

use laxity_shm::layout::{CREDIT_WHOLE, attention};
use laxity_shm::record::Flow;
use laxity_shm::region::HeaderRef;
use laxity_shm::sleep::lately_ns;

use super::Lane;
use super::owed::Owed;

/// Part of the credit at hand that is lent at a time.
const LOAN_SHARE: u64 = 4;
/// How long a loan holds: so long may the daemon not hear of what goes on it.
const LOAN_NS: u64 = 10_000_000;

/// Credit for work requests that are told of later, see [`Lane::lend`].
#[derive(Debug)]
pub struct Loan {
    header: HeaderRef,
    /// Of the binding that lent it.
    seat: u64,
    port: usize,
    bytes: u64,
    until_ns: u64,
}

impl Loan {
    /// Bytes that may go on it.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing waits on any port so far, the daemon schedules, and has been told a moment
    /// ago.
    #[inline]
    #[must_use]
    pub fn holds(&self) -> bool {
        self.header.credit_stages() & CREDIT_WHOLE != 0
            && self.header.attention() & attention::NOT_ENFORCED == 0
            && lately_ns() < self.until_ns
    }
}

impl Lane {
    /// Lends some of the credit at hand, `most` bytes at most, to small work requests like `flow`:
    /// they go before the daemon hears of them, while nothing waits on any port. It hears of them
    /// in one flow, with [`Lane::repay`].
    #[must_use]
    pub fn lend(&mut self, flow: &Flow, most: u64) -> Option<Loan> {
        // With loans little is said, and so little is noticed of a daemon that is gone.
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

    /// `flow` went on a loan and is complete; what it did not use of the loan is credit again.
    /// Where the loan was of a daemon that is gone, its bytes count as bypassed.
    pub fn repay(&mut self, loan: &Loan, flow: &Flow) {
        let Some(binding) = self.binding.as_mut().filter(|_| self.seat == loan.seat) else {
            if flow.bytes > 0 {
                let _ = self.bypassed(flow.bytes);
            }
            return;
        };
        let rest = loan.bytes.saturating_sub(flow.bytes);
        binding.credit.give_back(loan.port, rest);
        if flow.bytes > 0 {
            self.owed.push_back(Owed::Repay(*flow));
            self.pay();
            self.owes_still();
        }
    }
}
