//! The queue pair of one class, with the pieces of messages that wait to be posted or are in
//! flight.

use core::sync::atomic::Ordering;
use std::collections::VecDeque;

use super::cts::{self, CtsEntry};
use super::pinned::Pinned;
use super::queue_pair::{OwnedQueuePair, Work, WorkRequest};
use crate::backend::Sent;
use crate::fault::Result;

/// A piece of a message, which is one work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) message: u64,
    pub(super) bytes: usize,
    pub(super) last: bool,
    pub(super) accounted: bool,
}

/// The sending queue pair of a class.
pub(super) struct OutgoingQueue {
    pub(super) qp: OwnedQueuePair,
    pub(super) room: usize,
    pub(super) in_flight: VecDeque<Piece>,
    /// Pieces that are not posted yet, in order.
    pub(super) waiting: VecDeque<(WorkRequest, Piece)>,
    pub(super) done: u64,
}

/// The message whose bytes are being pushed.
pub(super) struct Newest {
    pub(super) message: u64,
    pub(super) class: usize,
    pub(super) entry: CtsEntry,
    pub(super) address: usize,
    pub(super) lkey: u32,
    pub(super) bytes: usize,
    pub(super) pushed: usize,
    pub(super) readable: bool,
    pub(super) accounted: bool,
}

impl Newest {
    /// Returns the work request for the next `count` bytes.
    pub(super) fn request(&self, work: Work, count: usize) -> WorkRequest {
        WorkRequest {
            id: self.class as u64,
            work,
            local: (self.address + self.pushed) as u64,
            lkey: self.lkey,
            remote: self.entry.address.wrapping_add(self.pushed as u64),
            rkey: self.entry.rkey,
            bytes: count as u32,
            signaled: true,
            readable: self.readable,
        }
    }

    /// Returns the work request that announces the message after its bytes. With `table`, the
    /// address of the receiver's table of sizes, it carries the size.
    pub(super) fn announcement(
        &self,
        immediate: u32,
        sizes: &Pinned,
        table: Option<(u64, u32)>,
    ) -> WorkRequest {
        let (local, bytes, remote, rkey) = match table {
            None => (0, 0, self.entry.address, self.entry.rkey),
            Some((address, rkey)) => {
                let at = cts::size_place(self.entry.post);
                // Relaxed, because the post that follows makes the word visible to the NIC, and the
                // provider's barriers order the post.
                sizes.words()[at].store((self.bytes as u64).to_le(), Ordering::Relaxed);
                let offset = at as u64 * 8;
                (sizes.address() + offset, 8, address.wrapping_add(offset), rkey)
            }
        };
        WorkRequest {
            id: self.class as u64,
            work: Work::Announce(immediate),
            local,
            lkey: sizes.lkey,
            remote,
            rkey,
            bytes,
            signaled: true,
            readable: true,
        }
    }

    /// Returns the record of a work request, which is kept until its completion.
    pub(super) fn piece(&self, bytes: usize, last: bool) -> Piece {
        Piece { message: self.message, bytes, last, accounted: self.accounted }
    }
}

impl OutgoingQueue {
    /// Posts waiting work requests, as far as there is room.
    pub(super) fn post(&mut self) -> Result<()> {
        // SAFETY: the memory of a message stays until its completion makes it done (the contract of
        // `backend::Message`). The memory of sizes stays until the message is done. The queue pair
        // is dropped before either.
        unsafe { self.qp.post_waiting(&mut self.waiting, &mut self.in_flight, self.room) }
    }

    /// Completes the oldest piece. Returns false if there was none.
    pub(super) fn complete_oldest(&mut self, sent: &mut Vec<Sent>) -> bool {
        let Some(piece) = self.in_flight.pop_front() else { return false };
        self.done += u64::from(piece.last);
        let left = if piece.accounted { piece.bytes } else { 0 };
        if piece.last || left > 0 {
            sent.push(Sent { message: piece.message, left, done: piece.last });
        }
        true
    }
}
