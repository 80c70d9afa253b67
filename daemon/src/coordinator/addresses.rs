//! Names of this host and its NICs at the coordinator: a host name, and the NICs' addresses. Peers
//! name these addresses, so the coordinator can find the port that a fetch reads.
//!
//! Addresses have the form of GIDs in RoCE v2: 16 bytes, IPv6 addresses or IPv4 addresses mapped
//! into IPv6.

use std::fs::{self, DirEntry};
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use laxity_nic::{RdmaPort, is_called, owner, rdma_ports};
use laxity_wire::v1::{Direction, PortInfo};
use nix::sys::socket::SockaddrIn6;

use crate::config::{ALL_DEVICES, CoordinatorConfig, NicConfig};

/// Maximum number of addresses of one NIC that are reported.
const ADDRESSES_MAX: usize = 64;

/// Returns the configured name of this host, or the kernel's host name.
pub fn own_host(config: &CoordinatorConfig) -> String {
    if !config.host.is_empty() {
        return config.host.clone();
    }
    // A system call is used, because the unit hides /proc/sys from the daemon.
    let names = nix::sys::utsname::uname();
    names.map_or_else(|_| String::new(), |names| names.nodename().to_string_lossy().into_owned())
}

/// Returns the ports for the coordinator. Addresses are read at each call, because interfaces may
/// come up late.
pub(super) fn ports(nics: &[NicConfig]) -> Vec<PortInfo> {
    let devices = devices(Path::new("/"), nics);
    let both = |nic: &NicConfig| {
        let addresses = of(&devices, nic);
        [Direction::Egress, Direction::Ingress].map(|direction| PortInfo {
            name: nic.name.clone(),
            direction: direction as i32,
            rate_bytes_per_s: nic.rate.bytes_per_s,
            addresses: addresses.clone(),
        })
    };
    nics.iter().flat_map(both).collect()
}

/// A network interface or an RDMA device of the kernel's.
struct KernelDevice {
    name: String,
    /// The device that owns the port, if this one is a function.
    owner: Option<String>,
    /// Whether this is a function with a NIC of its own.
    has_nic: bool,
    addresses: Vec<Ipv6Addr>,
}

impl KernelDevice {
    /// Returns `None` if the addresses don't belong to the NIC, else whether they are a function's.
    fn at(&self, nic: &str) -> Option<bool> {
        if self.name == nic {
            return Some(false);
        }
        let is_its = nic == ALL_DEVICES || self.owner.as_deref() == Some(nic);
        (is_its && !self.has_nic).then_some(self.owner.is_some())
    }
}

/// Returns the configured addresses of a NIC, or those of its devices. Those of functions come
/// last, so that they don't displace the NIC's own.
fn of(devices: &[KernelDevice], nic: &NicConfig) -> Vec<Vec<u8>> {
    let mut addresses: Vec<(bool, Ipv6Addr)> =
        nic.addresses.iter().map(|address| (false, mapped(address))).collect();
    if addresses.is_empty() {
        for device in devices {
            let Some(is_function) = device.at(&nic.name) else { continue };
            addresses.extend(device.addresses.iter().map(|address| (is_function, *address)));
        }
    }
    addresses.sort_unstable();
    let mut told = Vec::new();
    for (_, address) in addresses {
        // Every host has the loopback addresses, so they identify none.
        let is_loopback = address.to_canonical().is_loopback() || address.is_unspecified();
        if !is_loopback && !told.contains(&address) && told.len() < ADDRESSES_MAX {
            told.push(address);
        }
    }
    told.iter().map(|address| address.octets().to_vec()).collect()
}

const fn mapped(address: &IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => *v6,
    }
}

/// Returns the devices of the host below `root`, and this machine's network interfaces.
fn devices(root: &Path, nics: &[NicConfig]) -> Vec<KernelDevice> {
    let ports = rdma_ports(root);
    let device = |name: &str, owner: Option<String>, addresses| {
        let is_nic = || nics.iter().any(|nic| is_called(&ports, name, &nic.name));
        let has_nic = owner.is_some() && is_nic();
        KernelDevice { name: name.to_owned(), owner, has_nic, addresses }
    };
    let interface = |(name, address): (String, _)| device(&name, owner(root, &name), vec![address]);
    let rdma = |port: &RdmaPort| device(&port.device, port.owner.clone(), gids(root, port));
    of_network_devices().into_iter().map(interface).chain(ports.iter().map(rdma)).collect()
}

fn of_network_devices() -> Vec<(String, Ipv6Addr)> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let addresses = all.filter_map(|one| {
        let address = one.address?;
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().to_ipv6_mapped());
        let v6 = || address.as_sockaddr_in6().map(SockaddrIn6::ip);
        Some((one.interface_name, v4.or_else(v6)?))
    });
    addresses.collect()
}

/// Returns the GIDs of an RDMA port, from `DEVICE/ports/PORT/gids/INDEX`.
fn gids(root: &Path, port: &RdmaPort) -> Vec<Ipv6Addr> {
    let folder = root.join("sys/class/infiniband").join(&port.device);
    let gids = fs::read_dir(folder.join("ports").join(&port.number).join("gids"));
    // A GID that is not set reads as zeroes or can't be read.
    let read = |gid: DirEntry| fs::read_to_string(gid.path()).ok()?.trim().parse().ok();
    gids.into_iter().flatten().flatten().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(name: &str, addresses: &[&str]) -> NicConfig {
        let mut nic = crate::config::Config::default().nic.remove(0);
        nic.name = name.into();
        nic.addresses = addresses.iter().map(|a| a.parse().expect("an address")).collect();
        nic
    }

    fn told(nic: &NicConfig) -> Vec<Vec<u8>> {
        ports(std::slice::from_ref(nic)).remove(0).addresses
    }

    #[test]
    fn configured_addresses_are_told_in_the_form_of_gids() {
        let told = told(&nic("eth0", &["10.1.2.3", "fd00::7", "10.1.2.3"]));
        let v4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3];
        let v6 = "fd00::7".parse::<Ipv6Addr>().expect("an address").octets();
        assert_eq!(told, [v4.to_vec(), v6.to_vec()]);
    }

    #[test]
    fn what_every_host_has_is_nobodys_address() {
        assert!(told(&nic("lo", &[])).is_empty());
        assert!(told(&nic("lo", &["127.0.0.1", "::1"])).is_empty());
        assert!(told(&nic("none-of-that-name", &[])).is_empty());
    }

    fn plug(root: &Path, device: &str, owner: Option<&str>, gids: &[String]) {
        let device = root.join("sys/class/infiniband").join(device);
        let folder = device.join("ports/1/gids");
        fs::create_dir_all(&folder).expect("a folder");
        for (index, gid) in gids.iter().enumerate() {
            fs::write(folder.join(index.to_string()), format!("{gid}\n")).expect("a file");
        }
        if let Some(owner) = owner {
            let owner = device.join("device/physfn/infiniband").join(owner);
            fs::create_dir_all(owner).expect("a folder");
        }
    }

    /// Returns the reported addresses of each NIC of the host whose `/` is `root`.
    fn of_all(root: &Path, names: &[&str]) -> Vec<Vec<Ipv6Addr>> {
        let nics: Vec<_> = names.iter().map(|name| nic(name, &[])).collect();
        let mut devices = devices(root, &nics);
        // The devices of this machine do not belong to the test.
        devices.retain(|device| device.name.starts_with("mlx5"));
        let parsed = |octets: Vec<u8>| Ipv6Addr::from(<[u8; 16]>::try_from(octets).expect("16"));
        let of = |nic| of(&devices, nic).into_iter().map(parsed).collect();
        nics.iter().map(of).collect()
    }

    #[test]
    fn gids_of_an_rdma_device_are_found() {
        let root = tempfile::tempdir().expect("a folder");
        let gids = ["::".to_owned(), "0000:0000:0000:0000:0000:ffff:0a00:0102".to_owned()];
        plug(root.path(), "mlx5_0", None, &gids);
        let v4: Ipv6Addr = "::ffff:10.0.1.2".parse().expect("an address");
        let told = of_all(root.path(), &["mlx5_0", "mlx5_1", ALL_DEVICES]);
        assert_eq!(told, [vec![v4], vec![], vec![v4]]);
    }

    #[test]
    fn addresses_of_functions_are_their_owners_after_its_own() {
        let root = tempfile::tempdir().expect("a folder");
        let gid = |at: u16| format!("fe80::{at:x}");
        let address = |at: u16| gid(at).parse::<Ipv6Addr>().expect("an address");
        let some = |range: std::ops::Range<u16>| range.map(gid).collect::<Vec<_>>();
        plug(root.path(), "mlx5_9", None, &some(100..110));
        plug(root.path(), "mlx5_1", Some("mlx5_9"), &some(0..40));
        plug(root.path(), "mlx5_2", Some("mlx5_9"), &some(200..240));
        plug(root.path(), "mlx5_3", None, &some(300..301));
        let both: Vec<_> = (100..110).chain(0..40).chain(200..214).map(address).collect();
        let own = |range: std::ops::Range<u16>| range.map(address).collect::<Vec<_>>();
        assert_eq!(of_all(root.path(), &["mlx5_9", "mlx5_3"]), [both, own(300..301)]);
        // A function with a NIC of its own has its addresses there, and nowhere else.
        let one: Vec<_> = (100..110).chain(0..40).map(address).collect();
        let told = of_all(root.path(), &["mlx5_9", "mlx5_2"]);
        assert_eq!(told, [one.clone(), own(200..240)]);
        let told = of_all(root.path(), &[ALL_DEVICES, "mlx5_2"]);
        let all: Vec<_> = (100..110).chain(300..301).chain(0..40).map(address).collect();
        assert_eq!(told, [all, own(200..240)], "`default` stands for the rest");
    }
}
