//! Without `LAXITY_RMA`, the tables of one-sided operations step aside, and NCCL uses its own.

use std::ptr::null_mut;

use nccl_net_laxity::abi::rma_table::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};

#[test]
fn without_the_variable_init_is_refused_and_there_is_no_device() {
    assert!(std::env::var_os("LAXITY_RMA").is_none(), "unset it for this test");
    let (init, devices) = (ncclRmaPlugin_v16.init, ncclRmaPlugin_v16.devices);
    let all = [
        (ncclRmaPlugin_v14.init, ncclRmaPlugin_v14.devices),
        (ncclRmaPlugin_v15.init, ncclRmaPlugin_v15.devices),
        (init, devices),
    ];
    for (init, devices) in all {
        let (mut context, mut count) = (null_mut(), 7);
        // SAFETY: the results are this function's own.
        let codes = unsafe { (init(&raw mut context, 1, None), devices(&raw mut count)) };
        assert_eq!((codes, count), ((5, 0), 0));
        assert!(context.is_null());
    }
}
