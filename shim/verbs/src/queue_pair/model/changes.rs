//! Changes by the program, and completions that are left over.

use laxity_ibverbs::ibv_qp_state;

use super::ModelConnection;
use crate::bundle;

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
