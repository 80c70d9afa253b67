//! The NICs of a host that are in use, and their rates, as the kernel has them.
//!
//! `ports/*/rate` of an RDMA device is in Gbit/s and `speed` of a network interface in Mbit/s
//! (the kernel's Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net).

use std::io;
use std::path::{Path, PathBuf};

use crate::ports::{INTERFACES, RDMA_DEVICES, RdmaPort, names, owner, rdma_ports, text};

/// A rate of 1 Mbit/s, in bytes per second.
const MBIT: u64 = 125_000;

/// Returns the names of RDMA devices, whether their links are up yet or not: hardware, or else
/// software with an active port. Without any, those of network interfaces that are up: hardware and
/// bonds, but not the interfaces below a bond. In place of a function is its [`owner`].
pub fn nics(root: &Path) -> Vec<String> {
    let ports = rdma_ports(root);
    let devices = |is_ours: &dyn Fn(&RdmaPort) -> bool| {
        let mut found: Vec<String> =
            ports.iter().filter(|port| is_ours(port)).map(|port| port.device.clone()).collect();
        found.dedup();
        found
    };
    let hardware = devices(&|port| !port.is_software && port.owner.is_none());
    let found = if hardware.is_empty() { devices(&|p| is_active(root, p)) } else { hardware };
    if !found.is_empty() {
        return found;
    }
    let interfaces = root.join(INTERFACES);
    let is_nic = |name: &String| {
        let folder = interfaces.join(name);
        let is_whole = folder.join("master").symlink_metadata().is_err();
        is_whole && (folder.join("device").exists() || folder.join("bonding").exists())
    };
    let is_up = |name: &String| {
        text(&interfaces.join(name).join("operstate")).is_some_and(|state| state == "up")
    };
    let nic_of = |name: String| owner(root, &name).filter(is_nic).or(Some(name).filter(is_nic));
    let up = names(&interfaces).into_iter().filter(is_up);
    let mut found: Vec<String> = up.filter_map(nic_of).collect();
    found.sort();
    found.dedup();
    found
}

/// Reports whether the kernel has an RDMA device or a network interface of this name, whatever the
/// state of its link. If it can't be asked, it counts as having it.
pub fn exists(root: &Path, name: &str) -> bool {
    [RDMA_DEVICES, INTERFACES].iter().any(|folder| {
        let entry = root.join(folder).join(name).symlink_metadata();
        entry.map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |_| true)
    })
}

/// Returns the folder, such as `infiniband` of a PCI function, in which the kernel has the RDMA
/// device or network interface of this name. The folder looks empty while all its devices are in
/// other network namespaces, and is removed with its last device.
pub fn folder_of(root: &Path, name: &str) -> Option<PathBuf> {
    let is_linked = |link: &PathBuf| link.symlink_metadata().is_ok_and(|it| it.is_symlink());
    let mut links = [RDMA_DEVICES, INTERFACES].iter().map(|class| root.join(class).join(name));
    let device = links.find(is_linked)?.canonicalize().ok()?;
    device.parent().map(Path::to_owned)
}

/// Reports whether the kernel has an RDMA device of this name.
pub fn is_rdma(root: &Path, name: &str) -> bool {
    root.join(RDMA_DEVICES).join(name).exists()
}

/// Returns the rate of an RDMA device or network interface, in bytes per second. It is unknown
/// while no port is active, and for most virtual interfaces.
pub fn rate(root: &Path, name: &str) -> Option<u64> {
    let ports = rdma_ports(root).into_iter().filter(|port| port.device == name);
    let mut active = ports.filter(|port| is_active(root, port)).peekable();
    if active.peek().is_none() {
        return speed(root, name);
    }
    active.filter_map(|port| of_port(root, &port)).max()
}

fn port_text(root: &Path, port: &RdmaPort, file: &str) -> Option<String> {
    let ports = root.join(RDMA_DEVICES).join(&port.device).join("ports");
    text(&ports.join(&port.number).join(file))
}

pub(crate) fn is_active(root: &Path, port: &RdmaPort) -> bool {
    port_text(root, port, "state").is_some_and(|state| state.contains("ACTIVE"))
}

fn of_port(root: &Path, port: &RdmaPort) -> Option<u64> {
    // Software RDMA invents a rate where its interface has none.
    if port.is_software {
        return speed(root, port.interface.as_deref()?);
    }
    // "100 Gb/sec (4X EDR)", and "2.5 Gb/sec (1X SDR)".
    let rate = port_text(root, port, "rate")?;
    let gbit: f64 = rate.split_once(" Gb/sec")?.0.parse().ok()?;
    Some((gbit * 1000.0) as u64 * MBIT).filter(|rate| *rate > 0)
}

fn speed(root: &Path, interface: &str) -> Option<u64> {
    // -1: unknown.
    let mbit = text(&root.join(INTERFACES).join(interface).join("speed"))?.parse::<u32>().ok()?;
    Some(u64::from(mbit) * MBIT).filter(|rate| *rate > 0 && mbit != u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let host = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = host.path().join("sys/class").join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("created");
            fs::write(path, text).expect("written");
        }
        host
    }

    #[test]
    fn rdma_devices_are_the_nics_and_their_active_ports_have_the_rate() {
        let host = host(&[
            ("infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
            ("infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
            ("infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
            ("infiniband/mlx5_1/ports/1/rate", "40 Gb/sec (4X QDR)\n"),
            ("infiniband/ib0/ports/1/state", "1: DOWN\n"),
            ("infiniband/ib0/ports/2/state", "4: ACTIVE\n"),
            ("infiniband/ib0/ports/2/rate", "2.5 Gb/sec (1X SDR)\n"),
            ("infiniband/rxe0/parent", "eth0\n"),
            ("infiniband/rxe0/ports/1/state", "4: ACTIVE\n"),
            ("infiniband/rxe0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n"),
            ("net/eth0/speed", "25000\n"),
            ("net/eth0/operstate", "up\n"),
            ("net/eth0/device/vendor", "x"),
        ]);
        // Software beside hardware has the hardware's packets. A link may come up later.
        assert_eq!(nics(host.path()), ["ib0", "mlx5_0", "mlx5_1"]);
        let rate = |name| rate(host.path(), name);
        assert_eq!(rate("mlx5_0"), Some(50_000_000_000));
        assert_eq!(rate("mlx5_1"), None);
        assert_eq!(rate("ib0"), Some(312_500_000));
        assert_eq!(rate("rxe0"), Some(3_125_000_000), "of the interface below");
        assert_eq!(rate("eth0"), Some(3_125_000_000));
        assert_eq!(rate("eth9"), None);
        let known = ["mlx5_1", "eth0", "eth9"].map(|name| exists(host.path(), name));
        assert_eq!(known, [true, true, false], "a link that is down is there");
    }

    #[test]
    fn without_rdma_the_nics_are_interfaces_that_are_up_and_bonds_in_place_of_their_members() {
        let host = host(&[
            ("net/bond0/bonding/mode", "802.3ad 4\n"),
            ("net/bond0/operstate", "up\n"),
            ("net/bond0/speed", "50000\n"),
            ("net/eth0/device/vendor", "x"),
            ("net/eth0/operstate", "up\n"),
            ("net/eth0/master/ifindex", "9\n"),
            ("net/eth1/device/vendor", "x"),
            ("net/eth1/operstate", "down\n"),
            ("net/eth2/device/vendor", "x"),
            ("net/eth2/operstate", "up\n"),
            ("net/eth2/speed", "-1\n"),
            ("net/veth0/operstate", "up\n"),
            ("net/veth0/speed", "10000\n"),
        ]);
        assert_eq!(nics(host.path()), ["bond0", "eth2"]);
        assert_eq!(rate(host.path(), "bond0"), Some(6_250_000_000));
        assert_eq!(rate(host.path(), "eth2"), None, "a virtual function may not know");
    }
}
