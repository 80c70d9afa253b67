//! Names of this host and its NICs at the coordinator: a host name, and the NICs' addresses. Peers
//! name these addresses, so the coordinator can find the port that a fetch reads.
//!
//! Addresses have the form of GIDs in RoCE v2: 16 bytes, IPv6 or IPv4 mapped into it.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use laxity_wire::v1::{Direction, PortInfo};
use nix::sys::socket::SockaddrIn6;

use crate::config::{ALL_DEVICES, CoordinatorConfig, NicConfig};

/// Maximum number of addresses of one NIC that are reported.
const ADDRESSES_MAX: usize = 64;
/// The folder in which the kernel lists RDMA devices.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

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
    let both = |nic: &NicConfig| {
        let addresses = of(nic);
        [Direction::Egress, Direction::Ingress].map(|direction| PortInfo {
            name: nic.name.clone(),
            direction: direction as i32,
            rate_bytes_per_s: nic.rate.bytes_per_s,
            addresses: addresses.clone(),
        })
    };
    nics.iter().flat_map(both).collect()
}

/// Returns the configured addresses of a NIC, or those of the kernel's devices of its name.
fn of(nic: &NicConfig) -> Vec<Vec<u8>> {
    let mut addresses: Vec<Ipv6Addr> = if nic.addresses.is_empty() {
        let mut found = of_network_devices(&nic.name);
        found.extend(of_rdma_devices(Path::new(RDMA_DEVICES), &nic.name));
        found
    } else {
        nic.addresses.iter().map(mapped).collect()
    };
    // Every host has the loopback addresses, so they identify none.
    addresses.retain(|address| !address.is_loopback() && !address.is_unspecified());
    addresses.retain(|address| address.to_ipv4_mapped().is_none_or(|v4| !v4.is_loopback()));
    addresses.sort_unstable();
    addresses.dedup();
    addresses.truncate(ADDRESSES_MAX);
    let bytes = addresses.iter().map(|address| address.octets().to_vec());
    bytes.collect()
}

const fn mapped(address: &IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => *v6,
    }
}

fn of_network_devices(name: &str) -> Vec<Ipv6Addr> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let ours = all.filter(|one| name == ALL_DEVICES || one.interface_name == name);
    let addresses = ours.filter_map(|one| {
        let address = one.address?;
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().to_ipv6_mapped());
        v4.or_else(|| address.as_sockaddr_in6().map(SockaddrIn6::ip))
    });
    addresses.collect()
}

/// Returns GIDs under `root`, from `DEVICE/ports/PORT/gids/INDEX`.
fn of_rdma_devices(root: &Path, name: &str) -> Vec<Ipv6Addr> {
    let entries = |path: &Path| {
        let read = fs::read_dir(path).into_iter().flatten().flatten();
        read.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let is_ours = |device: &&std::path::PathBuf| {
        name == ALL_DEVICES || device.file_name().is_some_and(|file| file == name)
    };
    let devices = entries(root);
    let ports = devices.iter().filter(is_ours).flat_map(|device| entries(&device.join("ports")));
    let gids = ports.flat_map(|port| entries(&port.join("gids")));
    // A GID that is not set reads as zeroes or can't be read.
    gids.filter_map(|gid| fs::read_to_string(gid).ok()?.trim().parse().ok()).collect()
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

    #[test]
    fn configured_addresses_are_told_in_the_form_of_gids() {
        let told = of(&nic("eth0", &["10.1.2.3", "fd00::7", "10.1.2.3"]));
        let v4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3];
        let v6 = "fd00::7".parse::<Ipv6Addr>().expect("an address").octets();
        assert_eq!(told, [v4.to_vec(), v6.to_vec()]);
    }

    #[test]
    fn what_every_host_has_is_nobodys_address() {
        assert!(of(&nic("lo", &[])).is_empty());
        assert!(of(&nic("lo", &["127.0.0.1", "::1"])).is_empty());
        assert!(of(&nic("none-of-that-name", &[])).is_empty());
    }

    #[test]
    fn gids_of_an_rdma_device_are_found() {
        let root = std::env::temp_dir().join(format!("laxity-gids-{}", std::process::id()));
        let gids = root.join("mlx5_0/ports/1/gids");
        fs::create_dir_all(&gids).expect("a folder");
        let write = |index: &str, gid: &str| fs::write(gids.join(index), gid).expect("a file");
        write("0", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write("1", "0000:0000:0000:0000:0000:ffff:0a00:0102\n");
        let found = of_rdma_devices(&root, "mlx5_0");
        let others = of_rdma_devices(&root, "mlx5_1");
        let all = of_rdma_devices(&root, ALL_DEVICES);
        fs::remove_dir_all(&root).expect("removed");
        let v4: Ipv6Addr = "::ffff:10.0.1.2".parse().expect("an address");
        assert!(found.contains(&v4) && others.is_empty() && all.contains(&v4));
    }
}
