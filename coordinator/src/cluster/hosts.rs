//! The hosts of the cluster: their names, streams, ports and addresses, what each is charged for,
//! and which of them have messages waiting.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use laxity_policy::{PortId, Span, Time};
use laxity_wire::v1;

use super::host::{Charge, Host, HostCounters, HostId, HostPort, Tenant};
use super::note::Note;
use super::outbox::Outbox;
use super::quota::Quota;
use super::refusal::{Refused, over_limit, unknown};
use crate::limits::Limits;

pub(super) const MISSING_MAX_AGE: Span = Span::from_millis(24 * 3600 * 1000);
const MISSING_MAX: usize = 1000;

/// A host that was removed, with its state when its last message came.
#[derive(Clone, Copy, Debug)]
pub(super) struct MissingHost {
    pub(super) tenant: Tenant,
    pub(super) heard_at: Time,
    pub(super) left: bool,
}

#[derive(Debug, Default)]
pub(super) struct Hosts {
    slots: Vec<Option<Host>>,
    pub(super) names: HashMap<String, HostId>,
    /// Hosts without a stream, by the time at which they are forgotten.
    lost: BTreeSet<(Time, HostId)>,
    /// Forgotten hosts that did not come back.
    pub(super) missing: BTreeMap<String, MissingHost>,
    /// Hosts that operators took out of the cluster order.
    pub(super) drained: BTreeMap<String, Note>,
    pub(super) port_hosts: Vec<Option<HostId>>,
    /// Egress ports by address, in the order in which they named it. It belongs to the first one.
    pub(super) addresses: HashMap<(Tenant, [u8; 16]), Vec<PortId>>,
    /// The number of entries that hosts may use, for each [`Charge`].
    quotas: [Quota; 4],
    /// Hosts with reports that no run has considered yet.
    pub(super) unconsidered: BTreeSet<HostId>,
    ready: Vec<HostId>,
    /// Number of streams that began so far.
    pub(super) streams: u64,
    past: HostCounters,
}

fn address_of(bytes: &[u8]) -> Option<[u8; 16]> {
    bytes.try_into().ok()
}

/// Returns the first free slot and adds one if there is none.
fn free_slot<T>(slots: &mut Vec<Option<T>>) -> usize {
    let free = slots.iter().position(Option::is_none);
    free.unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    })
}

impl Hosts {
    pub(super) fn new(limits: &Limits) -> Self {
        let quota = |total, host_max| Quota::new(total, limits.hosts_max, host_max);
        Self {
            quotas: [
                quota(limits.batches_max, limits.batches_per_host_max),
                quota(limits.requests_max, limits.requests_per_host_max),
                quota(limits.loads_max, limits.loads_per_host_max),
                quota(limits.fetches_max, limits.fetches_per_host_max),
            ],
            ..Self::default()
        }
    }

    pub(super) fn get(&self, id: HostId) -> Option<&Host> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: HostId) -> Option<&mut Host> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    pub(super) fn speaking(&mut self, id: HostId, stream: u64) -> Option<&mut Host> {
        self.get_mut(id).filter(|host| host.stream == Some(stream))
    }

    pub(super) fn named(&self, name: &str) -> Option<&Host> {
        self.get(*self.names.get(name)?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (HostId, &Host)> + Clone {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, host)| Some((HostId(slot as u32), host.as_ref()?)))
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns the sum of the counters of all hosts, including forgotten ones.
    pub(super) fn counters(&self) -> HostCounters {
        let mut sum = self.past;
        for (_, host) in self.iter() {
            sum.add(&host.counters);
        }
        sum
    }

    /// Returns how many hosts got an order since the last call.
    pub(super) fn take_told(&mut self) -> usize {
        let hosts = self.slots.iter_mut().flatten();
        hosts.filter_map(|host| core::mem::take(&mut host.told).then_some(())).count()
    }

    /// Adds a host. The caller checks the limit on their number.
    pub(super) fn insert(&mut self, host: Host) -> HostId {
        let slot = free_slot(&mut self.slots);
        let id = HostId(slot as u32);
        self.names.insert(host.name.clone(), id);
        self.slots[slot] = Some(host);
        id
    }

    /// Removes a host. The caller has removed its reports.
    pub(super) fn remove(&mut self, id: HostId) {
        let Some(host) = self.slots.get_mut(id.0 as usize).and_then(Option::take) else { return };
        self.lost.remove(&(host.lost_at, id));
        self.names.remove(&host.name);
        self.unconsidered.remove(&id);
        self.ready.retain(|&ready| ready != id);
        for port in &host.ports {
            self.forget_port(host.tenant, port);
        }
        self.past.add(&host.counters);
        self.miss(host);
    }

    /// Notes that a forgotten host is missing. The one that is missing for longest makes room.
    fn miss(&mut self, host: Host) {
        let Host { tenant, heard_at, left, .. } = host;
        self.missing.retain(|_, other| heard_at.since(other.heard_at) < MISSING_MAX_AGE);
        if self.missing.len() >= MISSING_MAX {
            let oldest = self.missing.iter().min_by_key(|(_, other)| other.heard_at);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                self.missing.remove(&name);
            }
        }
        self.missing.insert(host.name, MissingHost { tenant, heard_at, left });
    }

    /// Returns the host that is forgotten next, and when.
    pub(super) fn first_lost(&self) -> Option<(Time, HostId)> {
        self.lost.first().copied()
    }

    /// Ends the stream of a host, which is forgotten at `until`.
    pub(super) fn lose(&mut self, id: HostId, stream: u64, until: Time) {
        if let Some(host) = self.speaking(id, stream) {
            host.stream = None;
            host.complete = false;
            host.lost_at = until;
            self.lost.insert((until, id));
        }
    }

    pub(super) fn begin_stream(&mut self, now: Time, id: HostId, hello: &v1::Hello) -> u64 {
        self.streams += 1;
        let stream = self.streams;
        self.missing.remove(&hello.host);
        let drained = self.drained.contains_key(&hello.host);
        if let Some(host) = self.get_mut(id) {
            host.begin_stream(now, stream, hello);
            host.drained = drained;
            let entry = (host.lost_at, id);
            self.lost.remove(&entry);
        }
        stream
    }

    pub(super) fn charge(&mut self, id: HostId, what: Charge) -> Result<(), Refused> {
        let host = self.slots.get_mut(id.0 as usize).and_then(Option::as_mut);
        let held = &mut host.ok_or_else(|| unknown("host", 0))?.usage[what as usize];
        if self.quotas[what as usize].take(held) {
            return Ok(());
        }
        let (has, limit) = match what {
            Charge::Batch => ("owns {} batches", "batches"),
            Charge::Request => ("has told of {} requests", "requests"),
            Charge::Load => ("has {} loads of requests on ports", "loads"),
            Charge::Fetch => ("has {} fetches open", "fetches"),
        };
        let has = has.replace("{}", &held.to_string());
        Err(over_limit(format!("this host {has}, its present limit (limits.{limit}_*)")))
    }

    /// Gives back one unit of what the host was charged for.
    pub(super) fn refund(&mut self, id: HostId, what: Charge) {
        if let Some(host) = self.slots.get_mut(id.0 as usize).and_then(Option::as_mut) {
            self.quotas[what as usize].give(&mut host.usage[what as usize]);
        }
    }

    /// Reports whether the quotas agree with what hosts are charged for.
    pub(super) fn quotas_agree(&self) -> bool {
        let held = |what: usize| self.iter().map(move |(_, host)| host.usage[what]);
        let mut quotas = self.quotas.iter().enumerate();
        quotas.all(|(what, quota)| quota.is_shared_by(held(what)))
    }

    pub(super) fn set_ports(&mut self, id: HostId, infos: &[v1::PortInfo]) {
        let Some(host) = self.get_mut(id) else { return };
        let (tenant, before) = (host.tenant, core::mem::take(&mut host.ports));
        for port in before {
            self.forget_port(tenant, &port);
        }
        let port = |info: &v1::PortInfo| {
            let slot = free_slot(&mut self.port_hosts);
            self.port_hosts[slot] = Some(id);
            HostPort {
                id: PortId(slot as u32),
                info: v1::PortInfo {
                    // `set_addresses` sets these.
                    addresses: Vec::new(),
                    ..info.clone()
                },
                load: v1::PortLoad::default(),
            }
        };
        let ports = infos.iter().map(port).collect();
        if let Some(host) = self.get_mut(id) {
            host.ports = ports;
        }
    }

    pub(super) fn set_addresses(&mut self, id: HostId, infos: &[v1::PortInfo]) {
        let Some(host) = self.get_mut(id) else { return };
        let tenant = host.tenant;
        let mut changed = Vec::new();
        for (port, info) in host.ports.iter_mut().zip(infos) {
            if port.info.addresses != info.addresses {
                let before = core::mem::replace(&mut port.info.addresses, info.addresses.clone());
                changed.push((port.id, info, before));
            }
        }
        for (port, info, before) in changed {
            self.forget_addresses(tenant, port, &before);
            if info.direction() == v1::Direction::Egress {
                for address in info.addresses.iter().filter_map(|it| address_of(it)) {
                    let ports = self.addresses.entry((tenant, address)).or_default();
                    if !ports.contains(&port) {
                        ports.push(port);
                    }
                }
            }
        }
    }

    fn forget_port(&mut self, tenant: Tenant, port: &HostPort) {
        self.port_hosts[port.id.0 as usize] = None;
        self.forget_addresses(tenant, port.id, &port.info.addresses);
    }

    /// Removes addresses of a port. The next port that names one of them gets it.
    fn forget_addresses(&mut self, tenant: Tenant, port: PortId, addresses: &[Vec<u8>]) {
        for address in addresses.iter().filter_map(|it| address_of(it)) {
            if let Entry::Occupied(mut ports) = self.addresses.entry((tenant, address)) {
                ports.get_mut().retain(|&other| other != port);
                if ports.get().is_empty() {
                    ports.remove();
                }
            }
        }
    }

    pub(super) fn owns_port(&self, id: HostId, port: PortId) -> bool {
        self.port_hosts.get(port.0 as usize) == Some(&Some(id))
    }

    pub(super) fn port(&self, port: PortId) -> Option<(&Host, &HostPort)> {
        let host = self.get((*self.port_hosts.get(port.0 as usize)?)?)?;
        Some((host, host.ports.iter().find(|known| known.id == port)?))
    }

    /// Returns the egress port of a tenant's host that has this address.
    pub(super) fn port_at(&self, tenant: Tenant, address: &[u8]) -> Option<&HostPort> {
        let port = *self.addresses.get(&(tenant, address.try_into().ok()?))?.first()?;
        Some(self.port(port)?.1)
    }

    pub(super) fn port_name(&self, port: PortId) -> Option<v1::PortName> {
        let (host, port) = self.port(port)?;
        Some(v1::PortName {
            host: host.name.clone(),
            port: port.info.name.clone(),
            direction: port.info.direction,
        })
    }

    /// Notes a change for the host's next order, if the host gets orders.
    pub(super) fn note(&mut self, id: HostId, change: impl FnOnce(&mut Outbox)) {
        if let Some(host) = self.get_mut(id)
            && host.gets_orders()
            && !host.outbox.full
        {
            change(&mut host.outbox);
            host.outbox.trim();
        }
    }

    /// Notes a change and lists the host, so that it is sent at once.
    pub(super) fn tell(&mut self, id: HostId, change: impl FnOnce(&mut Outbox)) {
        self.note(id, change);
        self.list(id);
    }

    /// Lists the host among those with messages, if it has any.
    pub(super) fn list(&mut self, id: HostId) {
        if let Some(host) = self.get_mut(id)
            && host.stream.is_some()
            && !host.outbox.is_empty()
            && !core::mem::replace(&mut host.outbox.listed, true)
        {
            self.ready.push(id);
        }
    }

    /// Removes and returns the next host with messages, and its stream.
    pub(super) fn pop_ready(&mut self) -> Option<(HostId, u64)> {
        while let Some(id) = self.ready.pop() {
            if let Some(host) = self.get_mut(id) {
                host.outbox.listed = false;
                if let Some(stream) = host.stream {
                    return Some((id, stream));
                }
            }
        }
        None
    }
}
