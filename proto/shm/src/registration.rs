//! The messages by which a client gets its region, and the socket for them.
//!
//! The socket is `SOCK_SEQPACKET` and carries one packet each way: [`Hello`] from the client, then
//! [`Reply`] from the daemon, with `[memfd, eventfd]` as SCM_RIGHTS if it is a welcome. The socket
//! then stays open without traffic, and its hangup shows each side that the other has ended. The
//! layout is fixed and little-endian and needs no serializer, because the client part runs inside
//! other people's processes.
//!
//! # Versions
//! Client and daemon may be of different releases (`docs/upgrading.md`). Each speaks a range of
//! versions, and the daemon chooses the newest that both speak. Within a version, a packet may only
//! grow at its end, and unused bits and bytes may get a meaning whose default is zero. So the
//! receiver ignores what it doesn't know, up to [`PACKET_MAX`] bytes.
//!
//! All functions are non-blocking except those named `wait`, which have a time limit.

use std::io;
use std::mem::size_of;
use std::path::PathBuf;

use bytemuck::{Pod, Zeroable};

use crate::layout::{Geometry, Mode, VERSION, VERSION_OLDEST};

mod eventfd;
mod packets;
mod socket;

pub use eventfd::*;
pub use packets::*;
pub use socket::*;

/// The default path of the daemon's socket. `LAXITY_SOCKET` overrides it.
pub const DEFAULT_SOCKET: &str = "/run/laxity/laxityd.sock";
/// `"LXHI"`: the first word of a [`Hello`].
pub const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"LXHI");
/// `"LXRE"`: the first word of a [`Reply`].
pub const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"LXRE");
/// Bit of [`Hello::flags`]: this process could not register for `membarrier`.
pub const HELLO_FENCED: u8 = 1;
/// Maximum size of a packet in bytes, in this and every later version.
pub const PACKET_MAX: usize = 128;
/// Maximum length of a client's name in bytes. A zero follows it.
pub const NAME_MAX: usize = 27;

/// Returns the path of the daemon's socket: `LAXITY_SOCKET`, or the default.
pub fn socket_path() -> PathBuf {
    std::env::var_os("LAXITY_SOCKET")
        .filter(|path| !path.is_empty())
        .map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from)
}

/// The range of versions that one side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version.
    pub oldest: u32,
    /// The newest version.
    pub newest: u32,
}

impl Versions {
    /// The versions that this build speaks.
    pub const OURS: Self = Self { oldest: VERSION_OLDEST, newest: VERSION };

    /// Returns the newest version that both sides speak, if there is one.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

/// The release of a library: major, minor and patch number. Zeros stand for a library that does not
/// name its release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Pod, Zeroable)]
#[repr(transparent)]
pub struct Release(pub [u8; 3]);

impl Release {
    /// Returns the release of this build.
    pub fn ours() -> Self {
        let number = |text: &str| text.parse().unwrap_or(u8::MAX);
        Self([
            number(env!("CARGO_PKG_VERSION_MAJOR")),
            number(env!("CARGO_PKG_VERSION_MINOR")),
            number(env!("CARGO_PKG_VERSION_PATCH")),
        ])
    }
}

impl std::fmt::Display for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            [0, 0, 0] => f.write_str("unknown"),
            [major, minor, patch] => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

/// The client's first packet. The daemon trusts `SO_PEERCRED` ([`peer`]), not `pid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Hello {
    /// The constant [`HELLO_MAGIC`].
    pub magic: u32,
    /// Oldest version that the client speaks.
    pub version: u32,
    /// Process id as the client sees it, for the log.
    pub pid: u32,
    /// [`Mode`] that the client asks for. The lower of this and the daemon's mode applies.
    pub mode: u8,
    /// Flag bits: [`HELLO_FENCED`] or none.
    pub flags: u8,
    /// Padding of zeros.
    pub reserved: [u8; 2],
    /// The client's name for logs and reports, UTF-8, padded with zeros.
    pub name: [u8; NAME_MAX + 1],
    /// Newest version that the client speaks. Builds before there was a range leave it and the
    /// release zero. They speak `version` only.
    pub newest: u8,
    /// Release of the client's library.
    pub release: Release,
}

/// Values of [`Reply`]'s `kind`.
const WELCOME: u32 = 1;
const REJECT: u32 = 2;

/// The daemon's answer to a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Reply {
    /// The constant [`REPLY_MAGIC`].
    pub magic: u32,
    /// Version that the daemon has chosen. In a refusal: the newest that it speaks.
    pub version: u32,
    kind: u32,
    reason: u32,
    region_bytes: u64,
    lanes: u16,
    slots: u16,
    colour: u8,
    reserved: [u8; 3],
}

/// The reason why the daemon refuses a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u32)]
pub enum Reason {
    /// Client and daemon have no version in common.
    #[error("client and daemon have no version in common")]
    Version = 1,
    /// The packet is not a valid [`Hello`].
    #[error("malformed greeting")]
    Malformed = 2,
    /// The daemon does not accept this user.
    #[error("this user may not attach")]
    Forbidden = 3,
    /// The daemon lacks memory, or serves its maximum number of clients.
    #[error("the daemon has no room for another client")]
    Full = 4,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping = 5,
}

/// The error of a registration that failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum RegistrationError {
    /// A system call on the socket failed, or no daemon listens. Client: run unscheduled, retry.
    #[error("registration: {call}: {source}")]
    System { call: &'static str, source: io::Error },
    /// The other side hung up, or did not answer in time. Client: run unscheduled, retry.
    #[error("registration: no answer from the other side")]
    NoAnswer,
    /// The packet is not of this protocol. Close the connection.
    #[error("registration: malformed message of {0} bytes")]
    Malformed(usize),
    /// No version is common. Daemon: send [`Reply::reject`] with [`Reason::Version`]. Client: run
    /// unscheduled and do not retry soon.
    #[error("registration: the other side has version {0}, this one {VERSION_OLDEST} to {VERSION}")]
    Version(u32),
    /// The daemon refused the client. Client: run unscheduled.
    #[error("registration: refused by the daemon (version {version}): {reason}")]
    Rejected { reason: Reason, version: u32 },
}

impl Hello {
    /// Creates the greeting of this process.
    pub fn new(name: &str, mode: Mode, fenced: bool) -> Self {
        let mut bytes = [0; NAME_MAX + 1];
        let mut end = name.len().min(NAME_MAX);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
        Self {
            magic: HELLO_MAGIC,
            version: VERSION_OLDEST,
            pid: std::process::id(),
            mode: mode as u8,
            flags: if fenced { HELLO_FENCED } else { 0 },
            reserved: [0; 2],
            name: bytes,
            newest: VERSION as u8,
            release: Release::ours(),
        }
    }

    /// Returns the name without control characters, which could harm a terminal or a label.
    #[must_use]
    pub fn name(&self) -> String {
        let end = self.name.iter().position(|&b| b == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..end])
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect()
    }

    /// Returns the mode that the client asks for, or `None` if the number is invalid.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        Mode::from_number(self.mode)
    }

    /// Returns the versions that the client speaks.
    #[must_use]
    pub fn versions(&self) -> Versions {
        Versions { oldest: self.version, newest: self.version.max(self.newest.into()) }
    }

    /// Daemon: decodes a packet.
    ///
    /// # Errors
    /// [`RegistrationError::Malformed`] or [`RegistrationError::Version`].
    pub fn parse(packet: &[u8]) -> Result<Self, RegistrationError> {
        let malformed = || RegistrationError::Malformed(packet.len());
        // Magic and version come first in every version, so that the error can name the version.
        let head = packet.get(..8).ok_or_else(malformed)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if word(0) != HELLO_MAGIC {
            return Err(malformed());
        }
        if word(4) > VERSION {
            return Err(RegistrationError::Version(word(4)));
        }
        let hello: Self = prefix(packet)?;
        if hello.versions().common(Versions::OURS).is_none() {
            return Err(RegistrationError::Version(hello.versions().newest));
        }
        if hello.mode().is_some() { Ok(hello) } else { Err(malformed()) }
    }
}

impl Reply {
    /// Returns a welcome to a region of `version`. The descriptors are sent with it.
    pub fn welcome(version: u32, geometry: Geometry) -> Self {
        Self {
            magic: REPLY_MAGIC,
            version,
            kind: WELCOME,
            reason: 0,
            region_bytes: geometry.region_bytes() as u64,
            lanes: geometry.lanes,
            slots: geometry.slots,
            colour: geometry.colour,
            reserved: [0; 3],
        }
    }

    /// Returns a refusal.
    pub fn reject(reason: Reason) -> Self {
        let reason = reason as u32;
        Self { magic: REPLY_MAGIC, version: VERSION, kind: REJECT, reason, ..Self::zeroed() }
    }

    /// Client: decodes a packet. Returns the shape of the region if the packet is a welcome.
    ///
    /// # Errors
    /// Every [`RegistrationError`] but `System`.
    pub fn parse(packet: &[u8]) -> Result<Geometry, RegistrationError> {
        let malformed = || RegistrationError::Malformed(packet.len());
        let reply: Self = prefix(packet)?;
        if reply.magic != REPLY_MAGIC {
            return Err(malformed());
        }
        let version = reply.version;
        match (reply.kind, reply.reason) {
            (REJECT, reason) => {
                let reason = match reason {
                    1 => Reason::Version,
                    3 => Reason::Forbidden,
                    4 => Reason::Full,
                    5 => Reason::Stopping,
                    _ => Reason::Malformed,
                };
                Err(RegistrationError::Rejected { reason, version })
            }
            (WELCOME, _) if !(VERSION_OLDEST..=VERSION).contains(&version) => {
                Err(RegistrationError::Version(version))
            }
            (WELCOME, _) => {
                let (lanes, slots, colour) = (reply.lanes, reply.slots, reply.colour);
                let geometry = Geometry { lanes, slots, colour };
                if geometry.is_valid() && geometry.region_bytes() as u64 == reply.region_bytes {
                    Ok(geometry)
                } else {
                    Err(malformed())
                }
            }
            _ => Err(malformed()),
        }
    }
}

/// Reads a message from the beginning of a packet, which a later release may have made longer.
fn prefix<T: Pod>(packet: &[u8]) -> Result<T, RegistrationError> {
    let known = packet.get(..size_of::<T>());
    known.map(bytemuck::pod_read_unaligned).ok_or(RegistrationError::Malformed(packet.len()))
}

const _: () = {
    assert!(VERSION_OLDEST <= VERSION && VERSION <= u8::MAX as u32);
    assert!(size_of::<Hello>() == 48);
    assert!(size_of::<Reply>() == 32);
    assert!(cfg!(target_endian = "little"));
};
