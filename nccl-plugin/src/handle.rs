//! The 128 bytes by which a sender finds its receiver (`NCCL_NET_HANDLE_MAXSIZE`).
//!
//! A handle comes from another process through NCCL's bootstrap network, so it is untrusted. If a
//! host lacks this plugin, handles of another plugin arrive. Taking one for this plugin's would
//! make the job hang. A magic number, a version and a checksum prevent that.
//!
//! | bytes | |
//! |---|---|
//! | 0–7 | `LAXNCCL` and 0 |
//! | 8–9 | version of the handle and of the handshake |
//! | 10 | backend: 1 TCP, 2 verbs |
//! | 11 | 4 or 6: the family of the address |
//! | 12–13 | port |
//! | 16–31 | address, IPv4 in the first four |
//! | 32–35 | IPv6 scope |
//! | 40–47 | a random number that the sender repeats to the listener |
//! | 48–55 | checksum of bytes 0–47 |
//! | 120–127 | the sender's mark of its connect. 0 as it comes from the listener |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::fault::Fault;

pub const HANDLE_BYTES: usize = 128;
/// Version of the handle and of the handshake that follows. Both ends must have the same.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"LAXNCCL\0";
const SUM_AT: usize = 48;
const MARK_AT: usize = 120;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Carrier {
    Tcp = 1,
    Verbs = 2,
}

/// The address of a receiver's listener, which its handle contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub carrier: Carrier,
    pub address: SocketAddr,
    /// A random number that identifies the listener, since a port may be reused.
    pub nonce: u64,
}

/// Returns the FNV-1a checksum. It detects handles of other programs and offers no security.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns the `N` bytes at `at`, or zeros where `bytes` is too short.
pub(crate) fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found.copied().unwrap_or([0; N])
}

/// Checks the magic number and the version with which a hello begins.
pub(crate) fn check_hello(bytes: &[u8], magic: [u8; 8]) -> Result<(), String> {
    if word(bytes, 0) != magic {
        return Err(String::from("what connected does not speak Laxity's protocol"));
    }
    let version = u16::from_le_bytes(word(bytes, 8));
    if version != VERSION {
        return Err(format!(
            "the peer's plugin speaks version {version}, this one version {VERSION}: install the \
             same release on all nodes"
        ));
    }
    Ok(())
}

impl Handle {
    /// Returns the bytes that NCCL carries to the sender.
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.carrier as u8;
        bytes[12..14].copy_from_slice(&self.address.port().to_le_bytes());
        match self.address {
            SocketAddr::V4(v4) => {
                bytes[11] = 4;
                bytes[16..20].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                bytes[11] = 6;
                bytes[16..32].copy_from_slice(&v6.ip().octets());
                bytes[32..36].copy_from_slice(&v6.scope_id().to_le_bytes());
            }
        }
        bytes[40..48].copy_from_slice(&self.nonce.to_le_bytes());
        let sum = checksum(&bytes[..SUM_AT]);
        bytes[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// [`Fault::Usage`] if the other end has no Laxity plugin, or one of another version.
    /// [`Fault::Argument`] if the handle is damaged.
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Fault> {
        if word(bytes, 0) != MAGIC {
            return Err(Fault::Usage(
                "the peer's handle is not Laxity's: NCCL there uses another network. Set \
                 NCCL_NET_PLUGIN=laxity on all \
                 nodes, see that libnccl-net-laxity.so is on the library path there \
                 (NCCL_DEBUG=INFO tells), and set \
                 NCCL_NET=Laxity so that a node that can't load it stops at once"
                    .into(),
            ));
        }
        let version = u16::from_le_bytes(word(bytes, 8));
        if version != VERSION {
            return Err(Fault::Usage(format!(
                "the peer's plugin speaks version {version}, this one version {VERSION}: install \
                 the same release of Laxity on all nodes"
            )));
        }
        if u64::from_le_bytes(word(bytes, SUM_AT)) != checksum(&bytes[..SUM_AT]) {
            return Err(Fault::Argument(
                "the peer's handle was damaged on its way: its checksum is wrong".into(),
            ));
        }
        let port = u16::from_le_bytes(word(bytes, 12));
        let damaged =
            || Fault::Argument("the peer's handle has a field that no version writes".into());
        let address = match bytes[11] {
            4 => SocketAddr::new(IpAddr::V4(Ipv4Addr::from(word::<4>(bytes, 16))), port),
            6 => SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(word::<16>(bytes, 16)),
                port,
                0,
                u32::from_le_bytes(word(bytes, 32)),
            )),
            _ => return Err(damaged()),
        };
        let carrier = match bytes[10] {
            1 => Carrier::Tcp,
            2 => Carrier::Verbs,
            _ => return Err(damaged()),
        };
        Ok(Self { carrier, address, nonce: u64::from_le_bytes(word(bytes, 40)) })
    }
}

/// Returns the sender's mark of the connect. 0 if the handle has none yet.
pub fn mark(bytes: &[u8; HANDLE_BYTES]) -> u64 {
    u64::from_le_bytes(word(bytes, MARK_AT))
}

/// Sets the sender's mark. NCCL keeps the sender's copy between the calls of one connect.
pub fn set_mark(bytes: &mut [u8; HANDLE_BYTES], mark: u64) {
    bytes[MARK_AT..].copy_from_slice(&mark.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_handle() -> impl Strategy<Value = Handle> {
        let address = prop_oneof![
            (any::<u32>(), any::<u16>())
                .prop_map(|(ip, port)| SocketAddr::from((Ipv4Addr::from(ip), port))),
            (any::<u128>(), any::<u16>(), any::<u32>()).prop_map(|(ip, port, scope)| {
                SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope))
            }),
        ];
        let carrier = prop_oneof![Just(Carrier::Tcp), Just(Carrier::Verbs)];
        (address, carrier, any::<u64>()).prop_map(|(address, carrier, nonce)| Handle {
            carrier,
            address,
            nonce,
        })
    }

    proptest! {
        #[test]
        fn a_handle_comes_back_as_it_was(handle in any_handle(), own in any::<u64>()) {
            let mut bytes = handle.encode();
            prop_assert_eq!(mark(&bytes), 0);
            set_mark(&mut bytes, own);
            prop_assert_eq!(mark(&bytes), own);
            prop_assert_eq!(Handle::decode(&bytes).unwrap(), handle);
        }

        #[test]
        fn a_changed_bit_is_noticed(handle in any_handle(), at in 0..56_usize, bit in 0..8_u8) {
            let mut bytes = handle.encode();
            bytes[at] ^= 1 << bit;
            prop_assert!(Handle::decode(&bytes).is_err());
        }

        #[test]
        fn anything_else_is_refused(bytes in prop::array::uniform32(any::<u8>())) {
            let mut handle = [0; HANDLE_BYTES];
            handle[..32].copy_from_slice(&bytes);
            prop_assert!(Handle::decode(&handle).is_err());
        }
    }

    #[test]
    fn a_handle_of_another_plugin_says_what_to_do() {
        // NCCL's own socket transport begins with a sockaddr.
        let mut bytes = [0; HANDLE_BYTES];
        bytes[0] = 2;
        let fault = Handle::decode(&bytes).unwrap_err();
        assert!(fault.to_string().contains("NCCL_NET_PLUGIN=laxity on all"), "{fault}");
        assert_eq!(fault.code(), 5);
    }
}
