//! Whether the books agree with each other: for tests and fuzzing, which ask after every step. What
//! is charged is counted anew from what is there.

use super::Cluster;
use super::host::{Host, HostId, Usage};
use super::quota::Quota;

impl Cluster {
    /// Counts everything anew.
    ///
    /// # Errors
    /// What does not agree; a bug of the coordinator, whatever daemons said.
    pub fn audit(&self) -> Result<(), String> {
        let known = || {
            let slots = self.hosts.iter().enumerate();
            slots.filter_map(|(slot, host)| Some((HostId(slot as u32), host.as_ref()?)))
        };
        let agree = |holds: bool, what: &dyn Fn() -> String| {
            if holds { Ok(()) } else { Err(what()) }
        };
        for (id, host) in known() {
            let counted = self.count(id, host);
            agree(counted == host.usage, &|| {
                format!("{} is charged {:?} for {counted:?}", host.name, host.usage)
            })?;
            agree(self.host_names.get(&host.name) == Some(&id), &|| {
                format!("{} is not found by its name", host.name)
            })?;
            for port in &host.ports {
                agree(self.port_hosts[port.id.0 as usize] == Some(id), &|| {
                    format!("port {:?} of {} is another's", port.id, host.name)
                })?;
            }
        }
        let ports: usize = known().map(|(_, host)| host.ports.len()).sum();
        agree(self.port_hosts.iter().flatten().count() == ports, &|| {
            "a port is nobody's".into()
        })?;
        for (&(tenant, _), port) in &self.addresses {
            let host = self.port_hosts.get(port.0 as usize).copied().flatten();
            let host = host.and_then(|id| self.host(id));
            agree(host.is_some_and(|host| host.tenant == tenant), &|| {
                format!("an address leads to port {port:?}, which is nobody's of its tenant")
            })?;
        }
        agree(self.host_names.len() == known().count(), &|| {
            "a name leads to no host".into()
        })?;
        type Held = fn(&Usage) -> usize;
        let quotas: [(&str, &Quota, Held); 4] = [
            ("batches", &self.quotas.batches, |usage| usage.batches),
            ("requests", &self.quotas.requests, |usage| usage.requests),
            ("loads", &self.quotas.loads, |usage| usage.loads),
            ("fetches", &self.quotas.fetches, |usage| usage.fetches),
        ];
        for (what, quota, held) in quotas {
            let held = known().map(|(_, host)| held(&host.usage));
            agree(quota.is_shared_by(held), &|| {
                format!("what hosts share of {what} is not what they hold: {quota:?}")
            })?;
        }
        self.audit_batches()
    }

    fn count(&self, id: HostId, host: &Host) -> Usage {
        let owned = |key: &&u64| self.owns_batch(id, **key);
        let requests = || self.request_names.values();
        let requests = || requests().filter_map(|&key| self.requests.get(key));
        let loads = requests().flat_map(|request| &request.loads);
        Usage {
            batches: host.batches.keys().filter(owned).count(),
            requests: requests().filter(|request| request.by == id).count(),
            loads: loads.filter(|load| load.by == id).count(),
            fetches: host.fetches.len(),
        }
    }

    fn audit_batches(&self) -> Result<(), String> {
        let mut requests = 0;
        for (&(tenant, name), &key) in &self.batch_names {
            let batch = self.batches.get(key);
            let batch = batch.ok_or_else(|| format!("batch {name} is not there"))?;
            for &id in &batch.members {
                let host = self.host(id);
                if !host
                    .is_some_and(|host| host.tenant == tenant && host.batches.contains_key(&key))
                {
                    return Err(format!("a member of batch {name} takes no part in it"));
                }
            }
            for &request in &batch.requests {
                requests += 1;
                let known = self.requests.get(request);
                let known = known.ok_or_else(|| format!("a request of batch {name} is gone"))?;
                let part = |id: HostId| batch.members.contains(&id);
                if known.batch != key {
                    return Err(format!("request {} is in two batches", known.name));
                }
                if !part(known.by) || known.loads.iter().any(|load| !part(load.by)) {
                    return Err(format!(
                        "a host that takes no part in batch {name} is charged for request {}",
                        known.name
                    ));
                }
            }
        }
        let parts: usize = self
            .hosts
            .iter()
            .flatten()
            .map(|host| host.batches.len())
            .sum();
        let members = self
            .batch_names
            .values()
            .filter_map(|&key| self.batches.get(key));
        let members: usize = members.map(|batch| batch.members.len()).sum();
        if (parts, self.batches.len()) != (members, self.batch_names.len()) {
            return Err("hosts and batches disagree on who takes part".into());
        }
        if (self.requests.len(), self.request_names.len()) != (requests, requests) {
            return Err("a request is in no batch".into());
        }
        let fetches: usize = self
            .hosts
            .iter()
            .flatten()
            .map(|host| host.fetches.len())
            .sum();
        if self.fetchers.len() != fetches {
            return Err("a fetch is nobody's".into());
        }
        Ok(())
    }
}
