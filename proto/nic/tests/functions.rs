//! Virtual functions and subfunctions, in folders that are linked as the kernel links them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use laxity_nic::{
    DcbError, NicCounters, NicDriver, PriorityMap, Trust, counters_of, nics, owner, rdma_ports,
    treatments,
};
use laxity_types::marking::Treatments;
use tempfile::TempDir;

/// The folders of a physical function, of its virtual function, and of its subfunction.
const OWNER: &str = "0000:03:00.0";
const VIRTUAL: &str = "0000:03:00.2";
const SUB: &str = "0000:03:00.0/mlx5_core.sf.4";

struct Host(TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().expect("a folder"));
        for folder in ["sys/class/infiniband", "sys/class/net", "proc/net"] {
            fs::create_dir_all(host.path(folder)).expect("created");
        }
        host
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    /// Adds a device of a class (`infiniband` or `net`) to a PCI function or auxiliary device.
    fn plug(&self, function: &str, class: &str, name: &str) -> &Self {
        let parent = self.path("sys/devices/pci0").join(function);
        let folder = parent.join(class).join(name);
        fs::create_dir_all(&folder).expect("created");
        symlink(&parent, folder.join("device")).expect("linked");
        symlink(&folder, self.path("sys/class").join(class).join(name)).expect("linked");
        if function == VIRTUAL && !parent.join("physfn").exists() {
            symlink(self.path("sys/devices/pci0").join(OWNER), parent.join("physfn"))
                .expect("linked");
        }
        if class == "net" {
            fs::write(folder.join("operstate"), "up\n").expect("written");
        } else {
            let port = folder.join("ports/1");
            fs::create_dir_all(&port).expect("created");
            fs::write(port.join("link_layer"), "Ethernet\n").expect("written");
            fs::write(port.join("state"), "4: ACTIVE\n").expect("written");
        }
        self
    }

    /// Moves a device to the network namespace of a pod.
    fn unplug(&self, function: &str, class: &str, name: &str) {
        fs::remove_file(self.path("sys/class").join(class).join(name)).expect("removed");
        let folder = self.path("sys/devices/pci0").join(function).join(class).join(name);
        fs::remove_dir_all(folder).expect("removed");
    }

    fn count(&self, device: &str, sent: u64, received: u64) {
        let counters = format!("sys/class/infiniband/{device}/ports/1/counters");
        // In words of four bytes.
        self.write(&format!("{counters}/port_xmit_data"), &format!("{}\n", sent / 4));
        self.write(&format!("{counters}/port_rcv_data"), &format!("{}\n", received / 4));
    }

    fn interfaces(&self, sent: &[(&str, u64)]) {
        let row = |(name, sent): &(&str, u64)| format!("{name}: 0 0 0 0 0 0 0 0 {sent} 0\n");
        self.write("proc/net/dev", &sent.iter().map(row).collect::<String>());
    }

    fn counters(&self, nic: &str) -> NicCounters {
        counters_of(self.root(), nic, NicDriver::NONE).expect("counters")
    }

    fn owner(&self, name: &str) -> Option<String> {
        owner(self.root(), name)
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn sent(counters: &mut NicCounters) -> u64 {
    counters.read(&[]).expect("counted").egress.bytes
}

#[test]
fn the_owner_of_a_function_is_the_device_whose_port_it_shares() {
    let host = Host::new();
    host.plug(OWNER, "infiniband", "mlx5_9").plug(OWNER, "net", "eth0");
    host.plug(VIRTUAL, "infiniband", "mlx5_1").plug(VIRTUAL, "net", "eth1");
    host.plug(SUB, "infiniband", "mlx5_2").plug(SUB, "net", "eth2");
    let owners = ["mlx5_1", "mlx5_2", "eth1", "eth2"].map(|name| host.owner(name));
    assert_eq!(owners.map(Option::unwrap), ["mlx5_9", "mlx5_9", "eth0", "eth0"]);
    assert_eq!(["mlx5_9", "eth0", "none", ""].map(|name| host.owner(name)), [const { None }; 4]);
    assert_eq!(nics(host.root()), ["mlx5_9"]);
    // The port of an interface in a bond is the bond's.
    host.write("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4\n");
    host.write("sys/devices/virtual/net/bond0/operstate", "up\n");
    let bond = host.path("sys/devices/virtual/net/bond0");
    symlink(&bond, host.path("sys/class/net/bond0")).unwrap();
    symlink(&bond, host.path("sys/class/net/eth0/master")).unwrap();
    assert_eq!(host.owner("eth1").as_deref(), Some("bond0"));
    host.unplug(OWNER, "infiniband", "mlx5_9");
    assert_eq!(nics(host.root()), ["mlx5_1", "mlx5_2"], "the owner is in another namespace");
    assert_eq!(host.owner("mlx5_1"), None);
}

#[test]
fn an_interface_that_is_a_function_makes_its_owner_a_nic() {
    let host = Host::new();
    host.plug(OWNER, "net", "eth9").plug(VIRTUAL, "net", "eth1").plug(SUB, "net", "eth2");
    assert_eq!(nics(host.root()), ["eth9"]);
    host.write("sys/class/net/eth9/operstate", "down\n");
    assert_eq!(nics(host.root()), ["eth9"], "its functions use the port");
    let bridge = host.path("sys/devices/virtual/net/br0");
    fs::create_dir_all(&bridge).expect("created");
    symlink(&bridge, host.path("sys/class/net/eth9/master")).unwrap();
    assert_eq!(nics(host.root()), ["eth1", "eth2"], "the owner is a part of a bridge");
}

/// An owner that has sent 1000 bytes of RDMA and 100 others, and a function with 4000 and 400.
fn counted() -> Host {
    let host = Host::new();
    host.plug(OWNER, "infiniband", "mlx5_9").plug(OWNER, "net", "eth0");
    host.plug(VIRTUAL, "infiniband", "mlx5_1").plug(VIRTUAL, "net", "eth1");
    host.count("mlx5_9", 1000, 0);
    host.count("mlx5_1", 4000, 0);
    host.interfaces(&[("eth0", 100), ("eth1", 400)]);
    host
}

#[test]
fn a_nic_counts_what_its_functions_send_from_when_they_are_seen() {
    for nic in ["mlx5_9", "eth0", "default"] {
        let host = counted();
        let mut counters = host.counters(nic);
        counters.look(&names(&[nic]));
        assert_eq!(sent(&mut counters), 1100, "{nic}: what they sent before is no jump");
        host.count("mlx5_1", 4040, 60);
        host.interfaces(&[("eth0", 100), ("eth1", 402)]);
        assert_eq!(sent(&mut counters), 1142, "{nic}");
        assert_eq!(counters.read(&[]).unwrap().ingress.bytes, 60);
        host.plug(SUB, "infiniband", "mlx5_2");
        host.count("mlx5_2", 1 << 40, 0);
        counters.look(&names(&[nic]));
        assert_eq!(sent(&mut counters), 1142, "{nic}: one is hot-plugged");
        host.count("mlx5_2", (1 << 40) + 8, 0);
        assert_eq!(sent(&mut counters), 1150, "{nic}");
    }
}

#[test]
fn a_function_that_goes_and_comes_back_makes_no_jump() {
    let host = counted();
    let mut counters = host.counters("mlx5_9");
    let look = |counters: &mut NicCounters| counters.look(&names(&["mlx5_9"]));
    look(&mut counters);
    host.count("mlx5_1", 4040, 0);
    host.interfaces(&[("eth0", 100), ("eth1", 402)]);
    assert_eq!(sent(&mut counters), 1142);
    // Its interface goes to a pod, and the rest of it later.
    host.interfaces(&[("eth0", 100)]);
    assert_eq!(sent(&mut counters), 1142);
    host.unplug(VIRTUAL, "infiniband", "mlx5_1");
    assert_eq!(sent(&mut counters), 1142);
    look(&mut counters);
    assert_eq!(sent(&mut counters), 1142);
    host.plug(VIRTUAL, "infiniband", "mlx5_1");
    host.count("mlx5_1", 900_000, 0);
    host.interfaces(&[("eth0", 100), ("eth1", 900_000)]);
    assert_eq!(sent(&mut counters), 1142, "it was not found yet");
    look(&mut counters);
    assert_eq!(sent(&mut counters), 1142);
    host.count("mlx5_1", 900_040, 0);
    assert_eq!(sent(&mut counters), 1182);
    host.count("mlx5_1", 40, 0);
    assert_eq!(sent(&mut counters), 1182, "its driver started again");
    host.unplug(OWNER, "infiniband", "mlx5_9");
    assert_eq!(counters.read(&[]), None);
}

#[test]
fn a_function_with_a_nic_of_its_own_counts_there_only() {
    for own in ["mlx5_1", "eth1"] {
        let host = counted();
        let nics = names(&["mlx5_9", own]);
        let (mut of_owner, mut of_function) = (host.counters("mlx5_9"), host.counters(own));
        of_owner.look(&nics);
        of_function.look(&nics);
        assert_eq!((sent(&mut of_owner), sent(&mut of_function)), (1100, 4400));
        host.count("mlx5_1", 4040, 0);
        host.interfaces(&[("eth0", 100), ("eth1", 402)]);
        assert_eq!((sent(&mut of_owner), sent(&mut of_function)), (1100, 4442), "{own}");
    }
}

#[test]
fn interfaces_count_with_their_owner_and_ipoib_with_its_device() {
    let host = Host::new();
    host.plug(OWNER, "net", "eth0").plug(VIRTUAL, "net", "eth1");
    host.interfaces(&[("eth0", 100), ("eth1", 400)]);
    let mut counters = host.counters("eth0");
    counters.look(&names(&["eth0"]));
    host.interfaces(&[("eth0", 100), ("eth1", 407)]);
    assert_eq!(sent(&mut counters), 107);

    let host = counted();
    host.write("sys/class/net/eth1/type", "32\n");
    let mut counters = host.counters("mlx5_9");
    counters.look(&names(&["mlx5_9"]));
    host.interfaces(&[("eth0", 100), ("eth1", 500)]);
    assert_eq!(sent(&mut counters), 1100);
}

#[test]
fn an_interface_of_a_pod_is_not_taken_for_the_hosts_of_the_same_name() {
    let host = counted();
    host.write("sys/class/infiniband/mlx5_9/ports/1/gid_attrs/ndevs/0", "eth0\n");
    host.write("sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "eth0\n");
    host.unplug(VIRTUAL, "net", "eth1");
    let interface = |at: usize| rdma_ports(host.root())[at].interface.clone();
    assert_eq!((interface(0), interface(1).as_deref()), (None, Some("eth0")));
}

#[test]
fn the_owner_says_what_its_port_does_with_the_packets_of_its_functions() {
    let host = counted();
    let query = |interface: &str| match interface {
        "eth0" => Ok(PriorityMap { trust: Some(Trust::Pcp), ..PriorityMap::default() }),
        _ => Err(DcbError::Unsupported),
    };
    assert_eq!(treatments(host.root(), |_| true, &query), Treatments::ALL_ALIKE);
    let function = treatments(host.root(), |port| port.device == "mlx5_1", &query);
    assert_eq!(function, Treatments::UNKNOWN, "it has a NIC of its own, and its owner has none");
}
