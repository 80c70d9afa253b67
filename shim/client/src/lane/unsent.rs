//! Records for the daemon that wait for a slot.

use laxity_shm::layout::attention;
use laxity_shm::producer::SlotRef;
use laxity_shm::record::{Flow, Record};

use super::Lane;
use crate::hints::{BATCHES_MAX, REQUESTS_MAX};

/// Largest number of records that wait for a slot. A live daemon never reaches it, see
/// `keep_unsent`. All remembered hints may be repeated to a new daemon at once.
const UNSENT_MAX: usize = 1 << 18;
const _: () = assert!(UNSENT_MAX > 2 * REQUESTS_MAX + 4 * BATCHES_MAX);

/// A record that found no slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unsent {
    Record(Record),
    Withdraw(SlotRef, u64),
    /// A completed flow that went on a loan, which needs two records.
    Repay(Flow),
}

impl Lane {
    /// Reports whether records wait for a slot, so that completions are not reported. The caller
    /// should then call [`Lane::flush_unsent`] later.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends waiting records, as far as there are slots.
    pub fn flush_unsent(&mut self) {
        if self.has_unsent() {
            self.send_unsent();
        }
    }

    pub(super) fn send(&mut self, message: Unsent) {
        if !self.unsent.is_empty() {
            self.send_unsent();
        }
        let Some(binding) = &mut self.binding else { return };
        if binding.header.attention() & attention::GONE != 0 {
            if binding.session.lost_at().is_some() {
                self.lose_binding();
            }
            return;
        }
        if self.unsent.is_empty() && binding.publish(message) {
            if !(matches!(message, Unsent::Record(Record::Completed { .. }))
                && binding.can_notify_later())
            {
                binding.notify();
            }
            self.notice_hangup_sometimes();
        } else {
            self.keep_unsent(message);
        }
    }

    /// Keeps a record for later. Completions must not be lost, because the daemon would count their
    /// bytes as in flight for ever. A daemon that leaves so many records unread is not alive.
    #[cold]
    fn keep_unsent(&mut self, message: Unsent) {
        if self.unsent.len() >= UNSENT_MAX {
            if let Some(binding) = &self.binding {
                binding.session.lose();
            }
            self.lose_binding();
            return;
        }
        self.unsent.push_back(message);
        self.hold_back_credit();
    }

    /// Disables the path on credit while records wait, so that no record overtakes them.
    pub(super) fn hold_back_credit(&mut self) {
        if let Some(binding) = &mut self.binding
            && !self.unsent.is_empty()
        {
            binding.credit.key = 0;
        }
    }

    /// Sends waiting records, as far as there are slots.
    #[cold]
    pub(crate) fn send_unsent(&mut self) {
        let Some(binding) = &mut self.binding else { return self.unsent.clear() };
        let (mut moved, mut urgent) = (false, false);
        while let Some(message) = self.unsent.front_mut() {
            if let Unsent::Repay(flow) = *message {
                let record = Record::SubmitOnCredit { flow, observed: false };
                let Ok(at) = binding.producer.publish(&record) else { break };
                *message = Unsent::Record(Record::Completed { tag: at.tag, bytes: flow.bytes });
            } else {
                if !binding.publish(*message) {
                    break;
                }
                urgent |= !matches!(message, Unsent::Record(Record::Completed { .. }));
                self.unsent.pop_front();
            }
            moved = true;
        }
        if moved {
            if urgent || !binding.can_notify_later() {
                binding.notify();
            }
        } else {
            // The daemon is slow or gone.
            self.notice_hangup();
        }
    }
}
