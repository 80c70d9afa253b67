//! Counters of NICs that consist of files, laid out as each driver does.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::time::Duration;

use laxity_nic::{
    DcbError, DirectionCounts, NicCounts, NicDriver, PriorityMap, Selection, Trust, counters_of,
};
use tempfile::TempDir;

/// As Linux 6.8 prints it.
const TABLE: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo \
colls carrier compressed
    lo:    2776      25    0    0    0     0          0         0 2776      25    0    0    0     \
0       0          0
  eth0: 1000 9 0 0 0 0 0 0 2000 8 0 0 0 0 0 0
 eth10:3000       9    0    0    0     0          0         0 18446744073709551615       8    0 0 \
   0     0       0          0
";

struct Host(TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder")).file("proc/net/dev", TABLE)
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn file(self, path: &str, text: &str) -> Self {
        self.write(path, text);
        self
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    /// Adds a device with these counters, given as `name=value` relative to the port's folder.
    fn device(self, device: &str, link_layer: &str, counters: &[&str]) -> Self {
        let port = format!("sys/class/infiniband/{device}/ports/1");
        let host = self.file(&format!("{port}/link_layer"), link_layer);
        counters.iter().fold(host, |host, counter| {
            let (name, value) = counter.split_once('=').expect("name=value");
            host.file(&format!("{port}/{name}"), &format!("{value}\n"))
        })
    }

    fn read(&self, nic: &str) -> Option<(&'static str, NicCounts)> {
        let mut source = counters_of(self.root(), nic, DRIVER)?;
        Some((source.name(), source.read(&OURS)?))
    }
}

/// The DSCPs of scheduled traffic.
const OURS: [u8; 3] = [46, 34, 26];

thread_local! {
    /// What the counters of bytes by priority are multiplied by.
    static PASSED: Cell<u64> = const { Cell::new(7) };
}

/// `eth10` has frames of PFC, and sent `10^p` times [`PASSED`] bytes with priority `p`.
const DRIVER: NicDriver = NicDriver {
    pauses: paused,
    map: |interface| if interface == "eth10" { Ok(strict()) } else { Err(DcbError::Unsupported) },
    sent_by_priority: |_| {
        Ok(std::array::from_fn(|priority| PASSED.get() * 10_u64.pow(priority as u32)))
    },
};

/// As mlx5 maps DSCPs, with a strict queue for each priority.
fn strict() -> PriorityMap {
    PriorityMap {
        trust: Some(Trust::Dscp),
        priority_of_dscp: Some(std::array::from_fn(|dscp| (dscp >> 3) as u8)),
        class_of_priority: Some([0, 1, 2, 3, 4, 5, 6, 7]),
        selection: Some([Selection::Strict; 8]),
        ..PriorityMap::default()
    }
}

fn paused(interface: &str) -> Result<u64, DcbError> {
    if interface == "eth10" { Ok(100) } else { Err(DcbError::Unsupported) }
}

fn counts(egress: (u64, u64), ingress: (u64, u64)) -> NicCounts {
    let passed = |(bytes, signals)| DirectionCounts { bytes, signals };
    NicCounts { egress: passed(egress), ingress: passed(ingress), yielding_bytes: 0 }
}

#[test]
fn an_interface_has_its_own_row_even_if_names_begin_alike() {
    let host = Host::new();
    assert_eq!(host.read("eth0"), Some(("netdev", counts((2000, 0), (1000, 0)))));
    assert_eq!(host.read("eth10"), Some(("netdev", counts((u64::MAX, 0), (3000, 0)))));
    assert_eq!(host.read("eth1"), None);
    host.write("proc/net/dev", "eth0: 1 2 3\n eth2: x\n:\n");
    assert_eq!((host.read("eth0"), host.read("eth2")), (None, None), "short rows");
}

#[test]
fn the_only_interface_of_a_host_without_rdma_is_what_default_stands_for() {
    let host = Host::new();
    let up = |name: &str| {
        host.write(&format!("sys/class/net/{name}/operstate"), "up");
        host.write(&format!("sys/class/net/{name}/device/vendor"), "0x15b3");
    };
    up("eth0");
    assert_eq!(host.read("default"), host.read("eth0"));
    assert!(host.read("default").is_some());
    up("eth10");
    assert_eq!(host.read("default"), None, "which of them?");
}

#[test]
fn mlx5_counts_words_of_rdma_and_its_interface_counts_the_rest() {
    let mlx5 = [
        "counters/port_xmit_data=500",
        "counters/port_rcv_data=700",
        "hw_counters/rp_cnp_handled=11",
        "hw_counters/np_ecn_marked_roce_packets=13",
        "gid_attrs/ndevs/0=eth0",
    ];
    let host = Host::new().device("mlx5_0", "Ethernet", &mlx5);
    let both = Some(("pma", counts((4 * 500 + 2000, 11), (4 * 700 + 1000, 13))));
    assert_eq!(host.read("mlx5_0"), both);
    assert_eq!(host.read("eth0"), both, "the interface's name means the same NIC");
    assert_eq!(host.read("default"), both, "it is the only one");
    assert_eq!(host.read("mlx5_1"), None);
    host.write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth10");
    let signals = host.read("mlx5_0").expect("counted").1.egress.signals;
    assert_eq!(signals, 111, "the switch paused it");
    let two = host.device("mlx5_1", "InfiniBand", &mlx5[..2]);
    assert_eq!(two.read("default"), None, "which of them?");
    let infiniband = Some(("pma", counts((2000, 0), (2800, 0))));
    assert_eq!(two.read("mlx5_1"), infiniband, "IPoIB is counted there");
}

#[test]
fn other_drivers_have_their_own_names_and_units() {
    let host = Host::new()
        .device(
            "bnxt_re0",
            "Ethernet",
            &[
                "hw_counters/tx_bytes=5",
                "hw_counters/rx_bytes=6",
                "hw_counters/rx_cnp_pkts=7",
                "hw_counters/tx_cnp_pkts=70",
                "hw_counters/rx_ecn_marked_pkts=8",
            ],
        )
        .device(
            "irdma0",
            "Ethernet",
            &[
                "hw_counters/ip4OutOctets=10",
                "hw_counters/ip6OutOctets=1",
                "hw_counters/ip4InOctets=20",
                "hw_counters/ip6InOctets=2",
                "hw_counters/cnpHandled=3",
                "hw_counters/RxECNMrkd=4",
                // The kernel's answer for a device without PMA.
                "counters/port_xmit_data=N/A (no PMA)",
            ],
        )
        .device(
            "efa_0",
            "Unspecified",
            &["hw_counters/tx_bytes=1", "hw_counters/rx_bytes=2", "hw_counters/send_bytes=1"],
        );
    assert_eq!(host.read("bnxt_re0"), Some(("hw_counters", counts((5, 7), (6, 8)))));
    assert_eq!(host.read("irdma0"), Some(("irdma", counts((11, 3), (22, 4)))));
    assert_eq!(host.read("efa_0"), Some(("hw_counters", counts((1, 0), (2, 0)))));
}

#[test]
fn software_rdma_passes_its_interface() {
    let host = Host::new().device("rxe0", "Ethernet", &["hw_counters/sent_pkts=5"]);
    host.write("sys/class/infiniband/rxe0/parent", "eth0\n");
    assert_eq!(host.read("rxe0"), Some(("netdev", counts((2000, 0), (1000, 0)))));
}

#[test]
fn a_device_that_counts_no_bytes_has_no_source_and_one_that_stops_has_no_reading() {
    let host = Host::new().device("hfi1_0", "InfiniBand", &["counters/port_xmit_data=1"]);
    assert_eq!(host.read("hfi1_0"), None, "it counts one direction only");
    let host = host.device(
        "mlx5_0",
        "InfiniBand",
        &["counters/port_xmit_data=1", "counters/port_rcv_data=1"],
    );
    let mut source = counters_of(host.root(), "mlx5_0", DRIVER).expect("a source");
    assert!(source.read(&OURS).is_some());
    host.write("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "no number");
    assert_eq!(source.read(&OURS), None);
    fs::remove_dir_all(host.root().join("sys")).expect("removed");
    assert_eq!(source.read(&OURS), None, "the device is gone");
}

#[test]
fn bytes_yield_that_the_nic_sends_after_all_scheduled_ones() {
    let mlx5 =
        ["counters/port_xmit_data=500", "counters/port_rcv_data=700", "gid_attrs/ndevs/0=eth10"];
    let host = Host::new().device("mlx5_0", "Ethernet", &mlx5);
    let mut sources: Vec<_> = [&OURS[..], &[46, 8], &[46, 0], &[], &[46, 8]]
        .into_iter()
        .map(|ours| (ours, counters_of(host.root(), "mlx5_0", DRIVER).expect("a source")))
        .collect();
    let mut read = || {
        let each = sources.iter_mut().map(|(ours, source)| source.read(ours).expect("counted"));
        let yielding = each.map(|counts| counts.yielding_bytes).collect::<Vec<_>>();
        sources[4].0 = &OURS;
        yielding
    };
    assert_eq!(read(), [0; 5], "what passed before does not matter");
    PASSED.set(8);
    assert_eq!(read(), [0; 5], "the driver is asked once a second");
    std::thread::sleep(Duration::from_millis(1_050));
    // DSCP 26 has priority 3, and nothing is below DSCP 0. The last one has other classes now.
    assert_eq!(read(), [111, 1, 0, 0, 111]);
}

#[test]
fn a_priority_yields_only_to_strict_queues_that_are_served_before_it() {
    let ets = Selection::Ets(50);
    let map = |classes: [u8; 8], selection: &[(usize, Selection)]| {
        let mut map = PriorityMap { class_of_priority: Some(classes), ..strict() };
        for (class, how) in selection {
            map.selection.as_mut().expect("known")[*class] = *how;
        }
        map.yields_to(&OURS)
    };
    let own = [0, 1, 2, 3, 4, 5, 6, 7];
    assert_eq!(map(own, &[]), 0b0000_0111);
    assert_eq!(map(own, &[(1, ets), (6, ets), (2, Selection::Vendor)]), 0b0100_0011);
    assert_eq!(map(own, &[(4, ets)]), 0, "DSCP 34 shares by weight");
    assert_eq!(map([0, 1, 3, 3, 4, 5, 6, 7], &[]), 0b0000_0011, "two share a queue");
    assert_eq!(map([3; 8], &[]), 0);
    let unknown = [
        PriorityMap { trust: Some(Trust::Pcp), ..strict() },
        PriorityMap { selection: None, ..strict() },
        PriorityMap { class_of_priority: Some([9; 8]), ..strict() },
        PriorityMap::default(),
    ];
    assert_eq!(unknown.map(|map| map.yields_to(&OURS)), [0; 4]);
}
