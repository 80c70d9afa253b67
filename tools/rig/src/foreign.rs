//! Traffic in the lab that no daemon permits: one process per host, which sends datagrams at a
//! steady rate to the next host. So each port carries the same share, in both directions.
//!
//! Datagrams don't yield to anyone. By default they have the DSCP of the highest level, so all
//! scheduled traffic waits for them: no other class does more harm.

use std::net::UdpSocket;
use std::path::Path;
use std::time::{Duration, Instant};

use laxity_wire::PortStatus;
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use crate::child::{Guarded, poll};
use crate::config::LabConfig;
use crate::daemons::status;
use crate::error::LabError;
use crate::fabric;
use crate::sandbox;

const PORT: u16 = 7900;
const DATAGRAM_BYTES: usize = 8_800;
const HEADER_BYTES: usize = 14 + 20 + 8;
const TICK: Duration = Duration::from_millis(1);
/// Longest time that a sender makes up for after it was not run.
const LATE_MAX: Duration = Duration::from_millis(20);
/// Longest time until the daemons have the full rate again.
const BACK_WITHIN: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForeignRecord {
    /// What all senders together were to send, in bytes per second.
    pub asked_bytes_per_s: f64,
    /// Foreign bytes that the daemons measured at their egress ports, per second.
    pub measured_bytes_per_s: f64,
    /// Mean of the rates in force at egress ports over the ports' rate, beside the senders.
    pub rate_in_force: f64,
    /// Time from the end of the senders until each daemon had the full rate, in s. `None` if one
    /// did not within 20 s.
    pub full_rate_after_s: Option<f64>,
}

/// Running senders. Dropping this kills them.
pub struct Foreign {
    senders: Vec<Guarded>,
    asked_bytes_per_s: f64,
    hosts: usize,
    /// When measurement began, and the foreign bytes of each host by then.
    before: (Instant, Vec<u64>),
}

fn egress(hosts: usize, folder: &Path) -> Vec<PortStatus> {
    let of_host = |host| {
        let ports = status(folder, host)?.ports;
        ports.into_iter().find(|port| port.direction == "egress")
    };
    (0..hosts).filter_map(of_host).collect()
}

impl Foreign {
    /// Starts the senders, or none if the configuration has no foreign traffic.
    pub fn start(config: &LabConfig, folder: &Path) -> Result<Option<Self>, LabError> {
        if config.foreign <= 0.0 {
            return Ok(None);
        }
        let hosts = config.hosts();
        let each = f64::from(config.port_mbit) * 1e6 / 8.0 * config.foreign;
        let before = egress(hosts, folder).iter().map(|port| port.foreign_bytes).collect();
        let mut foreign = Self {
            senders: Vec::new(),
            asked_bytes_per_s: each * hosts as f64,
            hosts,
            before: (Instant::now(), before),
        };
        for host in 0..hosts {
            let mut command = sandbox::internal("foreign");
            command
                .args([host, (host + 1) % hosts].map(|number| number.to_string()))
                .arg(each.to_string())
                .arg(config.foreign_dscp().to_string());
            let log = folder.join(format!("foreign{host}.log"));
            foreign.senders.push(Guarded::start("a foreign sender", &mut command, &log)?);
        }
        Ok(Some(foreign))
    }

    /// Asks the daemons what they found, ends the senders, and waits for the full rate.
    pub fn end(mut self, folder: &Path) -> ForeignRecord {
        let ports = egress(self.hosts, folder);
        let passed_s = self.before.0.elapsed().as_secs_f64();
        let measured = ports
            .iter()
            .zip(&self.before.1)
            .map(|(port, before)| port.foreign_bytes.saturating_sub(*before) as f64 / passed_s);
        let share = |port: &PortStatus| {
            port.rate_in_force_bytes_per_s as f64 / port.rate_bytes_per_s.max(1) as f64
        };
        let mut record = ForeignRecord {
            asked_bytes_per_s: self.asked_bytes_per_s,
            measured_bytes_per_s: measured.sum(),
            rate_in_force: ports.iter().map(share).sum::<f64>() / ports.len().max(1) as f64,
            full_rate_after_s: None,
        };
        for sender in &mut self.senders {
            if let Some(status) = sender.ended() {
                eprintln!("a foreign sender {status}: {}", sender.tail());
            }
        }
        self.senders.clear();
        let ended = Instant::now();
        let full_rate_after_s = || {
            let is_back = egress(self.hosts, folder).iter().all(|port| share(port) >= 1.0);
            is_back.then(|| ended.elapsed().as_secs_f64())
        };
        if !ports.is_empty() {
            record.full_rate_after_s =
                poll(BACK_WITHIN, Duration::from_millis(100), full_rate_after_s);
        }
        record
    }
}

/// *foreign*: sends from a host until it is killed. The arguments are the host, its peer, the bytes
/// per second and the DSCP.
pub fn send(args: &[&str]) -> Result<(), LabError> {
    let number = |at: usize| -> Result<f64, LabError> {
        let text = args.get(at).copied().unwrap_or_default();
        text.parse().map_err(|error| LabError::unreadable("a number for a foreign sender", error))
    };
    let (host, peer) = (number(0)? as usize, number(1)? as usize);
    let (bytes_per_s, dscp) = (number(2)?, number(3)? as i32);
    sandbox::enter_host(&fabric::namespace(host))?;
    let socket = UdpSocket::bind((fabric::address(host), PORT))
        .map_err(LabError::system("binding a foreign sender"))?;
    setsockopt(&socket, sockopt::Ipv4Tos, &(dscp << 2))
        .map_err(LabError::system("marking foreign traffic"))?;
    let (peer, datagram) = ((fabric::address(peer), PORT), [0; DATAGRAM_BYTES]);
    let per_datagram =
        Duration::from_secs_f64((DATAGRAM_BYTES + HEADER_BYTES) as f64 / bytes_per_s);
    let mut due = Instant::now();
    loop {
        let now = Instant::now();
        due = due.max(now.checked_sub(LATE_MAX).unwrap_or(now));
        while due <= now {
            // A full queue drops the datagram, as it would on any network.
            let _ = socket.send_to(&datagram, peer);
            due += per_datagram;
        }
        std::thread::sleep(TICK);
    }
}
