//! Tests of the checks with hosts that consist of files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use laxity_shm::marking::Treatments;
use laxity_shm::record::Stage;
use laxity_shm::registration::{Reason, RegistrationError};
use laxity_wire::{ClientStatus, ControlError, LevelStatus, PortStatus, Status};
use tempfile::TempDir;

use super::finding::{Finding, Severity};
use super::kernel::Tried;
use super::root::Root;
use super::{classes, fabric, kernel, levels, limits, processes, service};
use crate::class_table::Layers;
use crate::class_variables;

mod map;
mod priorities;

struct Host {
    folder: TempDir,
}

impl Host {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn root(&self) -> Root {
        Root::new(self.folder.path())
    }

    fn path(&self, path: &str) -> PathBuf {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn file(self, path: &str, text: &str) -> Self {
        fs::write(self.path(path), text).unwrap();
        self
    }

    fn roce(mut self, device: &str, netdev: &str, gids: &[(&str, &str)]) -> Self {
        let port = format!("sys/class/infiniband/{device}/ports/1");
        for (file, text) in [
            ("state", "4: ACTIVE\n"),
            ("link_layer", "Ethernet\n"),
            ("rate", "100 Gb/sec (4X EDR)\n"),
            ("gid_attrs/ndevs/0", netdev),
        ] {
            self = self.file(&format!("{port}/{file}"), text);
        }
        for (index, (gid, kind)) in gids.iter().enumerate() {
            self = self.file(&format!("{port}/gids/{index}"), gid);
            self = self.file(&format!("{port}/gid_attrs/types/{index}"), kind);
        }
        self
    }

    fn process(self, pid: u32, libraries: &[&str], variables: &[&str], uses_rdma: bool) -> Self {
        let line = |library: &&str| format!("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/{library}\n");
        let maps: String = libraries.iter().map(line).collect();
        let host = self
            .file(&format!("proc/{pid}/maps"), &maps)
            .file(&format!("proc/{pid}/comm"), "engine\n")
            .file(&format!("proc/{pid}/environ"), &variables.join("\0"));
        if uses_rdma {
            let fd = host.path(&format!("proc/{pid}/fd/7"));
            symlink("/dev/infiniband/uverbs0", fd).unwrap();
        }
        host
    }
}

const EMPTY: &str = "0000:0000:0000:0000:0000:0000:0000:0000\n";
const MAPPED: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001\n";
const LOCAL: &str = "fe80:0000:0000:0000:ba59:9fff:fe00:0001\n";

fn nothing(_: &str, _: &[&str]) -> Option<String> {
    None
}

fn status() -> Status {
    let level = |(level, dscp): (&str, u8)| LevelStatus {
        level: level.into(),
        dscp,
        ..LevelStatus::default()
    };
    let levels = [("P1", 46), ("P2", 34), ("P3", 26), ("P4", 18), ("P5", 10), ("scavenger", 8)];
    Status {
        version: env!("CARGO_PKG_VERSION").into(),
        mode: "enforce".into(),
        ports: vec![PortStatus {
            name: "default".into(),
            direction: "egress".into(),
            rate_bytes_per_s: 12_500_000_000,
            levels: levels.map(level).to_vec(),
            ..PortStatus::default()
        }],
        ..Status::default()
    }
}

fn severity(findings: &[Finding], id: &str) -> Severity {
    let of_id = findings.iter().filter(|finding| finding.id == id);
    of_id.map(|f| f.severity).max().unwrap_or_else(|| panic!("no {id} in {findings:?}"))
}

fn text(findings: &[Finding]) -> String {
    findings.iter().map(|f| format!("{} {} {} {}\n", f.subject, f.found, f.why, f.action)).collect()
}

#[test]
fn a_host_without_devices_is_told_so_and_nothing_fails() {
    let host = Host::new();
    let ports = fabric::ports(&host.root());
    let findings = fabric::devices(&ports, Some(&status()));
    assert_eq!(severity(&findings, "device"), Severity::Info);
    assert!(fabric::gids(&host.root(), &ports).is_empty());
}

#[test]
fn an_active_port_of_the_rate_that_the_daemon_believes_is_fine() {
    let host = Host::new().roce("mlx5_0", "eth0", &[]);
    let findings = fabric::devices(&fabric::ports(&host.root()), Some(&status()));
    assert_eq!(severity(&findings, "device"), Severity::Ok);
    assert_eq!(severity(&findings, "nic"), Severity::Ok);
    assert!(text(&findings).contains("RoCE, 100 Gbit/s, eth0"), "{findings:?}");
}

#[test]
fn a_port_that_is_down_faster_than_believed_or_unknown_to_the_daemon_is_a_warning() {
    let down = Host::new()
        .roce("mlx5_0", "eth0", &[])
        .file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    let findings = fabric::devices(&fabric::ports(&down.root()), None);
    assert_eq!(severity(&findings, "device"), Severity::Warn);

    let fast = Host::new()
        .roce("mlx5_0", "eth0", &[])
        .file("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
    let findings = fabric::devices(&fabric::ports(&fast.root()), Some(&status()));
    assert!(text(&findings).contains("rate = \"400Gbit\""), "{findings:?}");

    let two = Host::new().roce("mlx5_0", "eth0", &[]).roce("mlx5_1", "eth1", &[]);
    let mut known = status();
    known.ports[0].name = "eth1".into();
    let findings = fabric::devices(&fabric::ports(&two.root()), Some(&known));
    let nics: Vec<_> = findings.iter().filter(|f| f.id == "nic").collect();
    assert_eq!(nics[0].severity, Severity::Warn, "mlx5_0 is nobody's");
    assert!(nics[0].action.contains("name = \"mlx5_0\""));
    assert_eq!(nics[1].severity, Severity::Ok, "mlx5_1 is eth1");
}

#[test]
fn a_rate_that_is_only_assumed_is_a_warning_once_for_each_nic() {
    let mut status = status();
    let fine = service::daemon(&Ok(status.clone()));
    assert!(fine.iter().all(|finding| finding.id != "rate"), "{fine:?}");
    status.ports[0].rate_assumed = true;
    let ingress = PortStatus { direction: "ingress".into(), ..status.ports[0].clone() };
    status.ports.push(ingress);
    let findings = service::daemon(&Ok(status));
    let rates: Vec<_> = findings.iter().filter(|finding| finding.id == "rate").collect();
    assert_eq!((rates.len(), rates[0].severity), (1, Severity::Warn));
    assert!(rates[0].found.contains("11.6 GiB/s is assumed"), "{rates:?}");
    assert!(rates[0].action.contains("rate in the [[nic]] of default"), "{rates:?}");
}

#[test]
fn functions_are_parts_of_the_port_that_they_share_unless_the_daemon_has_a_nic_of_them() {
    let owner =
        |device: &str| format!("sys/class/infiniband/{device}/device/physfn/infiniband/mlx5_0/dev");
    let host = Host::new().roce("mlx5_0", "eth0", &[]).roce("mlx5_1", "eth1", &[]);
    let host =
        host.roce("mlx5_2", "eth2", &[]).file(&owner("mlx5_1"), "").file(&owner("mlx5_2"), "");
    let ports = fabric::ports(&host.root());
    let nics = |known: &Status| {
        let findings = fabric::devices(&ports, Some(known));
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:?}");
        findings.into_iter().filter(|finding| finding.id == "nic").collect::<Vec<_>>()
    };
    let mut known = status();
    for name in ["mlx5_0", "default"] {
        known.ports[0].name = name.into();
        let found = nics(&known);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (&*found[0].subject, found[0].found.contains("2 functions")),
            ("mlx5_0/1", true)
        );
    }
    known.ports.push(PortStatus { name: "mlx5_2".into(), ..known.ports[0].clone() });
    known.ports[0].name = "mlx5_0".into();
    let found = text(&nics(&known));
    assert!(found.contains("shared by 1 function ") && found.contains("mlx5_2/1"), "{found}");
}

#[test]
fn a_nic_that_the_daemon_had_found_and_that_is_gone_is_a_warning_with_or_without_other_nics() {
    let mut known = status();
    (known.ports[0].name, known.ports[0].absent) = ("mlx5_7".into(), true);
    for host in [Host::new(), Host::new().roce("mlx5_7", "eth0", &[])] {
        let findings = fabric::devices(&fabric::ports(&host.root()), Some(&known));
        let gone: Vec<_> = findings.iter().filter(|f| f.subject == "mlx5_7").collect();
        assert!(gone[0].found.contains("gone") && gone[0].severity == Severity::Warn, "{gone:?}");
    }
}

#[test]
fn other_fabrics_than_ethernet_are_told_how_their_levels_are_kept_apart() {
    let marking = |layer: &str, status: Option<&Status>| {
        let host = Host::new()
            .roce("mlx5_0", "ib0", &[])
            .file("sys/class/infiniband/mlx5_0/ports/1/link_layer", layer);
        let findings = fabric::devices(&fabric::ports(&host.root()), status);
        assert_eq!(severity(&findings, "marking"), Severity::Info);
        text(&findings)
    };
    let none = marking("InfiniBand", Some(&status()));
    assert!(none.contains("no service levels are configured"), "{none}");
    let mut named = status();
    for (sl, level) in named.ports[0].levels.iter_mut().rev().enumerate() {
        level.sl = Some(sl as u8);
    }
    let named = marking("InfiniBand", Some(&named));
    assert!(named.contains("P1 SL 5") && named.contains("scavenger SL 0"), "{named}");
    let efa = marking("Unspecified", None);
    assert!(efa.contains("software order only") && efa.contains("EFA"), "{efa}");
}

#[test]
fn a_rocev2_gid_over_ipv4_is_wanted_and_what_is_there_instead_is_said() {
    let gid = |gids: &[(&str, &str)]| {
        let host = Host::new().roce("mlx5_0", "eth0", gids);
        fabric::gids(&host.root(), &fabric::ports(&host.root())).remove(0)
    };
    let good =
        gid(&[(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (EMPTY, ""), (MAPPED, "RoCE v2\n")]);
    assert_eq!((good.severity, good.found.as_str()), (Severity::Ok, "RoCEv2 over IPv4 at index 3"));
    assert_eq!(gid(&[(LOCAL, "RoCE v2")]).severity, Severity::Info);
    assert_eq!(gid(&[(MAPPED, "IB/RoCE v1")]).severity, Severity::Warn);
    let none = gid(&[(EMPTY, "")]);
    assert!(none.severity == Severity::Warn && none.action.contains("dev eth0"));
}

#[test]
fn a_class_that_is_forced_on_everything_is_an_error_and_a_default_one_is_mentioned() {
    let host = Host::new().roce("mlx5_0", "eth0", &[]);
    let ports = fabric::ports(&host.root());
    assert!(fabric::forced_class(&host.root(), &ports).is_empty());
    let host = host
        .file("sys/class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=106\n")
        .file("sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", "104\n");
    let findings = fabric::forced_class(&host.root(), &ports);
    assert_eq!(severity(&findings, "forced-class"), Severity::Error);
    assert!(text(&findings).contains("106"));
    assert_eq!(severity(&findings, "default-tos"), Severity::Info);
    let host = host.file("sys/class/infiniband/mlx5_0/tc/1/traffic_class", "");
    assert_eq!(fabric::forced_class(&host.root(), &ports).len(), 1);
}

#[test]
fn kv_transfer_above_collectives_is_found_from_the_libraries_defaults() {
    let host = Host::new().process(10, &["libucp.so.0", "libibverbs.so.1"], &[], true).process(
        11,
        &["libnccl.so.2", "libibverbs.so.1"],
        &["HOME=/root"],
        true,
    );
    let seen = processes::scan(&host.root());
    for status in [None, Some(&status())] {
        let findings = classes::inverted(&seen, status);
        assert_eq!(severity(&findings, "inverted-classes"), Severity::Warn);
        assert!(
            text(&findings).contains("UCX of 10 (engine): class 106 (DSCP 26)"),
            "{findings:?}"
        );
    }
}

#[test]
fn classes_that_an_operator_pinned_the_right_way_round_are_fine() {
    let host = Host::new()
        .process(10, &["libucp-9ab1.so.0"], &["UCX_IB_TRAFFIC_CLASS=72"], true)
        .process(11, &["libnccl.so.2"], &["NCCL_IB_TC=184"], true);
    let findings = classes::inverted(&processes::scan(&host.root()), Some(&status()));
    assert_eq!(severity(&findings, "inverted-classes"), Severity::Ok);
    // CS1 is below best effort.
    let host = Host::new().process(10, &["libtransfer_engine.so"], &["MC_IB_TC=32"], true).process(
        11,
        &["libnccl.so.2"],
        &[],
        true,
    );
    let findings = classes::inverted(&processes::scan(&host.root()), None);
    assert_eq!(severity(&findings, "inverted-classes"), Severity::Ok);
}

#[test]
fn under_the_library_defaults_do_not_count_and_pins_are_mentioned() {
    let shim = "liblaxity.so";
    let host = Host::new().process(10, &["libucp.so.0", shim], &[], true).process(
        11,
        &["libnccl.so.2", shim],
        &["NCCL_IB_TC=0"],
        true,
    );
    let findings = classes::inverted(&processes::scan(&host.root()), None);
    assert_eq!(severity(&findings, "inverted-classes"), Severity::Ok);
    assert!(
        text(&findings).contains("NCCL of 11 (engine): class 0 (DSCP 0), pinned"),
        "{findings:?}"
    );
}

#[test]
fn expert_parallel_libraries_below_kv_are_found_even_under_the_library() {
    // GPUs ring the doorbells for NVSHMEM and DeepEP, so the library changes no class there.
    let libraries = ["libnvshmem_host.so.3", "deep_ep/_C.cpython-312.so", "libnccl.so.2"];
    let host =
        |set: &[&str]| {
            Host::new()
                .process(10, &[&libraries[..], &["liblaxity.so"]].concat(), set, true)
                .process(11, &["libucp.so.0", "liblaxity.so"], &["UCX_IB_TRAFFIC_CLASS=0x6a"], true)
        };
    let inverted =
        |set: &[&str]| classes::inverted(&processes::scan(&host(set).root()), Some(&status()));
    let stock = inverted(&[]);
    assert_eq!(severity(&stock, "inverted-classes"), Severity::Warn);
    assert!(text(&stock).contains("UCX of 11 (engine): class 106 (DSCP 26), pinned"), "{stock:?}");
    let half = inverted(&["NVSHMEM_IB_TRAFFIC_CLASS=136"]);
    assert!(text(&half).contains("DeepEP V2 of 10 (engine): class 3 (DSCP 0)"), "{half:?}");
    let both = inverted(&["NVSHMEM_IB_TRAFFIC_CLASS=136", "NCCL_GIN_IB_TC=136"]);
    assert_eq!(severity(&both, "inverted-classes"), Severity::Ok, "{both:?}");
}

#[test]
fn the_classes_of_each_process_are_shown_with_the_variables_that_are_not_set() {
    let host = Host::new()
        .process(10, &["libnccl.so.2", "libucp.so.0"], &["NCCL_IB_TC=136"], true)
        .process(11, &["libibverbs.so.1"], &[], true);
    let shown = classes::table(&processes::scan(&host.root()));
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert_eq!(shown[0].subject, "10 (engine)");
    assert_eq!(shown[0].found, "NCCL 136 (DSCP 34, pinned), UCX 106 (DSCP 26, its default)");
    assert_eq!(shown[0].why, "not set: UCX_IB_TRAFFIC_CLASS");
}

#[test]
fn a_class_that_is_set_and_is_not_that_of_the_table_is_a_warning() {
    let host = Host::new()
        .process(10, &["libnccl.so.2", "libucp.so.0"], &["NCCL_IB_TC=106", "MC_IB_TC=1"], true)
        .process(11, &["libnccl.so.2", "libucp.so.0"], &["UCX_IB_TRAFFIC_CLASS=0x28"], true)
        .process(12, &["libnccl.so.2"], &["NCCL_IB_SL=3"], true);
    let compared = |layers: Layers| {
        let mut rules = class_variables::rules(None, || Treatments::ALL_ALIKE).unwrap();
        rules.service_level[Stage::Collective.index()] = Some(2);
        classes::compared(&processes::scan(&host.root()), layers, &rules)
    };
    let roce = compared(Layers { roce: true, infiniband: false });
    assert_eq!((roce.len(), severity(&roce, "classes")), (1, Severity::Warn), "{roce:?}");
    assert_eq!((&*roce[0].subject, &*roce[0].found), ("10 (engine)", "NCCL_IB_TC is 106, not 136"));
    let infiniband = compared(Layers { roce: false, infiniband: true });
    assert_eq!(infiniband[0].found, "NCCL_IB_SL is 3, not 2");
}

#[test]
fn rdma_without_the_library_is_a_warning_that_names_the_process_and_the_command() {
    let host = Host::new()
        .process(10, &["libibverbs.so.1", "mooncake/engine.so", "libnccl.so.2"], &[], true)
        .process(11, &["libibverbs.so.1"], &[], false)
        .process(12, &["libc.so.6"], &[], false);
    let findings = processes::coverage(&processes::scan(&host.root()), None);
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert_eq!(
        (findings[0].severity, findings[0].subject.as_str()),
        (Severity::Warn, "10 (engine)")
    );
    assert!(findings[0].action.contains("laxity run --profile mooncake"));
    assert_eq!(findings[1].severity, Severity::Info);
}

#[test]
fn preloaded_and_attached_is_covered_and_preloaded_alone_is_not() {
    let host = Host::new().process(10, &["libibverbs.so.1", "liblaxity.so"], &[], true);
    let seen = processes::scan(&host.root());
    assert_eq!(severity(&processes::coverage(&seen, None), "coverage"), Severity::Ok);
    let mut status = status();
    assert_eq!(severity(&processes::coverage(&seen, Some(&status)), "coverage"), Severity::Warn);
    status.clients.push(ClientStatus { pid: 10, ..ClientStatus::default() });
    assert_eq!(severity(&processes::coverage(&seen, Some(&status)), "coverage"), Severity::Ok);
}

#[test]
fn memory_that_may_not_be_locked_is_a_warning_where_there_are_devices() {
    let limits = |value: &str| {
        format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {value}              \
             {value}              bytes\n"
        )
    };
    let host = Host::new()
        .file("proc/self/limits", &limits("8388608"))
        .file("proc/self/status", "CapEff:\t0000000000000000\n");
    let none = processes::ProcessScan::default();
    let own = |host: &Host, devices| limits::memlock(&host.root(), &none, devices).remove(0);
    assert_eq!(own(&host, true).severity, Severity::Warn);
    assert!(own(&host, true).found.contains("8 MiB"));
    assert_eq!(own(&host, false).severity, Severity::Info);
    let host = host.file("proc/self/status", "CapEff:\t000001ffffffffff\n");
    assert_eq!(own(&host, true).severity, Severity::Info, "CAP_IPC_LOCK");
    let host = host.file("proc/self/limits", &limits("unlimited"));
    assert_eq!(own(&host, true).severity, Severity::Ok);

    let host = host
        .process(10, &["libibverbs.so.1"], &[], true)
        .file("proc/10/limits", &limits("65536"))
        .file("proc/10/status", "CapEff:\t0000000000000000\n")
        .file("etc/security/limits.d/rdma.conf", "# x\n* - memlock unlimited\n* - nofile 9\n")
        .file("etc/systemd/system.conf", "#DefaultLimitMEMLOCK=8M\nDefaultLimitMEMLOCK=infinity\n");
    let findings = limits::memlock(&host.root(), &processes::scan(&host.root()), true);
    let said = text(&findings);
    assert!(said.contains("10 (engine) it may lock 64 KiB"), "{said}");
    let configured: Vec<_> = findings.iter().filter(|f| f.id == "memlock-configured").collect();
    assert_eq!(configured.len(), 2, "{said}");
}

#[test]
fn an_old_kernel_a_refused_barrier_and_unsealable_memory_are_said_by_their_weight() {
    let tried = |membarrier, region: Result<(), &str>| Tried {
        membarrier,
        region: region.map_err(str::to_owned),
    };
    let host = Host::new().file("proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
    let findings = kernel::kernel(&host.root(), &tried(true, Ok(())));
    assert!(findings.iter().all(|f| f.severity == Severity::Ok), "{findings:?}");
    let host = host.file("proc/sys/kernel/osrelease", "4.15.0\n");
    let findings = kernel::kernel(&host.root(), &tried(false, Err("fcntl")));
    assert_eq!(severity(&findings, "kernel"), Severity::Warn);
    assert_eq!(severity(&findings, "membarrier"), Severity::Warn);
    assert_eq!(severity(&findings, "memfd"), Severity::Error);
}

#[test]
fn a_daemon_that_is_absent_bypassed_or_of_another_release_is_told_apart() {
    let nobody = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let absent =
        service::daemon(&Err(ControlError::Connect { path: "/run/x".into(), cause: nobody() }));
    assert_eq!(severity(&absent, "daemon"), Severity::Error);
    assert!(text(&absent).contains("systemctl enable --now laxityd"));
    let forbidden = service::daemon(&Err(ControlError::Connect {
        path: "/run/x".into(),
        cause: std::io::ErrorKind::PermissionDenied.into(),
    }));
    assert_eq!(
        severity(&forbidden, "daemon"),
        Severity::Info,
        "that says nothing about the daemon"
    );

    let good = service::daemon(&Ok(status()));
    assert_eq!(good.iter().map(|f| f.severity).max(), Some(Severity::Info), "no client yet");
    let mut odd = status();
    odd.version = "0.0.1".into();
    odd.bypass = true;
    odd.clients.push(ClientStatus { garbage_records: 3, ..ClientStatus::default() });
    let odd = service::daemon(&Ok(odd));
    for id in ["version", "mode", "clients"] {
        assert_eq!(severity(&odd, id), Severity::Warn, "{id}");
    }
}

#[test]
fn a_refused_registration_says_what_to_change() {
    let socket = "/run/laxity/laxityd.sock".as_ref();
    assert_eq!(service::registration(socket, None).severity, Severity::Ok);
    let rejected = |reason| {
        let error = RegistrationError::Rejected { reason, version: 1 };
        service::registration(socket, Some(&error))
    };
    assert!(rejected(Reason::Forbidden).action.contains("[access]"));
    assert!(rejected(Reason::Full).action.contains("clients_max"));
    assert!(rejected(Reason::Version).action.contains("one release"));
    assert_eq!(rejected(Reason::Stopping).severity, Severity::Error);
}
