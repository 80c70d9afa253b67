//! Begins and ends the streams of daemons, and keeps the ports of hosts.

use laxity_policy::Time;
use laxity_policy::admission::AdmissionEvent;
use laxity_wire::v1::{self, Hello, Welcome, from_coordinator::Message};

use super::Cluster;
use super::host::{Host, HostId, Tenant};
use super::refusal::goodbye;

/// Maximum number of addresses of one port.
const ADDRESSES_MAX: usize = 64;
/// Maximum rate of Hellos of one host, per second. Four may come at once. A refused Hello does not
/// count.
const HELLOS_PER_S: u32 = 8;
pub(crate) const TOO_OFTEN: &str = "this host says Hello too often";

/// Returns the name and the direction of a port, which identify it. Its addresses may change.
fn identity(info: &v1::PortInfo) -> (&str, i32) {
    (&info.name, info.direction)
}

impl Cluster {
    /// Begins the stream of a daemon. Returns the host and the number of the stream.
    pub fn attend(&mut self, now: Time, hello: &Hello) -> Result<(HostId, u64), v1::Goodbye> {
        self.check_hello(hello)?;
        let tenant = self.settings.tenants.of(&hello.host).ok_or_else(|| {
            let detail = format!("no [[tenant]] of the coordinator matches {}", hello.host);
            goodbye(v1::GoodbyeReason::Protocol, detail)
        })?;
        let id = match self.hosts.names.get(&hello.host) {
            Some(&id) => id,
            None => self.admit(now, hello, tenant)?,
        };
        if let Some(host) = self.hosts.get_mut(id)
            && !host.hellos.admits(now, HELLOS_PER_S)
        {
            host.counters.refused_hellos += 1;
            host.refused_at = Some(now);
            return Err(goodbye(v1::GoodbyeReason::Protocol, TOO_OFTEN));
        }
        let has_same_ports = self.hosts.get(id).is_some_and(|host| {
            let known = host.ports.iter().map(|port| &port.info);
            known.map(identity).eq(hello.ports.iter().map(identity))
        });
        if !has_same_ports {
            self.forget_reports(now, id);
            self.hosts.set_ports(id, &hello.ports);
        }
        self.hosts.set_addresses(id, &hello.ports);
        self.set_rates(now, id, &hello.ports);
        let stream = self.hosts.begin_stream(now, id, hello);
        let welcome = self.welcome();
        if let Some(host) = self.hosts.get_mut(id) {
            let drained = host.drained;
            host.outbox.write(Message::Welcome(welcome));
            host.outbox.write(Message::Standing(v1::Standing { drained }));
        }
        self.hosts.list(id);
        Ok((id, stream))
    }

    /// Checks whether `host` can be the name of a host.
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
        let events_per_report_max = self.settings.limits.events_per_report_max as u32;
        Welcome {
            protocol: v1::PROTOCOL,
            protocol_min: v1::PROTOCOL_MIN,
            software: format!("laxity-coordinator {}", env!("CARGO_PKG_VERSION")),
            capabilities: Vec::new(),
            term: self.term,
            heartbeat_ns: self.settings.heartbeat.0,
            limits: Some(v1::Limits { events_per_report_max }),
            order_age_max_ns: self.settings.order_age_max.0,
        }
    }

    /// Adds a host and returns its id. If there is no room, the longest lost host is removed.
    fn admit(&mut self, now: Time, hello: &Hello, tenant: Tenant) -> Result<HostId, v1::Goodbye> {
        let known = self.hosts.len();
        if known >= self.settings.limits.hosts_max {
            let Some((_, oldest)) = self.hosts.first_lost() else {
                let detail = format!("there are {known} hosts already; raise limits.hosts_max");
                return Err(goodbye(v1::GoodbyeReason::Full, detail));
            };
            self.forget_host(now, oldest);
        }
        Ok(self.hosts.insert(Host::new(&hello.host, tenant)))
    }

    fn set_rates(&mut self, now: Time, id: HostId, infos: &[v1::PortInfo]) {
        let Some(host) = self.hosts.get_mut(id) else { return };
        for (port, info) in host.ports.iter_mut().zip(infos) {
            port.info.rate_bytes_per_s = info.rate_bytes_per_s;
            let event =
                AdmissionEvent::PortRate { port: port.id, bytes_per_second: info.rate_bytes_per_s };
            self.workload.admission.handle(now, event);
        }
    }

    /// Ends the stream of a host. The host's reports stay valid for the grace period.
    pub fn detach(&mut self, now: Time, id: HostId, stream: u64) {
        let until = now + self.settings.host_grace;
        self.hosts.lose(id, stream, until);
    }

    /// Notes that the daemon of a stream stops on purpose.
    pub fn leaves(&mut self, now: Time, id: HostId, stream: u64) {
        if let Some(host) = self.hosts.speaking(id, stream) {
            (host.heard_at, host.left) = (now, true);
        }
    }

    /// Removes a host that no longer exists from the list. Its reports end at once.
    pub fn forget(&mut self, now: Time, name: &str) -> Result<(), String> {
        if self.hosts.drained.contains_key(name) {
            return Err(format!(
                "{name} is drained, which outlasts its daemon; take that back first: `laxity \
                 cluster drain {name} --undo`"
            ));
        }
        let known = self.hosts.names.get(name).copied();
        if known.and_then(|id| self.hosts.get(id)).is_some_and(|host| host.stream.is_some()) {
            return Err(format!("{name} is connected; stop its daemon first"));
        }
        if let Some(id) = known {
            self.forget_host(now, id);
        }
        let was_missing = self.hosts.missing.remove(name).is_some();
        if known.is_some() || was_missing {
            Ok(())
        } else {
            Err(format!("no host {name} is known"))
        }
    }

    pub fn host_changed(&self, name: &str) -> v1::HostChanged {
        let host = self.hosts.named(name);
        v1::HostChanged {
            host: name.to_owned(),
            connected: host.is_some_and(|host| host.stream.is_some()),
            drained: self.hosts.drained.contains_key(name),
        }
    }
}
