//! The library as a file: its exports, its dependencies, and that a process without RDMA does not
//! notice it. `laxity lab verbs` tests its effect on work requests with real devices.

#[path = "../../job/tests/preloaded/mod.rs"]
mod preloaded;

use std::collections::BTreeSet;
use std::process::Command;

use preloaded::{a_process_does_not_notice, exported, library, output, text};

/// Functions that the library exports besides the `lax_*` of `laxity.h`: those that programs call
/// instead of libibverbs, and the exemption.
const INTERPOSED: [&str; 17] = [
    "ibv_ack_async_event", "ibv_close_device", "ibv_cmd_alloc_pd", "ibv_cmd_dealloc_pd",
    "ibv_cmd_destroy_qp", "ibv_cmd_modify_qp", "ibv_cmd_modify_qp_ex", "ibv_create_qp",
    "ibv_destroy_qp", "ibv_get_async_event", "ibv_import_device", "ibv_modify_qp",
    "ibv_open_device", "ibv_query_qp", "laxity_verbs_exempt", "verbs_set_ops",
    "verbs_uninit_context",
];

const LIBRARY: &str = "liblaxity.so";

/// Returns the functions of `laxity.h`, which are the names before an argument list.
fn declared() -> BTreeSet<String> {
    let header = include_str!("../../client-c/include/laxity.h");
    let name = |text: &str| {
        let start =
            text.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        text[start..].to_owned()
    };
    header
        .match_indices('(')
        .map(|(at, _)| name(&header[..at]))
        .filter(|name| name.starts_with("lax_"))
        .collect()
}

#[test]
fn only_what_is_interposed_and_laxity_h_leave_the_library() {
    let interposed: BTreeSet<_> = INTERPOSED.map(str::to_owned).into();
    let declared = declared();
    assert!(declared.contains("lax_scope_push"), "{declared:?}");
    assert_eq!(exported(LIBRARY), &interposed | &declared);
}

#[test]
fn it_needs_no_rdma_library() {
    let dynamic = output(Command::new("readelf").arg("-d").arg(library(LIBRARY)));
    let needed: Vec<_> = text(&dynamic.stdout)
        .lines()
        .filter(|line| line.contains("NEEDED"))
        .map(str::to_owned)
        .collect();
    assert!(!needed.is_empty());
    assert!(
        needed.iter().all(|line| !line.contains("ibverbs") && !line.contains("rdmacm")),
        "{needed:?}"
    );
}

#[test]
fn a_process_without_rdma_does_not_notice_it() {
    a_process_does_not_notice(LIBRARY);
}
