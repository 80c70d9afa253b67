//! What operators see of hosts and batches, and the explanation of a batch's place in the order.

use laxity_policy::admission::Decision;
use laxity_policy::prune::{Estimate, PACE_UNIT};
use laxity_policy::{BatchId, RequestId, Time};
use laxity_quantity::{Bytes, Nanos, Rate};
use laxity_wire::v1;

use super::Cluster;
use super::batch::ClusterBatch;
use super::host::{Charge, Host};
use super::hosts::MISSING_MAX_AGE;
use super::table::Key;

const BATCHES_MAX: usize = 1000;
/// Neighbours in the order that an explanation names on each side.
const NEIGHBOURS: usize = 3;

/// Returns the time from now to `at`, or `None` for [`Time::NEVER`].
fn remaining(now: Time, at: Time) -> Option<i64> {
    (at != Time::NEVER).then(|| at.remaining_ns(now))
}

impl Cluster {
    /// Lists all hosts by name, including missing hosts and drained hosts that never attended.
    pub fn list_hosts(&self, now: Time) -> v1::ListHostsResponse {
        let known = self.hosts.iter();
        let mut hosts: Vec<v1::HostStatus> =
            known.map(|(_, host)| self.host_status(now, host)).collect();
        let drained = self.hosts.drained.iter();
        let unknown = drained.filter(|(name, _)| self.hosts.named(name).is_none());
        hosts.extend(unknown.map(|(name, drain)| v1::HostStatus {
            host: name.clone(),
            drained: true,
            drain: Some(drain.to_wire(now)),
            ..v1::HostStatus::default()
        }));
        let missing = self.hosts.missing.iter().filter(|(name, host)| {
            let is_recent = now.since(host.heard_at) < MISSING_MAX_AGE;
            is_recent && !self.hosts.drained.contains_key(*name)
        });
        hosts.extend(missing.map(|(name, host)| v1::HostStatus {
            host: name.clone(),
            tenant: self.settings.tenants.name(host.tenant).to_owned(),
            silent_ns: Some(now.since(host.heard_at).0),
            left: host.left,
            ..v1::HostStatus::default()
        }));
        hosts.sort_by(|one, other| one.host.cmp(&other.host));
        v1::ListHostsResponse {
            hosts,
            tenants: self.list_tenants(),
            term: self.term,
            run: self.workload.admission.counters().runs,
            leading: true, // Without an election; `Shared` knows better.
            leader: String::new(),
            software: format!("laxity-coordinator {}", env!("CARGO_PKG_VERSION")),
        }
    }

    fn list_tenants(&self) -> Vec<v1::TenantStatus> {
        let budgets = self.settings.tenants.drop_budgets();
        let mut tenants: Vec<v1::TenantStatus> = (0..self.settings.tenants.count())
            .map(|index| v1::TenantStatus {
                tenant: self.settings.tenants.name(index as u16).to_owned(),
                drop_budget: budgets.get(index).copied().flatten().map(|budget| budget as u32),
                ..v1::TenantStatus::default()
            })
            .collect();
        for (_, host) in self.hosts.iter() {
            tenants[usize::from(host.tenant)].hosts += 1;
        }
        for (&(tenant, _), &key) in &self.workload.batch_names {
            let requests = self.workload.batches.get(key).map_or(0, |batch| batch.requests.len());
            tenants[usize::from(tenant)].batches += 1;
            tenants[usize::from(tenant)].requests += requests as u32;
        }
        for request in self.workload.pruned.iter().filter_map(|&it| self.workload.requests.get(it))
        {
            tenants[usize::from(request.tenant)].pruned += 1;
        }
        tenants
    }

    fn host_status(&self, now: Time, host: &Host) -> v1::HostStatus {
        let port = |port: &super::host::HostPort| v1::PortStatus {
            port: port.info.name.clone(),
            direction: port.info.direction,
            rate_bytes_per_s: port.info.rate_bytes_per_s,
            queued_bytes: port.load.queued_bytes,
            load_permille: port.load.load_permille,
            queued_level_bytes: port.load.queued_level_bytes.clone(),
            queued_stage_bytes: port.load.queued_stage_bytes.clone(),
            foreign_bytes_per_s: port.load.foreign_bytes_per_s,
        };
        v1::HostStatus {
            host: host.name.clone(),
            tenant: self.settings.tenants.name(host.tenant).to_owned(),
            connected: host.stream.is_some(),
            drained: host.drained,
            software: host.software.clone(),
            settings: host.settings.clone(),
            ports: host.ports.iter().map(port).collect(),
            batches: host.batches.len() as u32,
            requests: host.usage[Charge::Request as usize] as u32,
            fetches: host.usage[Charge::Fetch as usize] as u32,
            silent_ns: Some(now.since(host.heard_at).0),
            reports: host.counters.reports,
            events: host.counters.events,
            refused_events: host.counters.refused_events,
            refused_hellos: host.counters.refused_hellos,
            refused_ns: host.refused_at.map(|at| now.since(at).0),
            orders: host.counters.orders,
            coalesced_orders: host.counters.coalesced_orders,
            applied: host.applied,
            completed_flows: host.counters.completed_flows,
            missed_flows: host.counters.missed_flows,
            drain: (self.hosts.drained.get(&host.name)).map(|drain| drain.to_wire(now)),
            left: host.left && host.stream.is_none(),
        }
    }

    fn batch_status(&self, now: Time, key: Key, batch: &ClusterBatch) -> v1::BatchStatus {
        let decision = self.workload.admission.last_decision(BatchId(key));
        let members = batch.members.iter().map(|&id| self.hosts.get(id));
        let name = |host: Option<&Host>| host.map_or_else(String::new, |it| it.name.clone());
        let hosts: Vec<String> = members.map(name).collect();
        v1::BatchStatus {
            batch: batch.name,
            tenant: self.settings.tenants.name(batch.tenant).to_owned(),
            owner: hosts.first().cloned().unwrap_or_default(),
            hosts,
            rank: decision.as_ref().map(|decision| decision.rank as u32),
            requests: batch.requests.len() as u32,
            pruned: decision.as_ref().map_or(0, |it| it.pruned.len()) as u32,
            started: batch.started.is_some(),
            layer: batch.layer,
            layers: batch.layers,
            red_remaining_ns: decision.as_ref().and_then(|it| remaining(now, it.red.score)),
            finish_remaining_ns: decision
                .as_ref()
                .and_then(|it| remaining(now, self.finish(now, key, it))),
            feasible: decision.is_none_or(|decision| decision.feasible),
            age_ns: now.since(batch.arrived).0,
        }
    }

    /// Returns the current estimate of when the batch has computed.
    fn ready(&self, now: Time, key: Key, decision: &Decision) -> Time {
        let ready = self.workload.admission.ready(now, BatchId(key));
        ready.unwrap_or(decision.estimate.ready)
    }

    /// Returns the current estimate of when the batch ends. The end of a batch that waits to
    /// compute moves on with time. The end of a batch that still exists is never in the past.
    fn finish(&self, now: Time, key: Key, decision: &Decision) -> Time {
        let estimate = Estimate { ready: self.ready(now, key, decision), ..decision.estimate };
        estimate.finish().max(now)
    }

    /// Lists batches in the order of the last run, without those that arrived after it.
    pub fn list_batches(
        &self,
        now: Time,
        wanted: &v1::ListBatchesRequest,
    ) -> v1::ListBatchesResponse {
        let most = match wanted.limit as usize {
            0 => BATCHES_MAX,
            limit => limit.min(BATCHES_MAX),
        };
        let of_host = |batch: &ClusterBatch| {
            wanted.host.is_empty()
                || (self.hosts.names.get(&wanted.host)).is_some_and(|id| batch.members.contains(id))
        };
        let of_tenant = |batch: &ClusterBatch| {
            wanted.tenant.is_empty() || self.settings.tenants.name(batch.tenant) == wanted.tenant
        };
        let in_trouble = |key: Key| {
            let decision = self.workload.admission.last_decision(BatchId(key));
            decision.is_some_and(|it| !it.feasible || !it.pruned.is_empty())
        };
        let batches = self
            .workload
            .admission
            .ranking()
            .filter_map(|(id, _)| Some((id.0, self.workload.batches.get(id.0)?)))
            .filter(|(_, batch)| of_host(batch) && of_tenant(batch))
            .filter(|&(key, _)| !wanted.in_trouble || in_trouble(key))
            .take(most)
            .map(|(key, batch)| self.batch_status(now, key, batch))
            .collect();
        v1::ListBatchesResponse { batches, total: self.workload.batches.len() as u32 }
    }

    pub fn explain(
        &self,
        now: Time,
        wanted: &v1::ExplainRequest,
    ) -> Result<v1::ExplainResponse, String> {
        let named = |tenant: &u16| {
            wanted.tenant.is_empty() || self.settings.tenants.name(*tenant) == wanted.tenant
        };
        let mut found = self
            .workload
            .batch_names
            .iter()
            .filter(|((tenant, name), _)| *name == wanted.batch && named(tenant))
            .map(|(_, &key)| key);
        let Some(key) = found.next() else {
            return Err(format!("no batch {} is active", wanted.batch));
        };
        if found.next().is_some() {
            return Err(format!("several tenants have a batch {}; name the tenant", wanted.batch));
        }
        let batch = self.workload.batches.get(key);
        let batch = batch.ok_or_else(|| format!("no batch {} is active", wanted.batch))?;
        let mut told = v1::ExplainResponse {
            status: Some(self.batch_status(now, key, batch)),
            sort_key: batch.sort_key,
            ..v1::ExplainResponse::default()
        };
        let Some(decision) = self.workload.admission.last_decision(BatchId(key)) else {
            told.text.push("It arrived after the last run and has no place yet.".into());
            return Ok(told);
        };
        self.explain_decision(now, key, batch, &decision, &mut told);
        Ok(told)
    }

    fn explain_decision(
        &self,
        now: Time,
        key: Key,
        batch: &ClusterBatch,
        decision: &Decision,
        told: &mut v1::ExplainResponse,
    ) {
        let (red, estimate) = (&decision.red, &decision.estimate);
        told.tight_remaining_ns = remaining(now, red.tight);
        told.loose_remaining_ns = remaining(now, red.loose);
        told.tight_count = red.tight_count as u32;
        told.deadline_count = red.count as u32;
        told.bottleneck = estimate.bottleneck.and_then(|port| self.hosts.port_name(port));
        told.bottleneck_bytes = estimate.bytes;
        told.bottleneck_rate_bytes_per_s = estimate.rate;
        told.ready_remaining_ns = self.ready(now, key, decision).remaining_ns(now);
        let held = |key: u64| red.score.remaining_ns(Time(key));
        told.held_back_ns = match batch.sort_key {
            Some(key) if red.score != Time::NEVER => held(key),
            _ => 0,
        };
        told.decided_ago_ns = now.since(decision.decided_at).0;
        if red.loose != Time::NEVER {
            let spare_ns = u128::from(red.loose.since(estimate.ready).0);
            let carried = spare_ns * u128::from(estimate.rate) * u128::from(PACE_UNIT)
                / (1_000_000_000 * u128::from(estimate.pace.max(1)));
            let carried = i64::try_from(carried).unwrap_or(i64::MAX);
            let wanted = i64::try_from(estimate.bytes).unwrap_or(i64::MAX);
            told.room_bytes = carried.saturating_sub(wanted);
        }
        let ranking: Vec<(BatchId, Time)> = self.workload.admission.ranking().collect();
        let at = ranking.iter().position(|(id, _)| {
            (self.workload.batches.get(id.0)).is_some_and(|it| core::ptr::eq(it, batch))
        });
        if let Some(at) = at {
            let neighbour = |&(id, red): &(BatchId, Time)| {
                Some(v1::Neighbour {
                    batch: self.workload.batches.get(id.0)?.name,
                    red_remaining_ns: remaining(now, red),
                })
            };
            let before = ranking[at.saturating_sub(NEIGHBOURS)..at].iter();
            told.before = before.filter_map(neighbour).collect();
            told.after = ranking[at + 1..].iter().take(NEIGHBOURS).filter_map(neighbour).collect();
        }
        told.pruned = decision
            .pruned
            .iter()
            .filter_map(|&request| self.pruned_request(now, request))
            .collect();
        told.text = sentences(decision, told);
    }

    fn pruned_request(&self, now: Time, id: RequestId) -> Option<v1::PrunedRequest> {
        let request = self.workload.requests.get(id.0)?;
        let cause = self.workload.admission.prune_cause(id);
        let on = |port| {
            let loads = request.loads.iter().filter(move |load| load.port == port);
            loads.map(|load| load.bytes).max().unwrap_or(0)
        };
        Some(v1::PrunedRequest {
            request: request.name,
            for_batch: cause
                .and_then(|cause| self.workload.batches.get(cause.batch.0))
                .map_or(0, |batch| batch.name),
            port: cause.and_then(|cause| self.hosts.port_name(cause.port?)),
            bytes: cause.and_then(|cause| cause.port).map_or(0, on),
            remaining_ns: remaining(now, request.deadline),
        })
    }
}

fn span(ns: i64) -> String {
    Nanos(ns.unsigned_abs()).about()
}

fn due(ns: Option<i64>) -> String {
    match ns.unwrap_or(0) {
        ns if ns < 0 => format!("{} ago", span(ns)),
        ns => format!("in {}", span(ns)),
    }
}

fn sentences(decision: &Decision, told: &v1::ExplainResponse) -> Vec<String> {
    let mut text = Vec::new();
    let red = told.status.as_ref().and_then(|status| status.red_remaining_ns);
    let place = decision.rank;
    match red {
        None => text.push(format!(
            "Place {place}: no request of it that can still be in time has a deadline, so it comes \
             after all batches that have one."
        )),
        Some(red) => text.push(format!(
            "Place {place}, by its robust effective deadline, {}: {} of {} requests are tight (the \
             first is due {}), the others are due {} or later.",
            due(Some(red)),
            told.tight_count,
            told.deadline_count,
            due(told.tight_remaining_ns),
            due(told.loose_remaining_ns),
        )),
    }
    if told.held_back_ns != 0 {
        text.push(format!(
            "Daemons still use a deadline that differs by {}, which is within the margin that \
             keeps ranks from flapping.",
            span(told.held_back_ns)
        ));
    }
    match &told.bottleneck {
        None => text.push(
            "It moves nothing through any port, so only computing decides when it ends.".into(),
        ),
        Some(port) => text.push(format!(
            "Its bottleneck is {} {} of {}: {} of it and of the batches before it at {}.",
            port.port,
            match port.direction() {
                v1::Direction::Ingress => "ingress",
                _ => "egress",
            },
            port.host,
            Bytes(told.bottleneck_bytes).about(),
            Rate(told.bottleneck_rate_bytes_per_s).about(),
        )),
    }
    let room = Bytes(told.room_bytes.unsigned_abs()).about();
    let (end, room_is) = if decision.feasible { ("make it", "more") } else { ("be late", "less") };
    text.push(format!("It should {end}: {room} {room_is} would have fitted."));
    for pruned in &told.pruned {
        text.push(match &pruned.port {
            None => format!("Request {} is pruned: computing alone makes it late.", pruned.request),
            Some(port) => format!(
                "Request {} is pruned for batch {}: it loaded {} of {} most.",
                pruned.request, pruned.for_batch, port.port, port.host
            ),
        });
    }
    text
}
