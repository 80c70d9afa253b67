//! Tests of `laxity switch-config`: each vendor's form is read back by a small parser of its own,
//! and compared with the levels of the sample configuration.

use std::collections::BTreeMap;
use std::process::{Command, Output};

use serde_json::Value;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/laxityd.toml");

fn switch_config(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
    command.args(["switch-config", "--control", "/nowhere/control.sock"]).args(arguments);
    command.output().expect("laxity runs")
}

/// What a switch does, as read from its configuration.
#[derive(Debug, Default, PartialEq)]
struct Switch {
    queue_of_dscp: BTreeMap<u8, u8>,
    /// The weight of each queue. `None`: strict priority.
    weight: BTreeMap<u8, Option<u32>>,
    pfc: Vec<u8>,
}

fn numbers(text: &str, separator: char) -> Vec<u8> {
    text.split(separator).map(|number| number.parse().expect(text)).collect()
}

fn sonic(text: &str) -> Switch {
    let tables: Value = serde_json::from_str(text).expect("JSON");
    let small = |value: &Value| value.as_str().expect("a string").parse::<u8>().expect("a number");
    let mut switch = Switch::default();
    let binding = &tables["PORT_QOS_MAP"]["Ethernet0"];
    // References are followed, so a name that is nowhere defined fails.
    let named = |table: &str, key: &str| &tables[table][binding[key].as_str().expect(key)];
    let queues = named("TC_TO_QUEUE_MAP", "tc_to_queue_map");
    let classes = named("DSCP_TO_TC_MAP", "dscp_to_tc_map").as_object().expect("a map");
    for (dscp, class) in classes {
        let queue = small(&queues[class.as_str().expect("a class")]);
        switch.queue_of_dscp.insert(dscp.parse().expect("a DSCP"), queue);
    }
    for (key, queue) in tables["QUEUE"].as_object().expect("queues") {
        let number = key.strip_prefix("Ethernet0|").expect(key).parse().expect("a queue");
        let scheduler = &tables["SCHEDULER"][queue["scheduler"].as_str().expect("a name")];
        let weight = match scheduler["type"].as_str() {
            Some("STRICT") => None,
            Some("DWRR") => Some(u32::from(small(&scheduler["weight"]))),
            other => panic!("{other:?}"),
        };
        switch.weight.insert(number, weight);
    }
    if let Some(list) = binding.get("pfc_enable") {
        switch.pfc = numbers(list.as_str().expect("a list"), ',');
        for queue in &switch.pfc {
            let key = queue.to_string();
            let group = &named("TC_TO_PRIORITY_GROUP_MAP", "tc_to_pg_map")[&key];
            let mapped = &named("MAP_PFC_PRIORITY_TO_QUEUE", "pfc_to_queue_map")[&key];
            assert_eq!((small(group), small(mapped)), (*queue, *queue));
        }
    }
    switch
}

fn cumulus(text: &str) -> Switch {
    let mut switch = Switch::default();
    let mut priorities = BTreeMap::new();
    let mut queue_of_priority = BTreeMap::new();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u8>().expect(line);
        match words[..] {
            ["nv", "set", "qos", "mapping", "default-global", "trust", "l3"]
            | ["nv", "set", "qos", "pfc", "default-global", "tx" | "rx", "enable"] => {}
            [
                "nv",
                "set",
                "qos",
                "mapping",
                "default-global",
                "dscp",
                list,
                "switch-priority",
                _,
            ] => {
                priorities.extend(numbers(list, ',').into_iter().map(|dscp| (dscp, number(8))));
            }
            [_, _, _, "egress-queue-mapping", _, "switch-priority", _, "traffic-class", _] => {
                queue_of_priority.insert(number(6), number(8));
            }
            [_, _, _, "egress-scheduler", _, "traffic-class", _, "mode", "strict" | "dwrr"] => {
                switch.weight.insert(number(6), None);
            }
            [_, _, _, "egress-scheduler", _, "traffic-class", _, "bw-percent", percent] => {
                let weight = switch.weight.get_mut(&number(6)).expect("mode comes first");
                *weight = Some(percent.parse().expect(line));
            }
            [_, _, _, "pfc", _, "switch-priority", _] => switch.pfc.push(number(6)),
            _ => panic!("no command of NVUE: {line}"),
        }
    }
    for (dscp, priority) in priorities {
        switch.queue_of_dscp.insert(dscp, queue_of_priority[&priority]);
    }
    switch
}

fn arista(text: &str) -> Switch {
    let mut switch = Switch::default();
    let (mut class_of_dscp, mut queue_of_class) = (BTreeMap::new(), BTreeMap::new());
    let mut queue = None;
    for line in text.lines().filter(|line| !line.trim_start().starts_with('!')) {
        let number = |text: &str| text.parse::<u8>().expect(line);
        if let Some(map) = line.strip_prefix("qos map dscp ") {
            let (list, class) = map.split_once(" to traffic-class ").expect(line);
            class_of_dscp.extend(numbers(list, ' ').into_iter().map(|dscp| (dscp, number(class))));
        } else if let Some(map) = line.strip_prefix("qos map traffic-class ") {
            let (class, queue) = map.split_once(" to tx-queue ").expect(line);
            queue_of_class.insert(number(class), number(queue));
        } else if let Some(name) = line.strip_prefix("   tx-queue ") {
            queue = Some(number(name));
        } else if let Some(percent) = line.strip_prefix("      bandwidth percent ") {
            switch.weight.insert(queue.expect(line), Some(percent.parse().expect(line)));
        } else if line == "      priority strict" {
            switch.weight.insert(queue.expect(line), None);
        } else if let Some(rest) = line.strip_prefix("   priority-flow-control priority ") {
            switch.pfc.push(number(rest.strip_suffix(" no-drop").expect(line)));
        } else {
            let known = [
                "qos profile laxity", "   qos trust dscp", "   priority-flow-control on",
                "      no priority", "interface Ethernet1", "   service-profile laxity",
            ];
            assert!(known.contains(&line), "no command of EOS: {line}");
        }
    }
    for (dscp, class) in class_of_dscp {
        switch.queue_of_dscp.insert(dscp, queue_of_class[&class]);
    }
    switch
}

fn generic(text: &str) -> Switch {
    let mut switch = Switch::default();
    for line in text.lines() {
        let (line, _) = line.split_once("  # ").expect(line);
        let mut words = line.split(' ');
        let mut next = || words.next().unwrap_or_default();
        assert_eq!(next(), "queue", "{line}");
        let number = next().parse().expect(line);
        let weight = match next() {
            "strict" => None,
            "weight" => Some(next().parse().expect(line)),
            other => panic!("{other}"),
        };
        switch.weight.insert(number, weight);
        let mut word = next();
        if word == "pfc" {
            switch.pfc.push(number);
            word = next();
        }
        assert_eq!(word, "dscp", "{line}");
        switch.queue_of_dscp.extend(numbers(next(), ',').into_iter().map(|dscp| (dscp, number)));
    }
    switch
}

/// What commands say of a NIC, by `dcb`'s keywords.
#[derive(Default)]
struct Nic(BTreeMap<String, BTreeMap<u8, String>>);

impl Nic {
    /// Reads `1:a 2:b`, or `a,b` from 0 on.
    fn set(&mut self, key: &str, text: &str) {
        let cells = self.0.entry(key.to_owned()).or_default();
        for (at, cell) in text.split([',', ' ']).enumerate() {
            let pair = cell.split_once(':').map(|(key, cell)| (key.parse().expect(text), cell));
            let (number, cell) = pair.unwrap_or((at as u8, cell));
            cells.insert(number, cell.to_owned());
        }
    }

    fn numbers(&self, key: &str) -> BTreeMap<u8, u8> {
        let cells = self.0[key].iter();
        cells.map(|(number, cell)| (*number, cell.parse().expect(key))).collect()
    }

    fn switch(self) -> Switch {
        assert_eq!(self.0["order"][&0], "dscp", "the NIC would go by PCP");
        let (class, share) = (self.numbers("prio-tc"), self.numbers("tc-bw"));
        let mut switch = Switch::default();
        for (dscp, priority) in self.numbers("dscp-prio") {
            let class = class[&priority];
            switch.queue_of_dscp.insert(dscp, class);
            let weight = match self.0["tc-tsa"][&class].as_str() {
                "strict" => None,
                "ets" => Some(share[&class].into()),
                other => panic!("{other}"),
            };
            switch.weight.insert(class, weight);
        }
        let pfc = self.0.get("prio-pfc").into_iter().flatten();
        let on = pfc.filter(|(_, state)| ["1", "on"].contains(&state.as_str()));
        switch.pfc = on.map(|(priority, _)| *priority).collect();
        switch
    }
}

fn mlnx_qos(text: &str) -> Switch {
    let options = |line| str::strip_prefix(line, "mlnx_qos -i eth0 ").expect(line);
    mlnx_qos_of(text.lines().map(options))
}

fn mlnx_qos_of<'a>(lines: impl Iterator<Item = &'a str>) -> Switch {
    let mut nic = Nic::default();
    for words in lines {
        for option in words.split(' ').collect::<Vec<_>>().chunks(2) {
            let set = option[1].strip_prefix("set,").map(|pair| pair.replace(',', ":"));
            match option[0] {
                "--trust" => nic.set("order", option[1]),
                "--dscp2prio" => nic.set("dscp-prio", &set.expect(words)),
                "--prio_tc" => nic.set("prio-tc", option[1]),
                "--tsa" => nic.set("tc-tsa", option[1]),
                "--tcbw" => nic.set("tc-bw", option[1]),
                "--pfc" => nic.set("prio-pfc", option[1]),
                _ => panic!("no option of mlnx_qos: {words}"),
            }
        }
    }
    nic.switch()
}

fn dcb_of<'a>(commands: impl Iterator<Item = &'a str>, interface: &str) -> Switch {
    let mut nic = Nic::default();
    for command in commands {
        let words: Vec<&str> = command.split(' ').collect();
        assert_eq!(words[2..4], ["dev", interface], "{command}");
        let keys: &[&str] = match words[..2] {
            ["apptrust", "set"] => &["order"],
            ["app", "replace"] => &["dscp-prio"],
            ["ets", "set"] => &["prio-tc", "tc-tsa", "tc-bw"],
            ["pfc", "set"] => &["prio-pfc"],
            _ => panic!("no command of dcb: {command}"),
        };
        // Each keyword is followed by its cells.
        let mut key = "";
        for word in &words[4..] {
            match keys.contains(word) {
                true => key = word,
                false => nic.set(key, word),
            }
        }
    }
    nic.switch()
}

fn dcb(text: &str) -> Switch {
    let command = |line| str::strip_prefix(line, "dcb ").and_then(|it| it.split(" || :").next());
    dcb_of(text.lines().map(|line| command(line).expect(line)), "eth0")
}

/// Returns what a unit starts.
fn starts(text: &str) -> impl Iterator<Item = &str> {
    for line in ["Type=oneshot", "WantedBy=sys-subsystem-net-devices-%i.device"] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    text.lines().filter_map(|line| line.strip_prefix("ExecStart="))
}

fn systemd(text: &str) -> Switch {
    let command = |line| str::trim_start_matches(line, '-').strip_prefix("/usr/sbin/dcb ");
    dcb_of(starts(text).map(|line| command(line).expect(line)), "%I")
}

fn systemd_mlnx_qos(text: &str) -> Switch {
    let options = |line| str::strip_prefix(line, "/usr/bin/mlnx_qos -i %I ").expect(line);
    mlnx_qos_of(starts(text).map(options))
}

type Parser = fn(&str) -> Switch;

const VENDORS: [(&str, Parser); 8] = [
    ("sonic", sonic),
    ("cumulus", cumulus),
    ("arista", arista),
    ("generic", generic),
    ("mlnx-qos", mlnx_qos),
    ("dcb", dcb),
    ("systemd", systemd),
    ("systemd-mlnx-qos", systemd_mlnx_qos),
];

fn read(vendor: &str, parse: Parser, arguments: &[&str]) -> Switch {
    let seen = switch_config(&[&["--vendor", vendor][..], arguments].concat());
    assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
    parse(&String::from_utf8(seen.stdout).expect("UTF-8"))
}

fn levels() -> Vec<u8> {
    let sample: toml::Table =
        std::fs::read_to_string(SAMPLE).expect("the sample").parse().expect("TOML");
    let small = |value: &toml::Value| value.as_integer().expect("a number") as u8;
    let levels = &sample["levels"];
    let named = levels["dscp"].as_array().expect("a list").iter().map(small);
    named.chain([small(&levels["scavenger_dscp"])]).collect()
}

#[test]
fn every_vendor_gets_the_order_of_the_levels_with_any_number_of_queues() {
    let levels = levels();
    for (vendor, parse) in VENDORS {
        for queues in ["1", "2", "4", "8"] {
            let switch = read(vendor, parse, &["--config", SAMPLE, "--queues", queues]);
            let what = format!("{vendor} with {queues} queues: {switch:?}");
            let mapped: Vec<u8> = switch.queue_of_dscp.keys().copied().collect();
            assert_eq!(mapped, (0..64).collect::<Vec<u8>>(), "{what}");
            assert_eq!(switch.weight.len().to_string(), queues, "{what}");
            let queue = |dscp: &u8| switch.queue_of_dscp[dscp];
            for pair in levels.windows(2) {
                let (upper, lower) = (queue(&pair[0]), queue(&pair[1]));
                assert!(upper >= lower, "{pair:?}, {what}");
                let apart = queues == "8" && pair[0] != pair[1];
                assert!(!apart || upper > lower, "{pair:?}, {what}");
            }
            // Unmarked traffic is above what can wait, and below all that is urgent.
            let unmarked = queue(&0);
            assert!(queue(&18) >= unmarked && unmarked >= queue(&10), "{what}");
            assert!(queues == "1" || queue(&18) > unmarked, "{what}");
            assert_eq!(queue(&48), switch.weight.len() as u8 - 1, "{what}");
            let weights = switch.weight.values().flatten();
            assert_eq!(weights.sum::<u32>(), 100, "{what}");
            let strict = |dscp: &u8| switch.weight[&queue(dscp)].is_none();
            assert_eq!(strict(&46), queues != "1", "{what}");
            assert!(!strict(&0) && !strict(&8), "what can wait is not starved: {what}");
            assert!(switch.pfc.is_empty(), "nobody asked for PFC: {what}");
        }
    }
}

#[test]
fn pfc_is_turned_on_for_the_named_queues_only() {
    for (vendor, parse) in VENDORS {
        let asked = ["--config", SAMPLE, "--queues", "4", "--pfc", "2,3"];
        let mut switch = read(vendor, parse, &asked);
        switch.pfc.sort_unstable();
        assert_eq!(switch.pfc, [2, 3], "{vendor}");
        let without = read(vendor, parse, &asked[..4]);
        assert_eq!(switch.queue_of_dscp, without.queue_of_dscp, "{vendor}");
    }
    let seen = switch_config(&["--vendor", "generic", "--queues", "2", "--pfc", "3"]);
    assert_eq!(seen.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&seen.stderr).contains("0 to 1"));
}

#[test]
fn other_levels_give_another_configuration_and_no_daemon_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laxityd.toml");
    let fewer = "[levels]\ncount = 3\ndscp = [40, 0, 30]\nscavenger_dscp = 30\n";
    std::fs::write(&path, fewer).expect("written");
    let path = path.to_str().expect("UTF-8");
    let switch = read("generic", generic, &["--config", path]);
    let queue = |dscp: u8| switch.queue_of_dscp[&dscp];
    // 1 stands for what nobody marked. DSCP 0 is the second level's here.
    assert!(queue(40) > queue(0) && queue(0) > queue(1) && queue(1) > queue(30), "{switch:?}");

    let seen = switch_config(&["--vendor", "generic"]);
    let said = String::from_utf8_lossy(&seen.stderr);
    assert!(said.contains("a daemon without a configuration (cannot reach"), "{said}");
    let same = switch_config(&["--vendor", "generic", "--config", SAMPLE]);
    assert_eq!(seen.stdout, same.stdout, "the defaults are the sample's");
}

/// What OpenSM reads: each service level's lane, and the lanes' weights by table.
fn opensm(text: &str) -> (Vec<u8>, BTreeMap<u8, u8>, BTreeMap<u8, u8>) {
    let option = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{key} ")));
        line.unwrap_or_else(|| panic!("{key}: {text}"))
    };
    let table = |key: &str| {
        let mut cells = Nic::default();
        cells.set(key, &option(key).replace(',', " "));
        cells.numbers(key)
    };
    assert_eq!((option("qos"), option("qos_high_limit")), ("TRUE", "64"));
    let lanes = numbers(option("qos_sl2vl"), ',');
    let lanes_max = option("qos_max_vls").parse().expect("a number");
    assert!(lanes.len() == 16 && lanes.iter().all(|lane| *lane < lanes_max), "{text}");
    (lanes, table("qos_vlarb_high"), table("qos_vlarb_low"))
}

#[test]
fn a_subnet_manager_gets_the_order_of_the_service_levels_with_any_number_of_lanes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laxityd.toml");
    std::fs::write(&path, "[levels]\nsl = [3, 3, 2, 1, 1, 0, 0, 0]\n").expect("written");
    let arguments = ["--vendor", "opensm", "--config", path.to_str().expect("UTF-8")];
    for queues in ["1", "2", "4", "8"] {
        let seen = switch_config(&[&arguments[..], &["--queues", queues]].concat());
        assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
        let (lanes, high, low) = opensm(&String::from_utf8(seen.stdout).expect("UTF-8"));
        assert!(lanes[3] >= lanes[2] && lanes[2] >= lanes[1] && lanes[1] >= lanes[0], "{lanes:?}");
        assert!(lanes[4..].iter().all(|lane| *lane == lanes[0]), "unmarked: {lanes:?}");
        let count = queues.parse::<u8>().expect("a number").min(4);
        assert_eq!(lanes[3] + 1, count, "{lanes:?}");
        assert!(high.values().rev().is_sorted_by(|a, b| a > b) && low.contains_key(&0), "{high:?}");
        assert!((1..count).all(|lane| high.contains_key(&lane)), "{high:?}");
    }
    let said = |arguments: &[&str]| {
        let seen = switch_config(arguments);
        assert_eq!(seen.status.code(), Some(1));
        String::from_utf8(seen.stderr).expect("UTF-8")
    };
    let none = said(&["--vendor", "opensm", "--config", SAMPLE]);
    assert!(none.contains("laxityd.toml has no service levels; set `[levels] sl`"), "{none}");
    assert!(said(&[&arguments[..], &["--pfc", "3"]].concat()).contains("InfiniBand"));
    std::fs::write(&path, "[levels]\nsl = [16]\n").expect("written");
    assert!(said(&arguments).contains("16, the service level of P1, is above 15"));
}
