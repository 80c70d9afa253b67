//! The queues of a host's NIC, which agree with those of the switches: commands of `mlnx_qos`
//! (OFED) or `dcb` (iproute2), and a systemd unit that repeats one of them whenever the interface
//! appears.
//!
//! The number of a queue is the NIC's priority and its traffic class, too. So PFC frames name the
//! priorities that the switches know. A higher class precedes a lower one among strict ones. The
//! forms are from dcb-app(8), dcb-ets(8), dcb-pfc(8) and NVIDIA's *Quality of Service* for MLNX_EN.

use std::fmt::Display;

use super::QueuePlan;

/// Priorities of IEEE 802.1Q, and traffic classes that a NIC has at most.
const PRIORITIES: u8 = 8;
/// mlx5 has no `apptrust`. It trusts DSCP as soon as one is mapped.
const TRUST: &str = "apptrust set dev";

/// A priority, and the traffic class of the same number.
struct EtsRow {
    /// The class of the priority. Priorities above all queues, which only tagged frames have, share
    /// the highest one.
    class: u8,
    algorithm: &'static str,
    /// The share in percent, or 0 under strict priority.
    share: u8,
    pfc: &'static str,
}

struct EtsRows(Vec<EtsRow>);

impl EtsRows {
    fn new(plan: &QueuePlan) -> Self {
        let row = |number: u8| {
            let queue = plan.0.iter().find(|queue| queue.number == number);
            let weight = queue.and_then(|queue| queue.weight);
            EtsRow {
                class: number.min(plan.0.len() as u8 - 1),
                algorithm: if weight.is_some() { "ets" } else { "strict" },
                share: weight.unwrap_or(0),
                pfc: if queue.is_some_and(|queue| queue.pfc) { "on" } else { "off" },
            }
        };
        Self((0..PRIORITIES).map(row).collect())
    }

    /// Returns the cells of all rows, such as `0,0,0,1,0,0,0,0`.
    fn list<T: Display>(&self, cell: impl Fn(&EtsRow) -> T) -> String {
        self.0.iter().map(|row| cell(row).to_string()).collect::<Vec<_>>().join(",")
    }

    /// Returns the cells of all rows with their numbers, such as `0:off 1:off`.
    fn pairs<T: Display>(&self, cell: impl Fn(&EtsRow) -> T) -> String {
        let pairs = self.0.iter().enumerate().map(|(at, row)| format!("{at}:{}", cell(row)));
        pairs.collect::<Vec<_>>().join(" ")
    }
}

/// Returns what follows the interface in each command of `mlnx_qos`.
fn mlnx_qos_options(plan: &QueuePlan) -> Vec<String> {
    let rows = EtsRows::new(plan);
    let mut options = vec!["--trust dscp".to_owned()];
    for queue in &plan.0 {
        let set = |dscp| format!("--dscp2prio set,{dscp},{}", queue.number);
        options.extend(queue.dscps().into_iter().map(set));
    }
    let classes = rows.list(|row| row.class);
    let (algorithms, shares) = (rows.list(|row| row.algorithm), rows.list(|row| row.share));
    options.push(format!("--prio_tc {classes} --tsa {algorithms} --tcbw {shares}"));
    if plan.0.iter().any(|queue| queue.pfc) {
        options.push(format!("--pfc {}", rows.list(|row| u8::from(row.pfc == "on"))));
    }
    options
}

pub(super) fn mlnx_qos(plan: &QueuePlan, ports: &[String]) -> String {
    let options = mlnx_qos_options(plan);
    let lines = ports.iter().flat_map(|port| {
        options.iter().map(move |option| format!("mlnx_qos -i {port} {option}\n"))
    });
    lines.collect()
}

/// Returns the arguments of each command of `dcb` for an interface.
fn dcb_commands(plan: &QueuePlan, interface: &str) -> Vec<String> {
    let rows = EtsRows::new(plan);
    let mut commands = vec![format!("{TRUST} {interface} order dscp")];
    for queue in &plan.0 {
        let pairs = queue.dscps().into_iter().map(|dscp| format!(" {dscp}:{}", queue.number));
        let pairs: String = pairs.collect();
        commands.push(format!("app replace dev {interface} dscp-prio{pairs}"));
    }
    commands.push(format!(
        "ets set dev {interface} prio-tc {} tc-tsa {} tc-bw {}",
        rows.pairs(|row| row.class),
        rows.pairs(|row| row.algorithm),
        rows.pairs(|row| row.share)
    ));
    if plan.0.iter().any(|queue| queue.pfc) {
        commands.push(format!("pfc set dev {interface} prio-pfc {}", rows.pairs(|row| row.pfc)));
    }
    commands
}

pub(super) fn dcb(plan: &QueuePlan, ports: &[String]) -> String {
    let line = |command: String| {
        let tolerant =
            if command.starts_with(TRUST) { " || :  # mlx5 has no apptrust" } else { "" };
        format!("dcb {command}{tolerant}\n")
    };
    ports.iter().flat_map(|port| dcb_commands(plan, port)).map(line).collect()
}

pub(super) fn systemd(plan: &QueuePlan, ports: &[String]) -> String {
    let start = |command: String| {
        let tolerant = if command.starts_with(TRUST) { "-" } else { "" };
        format!("ExecStart={tolerant}/usr/sbin/dcb {command}\n")
    };
    unit(ports, &dcb_commands(plan, "%I").into_iter().map(start).collect::<String>())
}

pub(super) fn systemd_mlnx_qos(plan: &QueuePlan, ports: &[String]) -> String {
    let start = |option: String| format!("ExecStart=/usr/bin/mlnx_qos -i %I {option}\n");
    unit(ports, &mlnx_qos_options(plan).into_iter().map(start).collect::<String>())
}

/// Returns a template of a unit that runs the lines `starts`. Its instances are named after
/// interfaces.
fn unit(ports: &[String], starts: &str) -> String {
    let enable = ports
        .iter()
        .map(|port| format!("#   systemctl enable --now laxity-qos@$(systemd-escape {port})\n"));
    format!(
        "# /etc/systemd/system/laxity-qos@.service, then:
{}[Unit]
Description=Queues of %I for the levels of laxityd
BindsTo=sys-subsystem-net-devices-%i.device
After=sys-subsystem-net-devices-%i.device
Before=laxityd.service

[Service]
Type=oneshot
RemainAfterExit=yes
{starts}
[Install]
WantedBy=sys-subsystem-net-devices-%i.device
",
        enable.collect::<String>(),
    )
}
