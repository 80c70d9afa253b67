//! The catalogue of the matrix: the programs, their arguments, and their work requests.

use std::time::Duration;

use super::Programs;
use super::daemon::{COLLECTIVE, P2D, TIGHT_SOCKET};
use super::program::{Launch, Posted, Program, Ready, Side, Through};
use crate::vm::network::{ADDRESSES, DEVICES};

pub(super) const MOONCAKE: &str = scratch!("transfer_engine.py");
pub(super) const MOONCAKE_PY: &str = include_str!("transfer_engine.py");
pub(super) const MOONCAKE_PORT: u16 = 7473;

/// The sides of a perftest that post work requests.
#[derive(Clone, Copy)]
enum Who {
    Client,
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Trait {
    /// The program posts more than the rate allows, so some of it has to wait.
    Greedy,
    Run,
    /// The program finds its peer by the RDMA connection manager. It also exchanges parameters and
    /// barriers by RDMA, so only the wire shows how many work requests there are.
    Managed,
    Datagram,
}

/// A perftest: its name, command, posting sides, number and size of work requests, and traits.
type Perftest = (&'static str, &'static str, Who, u64, u64, &'static [Trait]);

#[rustfmt::skip]
const PERFTESTS: &[Perftest] = {
    const K64: u64 = 65536;
    use Trait::{Datagram, Greedy, Managed, Run};
    use Who::{Both, Client};
    &[
        ("write_bw", "ib_write_bw -n 160", Client, 160, K64, &[Greedy, Run]),
        ("write_bw_4_qps", "ib_write_bw -n 50 -q 4", Client, 200, K64, &[Greedy]),
        ("write_bw_post_list", "ib_write_bw -n 160 -l 16", Client, 160, K64, &[Greedy]),
        ("write_bw_cq_mod", "ib_write_bw -n 160 -Q 20", Client, 160, K64, &[Greedy]),
        // These are so few bytes that possibly none has to wait.
        ("write_bw_inline", "ib_write_bw -n 1000 -s 64 -I 64", Client, 1000, 64, &[]),
        ("write_bw_both_ways", "ib_write_bw -n 100 -b", Both, 100, K64, &[Greedy]),
        ("write_bw_uc", "ib_write_bw -n 160 -c UC", Client, 160, K64, &[Greedy]),
        ("write_lat", "ib_write_lat -n 100 -s 8", Both, 100, 8, &[]),
        ("write_lat_uc_inline", "ib_write_lat -n 100 -s 64 -c UC -I 64", Both, 100, 64, &[]),
        ("read_bw", "ib_read_bw -n 160", Client, 160, K64, &[Greedy, Run]),
        // An emulated processor that is woken for each completion may be slower than the rate.
        ("read_bw_events", "ib_read_bw -n 160 -e", Client, 160, K64, &[]),
        ("read_lat", "ib_read_lat -n 100 -s 4096", Client, 100, 4096, &[]),
        ("send_bw", "ib_send_bw -n 160", Client, 160, K64, &[Greedy]),
        ("send_bw_events", "ib_send_bw -n 160 -e", Client, 160, K64, &[]),
        ("send_bw_list_qps", "ib_send_bw -n 96 -l 8 -q 2", Client, 192, K64, &[Greedy]),
        ("send_bw_ud", "ib_send_bw -n 300 -c UD -s 2048", Client, 300, 2048, &[Datagram]),
        ("send_lat", "ib_send_lat -n 100 -s 64", Both, 100, 64, &[]),
        ("send_lat_events", "ib_send_lat -n 100 -s 64 -e", Both, 100, 64, &[]),
        ("atomic_bw", "ib_atomic_bw -n 200", Client, 200, 8, &[]),
        ("atomic_lat", "ib_atomic_lat -n 100", Client, 100, 8, &[]),
        ("write_bw_cm", "ib_write_bw -n 160 -R", Client, 0, 0, &[Greedy, Run, Managed]),
        ("send_lat_cm", "ib_send_lat -n 100 -s 64 -R", Both, 0, 0, &[Managed]),
    ]
};

/// Exponent of the timeout of perftest's queue pairs: 4.096 µs · 2^18, about a second. perftest has
/// 67 ms, and on a busy machine acknowledgements take longer. What rxe (Linux 6.1) sends again then
/// may end in `IBV_WC_REM_INV_REQ_ERR` (docs/notes/verbs-seen-once.md).
const TIMEOUT_EXPONENT: u32 = 18;

fn perftest(gid: u32, &(name, line, who, posts, size, traits): &Perftest) -> Program {
    let has = |wanted| traits.contains(&wanted);
    let (one, none) = match has(Trait::Managed) {
        true => (Posted::Wire, Posted::Wire),
        false => (exactly(posts, posts * size), exactly(0, 0)),
    };
    let server = match who {
        Who::Client => none,
        Who::Both => one,
    };
    let ready = match has(Trait::Managed) {
        true => Ready::Management,
        false => Ready::Port(18515),
    };
    let line = |device: usize, to: &str| {
        format!("{line} -d {} -x {gid} -u {TIMEOUT_EXPONENT} -F {to}", DEVICES[device])
    };
    let through = match has(Trait::Run) {
        true => Through::Run,
        false => Through::Preload,
    };
    Program {
        name: name.into(),
        launch: launch(through, "perftest", 300),
        server: Some((Side::new(&line(0, ""), server), ready)),
        client: Side::new(&line(1, ADDRESSES[0]), one),
        must_defer: has(Trait::Greedy),
        dscp: (!has(Trait::Datagram)).then_some(P2D),
        datagram_dscp: has(Trait::Datagram).then_some(0),
        all_cross: true,
    }
}

const fn launch(through: Through, profile: &'static str, limit_s: u64) -> Launch {
    Launch { through, profile, limit: Duration::from_secs(limit_s) }
}

const fn exactly(work_requests: u64, bytes: u64) -> Posted {
    Posted::Exactly { work_requests, bytes }
}

fn perftests(gid: u32) -> Vec<Program> {
    PERFTESTS.iter().map(|test| perftest(gid, test)).collect()
}

/// Returns the programs over frameworks. The framework chooses the work requests of a message.
fn frameworks(gid: u32) -> Vec<Program> {
    let side = |line: &str| Side::new(line, Posted::Wire);
    let pair = |name: &str, profile, server: Side, ready, client: Side| Program {
        name: name.into(),
        launch: launch(Through::Run, profile, 300),
        server: Some((server, ready)),
        client,
        must_defer: false,
        dscp: Some(P2D),
        datagram_dscp: None,
        all_cross: true,
    };
    let ucx = |name: &str, test: &str, must_defer: bool| {
        let gid = gid.to_string();
        let side = |device: usize, to: &str| {
            side(&format!("ucx_perftest {test} -s 65536 -n 160 -w 5 {to}"))
                .with("UCX_TLS", "rc_verbs,ud_verbs")
                .with("UCX_NET_DEVICES", &format!("{}:1", DEVICES[device]))
                .with("UCX_IB_GID_INDEX", &gid)
                // SoftRoCE does not fill in the header of a datagram as UCX expects.
                .with("UCX_UD_VERBS_ETH_DGID_CHECK", "n")
        };
        let (server, client) = (side(0, ""), side(1, ADDRESSES[0]));
        Program {
            must_defer,
            // Datagrams carry UCX's default traffic class, 106.
            datagram_dscp: Some(26),
            ..pair(name, "ucx", server, Ready::Port(13337), client)
        }
    };
    let here = ADDRESSES[0];
    let rping = |role: &str| side(&format!("rping {role} -a {here} -C 20 -S 4096 -V"));
    let libfabric = |device: &str, to: &str| {
        let line = format!("fi_pingpong -p verbs -e msg -d {device} -I 50 -S 65536 -v {to}");
        side(&line)
    };
    let (server, client) = (libfabric("rxe0", ""), libfabric("rxe1", here));
    vec![
        pair("rping", "default", rping("-s"), Ready::Management, rping("-c")),
        ucx("ucx_put", "-t ucp_put_bw -C", true),
        // This test sends pieces of 8 KiB, more slowly than the enforced rate.
        ucx("ucx_tag", "-t tag_bw", false),
        pair("fi_pingpong", "default", server, Ready::Port(47592), client),
    ]
}

pub(super) fn mooncake(programs: &Programs, name: &str, what: &str) -> Option<Program> {
    let python = programs.python.as_ref()?.display().to_string();
    let side = |line: &str| {
        let mut side = Side::new(line, Posted::Stated);
        side.argv.insert(0, python.clone());
        side
    };
    let server = format!("{MOONCAKE} target {} {MOONCAKE_PORT}", DEVICES[0]);
    let client = format!("{MOONCAKE} initiator {} {MOONCAKE_PORT} {what}", DEVICES[1]);
    Some(Program {
        name: name.into(),
        launch: launch(Through::Run, "mooncake", 300),
        server: Some((side(&server), Ready::Port(MOONCAKE_PORT))),
        client: side(&client),
        must_defer: true,
        dscp: Some(P2D),
        datagram_dscp: None,
        all_cross: true,
    })
}

pub(super) fn long_write(gid: u32) -> Program {
    let test = (
        "ib_write_bw",
        "ib_write_bw -n 3200",
        Who::Client,
        3200,
        65536,
        &[Trait::Greedy, Trait::Run][..],
    );
    Program { launch: launch(Through::Run, "perftest", 300), dscp: None, ..perftest(gid, &test) }
}

fn checks(programs: &Programs, gid: u32) -> Vec<Program> {
    let folder = programs.checks.display().to_string();
    let program = |name: &str, line: &str, through| Program {
        name: name.into(),
        launch: launch(through, "default", 240),
        server: None,
        client: Side::new(&format!("{folder}/{line} -g {gid}"), Posted::Stated)
            // The factor on time limits, because the machine may have other load.
            .with("VERBS_SLOW", "4"),
        must_defer: true,
        dscp: Some(P2D),
        datagram_dscp: Some(0),
        all_cross: false,
    };
    let nccl = |name: &str, line: &str| Program {
        launch: launch(Through::Preload, "nccl", 240),
        dscp: Some(COLLECTIVE),
        all_cross: true,
        ..program(name, line, Through::Preload)
    };
    // The program takes options before the subtests.
    let options_first = |mut program: Program| {
        let gid_option = program.client.argv.split_off(program.client.argv.len() - 2);
        program.client.argv.splice(1..1, gid_option);
        program
    };
    // While a work request waits, the library counts the free entries of the send queue. SoftRoCE's
    // provider accepts more than it announces, so all work requests have to wait here.
    let strict = "verbs_check --strict-sq sq_overflow wr_overflow";
    let mut tight = options_first(program("send_queue_full", strict, Through::Preload));
    tight.client = tight.client.with("LAXITY_SOCKET", TIGHT_SOCKET);
    vec![
        nccl("dlopen", "dlopen_check"),
        nccl("late_dlopen", "dlopen_check --late"),
        options_first(nccl("nccl_rma_ib_proxy", "verbs_check nccl_rma")),
        program("verbs_check", "verbs_check", Through::Run),
        tight,
    ]
}

pub(super) fn all(gid: u32, programs: &Programs) -> Vec<Program> {
    let mut all = perftests(gid);
    all.extend(frameworks(gid));
    all.extend(mooncake(programs, "mooncake", "all"));
    all.extend(checks(programs, gid));
    all
}
