//! Replies as the kernel's net/dcb/dcbnl.c packs them, and arbitrary ones.

use proptest::prelude::*;

use super::*;

fn parse(reply: &[u8]) -> Result<PriorityMap, DcbError> {
    Ok(map(ieee(reply)?))
}

fn packed(kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = ATTRIBUTE_BYTES + payload.len();
    let mut bytes = (length as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = ((HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend([0; 10]);
    bytes.extend(body);
    bytes
}

fn reply(ieee: &[Vec<u8>]) -> Vec<u8> {
    let name = packed(DCB_ATTR_IFNAME, b"eth0\0");
    // The kernel sets the flag of nested attributes here, and not in the APP table.
    let nested = packed(DCB_ATTR_IEEE | 0x8000, &ieee.concat());
    message(RTM_GETDCB, &[vec![0, DCB_CMD_IEEE_GET, 0, 0], name, nested].concat())
}

fn app(selector: u8, priority: u8, protocol: u16) -> Vec<u8> {
    let [low, high] = protocol.to_ne_bytes();
    packed(IEEE_APP, &[selector, priority, low, high])
}

/// willing, ets_cap, cbs, then seven tables of eight.
fn ets(bandwidth: [u8; 8], selection: [u8; 8], class_of_priority: [u8; 8]) -> Vec<u8> {
    let tables = [bandwidth, bandwidth, selection, class_of_priority, [0; 8], [0; 8], [0; 8]];
    packed(IEEE_ETS, &[vec![0, 8, 0], tables.concat()].concat())
}

fn pfc(enabled: u8) -> Vec<u8> {
    let mut payload = vec![8, enabled, 0, 0];
    payload.resize(136, 0);
    packed(IEEE_PFC, &payload)
}

#[test]
fn a_reply_of_mlx5_that_trusts_dscp_is_read_in_full() {
    let rows: Vec<u8> =
        (0..64).flat_map(|dscp| app(SELECTOR_DSCP, (dscp >> 3) as u8, dscp)).collect();
    let reply = reply(&[
        ets([10, 0, 0, 90, 0, 0, 0, 0], [2, 0, 255, 2, 1, 0, 0, 0], [1, 0, 2, 3, 4, 5, 6, 7]),
        pfc(1 << 3),
        packed(IEEE_APP_TABLE, &rows),
    ]);
    let map = parse(&reply).unwrap();
    assert_eq!(map.trust, Some(Trust::Dscp));
    assert_eq!((map.priority(26), map.priority(34), map.priority(64)), (Some(3), Some(4), None));
    assert_eq!((map.class(0), map.class(8), map.class(46)), (Some(1), Some(0), Some(5)));
    assert_eq!((map.is_lossless(26), map.is_lossless(34)), (Some(true), Some(false)));
    let selection = map.selection.unwrap();
    assert_eq!(selection[..3], [Selection::Ets(10), Selection::Strict, Selection::Vendor]);
    assert_eq!(selection[3..5], [Selection::Ets(90), Selection::CreditBased]);
    assert_eq!(map.treatments().alike(0, 34), Some(true));
    assert_eq!(map.treatments().alike(0, 26), Some(false));
}

#[test]
fn received_pfc_frames_of_all_priorities_are_added() {
    let mut payload = vec![8, 1 << 3, 0, 0, 0, 0, 0, 0];
    for frames in [[9_u64; 8], [0, 0, 0, 7, 0, 0, 0, 5]] {
        payload.extend(frames.into_iter().flat_map(u64::to_ne_bytes));
    }
    let whole = reply(&[packed(IEEE_PFC, &payload)]);
    assert_eq!(received(ieee(&whole).unwrap()), Some(12), "what was sent does not count");
    let short = reply(&[packed(IEEE_PFC, &payload[..135])]);
    assert_eq!(received(ieee(&short).unwrap()), None);
    assert_eq!(received(ieee(&reply(&[])).unwrap()), None);
}

#[test]
fn unmapped_dscps_have_the_default_priority_and_of_two_rows_the_higher_counts() {
    let rows = [
        app(SELECTOR_ETHERTYPE, 2, 0),
        app(SELECTOR_ETHERTYPE, 7, 0x8915),
        app(SELECTOR_DSCP, 3, 26),
        app(SELECTOR_DSCP, 5, 26),
        app(SELECTOR_DSCP, 9, 30),
        app(SELECTOR_DSCP, 1, 64),
    ];
    let map = parse(&reply(&[pfc(0), packed(IEEE_APP_TABLE, &rows.concat())])).unwrap();
    assert_eq!([26, 0, 30, 63].map(|dscp| map.priority(dscp)), [5, 2, 2, 2].map(Some));
    assert_eq!(map.class(26), None, "nobody said");
}

#[test]
fn trust_is_what_the_driver_says_else_what_its_rows_imply_else_unknown() {
    let trust = |parts: &[Vec<u8>]| parse(&reply(parts)).unwrap();
    let row = packed(IEEE_APP_TABLE, &app(SELECTOR_DSCP, 3, 26));
    let order = |selectors: &[u8]| {
        let one = |selector: &u8| packed(if *selector > 7 { 2 } else { 1 }, &[*selector]);
        packed(IEEE_APP_TRUST, &selectors.iter().flat_map(one).collect::<Vec<_>>())
    };
    assert_eq!(trust(&[]).trust, None);
    assert_eq!(trust(&[]).treatments(), Treatments::UNKNOWN);
    assert_eq!(trust(std::slice::from_ref(&row)).trust, Some(Trust::Dscp));
    let pcp = trust(&[row, order(&[255]), pfc(1 << 3)]);
    assert_eq!((pcp.trust, pcp.priority(26)), (Some(Trust::Pcp), None));
    assert_eq!(pcp.treatments(), Treatments::ALL_ALIKE, "no DSCP changes anything");
    let both = trust(&[order(&[5, 255]), pfc(1)]);
    assert_eq!((both.trust, both.is_lossless(26)), (Some(Trust::Dscp), Some(true)));
}

#[test]
fn errors_of_the_kernel_are_told_apart() {
    let error = |errno: Errno| parse(&message(NLMSG_ERROR, &(-(errno as i32)).to_ne_bytes()));
    assert!(matches!(error(Errno::EOPNOTSUPP), Err(DcbError::Unsupported)));
    assert!(matches!(error(Errno::EPERM), Err(DcbError::System(_))));
    let worst = parse(&message(NLMSG_ERROR, &i32::MIN.to_ne_bytes()));
    assert!(matches!(worst, Err(DcbError::Malformed(_))));
    let cee_only = message(RTM_GETDCB, &[0, DCB_CMD_IEEE_GET, 0, 0]);
    assert!(matches!(parse(&cee_only), Err(DcbError::Unsupported)));
}

#[test]
fn this_machines_loopback_has_no_dcb_and_an_absent_interface_is_named() {
    assert!(matches!(query("lo"), Err(DcbError::Unsupported)), "{:?}", query("lo"));
    for absent in ["no-such-dev", "", "a-name-that-is-too-long", "a\0b"] {
        assert!(matches!(query(absent), Err(DcbError::NoDevice(_))), "{absent:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_replies_are_read_without_panic(bytes: Vec<u8>, at in 0_usize..400, byte: u8) {
        let _ = parse(&bytes);
        let _ = parse(&message(RTM_GETDCB, &bytes));
        let rows: Vec<u8> = (0..64).flat_map(|dscp| app(SELECTOR_DSCP, 3, dscp)).collect();
        let mut good = reply(&[ets([0; 8], [0; 8], [0; 8]), pfc(8), packed(IEEE_APP_TABLE, &rows)]);
        let at = at % good.len();
        good[at] = byte;
        if let Ok(map) = parse(&good) {
            let _ = map.treatments();
        }
        let _ = parse(&good[..at]);
    }
}
