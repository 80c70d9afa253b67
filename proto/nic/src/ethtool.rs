//! Asks a network interface's driver for its statistics, as `ethtool -S` does: `SIOCETHTOOL` of the
//! kernel's include/uapi/linux/ethtool.h. Reading needs no privilege.

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::map::PRIORITIES;

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
/// The string set with the names of statistics.
const ETH_SS_STATS: u32 = 1;
/// Bytes of a name, with its zero.
const NAME_BYTES: usize = 32;
/// Most statistics that a driver may have. Older kernels write as many as there are at that moment,
/// whatever the buffer holds. So the buffer has room for twice as many: a driver may get more
/// queues, and then statistics, at any time. mlx5 has about 30 for each queue.
const STATISTICS_MAX: usize = 1 << 14;

/// A buffer of the kernel's, as words of four bytes.
type Words = Vec<u32>;

/// Returns the bytes that a network interface's port has sent by priority, with those of RDMA.
///
/// # Errors
/// The driver has no statistics, or does not count bytes by priority.
pub(crate) fn sent_by_priority(interface: &str) -> io::Result<[u64; PRIORITIES]> {
    let (names, values) = statistics(interface)?;
    by_priority(&names, &values).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// Finds the bytes by priority, as mlx5 (`tx_prio3_bytes`) or bnxt (`tx_bytes_pri3`) name them.
fn by_priority(names: &[u8], values: &[u8]) -> Option<[u64; PRIORITIES]> {
    let value = |name: String| {
        let is_called =
            |bytes: &[u8]| bytes.split(|byte| *byte == 0).next() == Some(name.as_bytes());
        let at = names.chunks_exact(NAME_BYTES).position(is_called)?;
        values.as_chunks().0.get(at).map(|bytes| u64::from_ne_bytes(*bytes))
    };
    let mut sent = [0; PRIORITIES];
    for (priority, bytes) in sent.iter_mut().enumerate() {
        *bytes = value(format!("tx_prio{priority}_bytes"))
            .or_else(|| value(format!("tx_bytes_pri{priority}")))?;
    }
    Some(sent)
}

/// Returns the names of an interface's statistics, [`NAME_BYTES`] each, and the values, eight bytes
/// each.
fn statistics(interface: &str) -> io::Result<(Vec<u8>, Vec<u8>)> {
    // `ethtool_sset_info`: the command, a reserved word, the mask of wanted sets, their sizes.
    let info = vec![ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_STATS, 0, 0];
    let count = ask(interface, info)?[4];
    if count as usize > STATISTICS_MAX {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // `ethtool_gstrings` and `ethtool_stats`: the number stands before the names or values.
    let names = each(interface, vec![ETHTOOL_GSTRINGS, ETH_SS_STATS, count], NAME_BYTES)?;
    let values = each(interface, vec![ETHTOOL_GSTATS, count], size_of::<u64>())?;
    Ok((names, values))
}

/// Returns what follows the header in the reply, which is `bytes` for each statistic.
fn each(interface: &str, header: Words, bytes: usize) -> io::Result<Vec<u8>> {
    let (length, count) = (header.len(), header.last().copied());
    let mut words = header;
    words.resize(length + 2 * STATISTICS_MAX * bytes / size_of::<u32>(), 0);
    let words = ask(interface, words)?;
    if Some(words[length - 1]) != count {
        // The driver has other statistics than a moment ago.
        return Err(io::ErrorKind::Interrupted.into());
    }
    let all = words[length..].iter().flat_map(|word| word.to_ne_bytes());
    Ok(all.take(words[length - 1] as usize * bytes).collect())
}

/// Sends a command, which begins `words`, and returns them as the kernel has filled them.
fn ask(interface: &str, mut words: Words) -> io::Result<Words> {
    let mut name = [0; libc::IFNAMSIZ];
    if interface.is_empty() || interface.len() >= name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    let ifru_data = words.as_mut_ptr().cast();
    let mut request =
        libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data } };
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: `request` has a name that ends with a zero, and the address of `words`. The kernel
    // writes the reply to its command there, for which the callers leave room, and may write
    // `request`.
    let result =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    Errno::result(result)?;
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(&str, u64)]) -> (Vec<u8>, Vec<u8>) {
        let name = |name: &str| {
            let mut bytes = [0; NAME_BYTES];
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            bytes
        };
        let names = rows.iter().flat_map(|(text, _)| name(text)).collect();
        (names, rows.iter().flat_map(|(_, value)| value.to_ne_bytes()).collect())
    }

    #[test]
    fn bytes_by_priority_are_found_by_the_names_of_both_drivers() {
        let expected: [u64; PRIORITIES] = std::array::from_fn(|at| 100 + at as u64);
        for (before, after) in [("tx_prio", "_bytes"), ("tx_bytes_pri", "")] {
            let rows: Vec<_> =
                (0..8).map(|at| (format!("{before}{at}{after}"), 100 + at)).collect();
            let mut rows: Vec<_> = rows.iter().map(|(name, value)| (&**name, *value)).collect();
            rows.insert(0, ("tx_prio0_packets", 7));
            let (names, values) = table(&rows);
            assert_eq!(by_priority(&names, &values), Some(expected));
            assert_eq!(by_priority(&names, &values[..40]), None, "values are missing");
            rows.pop();
            let (names, values) = table(&rows);
            assert_eq!(by_priority(&names, &values), None, "a priority is missing");
        }
    }

    #[test]
    fn the_kernel_gives_a_name_and_a_value_for_each_statistic_of_this_host() {
        for interface in std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten() {
            let interface = interface.file_name().to_string_lossy().into_owned();
            match statistics(&interface) {
                Ok((names, values)) => {
                    assert_eq!(names.len() / NAME_BYTES, values.len() / 8, "{interface}");
                    let mut names = names.chunks(NAME_BYTES);
                    assert!(names.all(|name| name[0].is_ascii_alphanumeric()), "{interface}");
                }
                Err(error) => {
                    let expected = [Errno::EOPNOTSUPP, Errno::ENODEV].map(|it| Some(it as i32));
                    assert!(expected.contains(&error.raw_os_error()), "{interface}: {error}");
                }
            }
        }
    }

    #[test]
    fn an_interface_without_statistics_by_priority_is_an_error() {
        for interface in ["lo", "", "no_such_device", "a_name_that_is_too_long"] {
            assert!(sent_by_priority(interface).is_err(), "{interface}");
        }
    }
}
