//! Another rank as the peer of exchanges: a communicator in each direction, and their messages.
//!
//! A parcel consists of its length (u64, little-endian) and its bytes, and is cut into messages.

use std::collections::VecDeque;
use std::net::SocketAddr;

use laxity_nccl_host::{Context, Handle, HostError, ReceiveQueue, STEP_BYTES, SendQueue};
use thiserror::Error;

use super::DEVICE;
use crate::apart::inbox::{Inbox, Key};
use crate::carry::frame::PARCEL_BYTES_MAX;

const LENGTH_BYTES: usize = 8;

#[derive(Debug, Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("a parcel of {0} bytes")]
    TooLong(u64),
    #[error("{came} bytes came, but {said} were announced")]
    MoreThanSaid { came: usize, said: usize },
}

struct Inbound {
    key: Key,
    /// The bytes that arrived so far, including the length.
    bytes: Vec<u8>,
}

/// Returns the bytes of a parcel with its length, or `None` until the length has arrived.
fn wire_bytes(so_far: &[u8]) -> Result<Option<usize>, ExchangeError> {
    let Some(length) = so_far.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u64::from_le_bytes(*length);
    if length > PARCEL_BYTES_MAX {
        return Err(ExchangeError::TooLong(length));
    }
    Ok(Some(LENGTH_BYTES + length as usize))
}

pub(super) struct Peer {
    pub(super) rank: SocketAddr,
    send: SendQueue<Vec<u8>>,
    receive: ReceiveQueue,
    inbound: VecDeque<Inbound>,
}

impl Peer {
    pub(super) fn listen(context: &Context, rank: SocketAddr) -> Result<(Self, Handle), HostError> {
        let (listener, handle) = context.listen(DEVICE)?;
        let peer = Self {
            rank,
            send: SendQueue::default(),
            receive: ReceiveQueue::new(listener),
            inbound: VecDeque::new(),
        };
        Ok((peer, handle))
    }

    pub(super) fn connect(&mut self, context: &Context, handle: Handle) {
        self.send.connect(context.connect(DEVICE, handle));
    }

    /// Reports whether the plugin has to be polled even without a new command.
    pub(super) fn is_busy(&self) -> bool {
        !self.receive.is_connected() || self.send.is_busy() || !self.inbound.is_empty()
    }

    pub(super) fn exchange(&mut self, key: Key, payload: Vec<u8>) {
        let mut bytes = (payload.len() as u64).to_le_bytes().to_vec();
        bytes.extend(payload);
        self.send.extend(bytes.chunks(STEP_BYTES).map(<[u8]>::to_vec));
        let bytes = Vec::new();
        self.inbound.push_back(Inbound { key, bytes });
    }

    pub(super) fn turn(&mut self, inbox: &Inbox) -> Result<(), ExchangeError> {
        self.receive.accept()?;
        // Receive first, because the other rank may wait for that.
        while self.receive(inbox)? {}
        Ok(self.send()?)
    }

    fn send(&mut self) -> Result<(), HostError> {
        let sent = self.send.turn(|message, region| {
            region[..message.len()].copy_from_slice(message);
            message.len()
        })?;
        metrics::counter!("laxity_engine_plugin_messages_total").increment(sent.messages);
        metrics::counter!("laxity_engine_plugin_bytes_total").increment(sent.bytes);
        metrics::counter!("laxity_engine_plugin_refusals_total").increment(sent.refusals);
        Ok(())
    }

    /// Receives a message if one has arrived, and returns whether it did.
    fn receive(&mut self, inbox: &Inbox) -> Result<bool, ExchangeError> {
        let Some(parcel) = self.inbound.front_mut() else { return Ok(false) };
        // One receive at a time, because the first message says how many follow.
        let take = |message: &mut [u8]| parcel.bytes.extend_from_slice(message);
        if self.receive.next(1, take)?.is_none() {
            return Ok(false);
        }
        if let Some(whole) = wire_bytes(&parcel.bytes)? {
            if parcel.bytes.len() > whole {
                let came = parcel.bytes.len();
                return Err(ExchangeError::MoreThanSaid { came, said: whole });
            }
            if parcel.bytes.len() == whole
                && let Some(mut parcel) = self.inbound.pop_front()
            {
                inbox.keep(parcel.key, parcel.bytes.split_off(LENGTH_BYTES));
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parcel_says_its_length_first_and_none_is_larger_than_any() {
        assert_eq!(wire_bytes(&[1, 0, 0]).unwrap(), None);
        assert_eq!(wire_bytes(&[2, 1, 0, 0, 0, 0, 0, 0, 9]).unwrap(), Some(266));
        assert!(wire_bytes(&[0xff; 8]).is_err());
    }
}
