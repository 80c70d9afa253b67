//! Outputs of the tools. The forms are those of `mlnx_qos` (OFED) and `dcb` (iproute2).

use std::fs;

use super::*;

const LOSSLESS: &str = include_str!("fixtures/mlnx_qos_lossless.txt");
const PCP: &str = include_str!("fixtures/mlnx_qos_pcp.txt");

#[test]
fn mlnx_qos_says_trust_map_pfc_and_queues() {
    let map = mlnx_qos(LOSSLESS);
    assert_eq!(map.trust, Some(Trust::Dscp));
    assert_eq!([26, 30, 48, 63, 7].map(|dscp| map.priority(dscp)), [3, 6, 6, 7, 0].map(Some));
    assert_eq!(map.pfc, Some(1 << 3));
    assert_eq!((map.class(0), map.class(8), map.class(26)), (Some(1), Some(0), Some(3)));
    let selection = map.selection.unwrap();
    assert_eq!((selection[3], selection[6]), (Selection::Ets(90), Selection::Strict));
    let pcp = mlnx_qos(PCP);
    assert_eq!((pcp.trust, pcp.pfc, pcp.priority(26)), (Some(Trust::Pcp), Some(0), None));
    assert_eq!(mlnx_qos(&LOSSLESS.replace('\n', "\r\n")), map);
    for nothing in ["", "Priority trust state is not supported on your system\n"] {
        assert_eq!(mlnx_qos(nothing), PriorityMap::default());
    }
}

#[test]
fn dcb_says_the_same_as_text_and_as_json_with_its_stray_blanks() {
    let text = "willing off ets-cap 8 cbs off \n\
        tc-bw 0:10 1:0 2:0 3:90 4:0 5:0 6:0 7:0 \n\
        tc-tsa 0:ets 1:strict 2:strict 3:ets 4:strict 5:strict 6:strict 7:strict \n\
        prio-tc 0:0 1:1 2:2 3:3 4:4 5:5 6:6 7:7 \n\
        pfc-cap 8 macsec-bypass off delay 4096 \n\
        prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off \n\
        dscp-prio 0:0 CS3:3 AF31:3 EF:5 \n\
        order: dscp pcp \n";
    let json = r#"{"willing":false,"ets_cap":8,"cbs":false,"tc_bw":[10,0,0,90,0,0,0,0],
        "tc_tsa":["ets","strict","strict","ets","strict","strict","strict","strict"],
        "prio_tc":[0,1,2,3,4,5,6,7],"pfc_cap":8,"macsec_bypass":false,"delay":4096,
        "prio_pfc":[false,false,false,true,false,false,false,false],
        "dscp_prio":[[0,0," "],[24,3," "],[26,3," "],[46,5," "]],"order":["dscp","pcp"]}"#;
    let map = dcb_output(text);
    assert_eq!(map.trust, Some(Trust::Dscp));
    assert_eq!([0, 24, 26, 46, 63].map(|dscp| map.priority(dscp)), [0, 3, 3, 5, 0].map(Some));
    assert_eq!((map.pfc, map.class(46)), (Some(1 << 3), Some(5)));
    let selection = map.selection.unwrap();
    assert_eq!(selection[..3], [Selection::Ets(10), Selection::Strict, Selection::Strict]);
    assert_eq!(selection[3], Selection::Ets(90));
    assert_eq!(dcb_output(json), map);
    assert_eq!(dcb_output(&format!("[{json}]")), map);
    let default = dcb_output("default-prio 0 2 \ndscp-prio 0:0 26:3 \n");
    assert_eq!([0, 26, 46].map(|dscp| default.priority_of_dscp.unwrap()[dscp]), [0, 3, 2]);
    let strays = json.replace("\"tc_bw\":[10,0", "\"tc_bw\":[10,\" \",0");
    assert_eq!(dcb_output(&strays), map);
}

#[test]
fn output_that_is_cut_or_odd_is_unknown_rather_than_wrong() {
    for odd in [
        "dscp-prio CS9:3",
        "dscp-prio 26:8",
        "dscp-prio 64:3",
        "prio-tc 0:0 1:1",
        "prio-pfc",
        "prio-tc 0:0 1:1 2:2 3:3 4:4 5:5 6:6 8:7",
        "{\"prio_tc\":[0,1,2]}",
        "{\"dscp_prio\":{}}",
        "Attribute read: Operation not supported",
        "null",
    ] {
        assert_eq!(dcb_output(odd), PriorityMap::default(), "{odd}");
    }
    for line in LOSSLESS.lines() {
        let _ = mlnx_qos(line);
    }
    assert_eq!(mlnx_qos("enabled 0 0 0 1").pfc, None);
    assert_eq!(mlnx_qos("prio:9 dscp:1,\nprio:1 dscp:99,").priority_of_dscp, None);
}

#[test]
fn the_kernels_word_precedes_and_tools_fill_in_what_it_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path());
    let dscp_5 = |_: &str| {
        Ok(PriorityMap {
            trust: Some(Trust::Dscp),
            priority_of_dscp: Some([5; DSCPS]),
            ..PriorityMap::default()
        })
    };
    let unsupported = |_: &str| Err(DcbError::Unsupported);
    let mlnx = |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| LOSSLESS.to_owned());
    let both = settings(&root, "eth0", &dscp_5, &mlnx);
    assert_eq!(both.source, "mlnx_qos");
    assert_eq!((both.maps[0].priority(26), both.maps[0].pfc), (Some(5), Some(8)));
    let dcb = |program: &str, arguments: &[&str]| {
        let text = match arguments.get(2) {
            Some(&"app") => "dscp-prio 26:3",
            Some(&"pfc") => "prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off",
            _ => return None,
        };
        (program == "dcb").then(|| text.to_owned())
    };
    let app = settings(&root, "eth0", &unsupported, &dcb);
    assert_eq!((app.source, app.maps[0].trust), ("dcb", Some(Trust::Dscp)));
    assert_eq!(app.maps[0].is_lossless(26), Some(true));
    let nobody = settings(&root, "eth0", &unsupported, &|_, _| None);
    assert_eq!(nobody, NicQos { maps: Vec::new(), source: "unknown" });
    let complete = |_: &str| Ok(mlnx_qos(LOSSLESS));
    assert_eq!(settings(&root, "eth0", &complete, &|_, _| panic!("not asked")).source, "dcbnl");
    fs::create_dir_all(folder.path().join("sys/class/net/bond0/lower_eth0")).unwrap();
    let below = |name: &str| if name == "eth0" { complete(name) } else { unsupported(name) };
    assert_eq!(settings(&root, "bond0", &below, &|_, _| None).maps.len(), 1);
}
