//! Hosts that consist of files, with answers of a kernel that the test writes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use laxity_nic::{DcbError, PriorityMap, Trust, ecn, map_of, rdma_ports, treatments};
use laxity_types::marking::Treatments;
use tempfile::TempDir;

struct Host(TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
        self
    }

    fn port(self, device: &str, interface: &str) -> Self {
        let port = format!("sys/class/infiniband/{device}/ports/1");
        self.file(&format!("{port}/link_layer"), "Ethernet\n")
            .file(&format!("{port}/gid_attrs/ndevs/0"), interface)
    }

    fn treatments(&self, query: &dyn Fn(&str) -> Result<PriorityMap, DcbError>) -> Treatments {
        treatments(self.root(), |_| true, query)
    }
}

/// The default map of NICs, with PFC on the priorities of `pfc`.
fn lossless(pfc: u8) -> PriorityMap {
    PriorityMap {
        trust: Some(Trust::Dscp),
        priority_of_dscp: Some(std::array::from_fn(|dscp| (dscp >> 3) as u8)),
        pfc: Some(pfc),
        ..PriorityMap::default()
    }
}

fn unsupported(_: &str) -> Result<PriorityMap, DcbError> {
    Err(DcbError::Unsupported)
}

#[test]
fn dscps_are_alike_if_every_port_treats_them_alike() {
    let host = Host::new().port("mlx5_0", "eth0").port("mlx5_1", "eth1");
    let query = |interface: &str| Ok(lossless(if interface == "eth0" { 1 << 3 } else { 1 << 5 }));
    let both = host.treatments(&query);
    assert_eq!(both.alike(0, 34), Some(true));
    assert_eq!((both.alike(0, 26), both.alike(0, 46)), (Some(false), Some(false)));
    let first = treatments(host.root(), |port| port.device == "mlx5_0", &query);
    assert_eq!((first.alike(0, 26), first.alike(0, 46)), (Some(false), Some(true)));
}

#[test]
fn hardware_that_says_nothing_makes_all_unknown_and_software_does_not_matter() {
    let hardware = Host::new().port("mlx5_0", "eth0");
    assert_eq!(hardware.treatments(&unsupported), Treatments::UNKNOWN);
    let rxe =
        || Host::new().port("rxe0", "veth0").file("sys/class/infiniband/rxe0/parent", "veth0");
    assert_eq!(rxe().treatments(&unsupported).alike(0, 26), Some(true));
    assert_eq!(rxe().treatments(&|_| Ok(lossless(8))).alike(0, 26), Some(false));
    let beside = rxe().port("mlx5_0", "eth0").treatments(&unsupported);
    assert_eq!(beside, Treatments::UNKNOWN);
    assert_eq!(Host::new().treatments(&unsupported), Treatments::ALL_ALIKE, "no RDMA device");
}

#[test]
fn infiniband_has_no_dscp_and_a_port_without_an_interface_is_unknown() {
    let port = "sys/class/infiniband/mlx5_0/ports/1/link_layer";
    let infiniband = Host::new().file(port, "InfiniBand\n");
    assert_eq!(infiniband.treatments(&unsupported), Treatments::ALL_ALIKE);
    let elsewhere = Host::new().file(port, "Ethernet\n");
    assert_eq!(elsewhere.treatments(&|_| Ok(lossless(8))), Treatments::UNKNOWN);
    assert_eq!(rdma_ports(elsewhere.root())[0].interface, None);
}

#[test]
fn behind_a_bond_and_a_vlan_are_the_nics_below() {
    let host = Host::new()
        .port("mlx5_bond_0", "bond0.7")
        .file("sys/class/net/bond0.7/lower_bond0/x", "")
        .file("sys/class/net/bond0/lower_eth0/x", "")
        .file("sys/class/net/bond0/lower_eth1/x", "");
    let query = |interface: &str| match interface {
        "eth0" => Ok(lossless(1 << 3)),
        "eth1" => Ok(lossless(1 << 4)),
        _ => Err(DcbError::Unsupported),
    };
    assert_eq!(map_of(host.root(), "bond0.7", &query).unwrap().len(), 2);
    let both = host.treatments(&query);
    assert_eq!([26, 34, 46].map(|dscp| both.alike(0, dscp)), [false, false, true].map(Some));
}

#[test]
fn ecn_holds_where_both_points_have_it_and_splits_priorities() {
    let mut host = Host::new().port("mlx5_0", "eth0");
    assert_eq!(ecn(host.root(), "eth0"), None);
    for priority in 0..8 {
        let folder = "sys/class/net/eth0/ecn";
        let on = if priority == 4 { "1\n" } else { "0\n" };
        host = host
            .file(&format!("{folder}/roce_np/enable/{priority}"), "1\n")
            .file(&format!("{folder}/roce_rp/enable/{priority}"), on);
    }
    assert_eq!(ecn(host.root(), "eth0"), Some(1 << 4));
    let split = host.treatments(&|_| Ok(lossless(0)));
    assert_eq!((split.alike(0, 34), split.alike(0, 46)), (Some(false), Some(true)));
}

#[test]
fn mlx5_without_a_mapped_dscp_trusts_pcp_and_of_other_drivers_nothing_is_known() {
    let empty = |_: &str| Ok(PriorityMap { pfc: Some(8), ..PriorityMap::default() });
    for (driver, expected) in
        [("mlx5_core", Treatments::ALL_ALIKE), ("bnxt_en", Treatments::UNKNOWN)]
    {
        let host = Host::new().port("rdma0", "eth0").file("sys/class/net/eth0/device/x", "");
        let link = host.root().join("sys/class/net/eth0/device/driver");
        symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
        assert_eq!(host.treatments(&empty), expected, "{driver}");
    }
}
