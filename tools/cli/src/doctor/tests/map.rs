//! Tests of the map of RDMA traffic, with hosts that consist of files.

use laxity_wire::{ClientStatus, PortStatus, Status};

use super::{Host, processes, severity, text};
use crate::doctor::finding::Severity;
use crate::doctor::map::{self, DaemonReply, PathRow, Reach, Row, Sources};
use crate::doctor::{fabric, paths::PathKind};

fn mlx5() -> Host {
    let port = "sys/class/infiniband/mlx5_0/ports/1";
    Host::new()
        .roce("mlx5_0", "eth0", &[])
        .file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
        .file(&format!("{port}/counters/port_xmit_data"), "1\n")
        .file(&format!("{port}/counters/port_rcv_data"), "1\n")
        .file("proc/net/dev", "header\n  eth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
}

fn rows(host: &Host, daemon: DaemonReply<'_>, queue_pairs: &str) -> Vec<Row> {
    let root = host.root();
    let ports = fabric::ports(&root);
    let queue_pairs = processes::queue_pairs(queue_pairs);
    map::rows(&Sources { root: &root, ports: &ports, daemon, queue_pairs }, &processes::scan(&root))
}

fn only(host: &Host, daemon: DaemonReply<'_>) -> Row {
    let mut rows = rows(host, daemon, "");
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows.remove(0)
}

fn short(flow: &PathRow) -> (PathKind, &str, Option<u8>, Reach) {
    (flow.path, flow.library.as_str(), flow.traffic_class.or(flow.service_level), flow.laxity)
}

fn shorts(row: &Row) -> Vec<(PathKind, &str, Option<u8>, Reach)> {
    row.paths.iter().map(short).collect()
}

/// A daemon that counts on `mlx5_0`, with these clients in a mode.
fn daemon(mode: &str, pids: &[u32]) -> Status {
    let client =
        |&pid: &u32| ClientStatus { pid, mode: mode.to_owned(), ..ClientStatus::default() };
    let port = PortStatus {
        name: "mlx5_0".to_owned(),
        counters: Some("pma".to_owned()),
        ..PortStatus::default()
    };
    Status {
        mode: mode.to_owned(),
        clients: pids.iter().map(client).collect(),
        ports: vec![port],
        ..Status::default()
    }
}

const NIXL: [&str; 6] = [
    "libibverbs.so.1",
    "libmlx5.so.1",
    "nixl_cu12.libs/libnixl.so",
    "nixl_cu12.libs/plugins/libplugin_UCX.so",
    "nixl_cu12.libs/libucp-9ab1.so.0",
    "nixl_cu12.libs/ucx/libuct_ib.so.0",
];

#[test]
fn vllm_with_nixl_goes_past_verbs_on_mlx5_unless_the_package_asks_for_it() {
    use PathKind::{Devx, Nixl, Verbs};
    let status = daemon("enforce", &[10]);
    let plain = only(&mlx5().process(10, &NIXL, &[], true), DaemonReply::Answers(&status));
    assert_eq!(plain.devices, ["mlx5_0"]);
    assert!(plain.libraries.contains(&"libucp-9ab1.so.0".to_owned()), "{plain:?}");
    let measured = Reach::Measured;
    let both = [(Nixl, "UCX", Some(106), measured), (Devx, "UCX", Some(106), measured)];
    assert_eq!(shorts(&plain), both);
    assert_eq!(plain.paths[0].class_from.as_deref(), Some("default"));

    let function = mlx5()
        .roce("mlx5_7", "eth7", &[])
        .file("sys/class/infiniband/mlx5_7/device/physfn/infiniband/mlx5_0/dev", "")
        .file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_7\n")
        .process(10, &NIXL, &[], true);
    let function = only(&function, DaemonReply::Answers(&status));
    assert_eq!(shorts(&function), both, "its owner's counters have its bytes");

    let gated = [&NIXL[..], &["laxity/_laxity.abi3.so"]].concat();
    let host = || mlx5().process(10, &gated, &[], true);
    let ordered = only(&host(), DaemonReply::Answers(&status));
    assert!(ordered.paths.iter().all(|path| path.laxity == Reach::Ordered), "{ordered:?}");
    let observed = only(&host(), DaemonReply::Answers(&daemon("observe", &[10])));
    assert_eq!(observed.paths[0].laxity, Reach::Measured);
    assert!(observed.paths[0].why.contains("delays nothing now"), "{observed:?}");
    let off = mlx5().process(10, &gated, &["LAXITY_NIXL=off", "UCX_IB_TRAFFIC_CLASS=72"], true);
    let off = only(&off, DaemonReply::Answers(&status));
    assert_eq!(short(&off.paths[1]), (Devx, "UCX", Some(72), Reach::Marked));

    let preloaded = [&NIXL[..], &["liblaxity.so"]].concat();
    let on_verbs = mlx5().process(10, &preloaded, &["UCX_TLS=rc_verbs,self,sm"], true);
    let on_verbs = only(&on_verbs, DaemonReply::Answers(&status));
    let ordered = Reach::Ordered;
    let both = [(Nixl, "UCX", Some(106), ordered), (Verbs, "UCX", Some(106), ordered)];
    assert_eq!(shorts(&on_verbs), both);
    let tcp = mlx5().process(10, &NIXL, &["UCX_TLS=tcp,self"], true);
    let tcp = only(&tcp, DaemonReply::Answers(&status));
    assert_eq!(shorts(&tcp), [(Verbs, "libibverbs", None, Reach::Measured)]);
    let line = map::summary(&[on_verbs, tcp]);
    assert!(line.starts_with("2 RDMA processes, 1 paths measured, 2 paths ordered:"), "{line}");
}

#[test]
fn nccl_is_ordered_by_its_plugin_or_by_the_preload_library_and_not_by_a_class() {
    let nccl = |more: &[&str], variables: &[&str], daemon| {
        let libraries = [&["libnccl.so.2.27.5", "libibverbs.so.1"], more].concat();
        let row = only(&mlx5().process(10, &libraries, variables, true), daemon);
        assert_eq!(row.paths.len(), 1, "{row:?}");
        (row.paths[0].path, row.paths[0].laxity, row.paths[0].why.clone())
    };
    let status = daemon("enforce", &[10]);
    let (path, reach, why) = nccl(&["libnccl-net-laxity.so"], &[], DaemonReply::Answers(&status));
    assert_eq!((path, reach), (PathKind::NcclNet, Reach::Ordered));
    assert_eq!(why, "by the NCCL plugin");
    let other = nccl(&["libnccl-net-laxity.so"], &["NCCL_NET=IB"], DaemonReply::Answers(&status));
    assert_eq!(other.1, Reach::Measured, "the plugin is loaded and not used");
    assert_eq!(nccl(&["liblaxity.so"], &[], DaemonReply::Unknown).1, Reach::Ordered);
    assert_eq!(nccl(&["liblaxity.so"], &[], DaemonReply::Absent).1, Reach::Unseen);
    let lost = daemon("enforce", &[]);
    let (_, reach, why) = nccl(&["liblaxity.so"], &["NCCL_IB_TC=106"], DaemonReply::Answers(&lost));
    assert_eq!(reach, Reach::Marked);
    assert_eq!(why, "class set by NCCL_IB_TC; liblaxity.so is in it, but not attached");
    assert_eq!(nccl(&[], &["NCCL_IB_TC=0"], DaemonReply::Absent).1, Reach::Unseen, "best effort");
}

#[test]
fn gin_and_ibgda_are_told_from_what_a_cpu_posts() {
    use PathKind::{GinGdaki, GinProxy, Ibgda, NcclNet};
    let status = daemon("enforce", &[10]);
    let seen = |libraries: &[&str], variables: &[&str]| {
        let libraries = [&["libibverbs.so.1", "liblaxity.so"], libraries].concat();
        only(&mlx5().process(10, &libraries, variables, true), DaemonReply::Answers(&status))
    };
    let ordered_nccl = (NcclNet, "NCCL", Some(136), Reach::Ordered);
    let v2 = ["libnccl.so.2", "deep_ep/_C.cpython-312.so"];
    let deepep = seen(&v2, &["NCCL_IB_TC=136", "NCCL_GIN_IB_TC=160"]);
    let gdaki = (GinGdaki, "DeepEP V2", Some(160), Reach::Marked);
    assert_eq!(shorts(&deepep), [ordered_nccl, gdaki]);
    assert_eq!(deepep.paths[1].class_from.as_deref(), Some("NCCL_GIN_IB_TC"));
    let proxy = seen(&v2, &["NCCL_IB_TC=136", "NCCL_GIN_TYPE=2"]);
    let ordered_gin = (GinProxy, "DeepEP V2", Some(136), Reach::Ordered);
    assert_eq!(shorts(&proxy), [ordered_nccl, ordered_gin]);
    let named = seen(&["libnccl.so.2"], &["NCCL_IB_TC=136", "NCCL_GIN_TYPE=3"]);
    assert_eq!(short(&named.paths[1]), (GinGdaki, "NCCL GIN", Some(136), Reach::Marked));
    assert_eq!(seen(&["libnccl.so.2"], &[]).paths.len(), 1, "nothing says that it uses GIN");
    let thread = mlx5()
        .process(10, &["libnccl.so.2", "libibverbs.so.1"], &[], true)
        .file("proc/10/task/11/comm", "NCCL GIN Progre\n");
    let thread = only(&thread, DaemonReply::Answers(&status));
    assert_eq!(short(&thread.paths[1]), (GinProxy, "NCCL GIN", Some(0), Reach::Measured));

    let by_plugin = |variables: &[&str]| {
        let libraries = ["libnccl.so.2", "libibverbs.so.1", "libnccl-net-laxity.so"];
        let variables = [&["NCCL_GIN_TYPE=2", "NCCL_NET=Laxity"], variables].concat();
        let host = mlx5().process(10, &libraries, &variables, true);
        only(&host, DaemonReply::Answers(&status)).paths.swap_remove(1)
    };
    let one_sided = by_plugin(&["LAXITY_RMA=1"]);
    assert_eq!(short(&one_sided), (GinProxy, "NCCL GIN", Some(0), Reach::Ordered));
    assert_eq!(one_sided.why, "by the NCCL plugin");
    assert_eq!(by_plugin(&[]).laxity, Reach::Measured, "NCCL's own backend");
    let other = by_plugin(&["LAXITY_RMA=on", "NCCL_RMA_PLUGIN=other"]);
    assert_eq!(other.laxity, Reach::Measured, "another plugin");

    let v1 = ["libnvshmem_host.so.3", "nvshmem_transport_ibgda.so.3", "deep_ep_cpp.so"];
    let ibgda = seen(&v1, &[]);
    assert_eq!(shorts(&ibgda), [(Ibgda, "NVSHMEM", Some(0), Reach::Measured)]);
    let ibrc = seen(&["libnvshmem_host.so.3", "nvshmem_transport_ibrc.so.3"], &[]);
    assert_eq!(shorts(&ibrc), [(PathKind::Verbs, "NVSHMEM", Some(0), Reach::Ordered)]);

    let rows = [ibgda, deepep, ibrc];
    assert_eq!(severity(&map::bypasses(&rows), "bypass-verbs"), Severity::Info);
    assert_eq!(map::bypasses(&rows).len(), 2, "{:?}", map::bypasses(&rows));
}

#[test]
fn mooncake_under_the_library_is_ordered_if_its_queue_pairs_are_of_a_kind_that_it_orders() {
    let libraries = ["libibverbs.so.1", "mooncake/engine.so", "liblaxity.so"];
    let host = mlx5().process(10, &libraries, &["MC_IB_TC=40"], true);
    let status = daemon("enforce", &[10]);
    let with =
        |queue_pairs: &str| rows(&host, DaemonReply::Answers(&status), queue_pairs).remove(0);
    let rc = with(
        r#"[{"ifname":"mlx5_0","lqpn":1,"type":"GSI","comm":"[ib_core]"},
        {"ifname":"mlx5_0","port":1,"lqpn":9,"type":"RC","state":"RTS","pid":10,"comm":"x"},
        {"ifname":"mlx5_0","port":1,"lqpn":8,"type":"RC","state":"RTS","pid":10,"comm":"x"}]"#,
    );
    assert_eq!(shorts(&rc), [(PathKind::Verbs, "Mooncake", Some(40), Reach::Ordered)]);
    assert_eq!(rc.queue_pairs["RC"], 2);
    let dc = with(r#"[{"ifname":"mlx5_0","lqpn":9,"type":"DRIVER","pid":10}]"#);
    assert_eq!(dc.paths[0].laxity, Reach::Marked);
    assert!(dc.paths[0].why.contains("RC and UC"), "{dc:?}");
}

#[test]
fn without_an_open_device_nothing_takes_a_path_unless_a_client_asks_for_other_networks() {
    let plugin = ["libnccl.so.2", "libibverbs.so.1", "libnccl-net-laxity.so"];
    let host = mlx5()
        .process(10, &NIXL, &[], false)
        .file("proc/10/fd/0", "")
        .process(11, &plugin, &[], false)
        .file("proc/11/fd/0", "");
    let status = daemon("enforce", &[11]);
    let rows = rows(&host, DaemonReply::Answers(&status), "");
    assert!(rows[0].paths.iter().all(|path| path.laxity == Reach::Idle), "{rows:?}");
    assert_eq!(rows[1].paths[0].laxity, Reach::Ordered);
    assert!(map::bypasses(&rows).is_empty());
}

#[test]
fn a_class_that_the_driver_forces_counts_for_verbs_and_not_for_devx() {
    let host = mlx5()
        .file("sys/class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=106\n")
        .process(10, &["libibverbs.so.1", "libtransfer_engine.so"], &["MC_IB_TC=40"], true)
        .process(11, &NIXL, &[], true);
    let rows = rows(&host, DaemonReply::Absent, "");
    let forced = (PathKind::Verbs, "Mooncake", Some(106), Reach::Marked);
    assert_eq!(shorts(&rows[0]), [forced]);
    assert_eq!(rows[0].paths[0].class_from.as_deref(), Some("driver"));
    assert_eq!(short(&rows[1].paths[1]), (PathKind::Devx, "UCX", Some(106), Reach::Unseen));
}

#[test]
fn infiniband_has_service_levels_and_efa_has_no_class() {
    let host = mlx5()
        .file("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n")
        .process(10, &["libnccl.so.2", "libibverbs.so.1"], &["NCCL_IB_SL=3"], true);
    let row = only(&host, DaemonReply::Absent);
    assert_eq!((row.paths[0].traffic_class, row.paths[0].service_level), (None, Some(3)));
    assert_eq!(row.paths[0].laxity, Reach::Marked);

    let efa =
        ["libnccl.so.2", "libnccl-net.so", "libfabric.so.1", "libefa.so.1", "libibverbs.so.1"];
    let device = "sys/class/infiniband/rdmap16s27/ports/1";
    let host = Host::new()
        .file(&format!("{device}/link_layer"), "Unspecified\n")
        .file(&format!("{device}/hw_counters/tx_bytes"), "1\n")
        .file(&format!("{device}/hw_counters/rx_bytes"), "1\n")
        .file("sys/class/infiniband_verbs/uverbs0/ibdev", "rdmap16s27\n")
        .process(10, &[&efa[..], &["liblaxity.so"]].concat(), &["NCCL_IB_TC=136"], true);
    let row = only(&host, DaemonReply::Unknown);
    assert_eq!(shorts(&row), [(PathKind::Efa, "aws-ofi-nccl", None, Reach::Measured)]);
    assert!(row.paths[0].why.contains("hw_counters"), "{row:?}");
}

#[test]
fn a_process_without_rdma_is_left_out_and_one_that_cannot_be_read_says_what_to_do() {
    let host = mlx5()
        .process(10, &["libc.so.6"], &["NCCL_IB_TC=136"], false)
        .file("proc/11/comm", "secret\x1b\n")
        .file("proc/11/cmdline", "secret\0")
        .file("proc/12/comm", "kworker\n")
        .file("proc/12/cmdline", "");
    let queue_pairs = r#"[{"type":"RC","pid":11}]"#;
    let rows = rows(&host, DaemonReply::Absent, queue_pairs);
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert!(!rows[0].readable && rows[0].next_step.contains("as root"));
    let page = map::page(&rows);
    assert!(page.contains("1 can't be read: 11 (secret\\u{1b}), queue pairs: 1 RC"), "{page}");
    assert!(page.contains("run it as root"), "{page}");
    assert!(map::page(&[]).contains("none\n"));
}

#[test]
fn the_page_has_a_line_for_each_path_and_a_warning_for_ucx_on_mlx5() {
    let host = mlx5().process(10, &NIXL, &[], true).process(
        11,
        &NIXL,
        &["UCX_TLS=rc_verbs,ud_verbs,self,sm"],
        true,
    );
    let rows = rows(&host, DaemonReply::Unknown, "");
    let page = map::page(&rows);
    assert!(page.contains("10 (engine), mlx5_0\n    libraries: libibverbs.so.1 "), "{page}");
    let line =
        "    DEVX       UCX         class 106 (DSCP 26, its default)  measured  counted by pma";
    assert!(page.contains(line), "{page}");
    let past = map::bypasses(&rows);
    assert_eq!((past.len(), past[0].severity), (1, Severity::Warn), "{past:?}");
    assert!(text(&past).starts_with("10 (engine) UCX on mlx5 builds"), "{past:?}");
}
