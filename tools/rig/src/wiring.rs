//! The fabric of a run: runs `ip` and `tc` with the scripts of [`fabric`](crate::fabric), and reads
//! the counters of its ports.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::child::output;
use crate::config::{Engine, LabConfig};
use crate::error::LabError;
use crate::fabric::{self, DscpCounters};
use crate::probe::Tools;
use crate::sandbox;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkRecord {
    pub egress: DscpCounters,
    pub ingress: DscpCounters,
}

pub fn between(before: &[LinkRecord], after: &[LinkRecord]) -> Vec<LinkRecord> {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| LinkRecord {
            egress: fabric::since(&before.egress, &after.egress),
            ingress: fabric::since(&before.ingress, &after.ingress),
        })
        .collect()
}

#[derive(Debug)]
pub struct Wiring<'a> {
    hosts: usize,
    tc: &'a Path,
    classes: Vec<u8>,
}

impl<'a> Wiring<'a> {
    pub fn build(config: &'a LabConfig, tools: &'a Tools) -> Result<Self, LabError> {
        let unordered = || LabError::Plan("level_dscp: the fabric cannot keep this order".into());
        let classes = fabric::classes(&config.level_dscp, config.scavenger_dscp);
        let classes = classes.ok_or_else(unordered)?;
        let (ip, tc) = (&tools.ip, &tools.tc);
        let hosts = config.hosts();
        let namespaces: String =
            (0..hosts).map(|host| format!("netns add {}\n", fabric::namespace(host))).collect();
        batch(None, ip, &namespaces)?;
        batch(None, ip, &fabric::switch_script(hosts))?;
        let congestion_control = congestion_control();
        for host in 0..hosts {
            let inside = Some(fabric::namespace(host));
            let addresses = fabric::host_script(host, hosts, &congestion_control);
            batch(inside.as_deref(), ip, &addresses)?;
            let shape = |device: &str| fabric::shaping_script(device, config, &classes);
            batch(inside.as_deref(), tc, &shape(fabric::HOST_PORT))?;
            batch(None, tc, &shape(&fabric::switch_port(host)))?;
        }
        if config.coordinator || config.engine == Engine::Vllm {
            batch(None, ip, &fabric::management_script(hosts))?;
            for host in 0..hosts {
                let inside = Some(fabric::namespace(host));
                batch(inside.as_deref(), ip, &fabric::management_host_script(host))?;
            }
        }
        Ok(Self { hosts, tc, classes })
    }

    pub fn counters(&self) -> Result<Vec<LinkRecord>, LabError> {
        let read = |namespace: Option<&str>, device: &str| -> Result<DscpCounters, LabError> {
            let show = ["-s", "-j", "qdisc", "show", "dev", device];
            let mut command = program(namespace, self.tc);
            let text = output(self.tc.display(), command.args(show), "")?;
            fabric::parse_counters(&text, &self.classes).map_err(|error| {
                let what = format!("reading the counters of {device}: {text}");
                LabError::unreadable(what, error)
            })
        };
        (0..self.hosts)
            .map(|host| {
                Ok(LinkRecord {
                    egress: read(Some(&fabric::namespace(host)), fabric::HOST_PORT)?,
                    ingress: read(None, &fabric::switch_port(host))?,
                })
            })
            .collect()
    }
}

/// Returns a command for a program, inside the namespace of a host if one is given.
fn program(namespace: Option<&str>, path: &Path) -> Command {
    match namespace {
        None => Command::new(path),
        Some(namespace) => {
            let mut command = sandbox::internal("in");
            command.arg(namespace).arg(path);
            command
        }
    }
}

fn batch(namespace: Option<&str>, path: &Path, script: &str) -> Result<(), LabError> {
    let mut command = program(namespace, path);
    output(path.display(), command.args(["-batch", "-"]), script)
        .map(drop)
        .map_err(LabError::step("building a part of the fabric"))
}

/// Returns CUBIC, the default of nearly every host, or Reno, which every kernel has.
fn congestion_control() -> String {
    let available = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    let cubic = available.is_ok_and(|list| list.split_whitespace().any(|name| name == "cubic"));
    if cubic { "cubic" } else { "reno" }.to_owned()
}
