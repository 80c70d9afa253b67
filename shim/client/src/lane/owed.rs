//! Records for the daemon that wait for a slot.

use laxity_shm::layout::attention;
use laxity_shm::producer::SlotRef;
use laxity_shm::record::{Flow, Record};

use super::Lane;

/// Largest number of records that wait for a slot. A live daemon never reaches it, see `owe`.
const OWED_MAX: usize = 1 << 16;
/// A record that found no slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owed {
    Say(Record),
    Withdraw(SlotRef, u64),
    /// A completed flow that went on a loan, which needs two records.
    Repay(Flow),
}

impl Lane {
    /// Reports whether records wait for a slot, so that completions are not reported. The caller
    /// should then use [`Lane::settle`] later.
    #[inline]
    pub fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Sends waiting records, as far as there are slots.
    pub fn settle(&mut self) {
        if self.owes() {
            self.pay();
        }
    }

    pub(super) fn send(&mut self, message: Owed) {
        if !self.owed.is_empty() {
            self.pay();
        }
        let Some(binding) = &mut self.binding else {
            return;
        };
        if binding.header.attention() & attention::GONE != 0 {
            if binding.session.lost_at().is_some() {
                self.lose_binding();
            }
            return;
        }
        if self.owed.is_empty() && binding.publish(message) {
            if !(matches!(message, Owed::Say(Record::Completed { .. })) && binding.can_tell_later())
            {
                binding.notify();
            }
            self.notice_hangup_sometimes();
        } else {
            self.owe(message);
        }
    }

    /// Keeps a record for later. Completions must not be lost, because the daemon would count their
    /// bytes as in flight for ever. A daemon that leaves so many records unread is not alive.
    #[cold]
    fn owe(&mut self, message: Owed) {
        if self.owed.len() >= OWED_MAX {
            if let Some(binding) = &self.binding {
                binding.session.lose();
            }
            self.lose_binding();
            return;
        }
        self.owed.push_back(message);
        self.owes_still();
    }

    /// Disables the path on credit while records wait, so that no record overtakes them.
    pub(super) fn owes_still(&mut self) {
        if let Some(binding) = &mut self.binding
            && !self.owed.is_empty()
        {
            binding.credit.key = 0;
        }
    }

    /// Sends waiting records, as far as there are slots.
    #[cold]
    pub(crate) fn pay(&mut self) {
        let Some(binding) = &mut self.binding else {
            return self.owed.clear();
        };
        let (mut moved, mut urgent) = (false, false);
        while let Some(message) = self.owed.front_mut() {
            if let Owed::Repay(flow) = *message {
                let record = Record::SubmitOnCredit { flow, observed: false };
                let Ok(at) = binding.producer.publish(&record) else {
                    break;
                };
                *message = Owed::Say(Record::Completed { tag: at.tag, bytes: flow.bytes });
            } else {
                if !binding.publish(*message) {
                    break;
                }
                urgent |= !matches!(message, Owed::Say(Record::Completed { .. }));
                self.owed.pop_front();
            }
            moved = true;
        }
        if moved {
            if urgent || !binding.can_tell_later() {
                binding.notify();
            }
        } else {
            // The daemon is slow or gone.
            self.notice_hangup();
        }
    }
}
