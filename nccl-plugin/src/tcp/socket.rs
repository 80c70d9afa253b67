//! Options and calls of the sockets. They never block, send small messages at once, and are marked.

use core::ffi::{c_int, c_void};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::socket::{SockaddrStorage, bind, setsockopt, sockopt};

use crate::fault::{Fault, Result};
use crate::socket::{self, KeepAlive};

/// Sets the class of all packets that a socket sends, acknowledgements included. A failure is
/// ignored, because the socket works without the class.
pub(crate) fn mark(stream: &TcpStream, is_v4: bool, dscp: u8) {
    let class = i32::from(dscp) << 2;
    let _ = if is_v4 {
        setsockopt(stream, sockopt::Ipv4Tos, &class)
    } else {
        setsockopt(stream, sockopt::Ipv6TClass, &class)
    };
}

/// Begins to connect from an address of this host, in a class.
pub(crate) fn connect(from: SocketAddr, to: SocketAddr, dscp: u8) -> Result<TcpStream> {
    socket::connect(to, |stream| {
        // Messages for a NIC thus leave by that NIC. From loopback, only this host can be reached.
        if from.is_ipv4() == to.is_ipv4() && !from.ip().is_loopback() {
            // The kernel chooses the port at the connect, where only the pair of addresses has to
            // be unique.
            set(stream, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
            bind(stream.as_raw_fd(), &SockaddrStorage::from(from))
                .map_err(|error| Fault::system(&format!("bind to {from}"), error))?;
        }
        notice_silence(stream);
        // The class is set before the handshake, so that the handshake's packets have it, too.
        mark(stream, to.is_ipv4(), dscp);
        Ok(())
    })
}

/// Sets an option that is a number. Reports whether that succeeded.
fn set(socket: &impl AsRawFd, level: c_int, name: c_int, value: c_int) -> bool {
    // SAFETY: reads one integer.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    answer == 0
}

/// Makes the kernel probe the peer's host, also while nothing is in flight. The times are long,
/// because a low class may be silent for long.
pub(crate) fn notice_silence(stream: &TcpStream) {
    let keep_alive = KeepAlive { idle_s: 30, every_s: 10, times: 9 };
    keep_alive.set(stream);
    set(stream, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 120_000);
}

/// Repeats a call while signals interrupt it. Returns `None` if the socket is not ready.
fn unless_blocked(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(Some(count));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock => return Ok(None),
            io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

/// Reads the available bytes into memory. Returns `None` if nothing is there, and 0 at the end.
///
/// # Safety
/// `length` bytes at `address` can be written, and nobody else writes them.
pub(crate) unsafe fn receive(
    socket: RawFd,
    address: *mut u8,
    length: usize,
) -> io::Result<Option<usize>> {
    let address = address.cast::<c_void>();
    // SAFETY: upheld by the caller.
    unless_blocked(|| unsafe { libc::recv(socket, address, length, libc::MSG_DONTWAIT) })
}

/// Sends from several pieces of memory. Returns `None` if the socket takes nothing now.
///
/// # Safety
/// The pieces of memory can be read. With `MSG_ZEROCOPY` they stay until the socket's error queue
/// releases them.
pub(crate) unsafe fn send(
    socket: RawFd,
    pieces: &[libc::iovec],
    flags: c_int,
) -> io::Result<Option<usize>> {
    // SAFETY: plain data, all of which may be zero.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len();
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: upheld by the caller. The message lives as long as the calls, which do not write to
    // it.
    unless_blocked(|| unsafe { libc::sendmsg(socket, &raw const message, flags) })
}

/// Returns the sent bytes that the peer's kernel has not acknowledged.
pub(super) fn unacknowledged(stream: &TcpStream) -> u64 {
    let mut bytes: c_int = 0;
    // SAFETY: the request writes one integer.
    let answer = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if answer < 0 {
        return 0;
    }
    u64::try_from(bytes).unwrap_or(0)
}

/// Acknowledges received bytes now. Until then the sender's scheduler counts them as in flight, and
/// the kernel would delay the acknowledgement by up to 40 ms.
pub(super) fn acknowledge(stream: &TcpStream) {
    set(stream, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
}

/// Resets the connection on close, so that the peer notices at once. Unsent bytes are dropped.
pub(super) fn reset_on_close(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = setsockopt(stream, sockopt::Linger, &linger);
}

/// Allows sends without a copy. Reports whether the kernel supports them.
pub(super) fn allow_zero_copy(stream: &TcpStream) -> bool {
    set(stream, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// A report of the error queue about sends without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Released {
    /// Number of the last send whose memory may be used again. Reports come in order.
    pub(super) through: u32,
    /// Whether the kernel copied nevertheless.
    pub(super) copied: bool,
}

/// The origin of a report about sends without a copy, `SO_EE_ORIGIN_ZEROCOPY`.
const ORIGIN_ZEROCOPY: u8 = 5;
/// The code of a report that the kernel copied, `SO_EE_CODE_ZEROCOPY_COPIED`.
const COPIED: u8 = 1;

/// Memory for the control message of a report.
#[repr(C, align(8))]
struct ControlBuffer([u8; 128]);

/// Takes one report from the error queue.
pub(super) fn released(stream: &TcpStream) -> Option<Released> {
    let mut control = ControlBuffer([0; 128]);
    // SAFETY: plain data, all of which may be zero.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<ControlBuffer>();
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message and its control buffer live as long as the call.
    if unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) } < 0 {
        return None;
    }
    // SAFETY: the kernel filled the control buffer up to `msg_controllen`, and these functions stay
    // within it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(found) = header.as_ref() {
            let of_ip = (found.cmsg_level == libc::SOL_IP && found.cmsg_type == libc::IP_RECVERR)
                || (found.cmsg_level == libc::SOL_IPV6 && found.cmsg_type == libc::IPV6_RECVERR);
            if of_ip {
                let error =
                    libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned();
                if error.ee_origin == ORIGIN_ZEROCOPY {
                    return Some(Released {
                        through: error.ee_data,
                        copied: error.ee_code & COPIED != 0,
                    });
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    None
}
