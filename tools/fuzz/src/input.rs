//! Input bytes that are taken from the front. After the end there are zeros.

use std::net::{SocketAddr, TcpStream};

use nix::sys::socket::{setsockopt, sockopt};

#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reports whether no bytes are left.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(count.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub fn packet(&mut self) -> &'a [u8] {
        let length = self.short();
        self.take(usize::from(length))
    }
}

/// Connects to a listener of this process. The connection ends with a reset, which avoids thousands
/// of ports in TIME_WAIT.
pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).expect("it listens");
    let reset = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = setsockopt(&stream, sockopt::Linger, &reset);
    stream
}

/// Appends bytes in the form that [`Input::packet`] reads.
pub(crate) fn put_packet(bytes: &mut Vec<u8>, packet: &[u8]) {
    bytes.extend((packet.len() as u16).to_le_bytes());
    bytes.extend(packet);
}
