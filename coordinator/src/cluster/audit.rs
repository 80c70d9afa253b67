//! Checks whether the parts of the cluster agree with each other. Tests and fuzzing call it after
//! every step. It counts anew what each host is charged for.

use super::Cluster;
use super::host::{Charge, HostId, Usage};

fn agree(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

impl Cluster {
    /// Counts everything anew and compares it with what is stored.
    ///
    /// # Errors
    /// Returns the first disagreement. It is a bug of the coordinator, whatever daemons reported.
    pub fn audit(&self) -> Result<(), String> {
        let hosts = &self.hosts;
        for (id, host) in hosts.iter() {
            let (counted, name) = (self.count(id), &host.name);
            agree(counted == host.usage, || {
                format!("{name} is charged {:?} for {counted:?}", host.usage)
            })?;
            agree(hosts.names.get(name) == Some(&id), || {
                format!("{name} is not found by its name")
            })?;
            for port in &host.ports {
                agree(hosts.owns_port(id, port.id), || {
                    format!("port {:?} of {name} is another's", port.id)
                })?;
            }
        }
        let ports: usize = hosts.iter().map(|(_, host)| host.ports.len()).sum();
        agree(hosts.port_hosts.iter().flatten().count() == ports, || "a port is nobody's".into())?;
        for (&(tenant, _), ports) in &hosts.addresses {
            agree(!ports.is_empty(), || "an address leads nowhere".into())?;
            for &port in ports {
                let host = hosts.port(port).map(|(host, _)| host);
                agree(host.is_some_and(|host| host.tenant == tenant), || {
                    format!("an address leads to port {port:?}, which is nobody's of its tenant")
                })?;
            }
        }
        agree(hosts.len() == hosts.iter().count(), || "a name leads to no host".into())?;
        agree(hosts.quotas_agree(), || "what hosts share is not what they hold".into())?;
        self.audit_batches()
    }

    fn count(&self, id: HostId) -> Usage {
        let mut usage = Usage::default();
        let batches = self.workload.batch_names.values();
        let owned = batches.filter(|&&key| self.workload.owns(id, key));
        usage[Charge::Batch as usize] = owned.count();
        for &key in self.workload.request_names.values() {
            if let Some(request) = self.workload.requests.get(key) {
                let loads = request.loads.iter().filter(|load| load.by == id);
                usage[Charge::Request as usize] += usize::from(request.by == id);
                usage[Charge::Load as usize] += loads.count();
            }
        }
        usage[Charge::Fetch as usize] = self.fetches.of_host(id).count();
        usage
    }

    fn audit_batches(&self) -> Result<(), String> {
        let (hosts, work) = (&self.hosts, &self.workload);
        let (mut members, mut requests) = (0, 0);
        for (&(tenant, name), &key) in &work.batch_names {
            let batch = work.batches.get(key);
            let batch = batch.ok_or_else(|| format!("batch {name} is not there"))?;
            members += batch.members.len();
            for &id in &batch.members {
                let host = hosts.get(id).filter(|host| host.tenant == tenant);
                agree(host.is_some_and(|it| it.batches.contains_key(&key)), || {
                    format!("a member of batch {name} takes no part in it")
                })?;
            }
            for &request in &batch.requests {
                requests += 1;
                let known = work.requests.get(request);
                let known = known.ok_or_else(|| format!("a request of batch {name} is gone"))?;
                let part = |id: HostId| batch.members.contains(&id);
                agree(known.batch == key, || format!("request {} is in two batches", known.name))?;
                let charged = part(known.by) && known.loads.iter().all(|load| part(load.by));
                agree(charged, || {
                    format!(
                        "a host that takes no part in batch {name} is charged for request {}",
                        known.name
                    )
                })?;
            }
        }
        let parts: usize = hosts.iter().map(|(_, host)| host.batches.len()).sum();
        let batches = (work.batches.len(), work.batch_names.len());
        agree(parts == members && batches.0 == batches.1, || {
            "hosts and batches disagree on who takes part".into()
        })?;
        let known = (work.requests.len(), work.request_names.len());
        agree(known == (requests, requests), || "a request is in no batch".into())?;
        let fetches: usize = hosts.iter().map(|(id, _)| self.fetches.of_host(id).count()).sum();
        agree(self.fetches.0.len() == fetches, || "a fetch is nobody's".into())
    }
}
