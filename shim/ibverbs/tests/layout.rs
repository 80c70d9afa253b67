//! Compares the bindings with this machine's libibverbs header, by means of its C compiler.

use core::fmt::Write as _;
use core::mem::offset_of;
use std::fs;
use std::path::Path;
use std::process::Command;

use laxity_ibverbs::*;
use laxity_tests::{Need, skip};

/// Compiles these lines after the header of libibverbs. Returns the compiler's message on failure.
fn compile(folder: &Path, lines: &str) -> Result<(), String> {
    let source = folder.join("layout.c");
    let text = format!("#include <stddef.h>\n#include <infiniband/verbs.h>\n{lines}");
    fs::write(&source, text).map_err(|error| error.to_string())?;
    let cc = Command::new("cc")
        .arg("-fsyntax-only")
        .arg(&source)
        .output()
        .map_err(|error| format!("cc: {error}"))?;
    if cc.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&cc.stderr).into_owned())
}

fn equal(lines: &mut String, c: &str, rust: impl core::fmt::Display) {
    writeln!(lines, "_Static_assert({c} == {rust}, \"{c} is not {rust}\");").expect("a string");
}

/// Checks the offsets of fields. A field has the same name in C unless another is given. With
/// `sized`, the size is checked, too. Other structs grow at their end.
macro_rules! layout {
    (@c $field:ident) => { stringify!($field) };
    (@c $field:ident $c:literal) => { $c };
    ($lines:ident: $(
        $sized:ident $kind:literal $name:ident { $($field:ident $(= $c:literal)?),+ }
    )+) => {
        $(
            let name = concat!($kind, " ", stringify!($name));
            if stringify!($sized) == "sized" {
                equal($lines, &format!("sizeof({name})"), size_of::<$name>());
            }
            $(
                let c = format!("offsetof({name}, {})", layout!(@c $field $($c)?));
                equal($lines, &c, offset_of!($name, $field));
            )+
        )+
    };
}

fn structs(lines: &mut String) {
    layout! { lines:
        sized "union" ibv_gid { raw, global }
        sized "struct" ibv_sge { addr, length, lkey }
        sized "struct" ibv_data_buf { addr, length }
        sized "struct" ibv_recv_wr { wr_id, next, sg_list, num_sge }
        sized "struct" ibv_mw_bind_info { mr, addr, length, mw_access_flags }
        sized "struct" ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_data_invalidated_rkey_union = "imm_data", wr,
            remote_srqn = "qp_type.xrc.remote_srqn", bind_mw_tso_union = "bind_mw"
        }
        sized "struct" ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len,
            imm_data_invalidated_rkey_union = "imm_data", qp_num, src_qp, wc_flags, pkey_index,
            slid, sl, dlid_path_bits
        }
        sized "struct" ibv_pd { context, handle }
        sized "struct" ibv_mr { context, addr, length, handle, lkey, rkey }
        sized "struct" ibv_srq { context, pd, handle, mutex, cond, events_completed }
        sized "struct" ibv_srq_attr { max_wr, max_sge, srq_limit }
        sized "struct" ibv_srq_init_attr { srq_context, attr }
        sized "struct" ibv_cq { context, cqe, mutex, cond, async_events_completed }
        sized "struct" ibv_qp {
            context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond,
            events_completed
        }
        sized "struct" ibv_qp_cap {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
        }
        sized "struct" ibv_qp_init_attr {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all
        }
        sized "struct" ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        sized "struct" ibv_ah_attr {
            grh, dlid, sl, src_path_bits, static_rate, is_global, port_num
        }
        sized "struct" ibv_qp_attr {
            qp_state, path_mtu, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr,
            alt_ah_attr, pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
            timeout, retry_cnt, rnr_retry, rate_limit
        }
        sized "struct" ibv_device { node_type, transport_type, name, dev_name, ibdev_path }
        sized "struct" ibv_device_attr {
            node_guid, sys_image_guid, max_qp, max_qp_wr, max_cqe, atomic_cap, phys_port_cnt
        }
        sized "struct" ibv_port_attr {
            state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed,
            link_layer, port_cap_flags2
        }
        sized "struct" ibv_context_ops {
            alloc_mw, poll_cq, post_srq_recv, post_send, post_recv
        }
        sized "struct" ibv_async_event { element, event_type }
        sized "struct" ibv_context { device, ops, cmd_fd, async_fd, mutex, abi_compat }
        sized "struct" ibv_rx_hash_conf { rx_hash_function, rx_hash_key, rx_hash_fields_mask }
        sized "struct" ibv_poll_cq_attr { comp_mask }
        grows "struct" ibv_cq_init_attr_ex { cqe, channel, wc_flags, comp_mask, parent_domain }
        grows "struct" ibv_qp_init_attr_ex {
            send_cq, cap, qp_type, comp_mask, pd, rx_hash_conf, source_qpn, send_ops_flags
        }
        grows "struct" ibv_cq_ex {
            context, status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_qp_num,
            read_completion_wallclock_ns
        }
        grows "struct" ibv_qp_ex {
            qp_base, wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add, wr_bind_mw,
            wr_local_inv, wr_rdma_read, wr_rdma_write, wr_rdma_write_imm, wr_send, wr_send_imm,
            wr_send_inv, wr_set_inline_data, wr_set_inline_data_list, wr_set_sge, wr_set_sge_list,
            wr_start, wr_complete, wr_abort, wr_atomic_write
        }
    }
}

#[test]
fn the_bindings_are_laid_out_as_the_installed_header_says() {
    let folder = tempfile::tempdir().expect("a folder");
    // This name is the newest in the bindings.
    if let Err(why) = compile(folder.path(), "enum { NEWEST = IBV_WR_ATOMIC_WRITE };") {
        let need = "libibverbs-dev of rdma-core 44 or newer is not installed";
        return skip(Need::Machine, format!("{need}: {why}"));
    }
    let mut lines = String::new();
    structs(&mut lines);
    for (rust, c) in [
        (offset_of!(ibv_send_wr, wr.rdma.rkey), "wr.rdma.rkey"),
        (offset_of!(ibv_send_wr, wr.atomic.swap), "wr.atomic.swap"),
        (offset_of!(ibv_send_wr, wr.atomic.rkey), "wr.atomic.rkey"),
        (offset_of!(ibv_send_wr, wr.ud.remote_qkey), "wr.ud.remote_qkey"),
    ] {
        equal(&mut lines, &format!("offsetof(struct ibv_send_wr, {c})"), rust);
    }
    // This struct grows at its beginning.
    let context = offset_of!(verbs_context, context);
    for (rust, c) in [
        (offset_of!(verbs_context, create_cq_ex), "create_cq_ex"),
        (offset_of!(verbs_context, create_qp_ex), "create_qp_ex"),
        (offset_of!(verbs_context, sz), "sz"),
    ] {
        let c = format!(
            "offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {c})"
        );
        equal(&mut lines, &c, context - rust);
    }
    let mut constants = 0;
    for line in include_str!("../src/generated.rs").lines() {
        if let Some(line) = line.trim().strip_prefix("pub const ") {
            let (name, value) = line.split_once(": Type = ").expect("a constant");
            equal(&mut lines, name, value.trim_end_matches(';'));
            constants += 1;
        }
    }
    assert!(constants > 50, "only {constants} constants were found");
    compile(folder.path(), &lines).unwrap_or_else(|why| panic!("{why}"));
}
