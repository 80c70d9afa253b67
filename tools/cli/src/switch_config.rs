//! `laxity switch-config`: the QoS configuration of a switch, a NIC or a subnet that agrees with
//! the daemon's levels.
//!
//! A [`QueuePlan`] assigns each of the 64 DSCPs to an egress queue, and each vendor's form is
//! printed from it. The classes in their order, the highest first:
//!
//! 1. network control (DSCP 48 to 63, as in RFC 4594), which no bulk traffic may starve;
//! 2. the levels except the lowest, in strict priority;
//! 3. unmarked traffic, and every DSCP that belongs to no other class;
//! 4. the lowest level and the scavenger.
//!
//! Classes 3 and 4 are served by weight, so that none of them starves another. Each queue has four
//! times the weight of the next lower one. The forms are from these sources:
//!
//! * SONiC: `src/sonic-yang-models/doc/Configuration.md` of sonic-net/sonic-buildimage;
//! * Cumulus: the NVUE reference of Cumulus Linux 5.3 and later, *Set and Unset Commands*, *QoS*;
//! * Arista: the EOS user manual, *Quality of Service*, and its `qos profile`;
//! * NICs: [`nic`], InfiniBand: [`opensm`].

mod nic;
mod opensm;

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::builder::TypedValueParser as _;
use clap::{Args, ValueEnum};
use laxity_cli::output::{OutputError, json, say};
use serde_json::{Map, Value, json as value};
use thiserror::Error;

use crate::host::Endpoint;
use crate::levels::{LevelsError, NamedLevel, of_file, of_status, service_of_status};

pub(crate) const HELP: &str = "\
The configuration maps DSCP to traffic class and traffic class to queue. It serves the queues of \
levels above unmarked traffic by strict priority, and the others by weight. Standard error says \
where the levels come from: --config, the daemon, or a daemon without a configuration.

The configuration does not change PFC and ECN, because they need buffers and thresholds of the \
switch. --pfc turns PFC on for queues. All queues that carry RDMA should have the same treatment: \
`laxity doctor` shows how the NIC treats them.

With fewer queues than classes, neighbouring classes share a queue. With one queue, the switch \
orders nothing, and only the daemons order.

Examples:
  laxity switch-config --vendor sonic --queues 4 --port Ethernet0 --port Ethernet4 > qos.json
  sudo config load qos.json                         # on the switch, then `config save`

  laxity switch-config --vendor cumulus | ssh leaf1 'sh && nv config diff'    # then nv config apply
  laxity switch-config --vendor generic             # for any other switch, to be typed in

  laxity switch-config --vendor dcb --port eth0 | sudo sh    # a host's NIC, until it is reset
  cd /etc/systemd/system && laxity switch-config --vendor systemd | sudo tee laxity-qos@.service
  laxity switch-config --vendor opensm | sudo tee -a /etc/opensm/opensm.conf    # [levels] sl";

const CONTROL: &str = "network control";
const CONTROL_DSCP_MIN: u8 = 48;
const UNMARKED: &str = "unmarked";
const DSCPS: u8 = 64;

#[derive(Args)]
pub(crate) struct SwitchConfigArgs {
    /// The software of the switch or NIC that the configuration is for
    #[arg(long, value_enum)]
    vendor: Vendor,
    /// Queues to use: 1, 2, 4 or 8
    #[arg(long, value_name = "N", default_value = "8",
          value_parser = clap::builder::PossibleValuesParser::new(["1", "2", "4", "8"])
              .map(|text| text.parse::<usize>().unwrap_or(8)))]
    queues: usize,
    /// Take the levels from this configuration of laxityd
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A port of the switch, or an interface of the host. May be repeated [default: the vendor's
    /// first, or eth0; Cumulus takes all]
    #[arg(long, value_name = "NAME")]
    port: Vec<String>,
    /// Turn PFC on for these queues
    #[arg(long, value_name = "QUEUES", value_delimiter = ',')]
    pfc: Vec<u8>,
    #[command(flatten)]
    endpoint: Endpoint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Vendor {
    /// SONiC 202205 and later: tables of CONFIG_DB
    Sonic,
    /// Cumulus Linux 5.3 and later: NVUE commands
    Cumulus,
    /// Arista EOS: a qos profile
    Arista,
    /// A line for each queue
    Generic,
    /// A host's NIC: commands of mlnx_qos (OFED)
    MlnxQos,
    /// A host's NIC: commands of dcb (iproute2)
    Dcb,
    /// A host's NIC: a systemd unit that runs dcb whenever the interface appears
    Systemd,
    /// The same with mlnx_qos
    SystemdMlnxQos,
    /// InfiniBand: options of OpenSM, from the service levels of `[levels] sl`
    Opensm,
}

#[derive(Debug, Error)]
pub(crate) enum SwitchConfigError {
    #[error(transparent)]
    Levels(#[from] LevelsError),
    #[error("--pfc {0}: the queues are 0 to {1}")]
    Queue(u8, usize),
    #[error("--pfc is for Ethernet; InfiniBand loses no packets without it")]
    Lossless,
    #[error("{0} has no service levels; set `[levels] sl` of laxityd, one for each level")]
    NoServiceLevels(String),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// DSCPs that are served alike, and their name.
#[derive(Clone, Debug, PartialEq)]
struct DscpClass {
    name: String,
    dscps: Vec<u8>,
}

/// An egress queue. Its number is also that of its traffic class.
#[derive(Debug, PartialEq)]
struct EgressQueue {
    number: u8,
    classes: Vec<DscpClass>,
    /// The share in percent among queues without strict priority. `None`: strict priority.
    weight: Option<u8>,
    pfc: bool,
}

impl EgressQueue {
    fn dscps(&self) -> Vec<u8> {
        let mut dscps: Vec<u8> =
            self.classes.iter().flat_map(|class| class.dscps.iter().copied()).collect();
        dscps.sort_unstable();
        dscps
    }

    fn list(&self, separator: &str) -> String {
        self.dscps().iter().map(u8::to_string).collect::<Vec<_>>().join(separator)
    }

    fn names(&self) -> String {
        self.classes.iter().map(|class| class.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Debug, PartialEq)]
struct QueuePlan(Vec<EgressQueue>);

impl QueuePlan {
    /// Assigns the levels, network control and unmarked traffic to at most `queues` queues.
    fn new(levels: &[NamedLevel], queues: usize, pfc: &[u8]) -> Self {
        let [upper, unmarked, lower] = classes(levels);
        // Groups of classes, each with whether strict priority serves it.
        let mut groups = match queues {
            1 => vec![(false, [upper, unmarked, lower].concat())],
            2 => vec![(true, upper), (false, [unmarked, lower].concat())],
            _ => vec![(true, upper), (false, unmarked), (false, lower)],
        };
        while groups.len() < queues {
            // The first of the largest groups is split, so urgent levels are told apart first.
            let by_size = |at: &usize| groups[*at].1.len();
            let largest = (0..groups.len()).rev().max_by_key(by_size).unwrap_or(0);
            let (is_strict, group) = &mut groups[largest];
            let rest = (*is_strict, group.split_off(group.len().div_ceil(2)));
            if rest.1.is_empty() {
                break;
            }
            groups.insert(largest + 1, rest);
        }
        let count = groups.len();
        let weighted = groups.iter().filter(|(is_strict, _)| !is_strict).count() as u32;
        let total = (4_u32.pow(weighted) - 1) / 3;
        let queue = |(at, (is_strict, classes)): (usize, (bool, Vec<DscpClass>))| {
            let number = (count - 1 - at) as u8;
            let weight = (!is_strict).then(|| {
                let share = f64::from(4_u32.pow(u32::from(number))) * 100.0 / f64::from(total);
                share.round() as u8
            });
            EgressQueue { number, classes, weight, pfc: pfc.contains(&number) }
        };
        Self(groups.into_iter().enumerate().map(queue).collect())
    }
}

/// Returns the classes above unmarked traffic, unmarked traffic, and the classes below it, each the
/// highest first. Every DSCP is in one class.
fn classes(levels: &[NamedLevel]) -> [Vec<DscpClass>; 3] {
    let mut marked: Vec<DscpClass> = Vec::new();
    for (name, dscp) in levels {
        match marked.last_mut().filter(|class| class.dscps == [*dscp]) {
            Some(class) => class.name.push_str(&format!(" {name}")),
            None => marked.push(DscpClass { name: name.clone(), dscps: vec![*dscp] }),
        }
    }
    let other = |range: std::ops::Range<u8>, name: &str| DscpClass {
        name: name.to_owned(),
        dscps: range.filter(|dscp| levels.iter().all(|(_, taken)| taken != dscp)).collect(),
    };
    // The lowest level may share its DSCP with the scavenger, and else precedes it.
    let lowest = levels.len().checked_sub(2).map(|at| levels[at].1);
    let waiting = marked.iter().position(|class| Some(class.dscps[0]) == lowest);
    let lower = marked.split_off(waiting.unwrap_or(marked.len()));
    marked.insert(0, other(CONTROL_DSCP_MIN..DSCPS, CONTROL));
    [marked, vec![other(0..CONTROL_DSCP_MIN, UNMARKED)], lower]
}

pub(crate) fn switch_config(args: &SwitchConfigArgs) -> Result<(), SwitchConfigError> {
    let ((levels, services), origin) = match &args.config {
        Some(path) => (of_file(path)?, path.display().to_string()),
        None => {
            let status = args.endpoint.connect().and_then(|mut daemon| daemon.status());
            let origin = match &status {
                Ok(_) => "the daemon".to_owned(),
                Err(error) => format!("a daemon without a configuration ({error})"),
            };
            let status = status.as_ref().ok();
            ((of_status(status), service_of_status(status)), origin)
        }
    };
    if args.vendor == Vendor::Opensm && !args.pfc.is_empty() {
        return Err(SwitchConfigError::Lossless);
    }
    if args.vendor == Vendor::Opensm && services.is_empty() {
        return Err(SwitchConfigError::NoServiceLevels(origin));
    }
    let plan = QueuePlan::new(&levels, args.queues, &args.pfc);
    if let Some(queue) = args.pfc.iter().find(|queue| usize::from(**queue) >= plan.0.len()) {
        return Err(SwitchConfigError::Queue(*queue, plan.0.len() - 1));
    }
    let port = |first: &str| match args.port.as_slice() {
        [] => vec![first.to_owned()],
        named => named.to_vec(),
    };
    let text = match args.vendor {
        Vendor::Sonic => json(&sonic(&plan, &port("Ethernet0")))?,
        Vendor::Cumulus => cumulus(&plan),
        Vendor::Arista => arista(&plan, &port("Ethernet1")),
        Vendor::Generic => generic(&plan),
        Vendor::MlnxQos => nic::mlnx_qos(&plan, &port("eth0")),
        Vendor::Dcb => nic::dcb(&plan, &port("eth0")),
        Vendor::Systemd => nic::systemd(&plan, &port("eth0")),
        Vendor::SystemdMlnxQos => nic::systemd_mlnx_qos(&plan, &port("eth0")),
        Vendor::Opensm => opensm::opensm(&services, args.queues),
    };
    eprintln!("laxity: levels of {origin}");
    Ok(say(text.trim_end())?)
}

fn sonic(plan: &QueuePlan, ports: &[String]) -> Value {
    const NAME: &str = "LAXITY";
    let row = |key: &dyn Fn(&EgressQueue) -> String,
               cell: &dyn Fn(&EgressQueue) -> Value|
     -> Map<_, _> { plan.0.iter().map(|queue| (key(queue), cell(queue))).collect() };
    let number = |queue: &EgressQueue| queue.number.to_string();
    let scheduler = |queue: &EgressQueue| match queue.weight {
        None => "laxity.strict".to_owned(),
        Some(_) => format!("laxity.{}", queue.number),
    };
    let served = |queue: &EgressQueue| match queue.weight {
        None => value!({"type": "STRICT"}),
        Some(weight) => value!({"type": "DWRR", "weight": weight.to_string()}),
    };
    let of_dscp = plan.0.iter().flat_map(|queue| {
        queue.dscps().into_iter().map(|dscp| (dscp.to_string(), value!(queue.number.to_string())))
    });
    let mut binding = value!({"dscp_to_tc_map": NAME, "tc_to_queue_map": NAME});
    let mut tables = value!({
        "DSCP_TO_TC_MAP": {NAME: of_dscp.collect::<Map<_, _>>()},
        "TC_TO_QUEUE_MAP": {NAME: row(&number, &|queue| value!(number(queue)))},
        "SCHEDULER": row(&scheduler, &served),
    });
    let lossless: Vec<String> = plan.0.iter().filter(|queue| queue.pfc).map(number).collect();
    if !lossless.is_empty() {
        binding["pfc_enable"] = value!(lossless.join(","));
        binding["tc_to_pg_map"] = value!(NAME);
        binding["pfc_to_queue_map"] = value!(NAME);
        // Lossy traffic shares the priority group 0.
        let group =
            |queue: &EgressQueue| value!(if queue.pfc { number(queue) } else { "0".to_owned() });
        tables["TC_TO_PRIORITY_GROUP_MAP"] = value!({NAME: row(&number, &group)});
        tables["MAP_PFC_PRIORITY_TO_QUEUE"] =
            value!({NAME: row(&number, &|queue| value!(number(queue)))});
    }
    for port in ports {
        tables["PORT_QOS_MAP"][port] = binding.clone();
        for queue in &plan.0 {
            tables["QUEUE"][format!("{port}|{}", queue.number)] =
                value!({"scheduler": scheduler(queue)});
        }
    }
    tables
}

fn cumulus(plan: &QueuePlan) -> String {
    let mut text = String::from("nv set qos mapping default-global trust l3\n");
    for queue in &plan.0 {
        let number = queue.number;
        let _ = writeln!(text, "# {}", queue.names());
        let mut set = |words: String| {
            let _ = writeln!(text, "nv set qos {words}");
        };
        let dscps = queue.list(",");
        set(format!("mapping default-global dscp {dscps} switch-priority {number}"));
        set(format!(
            "egress-queue-mapping default-global switch-priority {number} traffic-class {number}"
        ));
        let scheduler = format!("egress-scheduler default-global traffic-class {number}");
        match queue.weight {
            None => set(format!("{scheduler} mode strict")),
            Some(weight) => {
                set(format!("{scheduler} mode dwrr"));
                set(format!("{scheduler} bw-percent {weight}"));
            }
        }
        if queue.pfc {
            set(format!("pfc default-global switch-priority {number}"));
        }
    }
    if plan.0.iter().any(|queue| queue.pfc) {
        text.push_str("nv set qos pfc default-global tx enable\n");
        text.push_str("nv set qos pfc default-global rx enable\n");
    }
    text
}

fn arista(plan: &QueuePlan, ports: &[String]) -> String {
    let mut text = String::new();
    for queue in &plan.0 {
        let (names, dscps, number) = (queue.names(), queue.list(" "), queue.number);
        let _ = writeln!(text, "! {names}\nqos map dscp {dscps} to traffic-class {number}");
        let _ = writeln!(text, "qos map traffic-class {number} to tx-queue {number}");
    }
    text.push_str("!\nqos profile laxity\n   qos trust dscp\n");
    if plan.0.iter().any(|queue| queue.pfc) {
        text.push_str("   priority-flow-control on\n");
    }
    for queue in plan.0.iter().filter(|queue| queue.pfc) {
        let _ = writeln!(text, "   priority-flow-control priority {} no-drop", queue.number);
    }
    for queue in &plan.0 {
        let _ = writeln!(text, "   !\n   tx-queue {}", queue.number);
        let _ = match queue.weight {
            None => writeln!(text, "      priority strict"),
            Some(weight) => writeln!(text, "      bandwidth percent {weight}\n      no priority"),
        };
    }
    for port in ports {
        let _ = writeln!(text, "!\ninterface {port}\n   service-profile laxity");
    }
    text
}

fn generic(plan: &QueuePlan) -> String {
    let mut text = String::new();
    for queue in &plan.0 {
        let served = queue.weight.map_or("strict".to_owned(), |weight| format!("weight {weight}"));
        let pfc = if queue.pfc { " pfc" } else { "" };
        let (number, dscps, names) = (queue.number, queue.list(","), queue.names());
        let _ = writeln!(text, "queue {number} {served}{pfc} dscp {dscps}  # {names}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_keeps_the_order_of_the_levels_with_any_number_of_queues() {
        let levels = of_status(None);
        for count in [1, 2, 4, 8] {
            let plan = QueuePlan::new(&levels, count, &[0]);
            assert_eq!(plan.0.len(), count);
            let queue = |dscp: u8| {
                let mut its = plan.0.iter().filter(|queue| queue.dscps().contains(&dscp));
                let first = its.next().unwrap_or_else(|| panic!("none for {dscp}: {plan:?}"));
                assert_eq!(its.next(), None, "{dscp} is in two: {plan:?}");
                first
            };
            for dscp in 0..DSCPS {
                queue(dscp);
            }
            for pair in levels.windows(2) {
                let (upper, lower) = (queue(pair[0].1).number, queue(pair[1].1).number);
                let is_apart = count == 8 && pair[0].1 != pair[1].1;
                assert!(upper >= lower && (upper > lower || !is_apart), "{pair:?}: {plan:?}");
            }
            // Unmarked traffic is above what can wait, and below all that is urgent.
            let (urgent, unmarked, waiting) = (queue(18), queue(0), queue(10));
            assert!(urgent.number > unmarked.number || count == 1, "{plan:?}");
            assert!(unmarked.number >= waiting.number, "{plan:?}");
            assert_eq!(usize::from(queue(CONTROL_DSCP_MIN).number), count - 1, "{plan:?}");
            assert_eq!(queue(46).weight.is_none(), count > 1, "{plan:?}");
            let is_starved = unmarked.weight.is_none() || queue(8).weight.is_none();
            assert!(!is_starved, "what can wait is not starved: {plan:?}");
            let weights = plan.0.iter().filter_map(|queue| queue.weight);
            assert_eq!(weights.map(u32::from).sum::<u32>(), 100, "{plan:?}");
            assert!(plan.0.iter().all(|queue| queue.pfc == (queue.number == 0)), "{plan:?}");
        }
    }
}
