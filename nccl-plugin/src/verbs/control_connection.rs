//! The TCP connection beside the RDMA connection. It carries the handshake and then stays open,
//! because only it shows that the peer is gone. An RDMA connection without traffic notices nothing,
//! and one with traffic may retry for a long time.
//!
//! Nothing here blocks.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::hello::{ControlMessage, Garbled, HEAD_BYTES, HelloHead};
use crate::socket::{KeepAlive, peer};

/// Time between two checks of the peer, since a check is a system call.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Number of calls per reading of the clock.
const CALLS: u32 = 64;
/// Time after a close until completions of what the peer's NIC acknowledged have arrived.
const GRACE: Duration = Duration::from_millis(20);
const KEEP_ALIVE: KeepAlive = KeepAlive { idle_s: 10, every_s: 5, times: 4 };
/// Largest message from the peer after the handshake, in bytes. It is a farewell.
const FAREWELL_BYTES_MAX: usize = 4096;

/// The reason why no message came.
#[derive(Debug, Error)]
pub(super) enum ReceiveError {
    #[error("{0}")]
    Broken(#[from] io::Error),
    /// The peer closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// The bytes are no message of this protocol.
    #[error("{0}")]
    Garbled(#[from] Garbled),
}

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// A TCP connection that carries messages of the handshake.
#[derive(Debug)]
pub(super) struct ControlConnection {
    stream: TcpStream,
    nonce: u64,
    out: Vec<u8>,
    heard: Vec<u8>,
    head: Option<HelloHead>,
}

impl ControlConnection {
    /// Returns a control connection over a non-blocking stream.
    pub(super) fn new(stream: TcpStream, nonce: u64) -> Self {
        Self { stream, nonce, out: Vec::new(), heard: Vec::new(), head: None }
    }

    /// Queues a message for the next `flush`.
    pub(super) fn say(&mut self, message: &ControlMessage) {
        self.out.extend(message.encode(self.nonce));
    }

    /// Writes queued messages. Reports whether all of them are written.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while !self.out.is_empty() {
            match self.stream.write(&self.out) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.out.drain(..written)),
                Err(error) if waits(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Returns the next message if it is complete. Never reads beyond that message.
    pub(super) fn hear(&mut self) -> Result<Option<ControlMessage>, ReceiveError> {
        loop {
            let wanted = HEAD_BYTES + self.head.map_or(0, |head| head.body);
            if self.heard.len() == wanted {
                if let Some(head) = self.head {
                    let message = ControlMessage::decode(head, &self.heard[HEAD_BYTES..])?;
                    self.heard.clear();
                    self.head = None;
                    return Ok(Some(message));
                }
                if let Some(head) = self.heard.first_chunk() {
                    self.head = Some(HelloHead::decode(head, self.nonce)?);
                    continue;
                }
            }
            let mut buffer = [0; 512];
            let room = (wanted - self.heard.len()).min(buffer.len());
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(read) => self.heard.extend(&buffer[..read]),
                Err(error) if waits(&error) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the peer's address as text, for faults and the log.
    pub(super) fn peer(&self) -> String {
        peer(&self.stream)
    }

    /// Ends the handshake. Returns a watch over the peer.
    pub(super) fn watch(self) -> PeerWatch {
        let peer = self.peer();
        // A host that lost its power sends nothing.
        KEEP_ALIVE.set(&self.stream);
        PeerWatch {
            stream: self.stream,
            peer,
            calls: 0,
            next: Instant::now(),
            farewell: Vec::new(),
            gone: None,
        }
    }
}

#[derive(Debug)]
pub(super) struct PeerWatch {
    stream: TcpStream,
    peer: String,
    calls: u32,
    next: Instant,
    farewell: Vec<u8>,
    gone: Option<Instant>,
}

/// The result of a check of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// The peer is there, or was at the last check.
    There,
    /// The peer is there and was checked just now. The caller can do other rare checks, too.
    Looked,
    /// The peer closed the connection. Completions may still arrive.
    Leaving,
    /// The peer is gone.
    Gone,
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        // A forked child may have the socket, too, so closing it here wouldn't notify the peer.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl PeerWatch {
    /// Returns the peer's address as text, for faults and the log.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// Checks the peer if the last check is long enough ago.
    pub(super) fn look(&mut self) -> PeerState {
        if let Some(gone) = self.gone {
            return if gone.elapsed() < GRACE { PeerState::Leaving } else { PeerState::Gone };
        }
        self.calls = self.calls.wrapping_add(1);
        if self.calls % CALLS != 1 {
            return PeerState::There;
        }
        let now = Instant::now();
        if now < self.next {
            return PeerState::There;
        }
        self.look_now()
    }

    pub(super) fn look_now(&mut self) -> PeerState {
        let now = Instant::now();
        self.next = now + LOOK_EVERY;
        let mut buffer = [0; 512];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => {
                    let room = FAREWELL_BYTES_MAX.saturating_sub(self.farewell.len());
                    self.farewell.extend(&buffer[..read.min(room)]);
                }
                Err(error) if waits(&error) => return PeerState::Looked,
                Err(_) => break,
            }
        }
        self.gone = Some(now);
        PeerState::Leaving
    }

    /// Returns the peer's [`farewell`] once it is leaving.
    pub(super) fn farewell(&self) -> &[u8] {
        &self.farewell
    }

    /// Sends the number of messages that arrived on each queue pair, and closes. The peer thus
    /// learns of messages whose last acknowledgement was lost.
    pub(super) fn part(mut self, arrived: &[u64]) {
        // The farewell fits into an empty socket buffer. Without it the peer has less information.
        let _ = self.stream.write(&farewell(arrived));
    }
}

const FAREWELL: [u8; 8] = *b"LAXFAREW";

/// Returns the farewell of a receiver: the number of messages that arrived, by queue pair.
pub(super) fn farewell(arrived: &[u64]) -> Vec<u8> {
    let counts = arrived.iter().flat_map(|count| count.to_le_bytes());
    FAREWELL.into_iter().chain(counts).collect()
}

/// Parses a farewell. Returns `None` unless it is complete.
pub(super) fn arrived(farewell: &[u8], lanes: usize) -> Option<Vec<u64>> {
    let counts = farewell.strip_prefix(&FAREWELL)?;
    if counts.len() != lanes * 8 {
        return None;
    }
    let (counts, _) = counts.as_chunks::<8>();
    Some(counts.iter().map(|count| u64::from_le_bytes(*count)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().unwrap()).expect("connects");
        let (far, _) = listener.accept().expect("accepts");
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(done) = step() {
                return done;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_word_comes_whole_however_it_is_cut() {
        let (mut near, far) = pair();
        let mut control = ControlConnection::new(far, 7);
        let message = ControlMessage::Refusal("there is no room".into());
        for byte in message.encode(7) {
            near.write_all(&[byte]).unwrap();
            if let Some(heard) = control.hear().unwrap() {
                assert_eq!(heard, message);
                return;
            }
        }
        assert_eq!(until(|| control.hear().unwrap()), message);
    }

    #[test]
    fn a_stranger_and_one_who_hangs_up_are_no_words() {
        let (mut near, far) = pair();
        near.write_all(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n").unwrap();
        let mut control = ControlConnection::new(far, 7);
        let refused = until(|| control.hear().err());
        assert!(matches!(refused, ReceiveError::Garbled(Garbled::Stranger)), "{refused}");
        let (near, far) = pair();
        drop(near);
        let mut control = ControlConnection::new(far, 7);
        assert!(matches!(until(|| control.hear().err()), ReceiveError::Closed));
    }

    #[test]
    fn a_peer_that_closes_is_leaving_and_then_gone_and_its_farewell_is_heard() {
        let (near, far) = pair();
        let mut watch = ControlConnection::new(far, 7).watch();
        assert!(matches!(watch.look(), PeerState::Looked));
        ControlConnection::new(near, 7).watch().part(&[3, 0, 1 << 40]);
        let peer_state =
            until(|| Some(watch.look()).filter(|peer_state| *peer_state == PeerState::Leaving));
        assert_eq!(peer_state, PeerState::Leaving);
        assert_eq!(arrived(watch.farewell(), 3), Some(vec![3, 0, 1 << 40]));
        assert_eq!(arrived(watch.farewell(), 2), None);
        until(|| (watch.look() == PeerState::Gone).then_some(()));
    }

    proptest! {
        #[test]
        fn a_farewell_of_garbage_says_nothing(
            bytes in prop::collection::vec(any::<u8>(), 0..80), lanes in 0..9_usize,
        ) {
            prop_assert_eq!(arrived(&bytes, lanes), None);
        }
    }
}
