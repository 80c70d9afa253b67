//! Hosts come, describe themselves, and go: streams, ports, drains.

use std::collections::BTreeMap;

use laxity_policy::admission::AdmissionEvent;
use laxity_policy::{PortId, Time};
use laxity_wire::v1::{self, Hello, Welcome, from_coordinator::Message};

use super::host::{Host, HostCounters, HostId, HostPort, Tenant, Usage};
use super::outbox::Outbox;
use super::{CAPABILITIES, Cluster};

fn address_of(bytes: &[u8]) -> Option<[u8; 16]> {
    bytes.try_into().ok()
}

/// Addresses that a port may have.
const ADDRESSES_MAX: usize = 64;

/// What makes a port another one if it changes. Addresses come and go.
fn identity(info: &v1::PortInfo) -> (&str, i32) {
    (&info.name, info.direction)
}

impl Cluster {
    /// A daemon's stream begins. Gives its host, and the number of the stream.
    ///
    /// # Errors
    /// What to tell the daemon before the stream is closed.
    pub fn attend(&mut self, now: Time, hello: &Hello) -> Result<(HostId, u64), v1::Goodbye> {
        self.check_hello(hello)?;
        let tenant = self.settings.tenants.of(&hello.host).ok_or_else(|| {
            let detail = format!("no [[tenant]] of the coordinator matches {}", hello.host);
            goodbye(v1::GoodbyeReason::Protocol, detail)
        })?;
        let id = match self.host_names.get(&hello.host) {
            Some(&id) => id,
            None => self.admit(now, hello, tenant)?,
        };
        let same_ports = self.host(id).is_some_and(|host| {
            let known = host.ports.iter().map(|port| &port.info);
            known.map(identity).eq(hello.ports.iter().map(identity))
        });
        if !same_ports {
            self.forget_reports(now, id);
            self.set_ports(id, &hello.ports);
        }
        self.set_addresses(id, &hello.ports);
        self.set_rates(now, id, &hello.ports);
        self.streams += 1;
        let stream = self.streams;
        let welcome = self.welcome();
        let drained = self.drained.contains_key(&hello.host);
        let Some(host) = self.hosts[id.0 as usize].as_mut() else {
            return Err(goodbye(v1::GoodbyeReason::Full, String::new()));
        };
        self.lost.remove(&(host.lost_at, id));
        host.stream = Some(stream);
        host.heard_at = now;
        host.software = hello.software.chars().take(64).collect();
        host.capabilities = v1::common_capabilities(&CAPABILITIES, &hello.capabilities);
        host.drained = drained;
        host.in_snapshot = false;
        host.complete = false;
        host.owed = false;
        (host.reported, host.considered) = (0, 0);
        host.applied = hello.applied;
        host.outbox.restart();
        host.outbox.write(Message::Welcome(welcome));
        host.outbox
            .write(Message::Standing(v1::Standing { drained }));
        self.list(id);
        Ok((id, stream))
    }

    /// Whether this can be the name of a host.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_name(host: &str) -> Result<(), &'static str> {
        if host.is_empty() || host.len() > 253 {
            return Err("a host name has 1 to 253 bytes");
        }
        if host.chars().any(char::is_control) {
            return Err("a host name has no control characters");
        }
        Ok(())
    }

    fn check_hello(&self, hello: &Hello) -> Result<(), v1::Goodbye> {
        let theirs = (hello.protocol, hello.protocol_min);
        if v1::common_protocol((v1::PROTOCOL, v1::PROTOCOL_MIN), theirs).is_none() {
            let detail = format!(
                "the daemon speaks protocols {} to {}, this coordinator {} to {}; bring them to \
                 releases that overlap",
                hello.protocol_min,
                hello.protocol,
                v1::PROTOCOL_MIN,
                v1::PROTOCOL
            );
            return Err(goodbye(v1::GoodbyeReason::Incompatible, detail));
        }
        let problem = if let Err(problem) = Self::check_name(&hello.host) {
            problem.to_owned()
        } else if hello.ports.len() > self.settings.limits.ports_per_host_max {
            format!(
                "{} ports exceed limits.ports_per_host_max = {}",
                hello.ports.len(),
                self.settings.limits.ports_per_host_max
            )
        } else if hello.ports.iter().any(|port| port.name.len() > 64) {
            "a port name has at most 64 bytes".to_owned()
        } else if hello.ports.iter().any(|port| {
            port.addresses.len() > ADDRESSES_MAX || port.addresses.iter().any(|a| a.len() != 16)
        }) {
            format!("a port has at most {ADDRESSES_MAX} addresses of 16 bytes each")
        } else {
            return Ok(());
        };
        Err(goodbye(v1::GoodbyeReason::Protocol, problem))
    }

    fn welcome(&self) -> Welcome {
        let limits = &self.settings.limits;
        Welcome {
            protocol: v1::PROTOCOL,
            protocol_min: v1::PROTOCOL_MIN,
            software: format!("laxity-coordinator {}", env!("CARGO_PKG_VERSION")),
            capabilities: CAPABILITIES.iter().map(|&one| one as i32).collect(),
            term: self.term,
            heartbeat_ns: self.settings.heartbeat.0,
            limits: Some(v1::Limits {
                batches_max: limits.batches_per_host_max as u32,
                requests_max: limits.requests_per_host_max as u32,
                fetches_max: limits.fetches_per_host_max as u32,
                events_per_report_max: limits.events_per_report_max as u32,
                events_per_s_max: limits.events_per_s_max,
                message_bytes_max: limits.message_bytes_max as u32,
            }),
            order_age_max_ns: self.settings.order_age_max.0,
        }
    }

    /// A place for a host that is new; one that is lost makes room if there is none.
    fn admit(&mut self, now: Time, hello: &Hello, tenant: Tenant) -> Result<HostId, v1::Goodbye> {
        if self.host_names.len() >= self.settings.limits.hosts_max {
            let Some(&(_, oldest)) = self.lost.first() else {
                let detail = format!(
                    "there are {} hosts already; raise limits.hosts_max",
                    self.host_names.len()
                );
                return Err(goodbye(v1::GoodbyeReason::Full, detail));
            };
            self.forget_host(now, oldest);
        }
        let host = Host {
            name: hello.host.clone(),
            tenant,
            software: String::new(),
            ports: Vec::new(),
            stream: None,
            lost_at: Time::ZERO,
            heard_at: Time::ZERO,
            capabilities: Vec::new(),
            drained: false,
            batches: BTreeMap::new(),
            fetches: BTreeMap::new(),
            usage: Usage::default(),
            mark: 0,
            in_snapshot: false,
            complete: false,
            reported: 0,
            considered: 0,
            owed: false,
            applied: None,
            outbox: Outbox::default(),
            told: false,
            counters: HostCounters::default(),
        };
        let free = self.hosts.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.hosts.len());
        if slot == self.hosts.len() {
            self.hosts.push(None);
        }
        self.hosts[slot] = Some(host);
        let id = HostId(slot as u32);
        self.host_names.insert(hello.host.clone(), id);
        Ok(id)
    }

    fn set_ports(&mut self, id: HostId, infos: &[v1::PortInfo]) {
        let Some(tenant) = self.host(id).map(|host| host.tenant) else {
            return;
        };
        let before = self
            .host_mut(id)
            .map(|host| core::mem::take(&mut host.ports));
        for port in before.unwrap_or_default() {
            self.forget_port(tenant, &port);
        }
        let mut ports = Vec::with_capacity(infos.len());
        for info in infos {
            let free = self.port_hosts.iter().position(Option::is_none);
            let slot = free.unwrap_or(self.port_hosts.len());
            if slot == self.port_hosts.len() {
                self.port_hosts.push(None);
            }
            self.port_hosts[slot] = Some(id);
            ports.push(HostPort {
                id: PortId(slot as u32),
                info: v1::PortInfo {
                    // Told of apart.
                    addresses: Vec::new(),
                    ..info.clone()
                },
                load: v1::PortLoad::default(),
            });
        }
        if let Some(host) = self.host_mut(id) {
            host.ports = ports;
        }
    }

    /// Where the ports of a host are reached.
    fn set_addresses(&mut self, id: HostId, infos: &[v1::PortInfo]) {
        let Some(host) = self.host_mut(id) else {
            return;
        };
        let tenant = host.tenant;
        let mut changed = Vec::new();
        for (port, info) in host.ports.iter_mut().zip(infos) {
            if port.info.addresses != info.addresses {
                let before = core::mem::replace(&mut port.info.addresses, info.addresses.clone());
                changed.push((port.id, info.direction(), before, info.addresses.clone()));
            }
        }
        for (port, direction, before, now) in changed {
            self.forget_addresses(tenant, port, &before);
            if direction == v1::Direction::Egress {
                for address in now.iter().filter_map(|address| address_of(address)) {
                    self.addresses.entry((tenant, address)).or_insert(port);
                }
            }
        }
    }

    /// A port of a host is gone.
    pub(super) fn forget_port(&mut self, tenant: Tenant, port: &HostPort) {
        self.port_hosts[port.id.0 as usize] = None;
        self.forget_addresses(tenant, port.id, &port.info.addresses);
    }

    /// A port is not reached there any more. Another that named the same is, then.
    fn forget_addresses(&mut self, tenant: Tenant, port: PortId, addresses: &[Vec<u8>]) {
        for address in addresses.iter().filter_map(|address| address_of(address)) {
            if self.addresses.get(&(tenant, address)) != Some(&port) {
                continue;
            }
            let ours = self
                .hosts
                .iter()
                .flatten()
                .filter(|host| host.tenant == tenant);
            let mut ports = ours.flat_map(|host| &host.ports);
            let names = |other: &&HostPort| {
                other.id != port
                    && other.info.direction() == v1::Direction::Egress
                    && other
                        .info
                        .addresses
                        .iter()
                        .any(|one| one[..] == address[..])
            };
            match ports.find(names).map(|other| other.id) {
                Some(other) => self.addresses.insert((tenant, address), other),
                None => self.addresses.remove(&(tenant, address)),
            };
        }
    }

    fn set_rates(&mut self, now: Time, id: HostId, infos: &[v1::PortInfo]) {
        let Some(host) = self.hosts[id.0 as usize].as_mut() else {
            return;
        };
        for (port, info) in host.ports.iter_mut().zip(infos) {
            port.info.rate_bytes_per_s = info.rate_bytes_per_s;
            let event = AdmissionEvent::PortRate {
                port: port.id,
                bytes_per_second: info.rate_bytes_per_s,
            };
            self.admission.handle(now, event);
        }
    }

    /// The stream has ended. What the host said holds for a while longer.
    pub fn detach(&mut self, now: Time, id: HostId, stream: u64) {
        let grace = self.settings.host_grace;
        if let Some(host) = self.host_mut(id)
            && host.stream == Some(stream)
        {
            host.stream = None;
            host.complete = false;
            host.lost_at = now + grace;
            let entry = (host.lost_at, id);
            self.lost.insert(entry);
        }
    }
}

pub(super) fn goodbye(reason: v1::GoodbyeReason, detail: String) -> v1::Goodbye {
    v1::Goodbye {
        reason: reason as i32,
        detail,
        retry_after_ns: 1_000_000_000,
        leader: String::new(),
    }
}
