//! Asks the kernel for a port's DCB settings: `RTM_GETDCB` with `DCB_CMD_IEEE_GET`, as in the
//! kernel's include/uapi/linux/dcbnl.h. Reading needs no privilege.
//!
//! A reply is a `nlmsghdr`, a `dcbmsg` and attributes. Numbers are in the host's byte order.

use std::io;
use std::os::fd::AsRawFd;

use laxity_types::marking::Treatments;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::map::{PRIORITIES, PriorityMap, Selection, Trust};

/// Longest wait for the kernel's answer, which comes at once unless the driver hangs.
const PATIENCE_MS: i64 = 1000;
/// Room for a reply. An APP table has at most a few hundred rows of 8 bytes.
const REPLY_BYTES_MAX: usize = 64 << 10;
/// Longest name of a network interface, with its zero (`IFNAMSIZ`).
const NAME_BYTES_MAX: usize = 16;

const HEADER_BYTES: usize = 16;
const DCBMSG_BYTES: usize = 4;
const ATTRIBUTE_BYTES: usize = 4;
/// The bits of an attribute's type that are no flags.
const TYPE_MASK: u16 = 0x3fff;

const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const IEEE_ETS: u16 = 1;
const IEEE_PFC: u16 = 2;
const IEEE_APP_TABLE: u16 = 3;
const IEEE_APP: u16 = 1;
const IEEE_APP_TRUST: u16 = 11;
/// `dcb_app.selector`: the protocol is an Ethertype. Ethertype 0 stands for the default priority.
const SELECTOR_ETHERTYPE: u8 = 1;
/// `dcb_app.selector`: the protocol is a DSCP.
const SELECTOR_DSCP: u8 = 5;
/// Offsets in `ieee_ets`, which is bytes only.
const ETS_TX_BANDWIDTH: usize = 3;
const ETS_SELECTION: usize = 19;
const ETS_CLASS_OF_PRIORITY: usize = 27;
const ETS_BYTES: usize = 59;
/// Offset of the received frames in `ieee_pfc`, and the size of it.
const PFC_RECEIVED: usize = 72;
const PFC_BYTES: usize = 136;

/// Why a port's settings are unknown.
#[derive(Debug, thiserror::Error)]
pub enum DcbError {
    /// The device has no DCB: loopback, veth, and most virtual functions. That says nothing about
    /// the port behind a virtual function.
    #[error("the device has no DCB")]
    Unsupported,
    /// There is no network interface of this name.
    #[error("there is no network interface `{0}`")]
    NoDevice(String),
    /// The kernel returned an error, or could not be asked.
    #[error("dcbnl: {0}")]
    System(#[from] io::Error),
    /// The reply is not as the kernel's header describes it.
    #[error("dcbnl: a malformed reply of {0} bytes")]
    Malformed(usize),
}

impl From<Errno> for DcbError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Asks the kernel for the settings of a network interface.
pub fn query(interface: &str) -> Result<PriorityMap, DcbError> {
    Ok(map(ieee(&ask(interface)?)?))
}

/// Asks the kernel for the PFC frames that a network interface received, over all priorities. Each
/// one pauses a priority there, or lets it go on.
pub(crate) fn pauses(interface: &str) -> Result<u64, DcbError> {
    received(ieee(&ask(interface)?)?).ok_or(DcbError::Unsupported)
}

/// Returns the kernel's reply for an interface.
fn ask(interface: &str) -> Result<Vec<u8>, DcbError> {
    if interface.is_empty() || interface.len() >= NAME_BYTES_MAX || interface.contains('\0') {
        return Err(DcbError::NoDevice(interface.to_owned()));
    }
    let (family, kind) = (AddressFamily::Netlink, SockType::Raw);
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(PATIENCE_MS))?;
    send(socket.as_raw_fd(), &request(interface), MsgFlags::empty())?;
    let mut reply = vec![0; REPLY_BYTES_MAX];
    let length = recv(socket.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    reply.truncate(length);
    match ieee(&reply) {
        Err(DcbError::System(error)) if error.raw_os_error() == Some(Errno::ENODEV as i32) => {
            Err(DcbError::NoDevice(interface.to_owned()))
        }
        _ => Ok(reply),
    }
}

fn request(interface: &str) -> Vec<u8> {
    let attribute = ATTRIBUTE_BYTES + interface.len() + 1;
    let length = HEADER_BYTES + DCBMSG_BYTES + attribute.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(RTM_GETDCB.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    // One request per socket, so the sequence number does not matter. The kernel fills in the id.
    bytes.extend([0; 8]);
    bytes.extend([AddressFamily::Unspec as u8, DCB_CMD_IEEE_GET, 0, 0]);
    bytes.extend((attribute as u16).to_ne_bytes());
    bytes.extend(DCB_ATTR_IFNAME.to_ne_bytes());
    bytes.extend(interface.as_bytes());
    bytes.resize(length, 0);
    bytes
}

fn ieee(reply: &[u8]) -> Result<&[u8], DcbError> {
    let malformed = || DcbError::Malformed(reply.len());
    let word = |at: usize| Some(u16::from_ne_bytes([*reply.get(at)?, *reply.get(at + 1)?]));
    let body = reply.get(HEADER_BYTES..).ok_or_else(malformed)?;
    match word(4).ok_or_else(malformed)? {
        NLMSG_ERROR => {
            let errno = body.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
            return Err(match errno.ok_or_else(malformed)?.checked_neg() {
                Some(errno) if errno == Errno::EOPNOTSUPP as i32 => DcbError::Unsupported,
                Some(errno) => io::Error::from_raw_os_error(errno).into(),
                None => malformed(),
            });
        }
        RTM_GETDCB => {}
        _ => return Err(malformed()),
    }
    let top = body.get(DCBMSG_BYTES..).ok_or_else(malformed)?;
    // A driver with dcbnl operations of the older CEE kind only has no IEEE settings.
    attribute(top, DCB_ATTR_IEEE).ok_or(DcbError::Unsupported)
}

/// Returns the received PFC frames. `ieee_pfc` ends with the frames sent and those received by
/// priority, as numbers of eight bytes.
fn received(ieee: &[u8]) -> Option<u64> {
    let frames = attribute(ieee, IEEE_PFC)?.get(PFC_RECEIVED..PFC_BYTES)?;
    let numbers = frames.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok());
    Some(numbers.map(u64::from_ne_bytes).fold(0, u64::wrapping_add))
}

/// Collects the settings from the attributes in `DCB_ATTR_IEEE`. What is missing stays unknown.
fn map(ieee: &[u8]) -> PriorityMap {
    let mut map = PriorityMap::default();
    if let Some(ets) = attribute(ieee, IEEE_ETS).filter(|ets| ets.len() >= ETS_BYTES) {
        let selection = |class: usize| match ets[ETS_SELECTION + class] {
            0 => Selection::Strict,
            1 => Selection::CreditBased,
            2 => Selection::Ets(ets[ETS_TX_BANDWIDTH + class]),
            _ => Selection::Vendor,
        };
        map.selection = Some(std::array::from_fn(selection));
        map.class_of_priority = Some(std::array::from_fn(|at| ets[ETS_CLASS_OF_PRIORITY + at]));
    }
    // `ieee_pfc` starts with the number of priorities that may have PFC, then the bit mask.
    map.pfc = attribute(ieee, IEEE_PFC).and_then(|pfc| pfc.get(1).copied());

    let mut mapped: [Option<u8>; Treatments::COUNT] = [None; Treatments::COUNT];
    let mut default = 0;
    let rows = attribute(ieee, IEEE_APP_TABLE).unwrap_or_default();
    for (kind, row) in attributes(rows) {
        let (IEEE_APP, [selector, priority, low, high, ..]) = (kind, row) else { continue };
        let protocol = usize::from(u16::from_ne_bytes([*low, *high]));
        if usize::from(*priority) >= PRIORITIES {
            continue;
        }
        match (*selector, mapped.get_mut(protocol)) {
            // The kernel takes the highest of several priorities.
            (SELECTOR_DSCP, Some(cell)) => *cell = (*cell).max(Some(*priority)),
            (SELECTOR_ETHERTYPE, _) if protocol == 0 => default = default.max(*priority),
            _ => {}
        }
    }
    let trusted = attribute(ieee, IEEE_APP_TRUST).map(|order| {
        attributes(order).any(|(_, selector)| selector.first() == Some(&SELECTOR_DSCP))
    });
    // A driver without this attribute trusts DSCP from the first row for a DSCP on (mlx5).
    let has_rows = mapped.iter().any(Option::is_some);
    map.trust = match trusted {
        Some(true) => Some(Trust::Dscp),
        Some(false) => Some(Trust::Pcp),
        None => has_rows.then_some(Trust::Dscp),
    };
    if map.trust == Some(Trust::Dscp) {
        map.priority_of_dscp = Some(mapped.map(|priority| priority.unwrap_or(default)));
    }
    map
}

/// Returns the payload of the first attribute of a type.
fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, payload)| payload)
}

/// Returns types and payloads of attributes, up to the first malformed one.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let [low, high, kind_low, kind_high, ..] = *bytes else { return None };
        let length = usize::from(u16::from_ne_bytes([low, high]));
        let payload = bytes.get(ATTRIBUTE_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([kind_low, kind_high]) & TYPE_MASK, payload))
    })
}

#[cfg(test)]
mod tests;
