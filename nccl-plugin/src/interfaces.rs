//! The choice of network interfaces, by the rules of `NCCL_SOCKET_IFNAME`.
//!
//! Without a list ([`Wanted`]), the order is NCCL's. The first group that isn't empty is used:
//! `ib*`, the interface in the subnet of `NCCL_COMM_ID`, all but docker, loopback and libvirt
//! bridges, docker, loopback, libvirt bridges. Only running interfaces count, each with its first
//! address in the kernel's order, which is IPv4 first. IPv6 loopback does not count.

use std::ffi::CString;
use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::path::Path;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::backend::{Device, POINTER_HOST};
use crate::fault::{Fault, Result};
use crate::settings::Settings;
use crate::wanted::Wanted;

const INTERFACES_MAX: usize = 16;
/// Largest number of connections per device, as in NCCL.
const COMMS_MAX: i32 = 65536;
/// Largest message in bytes, NCCL's `NCCL_MAX_NET_SIZE_BYTES`.
const MESSAGE_MAX: usize = 1 << 40;
/// Assumed speed of an interface whose speed the kernel doesn't report, as in NCCL.
const SPEED_UNKNOWN_MBIT: i32 = 10_000;

/// A running interface with one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// The interface's address. The port is 0.
    pub address: SocketAddr,
    /// Length of the network's prefix in bits.
    pub prefix: u32,
}

fn is_in_subnet(interface: &Interface, address: IpAddr) -> bool {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    };
    let ((own, width), (other, other_width)) = (bits(interface.address.ip()), bits(address));
    width == other_width
        && (interface.prefix == 0 || (own ^ other) >> (128 - interface.prefix.min(width)) == 0)
}

/// Returns the interfaces of `all` that NCCL would use.
pub fn choose(all: &[Interface], settings: &Settings) -> Vec<Interface> {
    let matching = |text: &str| {
        let (wanted, _) = Wanted::parse(text);
        let mut found: Vec<Interface> = Vec::new();
        for interface in all {
            let family = if interface.address.is_ipv4() { 4 } else { 6 };
            if settings.family.is_none_or(|only| only == family)
                && wanted.takes_interface(&interface.name)
                && !found.iter().any(|other| other.name == interface.name)
            {
                found.push(interface.clone());
            }
        }
        found
    };
    let mut chosen = match &settings.interfaces {
        Some(text) => matching(text),
        None => {
            let near = || {
                let text = settings.comm_id.as_deref()?;
                let address = text.parse::<SocketAddr>().ok()?.ip();
                let found = all.iter().find(|interface| is_in_subnet(interface, address));
                found.map(|interface| vec![interface.clone()])
            };
            let tries: [&dyn Fn() -> Vec<Interface>; 6] = [
                &|| matching("ib"),
                &|| near().unwrap_or_default(),
                &|| matching("^docker,lo,virbr"),
                &|| matching("docker"),
                &|| matching("lo"),
                &|| matching("virbr"),
            ];
            let found = tries.iter().map(|attempt| attempt());
            found.into_iter().find(|found| !found.is_empty()).unwrap_or_default()
        }
    };
    chosen.truncate(INTERFACES_MAX);
    chosen
}

fn running() -> Result<Vec<Interface>> {
    let list = getifaddrs()
        .map_err(|error| Fault::system("the network interfaces can't be listed", error))?;
    let mut found = Vec::new();
    for entry in list.filter(|entry| entry.flags.contains(InterfaceFlags::IFF_RUNNING)) {
        let Some(address) = entry.address else { continue };
        let address = if let Some(v4) = address.as_sockaddr_in() {
            SocketAddr::from((v4.ip(), 0))
        } else if let Some(v6) = address.as_sockaddr_in6() {
            if v6.ip().is_loopback() {
                continue;
            }
            SocketAddr::V6(SocketAddrV6::new(v6.ip(), 0, 0, v6.scope_id()))
        } else {
            continue;
        };
        let prefix = entry.netmask.map_or(0, |mask| {
            let v4 = mask.as_sockaddr_in().map(|mask| mask.ip().to_bits().count_ones());
            let v6 = || mask.as_sockaddr_in6().map(|mask| mask.ip().to_bits().count_ones());
            v4.or_else(v6).unwrap_or(0)
        });
        found.push(Interface { name: entry.interface_name, address, prefix });
    }
    Ok(found)
}

fn speed_mbit(name: &str) -> i32 {
    fs::read_to_string(Path::new("/sys/class/net").join(name).join("speed"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|speed| *speed > 0)
        .unwrap_or(SPEED_UNKNOWN_MBIT)
}

/// Returns a device for each interface that is to be used.
pub fn devices(settings: &Settings) -> Result<Vec<(Device, SocketAddr)>> {
    let all = running()?;
    let chosen = choose(&all, settings);
    if chosen.is_empty() {
        let names: Vec<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
        let wanted = settings
            .interfaces
            .as_deref()
            .map_or(String::new(), |text| format!(" that NCCL_SOCKET_IFNAME={text} takes"));
        return Err(Fault::System(format!(
            "there is no running network interface with an address{wanted}; running here: {}. Name \
             others in NCCL_SOCKET_IFNAME",
            names.join(" ")
        )));
    }
    let device = |(index, interface): (usize, Interface)| {
        let path = Path::new("/sys/class/net").join(&interface.name).join("device");
        let pci_path = fs::canonicalize(path)
            .ok()
            .and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let device = Device {
            name: CString::new(interface.name.as_str()).unwrap_or_default(),
            pci_path,
            guid: index as u64,
            pointers: POINTER_HOST,
            speed_mbit: speed_mbit(&interface.name),
            port: 0,
            latency_us: 0.0,
            comms_max: COMMS_MAX,
            registers_globally: false,
            force_flush: false,
            message_max: MESSAGE_MAX,
            address: interface.address.ip(),
        };
        (device, interface.address)
    };
    Ok(chosen.into_iter().enumerate().map(device).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Interface> {
        let interface = |name: &str, address: &str, prefix| Interface {
            name: name.to_owned(),
            address: SocketAddr::new(address.parse().expect("an address"), 0),
            prefix,
        };
        vec![
            interface("lo", "127.0.0.1", 8),
            interface("eth0", "10.0.0.5", 16),
            interface("eth1", "10.1.0.5", 16),
            interface("docker0", "172.17.0.1", 16),
            interface("eth0", "fd00::5", 64),
        ]
    }

    fn names(wanted: Option<&str>, change: impl FnOnce(&mut Settings)) -> Vec<String> {
        let mut settings =
            Settings { interfaces: wanted.map(str::to_owned), ..Settings::default() };
        change(&mut settings);
        let chosen = choose(&host(), &settings);
        chosen.into_iter().map(|interface| interface.name).collect()
    }

    #[test]
    fn without_a_wish_loopback_and_docker_come_last() {
        assert_eq!(names(None, |_| {}), ["eth0", "eth1"]);
        let only: Vec<Interface> = host().into_iter().filter(|i| i.name == "lo").collect();
        assert_eq!(choose(&only, &Settings::default()).len(), 1);
    }

    #[test]
    fn a_list_has_prefixes_exact_names_and_exclusions() {
        assert_eq!(names(Some("eth"), |_| {}), ["eth0", "eth1"]);
        assert_eq!(names(Some("=eth1"), |_| {}), ["eth1"]);
        assert_eq!(names(Some("=eth"), |_| {}), Vec::<String>::new());
        assert_eq!(names(Some("^lo,docker"), |_| {}), ["eth0", "eth1"]);
        assert_eq!(names(Some("^=eth0,lo"), |_| {}), ["eth1", "docker0"]);
        assert_eq!(names(Some("eth1:0,lo"), |_| {}), ["lo", "eth1"]);
    }

    #[test]
    fn a_family_and_the_subnet_of_the_root_are_honoured() {
        let six = choose(&host(), &Settings { family: Some(6), ..Settings::default() });
        assert!(six.len() == 1 && six[0].address.is_ipv6());
        let near = |root: &str| names(None, |s| s.comm_id = Some(root.to_owned()));
        assert_eq!(near("10.1.9.9:4000"), ["eth1"]);
        assert_eq!(near("[fd00::9]:4000"), ["eth0"]);
        assert_eq!(near("192.168.0.1:4000"), ["eth0", "eth1"]);
    }

    #[test]
    fn this_host_has_a_device() {
        let devices = devices(&Settings { interfaces: Some("lo".into()), ..Settings::default() })
            .expect("loopback is running");
        assert_eq!(devices[0].0.speed_mbit, SPEED_UNKNOWN_MBIT);
        assert!(devices[0].1.ip().is_loopback());
        let none = Settings { interfaces: Some("=nonsense".into()), ..Settings::default() };
        let fault = super::devices(&none).unwrap_err();
        assert!(
            fault.to_string().contains("NCCL_SOCKET_IFNAME=nonsense")
                || fault.to_string().contains("=nonsense")
        );
    }
}
