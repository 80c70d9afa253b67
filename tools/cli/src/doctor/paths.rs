//! The paths by which a process moves data over RDMA, from its libraries and its environment.
//!
//! A path is decided by who posts the work requests: the verbs library, NCCL's network plugin, a
//! library that writes to the NIC itself, or a GPU. An environment is that of the process's start,
//! so a variable that a program sets later is not seen.

use serde::Serialize;

use super::processes::{NicKind, Process};

/// Who posts the work requests of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum PathKind {
    #[serde(rename = "verbs")]
    Verbs,
    #[serde(rename = "ncclNet")]
    NcclNet,
    #[serde(rename = "GIN proxy")]
    GinProxy,
    #[serde(rename = "GIN GDAKI")]
    GinGdaki,
    /// GPUs write the NIC's doorbells, by NVSHMEM and the like.
    #[serde(rename = "IBGDA")]
    Ibgda,
    /// A CPU writes to an mlx5 NIC without libibverbs.
    #[serde(rename = "DEVX")]
    Devx,
    #[serde(rename = "NIXL")]
    Nixl,
    #[serde(rename = "EFA")]
    Efa,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataPath {
    pub(crate) kind: PathKind,
    /// The library that chooses the class: a library of `classes.toml`, or one without a class.
    pub(crate) library: String,
    pub(crate) verbs: bool,
    pub(crate) asks: Option<&'static str>,
}

impl DataPath {
    fn new(kind: PathKind, library: &str, verbs: bool) -> Self {
        Self { kind, library: library.to_owned(), verbs, asks: None }
    }
}

const PACKAGE: &str = "the Python package laxity";
const NCCL_PLUGIN: &str = "the NCCL plugin";

pub(crate) fn data_paths(process: &Process) -> Vec<DataPath> {
    let mut paths: Vec<DataPath> = nccl(process).into_iter().collect();
    paths.extend(gin(process));
    paths.extend(nvshmem(process));
    paths.extend(ucx_and_nixl(process));
    paths.extend(mooncake(process));
    paths.extend(others(process));
    if paths.is_empty() && can_verbs(process) {
        paths.push(posted(process, "libibverbs"));
    }
    paths
}

fn can_verbs(process: &Process) -> bool {
    process.uses_rdma || process.has("libibverbs")
}

fn posted(process: &Process, library: &str) -> DataPath {
    match process.nic {
        NicKind::Efa => DataPath::new(PathKind::Efa, library, false),
        _ => DataPath::new(PathKind::Verbs, library, true),
    }
}

fn has_nccl_plugin(process: &Process) -> bool {
    process.has("libnccl-net-laxity") || process.has("libnccl_net_laxity")
}

fn nccl(process: &Process) -> Option<DataPath> {
    if !process.has("libnccl") && !process.has("librccl") {
        return None;
    }
    let net = process.variable("NCCL_NET");
    let named = |name: &str| net.is_none_or(|net| net.eq_ignore_ascii_case(name));
    if has_nccl_plugin(process) && named("Laxity") {
        let asks = Some(NCCL_PLUGIN);
        return Some(DataPath { asks, ..DataPath::new(PathKind::NcclNet, "NCCL", false) });
    }
    if !can_verbs(process) {
        return None;
    }
    if process.nic == NicKind::Efa {
        // NCCL's own transport knows no EFA, so a plugin over libfabric is needed.
        let has_plugin = process.has("libnccl-net") || process.has("libfabric");
        return has_plugin.then(|| DataPath::new(PathKind::Efa, "aws-ofi-nccl", false));
    }
    if process.has("libnccl-net-uccl") {
        return Some(DataPath::new(PathKind::NcclNet, "UCCL", true));
    }
    let is_off = process.variable("NCCL_IB_DISABLE") == Some("1");
    let is_socket = net.is_some_and(|net| net.eq_ignore_ascii_case("Socket"));
    (!is_off && !is_socket).then(|| DataPath::new(PathKind::NcclNet, "NCCL", true))
}

/// NCCL's one-sided path. By default GPUs ring the doorbells of mlx5 NICs, and a thread of NCCL
/// posts for other NICs. Only DeepEP V2, a variable or that thread shows that a job uses the path.
/// Laxity's plugin orders what the thread posts if `LAXITY_RMA` gives it to the plugin.
fn gin(process: &Process) -> Option<DataPath> {
    let is_deepep = process.has("deep_ep/_C");
    let has_nccl = process.has("libnccl") || process.has("librccl") || is_deepep;
    if !has_nccl || process.variable("NCCL_GIN_ENABLE") == Some("0") {
        return None;
    }
    let kind = match (process.variable("NCCL_GIN_TYPE"), process.nic) {
        (Some("2"), _) => PathKind::GinProxy,
        (Some("3" | "4"), _) => PathKind::GinGdaki,
        (Some("5"), _) => PathKind::Efa,
        _ if process.gin_thread => PathKind::GinProxy,
        (_, NicKind::Mlx5) if is_deepep => PathKind::GinGdaki,
        _ if is_deepep => PathKind::GinProxy,
        _ => return None,
    };
    let library = if is_deepep { "DeepEP V2" } else { "NCCL GIN" };
    let is_proxy = kind == PathKind::GinProxy;
    if is_proxy && has_one_sided_plugin(process) {
        return Some(DataPath { asks: Some(NCCL_PLUGIN), ..DataPath::new(kind, library, false) });
    }
    Some(DataPath::new(kind, library, is_proxy && process.nic != NicKind::Efa))
}

fn has_one_sided_plugin(process: &Process) -> bool {
    let is_on = matches!(process.variable("LAXITY_RMA"), Some("1" | "on"));
    let named = process.variable("NCCL_RMA_PLUGIN").is_none_or(|names| names.contains("laxity"));
    is_on && named && has_nccl_plugin(process)
}

/// NVSHMEM's transports are libraries of their own. If none is loaded, GPUs are assumed to post
/// work requests themselves (IBGDA).
fn nvshmem(process: &Process) -> Vec<DataPath> {
    const LIBRARY: &str = "NVSHMEM";
    if !process.has("libnvshmem") && !process.has("nvshmem_transport_") {
        return Vec::new();
    }
    let has = |transport: &str| process.has(&format!("nvshmem_transport_{transport}"));
    let mut paths = Vec::new();
    if has("ibrc") {
        paths.push(posted(process, LIBRARY));
    }
    if has("ibdevx") {
        paths.push(DataPath::new(PathKind::Devx, LIBRARY, false));
    }
    if has("libfabric") {
        paths.push(posted(process, LIBRARY));
    }
    let wanted = process.variable("NVSHMEM_IB_ENABLE_IBGDA");
    let wanted = wanted.is_some_and(|value| !matches!(value, "0" | "n" | "no" | "false"));
    if has("ibgda") || wanted || paths.is_empty() && !has("ucx") {
        paths.push(DataPath::new(PathKind::Ibgda, LIBRARY, false));
    }
    paths
}

fn ucx_and_nixl(process: &Process) -> Vec<DataPath> {
    let ucx = ucx(process);
    if !process.has("libnixl") {
        return ucx.into_iter().collect();
    }
    let backend = |name: &str| process.has(&format!("libplugin_{name}"));
    let over_ucx = backend("UCX") || process.has("libucp") || !process.has("libplugin_");
    let carrier = match () {
        () if over_ucx => ucx,
        () if backend("Mooncake") => Some(posted(process, "Mooncake")),
        () if can_verbs(process) => Some(posted(process, "libfabric")),
        () => None,
    };
    // The package waits for permits itself, also where the library is preloaded.
    let asks = match () {
        () if process.variable("LAXITY_NIXL") == Some("off") => None,
        () if process.has("_laxity.") => Some(PACKAGE),
        () if process.has("liblaxity_nixl") => Some("liblaxity_nixl.so"),
        () => None,
    };
    let Some(carrier) = carrier else {
        let own = DataPath { asks, ..DataPath::new(PathKind::Nixl, "UCX", false) };
        return asks.is_some().then_some(own).into_iter().collect();
    };
    let carrier = DataPath { asks, ..carrier };
    vec![DataPath { kind: PathKind::Nixl, ..carrier.clone() }, carrier]
}

fn ucx(process: &Process) -> Option<DataPath> {
    let transports = process.variable("UCX_TLS");
    let has_ucx = process.has("libucp") || process.has("libuct_");
    if !has_ucx || !can_verbs(process) || !transports.is_none_or(allows_infiniband) {
        return None;
    }
    if process.nic == NicKind::Mlx5 && transports.is_none_or(allows_mlx5) {
        return Some(DataPath::new(PathKind::Devx, "UCX", false));
    }
    Some(posted(process, "UCX"))
}

fn mooncake(process: &Process) -> Option<DataPath> {
    if !process.has("libtransfer_engine") && !process.has("mooncake/") {
        return None;
    }
    let asks = match () {
        () if process.has("liblaxity_mooncake") => Some("liblaxity_mooncake.so"),
        () if process.has("_laxity.") => Some(PACKAGE),
        () => None,
    };
    let is_rdma = can_verbs(process) || asks.is_some();
    is_rdma.then(|| DataPath { asks, ..posted(process, "Mooncake") })
}

/// Returns the paths of those libraries of `classes.toml` that the functions above do not handle.
/// MORI's GPUs ring the doorbells.
fn others(process: &Process) -> Vec<DataPath> {
    let mut libraries: Vec<&str> =
        process.class_variables.iter().map(|row| row.library.as_str()).collect();
    libraries.dedup();
    let has_mori = process
        .libraries
        .iter()
        .any(|file| file.strip_prefix("libmori_").is_some_and(|rest| !rest.starts_with("io")));
    let path = |library| match library {
        "MORI" if has_mori => Some(DataPath::new(PathKind::Ibgda, library, false)),
        "MORI-IO" | "UCCL EP" | "UCCL P2P" => Some(posted(process, library)),
        _ => None,
    };
    libraries.into_iter().filter_map(path).collect()
}

/// Reports whether a value of UCX_TLS allows UCX's own mlx5 transports. A value that starts with
/// `^` lists excluded transports, and is taken to allow UCX's own.
fn allows_mlx5(tls: &str) -> bool {
    allows(tls, |name| {
        matches!(name, "all" | "ib" | "rc" | "ud" | "dc")
            || name.ends_with("_x")
            || name.ends_with("_mlx5")
    })
}

fn allows_infiniband(tls: &str) -> bool {
    allows(tls, |name| {
        name == "all" || ["ib", "rc", "ud", "dc", "srd"].iter().any(|it| name.starts_with(it))
    })
}

fn allows(tls: &str, is_one: impl Fn(&str) -> bool) -> bool {
    tls.starts_with('^') || tls.split(',').any(|name| is_one(name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lists_of_verbs_transports_keep_ucx_on_verbs() {
        for own in ["all", "rc,cuda", "rc_x,sm", "^tcp", "dc_mlx5"] {
            assert!(allows_mlx5(own) && allows_infiniband(own), "{own}");
        }
        for verbs in ["rc_verbs,ud_verbs,self,sm", "rc_v"] {
            assert!(!allows_mlx5(verbs) && allows_infiniband(verbs), "{verbs}");
        }
        assert!(!allows_mlx5("tcp,sm") && !allows_infiniband("tcp,sm"));
    }
}
