//! Another rank as the peer of exchanges: a communicator in each direction, and their messages.
//!
//! A parcel consists of its length (u64, little-endian) and its bytes, and is cut into messages.

use std::collections::VecDeque;
use std::net::SocketAddr;

use laxity_nccl_host::{
    Attempt, Connecting, Context, Handle, HostError, Listener, RecvComm, Region, Request, SendComm,
    Tested,
};
use thiserror::Error;

use super::DEVICE;
use crate::apart::inbox::{Inbox, Key};
use crate::carry::frame::PARCEL_BYTES_MAX;

/// Maximum number of bytes of a message. This is a step of NCCL's buffers (4 MiB in 8 steps).
const MESSAGE_BYTES_MAX: usize = 512 << 10;

/// Maximum number of messages in flight on one communicator. NCCL has as many steps.
const UNDER_WAY_MAX: usize = 8;

/// Bytes of a parcel's length field.
const LENGTH_BYTES: usize = 8;

/// The reason why an exchange with a rank failed.
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

/// Another rank and the state of its exchanges.
pub(super) struct Peer {
    pub(super) rank: SocketAddr,
    listener: Option<Listener>,
    connecting: Option<Connecting>,
    send: Option<SendComm>,
    receive: Option<RecvComm>,
    outbound: VecDeque<Vec<u8>>,
    /// Copy in registered memory of the first waiting message, after the plugin answered "not now".
    filled: Option<(Region, usize)>,
    sending: VecDeque<Request>,
    inbound: VecDeque<Inbound>,
    /// Request for the next message. There is one at a time, because the first says how many
    /// follow.
    receiving: Option<Request>,
    spare_out: Vec<Region>,
    spare_in: Option<Region>,
}

impl Peer {
    pub(super) fn listen(context: &Context, rank: SocketAddr) -> Result<(Self, Handle), HostError> {
        let (listener, handle) = context.listen(DEVICE)?;
        let peer = Self {
            rank,
            listener: Some(listener),
            connecting: None,
            send: None,
            receive: None,
            outbound: VecDeque::new(),
            filled: None,
            sending: VecDeque::new(),
            inbound: VecDeque::new(),
            receiving: None,
            spare_out: Vec::new(),
            spare_in: None,
        };
        Ok((peer, handle))
    }

    pub(super) fn connect(&mut self, context: &Context, handle: Handle) {
        self.connecting = Some(context.connect(DEVICE, handle));
    }

    /// Reports whether the plugin has to be polled even without a new command.
    pub(super) fn is_busy(&self) -> bool {
        self.connecting.is_some()
            || self.listener.is_some()
            || self.filled.is_some()
            || !(self.outbound.is_empty() && self.sending.is_empty() && self.inbound.is_empty())
    }

    /// Sends a parcel and receives one.
    pub(super) fn exchange(&mut self, key: Key, payload: Vec<u8>) {
        let mut bytes = (payload.len() as u64).to_le_bytes().to_vec();
        bytes.extend(payload);
        let messages = bytes.chunks(MESSAGE_BYTES_MAX).map(<[u8]>::to_vec);
        self.outbound.extend(messages);
        let bytes = Vec::new();
        self.inbound.push_back(Inbound { key, bytes });
    }

    pub(super) fn turn(&mut self, inbox: &Inbox) -> Result<(), ExchangeError> {
        if let Some(connecting) = &mut self.connecting
            && let Some(send) = connecting.poll()?
        {
            self.send = Some(send);
            self.connecting = None;
        }
        if let Some(listener) = &mut self.listener
            && let Some(receive) = listener.accept()?
        {
            self.receive = Some(receive);
            self.listener = None;
        }
        // Receive first, because the other rank may wait for that.
        while self.receive(inbox)? {}
        Ok(self.send()?)
    }

    fn send(&mut self) -> Result<(), HostError> {
        let Some(comm) = &self.send else { return Ok(()) };
        while self.sending.len() < UNDER_WAY_MAX {
            let (region, length) = if let Some(filled) = self.filled.take() {
                filled
            } else if let Some(message) = self.outbound.pop_front() {
                let mut region = match self.spare_out.pop() {
                    Some(region) => region,
                    None => comm.register(vec![0; MESSAGE_BYTES_MAX])?,
                };
                region[..message.len()].copy_from_slice(&message);
                (region, message.len())
            } else {
                break;
            };
            match comm.send(region, length, 0)? {
                Attempt::Started(request) => {
                    self.sending.push_back(request);
                    metrics::counter!("laxity_engine_plugin_messages_total").increment(1);
                    metrics::counter!("laxity_engine_plugin_bytes_total").increment(length as u64);
                }
                Attempt::NotNow(region) => {
                    metrics::counter!("laxity_engine_plugin_refusals_total").increment(1);
                    self.filled = Some((region, length));
                    break;
                }
            }
        }
        while let Some(request) = self.sending.pop_front() {
            match request.test()? {
                Tested::Done(region, _) => self.spare_out.push(region),
                Tested::Pending(request) => {
                    self.sending.push_front(request);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Receives a message if one has arrived, and returns whether it did.
    fn receive(&mut self, inbox: &Inbox) -> Result<bool, ExchangeError> {
        let (Some(comm), Some(parcel)) = (&self.receive, self.inbound.front_mut()) else {
            return Ok(false);
        };
        if self.receiving.is_none() {
            let region = match self.spare_in.take() {
                Some(region) => region,
                None => comm.register(vec![0; MESSAGE_BYTES_MAX])?,
            };
            match comm.receive(region, MESSAGE_BYTES_MAX, 0)? {
                Attempt::Started(request) => self.receiving = Some(request),
                Attempt::NotNow(region) => {
                    self.spare_in = Some(region);
                    return Ok(false);
                }
            }
        }
        let Some(request) = self.receiving.take() else { return Ok(false) };
        match request.test()? {
            Tested::Pending(request) => {
                self.receiving = Some(request);
                return Ok(false);
            }
            Tested::Done(region, length) => {
                parcel.bytes.extend_from_slice(&region[..length]);
                self.spare_in = Some(region);
            }
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
