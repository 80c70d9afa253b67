//! Changes by the program, and completions that are left over.

use core::mem;

use laxity_ibverbs::{
    ibv_access_flags as access, ibv_qp_state, ibv_wc, ibv_wc_status as status, ibv_wr_opcode as op,
};

use super::{AT_POLL, ModelCompletion, ModelConnection, ModelRequest};
use crate::bundle::{self, BARRIER_ID};
use crate::contexts;

/// Puts a completion into the queue, as one that is left over from before a change.
fn leave_over(connection: &ModelConnection, index: usize, id: u64) {
    let request =
        ModelRequest { id, signaled: true, landing: core::ptr::null_mut(), place: 0, slot: 0 };
    let left = ModelCompletion { request, status: status::IBV_WC_WR_FLUSH_ERR };
    connection.device.state.lock().completed.push_back((index, left));
}

/// Returns ids and numbers of completions, relative to the program's queue pair.
fn polled(connection: &ModelConnection) -> Vec<(u64, u32)> {
    let first = connection.device.pairs[0].qp_num;
    connection.poll(8).iter().map(|wc| (wc.wr_id, wc.qp_num - first)).collect()
}

#[test]
fn without_bundles_a_change_waits_for_no_candidate() {
    let connection = ModelConnection::new(4, 1);
    bundle::IS_ON_IN_TEST.set(false);
    let candidate = connection.queue_pair.candidate.lock();
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RTS), 0);
    connection.queue_pair.end_bundle();
    assert!(!connection.queue_pair.close());
    drop(candidate);
    bundle::IS_ON_IN_TEST.set(true);
}

#[test]
fn after_a_reset_completions_of_siblings_are_left_over_and_none_of_barriers() {
    let connection = ModelConnection::new(4, 1);
    connection.bundle();
    assert_eq!(connection.post(&[(1, op::IBV_WR_RDMA_READ, true)]), (0, 1));
    let mut state = connection.device.state.lock();
    state.execute(0, true);
    state.complete(0);
    assert_eq!(state.completed.len(), 1, "the barrier failed");
    drop(state);
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RESET), 0);
    leave_over(&connection, 1, 7);
    leave_over(&connection, 1, BARRIER_ID + 3);
    assert_eq!(polled(&connection), [(7, 0)]);
}

#[test]
fn completions_of_a_destroyed_bundle_have_the_number_that_the_program_knew() {
    let connection = ModelConnection::new(4, 2);
    connection.bundle();
    let first = connection.device.pairs[0].qp_num;
    let context = contexts::find(connection.device.pairs[0].context).expect("a context");
    connection.queue_pair.end_bundle();
    connection.queue_pair.close();
    context.queue_pairs.remove(first);
    for index in 0..3 {
        leave_over(&connection, index, BARRIER_ID + 31);
        leave_over(&connection, index, 7);
    }
    assert_eq!(polled(&connection), [(7, 0), (7, 0), (7, 0)]);
    // Another queue pair has the number now.
    context.queue_pairs.make(first + 1);
    leave_over(&connection, 1, 8);
    leave_over(&connection, 2, 9);
    assert_eq!(polled(&connection), [(8, 1), (9, 0)]);
}

#[test]
fn only_completions_of_the_bundle_are_changed() {
    for is_reset in [false, true] {
        let connection = ModelConnection::new(4, 1);
        connection.bundle();
        if is_reset {
            assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RESET), 0);
        }
        // A queue pair of the program failed, whose work request has the id of a barrier.
        let number = connection.device.pairs[1].qp_num + 1;
        // SAFETY: plain data, for which zeroes are a value.
        let mut wc = unsafe { mem::zeroed::<ibv_wc>() };
        (wc.qp_num, wc.wr_id, wc.status) = (number, BARRIER_ID, status::IBV_WC_WR_FLUSH_ERR);
        let mut out = Vec::new();
        let cq = core::ptr::from_ref(&*connection.device.cq);
        assert!(!connection.queue_pair.complete_bundled(cq, &mut wc, (&mut out, 1)), "{is_reset}");
        assert_eq!((wc.qp_num, out.len()), (number, 0), "{is_reset}");
    }
}

#[test]
fn the_end_of_an_earlier_barrier_is_not_that_of_the_outstanding_one() {
    for (index, place) in [(1, 0), (0, 3)] {
        let connection = ModelConnection::new(4, 1);
        connection.bundle();
        assert_eq!(connection.post(&[(1, op::IBV_WR_RDMA_READ, true)]), (0, 1));
        leave_over(&connection, index, BARRIER_ID + place);
        assert_eq!(polled(&connection), [], "member {index}, place {place}");
        connection.device.state.lock().complete(0);
        assert_eq!(polled(&connection), [(1, 0)], "member {index}, place {place}");
    }
}

#[test]
fn a_bundle_needs_the_peers_right_to_read() {
    let connection = ModelConnection::new(4, 1);
    let reads = access::IBV_ACCESS_REMOTE_READ;
    assert_eq!(connection.change_rights(access::IBV_ACCESS_REMOTE_WRITE), 0, "there is no bundle");
    connection.bundle();
    assert_eq!(connection.change_rights(access::IBV_ACCESS_REMOTE_WRITE), libc::EINVAL);
    let state = connection.queue_pair.state.lock();
    assert!(state.bundle.as_ref().is_some_and(|bundle| !bundle.is_broken));
    drop(state);
    bundle::IS_ON_IN_TEST.set(false);
    assert_eq!(connection.change_rights(access::IBV_ACCESS_REMOTE_WRITE), 0);
    bundle::IS_ON_IN_TEST.set(true);
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RESET), 0);
    assert_eq!(connection.change_rights(access::IBV_ACCESS_REMOTE_WRITE), 0);
    assert_eq!(connection.change_rights(reads), 0);
}

#[test]
fn a_bundle_that_begins_during_a_poll_is_hidden() {
    let connection: &'static _ = Box::leak(Box::new(ModelConnection::new(4, 1)));
    AT_POLL.set(Some(Box::new(|| {
        connection.bundle();
        leave_over(connection, 1, 7);
    })));
    assert_eq!(polled(connection), [(7, 0)]);
}
