//! The packets of a registration: greeting and answer over a connected socket, with descriptors
//! beside the answer.

use std::io::{self, IoSlice};
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use super::socket::failed;
use crate::layout::Geometry;
use crate::registration::{Hello, PACKET_MAX, Reason, RegistrationError, Reply};

/// Room for descriptors, with the alignment of `cmsghdr`.
#[repr(C, align(8))]
struct DescriptorBuffer([u8; 64]);

const RIGHTS: usize = 2;

fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    rights: Option<[BorrowedFd<'_>; RIGHTS]>,
) -> Result<(), RegistrationError> {
    let rights = rights.map(|rights| rights.map(|fd| fd.as_raw_fd()));
    let rights = rights.as_ref().map(|rights| ControlMessage::ScmRights(rights));
    let (bytes, flags) = ([IoSlice::new(bytes)], MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
    let sent = sendmsg::<()>(socket.as_raw_fd(), &bytes, rights.as_slice(), flags, None);
    sent.map(drop).map_err(failed("sendmsg"))
}

#[derive(Debug)]
struct Packet {
    bytes: [u8; PACKET_MAX],
    length: usize,
    rights: Vec<OwnedFd>,
}

/// Receives one packet without blocking, or returns `None` if there is none. Without `rights` the
/// kernel drops descriptors and marks the packet, which is then malformed.
fn receive(socket: BorrowedFd<'_>, rights: bool) -> Result<Option<Packet>, RegistrationError> {
    let mut packet = Packet { bytes: [0; PACKET_MAX], length: 0, rights: Vec::new() };
    let mut part =
        libc::iovec { iov_base: packet.bytes.as_mut_ptr().cast(), iov_len: packet.bytes.len() };
    let mut control = DescriptorBuffer([0; 64]);
    // SAFETY: `msghdr` is plain data, for which zero is a valid value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if rights {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` and all that it points to are valid to write to until the call returns.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if length < 0 {
        let source = io::Error::last_os_error();
        return match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(failed("recvmsg")(source)),
        };
    }
    // SAFETY: the kernel filled `control` with well-formed headers up to `msg_controllen`, which
    // the CMSG functions walk; each descriptor in SCM_RIGHTS is fresh and ours alone.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    packet.rights.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    if length == 0 {
        return Err(RegistrationError::NoAnswer);
    }
    packet.length = length as usize;
    if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(RegistrationError::Malformed(packet.length));
    }
    Ok(Some(packet))
}

/// Client: sends the greeting.
pub fn send_hello(socket: BorrowedFd<'_>, hello: &Hello) -> Result<(), RegistrationError> {
    send(socket, bytemuck::bytes_of(hello), None)
}

/// Daemon: receives the greeting, or returns `None` if it has not come yet.
///
/// # Errors
/// Every [`RegistrationError`]: answer with [`send_reject`] and close.
pub fn receive_hello(socket: BorrowedFd<'_>) -> Result<Option<Hello>, RegistrationError> {
    match receive(socket, false)? {
        None => Ok(None),
        Some(packet) => Hello::parse(&packet.bytes[..packet.length]).map(Some),
    }
}

/// Daemon: sends a region of `version` to the client.
///
/// # Errors
/// [`RegistrationError::System`]: drop the client.
pub fn send_welcome(
    socket: BorrowedFd<'_>,
    version: u32,
    geometry: Geometry,
    memfd: BorrowedFd<'_>,
    eventfd: BorrowedFd<'_>,
) -> Result<(), RegistrationError> {
    send(socket, bytemuck::bytes_of(&Reply::welcome(version, geometry)), Some([memfd, eventfd]))
}

/// Daemon: refuses a client.
///
/// # Errors
/// [`RegistrationError::System`]: the client has ended already.
pub fn send_reject(socket: BorrowedFd<'_>, reason: Reason) -> Result<(), RegistrationError> {
    send(socket, bytemuck::bytes_of(&Reply::reject(reason)), None)
}

/// The contents of a welcome.
#[derive(Debug)]
pub struct Welcome {
    /// Shape of the region.
    pub geometry: Geometry,
    /// The region's memfd, for [`crate::region::Region::map`].
    pub memfd: OwnedFd,
    /// The eventfd that wakes a sleeping daemon.
    pub eventfd: OwnedFd,
}

/// Client: receives the answer, or returns `None` if it has not come yet.
///
/// # Errors
/// Every [`RegistrationError`]: run unscheduled.
pub fn receive_reply(socket: BorrowedFd<'_>) -> Result<Option<Welcome>, RegistrationError> {
    let Some(packet) = receive(socket, true)? else { return Ok(None) };
    let geometry = Reply::parse(&packet.bytes[..packet.length])?;
    let mut rights = packet.rights.into_iter();
    match (rights.next(), rights.next(), rights.next()) {
        (Some(memfd), Some(eventfd), None) => Ok(Some(Welcome { geometry, memfd, eventfd })),
        _ => Err(RegistrationError::Malformed(packet.length)),
    }
}

/// What a daemon says beside the sockets that it passes on.
const LISTENERS: &[u8] = b"laxityd listens at these";

/// Daemon: passes the sockets that it listens at to the next daemon.
///
/// # Errors
/// [`RegistrationError::System`]: that daemon has ended already.
pub fn send_listeners(
    socket: BorrowedFd<'_>,
    listeners: [BorrowedFd<'_>; RIGHTS],
) -> Result<(), RegistrationError> {
    send(socket, LISTENERS, Some(listeners))
}

/// Next daemon: receives the sockets at which the daemon before it listens, or returns `None` if
/// they have not come yet.
///
/// # Errors
/// Every [`RegistrationError`]: that daemon has ended without passing any.
pub fn receive_listeners(
    socket: BorrowedFd<'_>,
) -> Result<Option<[OwnedFd; RIGHTS]>, RegistrationError> {
    let Some(packet) = receive(socket, true)? else { return Ok(None) };
    match <[OwnedFd; RIGHTS]>::try_from(packet.rights) {
        Ok(listeners) if packet.bytes[..packet.length] == *LISTENERS => Ok(Some(listeners)),
        _ => Err(RegistrationError::Malformed(packet.length)),
    }
}
