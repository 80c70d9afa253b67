//! The cluster as the coordinator knows it, without I/O and without a clock: reports of daemons go
//! in, admission (MFS §4.4.2 and Appendix B, `laxity_policy::admission`) runs over their sum,
//! orders come out.
//!
//! ```text
//! attend(now, hello)                a daemon's stream begins
//! report(now, host, report)         what it says; refusals go into its outbox
//! poll(now)                         runs, grants and forgets what is due
//! next_deadline()                   when to call poll though nothing happens
//! poll_ready(), take(host, stream)  whose stream has something to send, and what
//! ```
//!
//! * *One batch, several hosts.* Ids are the tenant's; admission knows batches and requests by keys
//!   of [`table`] instead, which ascend by arrival. So of equal REDs the batch that came first
//!   stays first.
//! * *Who may say what* is in docs/coordinator.md; [`intake`] holds it up.
//! * *Debounce.* Triggers of a few milliseconds share a run ([`ClusterPolicy::debounce`]), and a
//!   run is followed by a rest in proportion to what it took ([`Cluster::rest`]), so admission has
//!   at most a bounded part of a core.
//! * *What a run costs* is one pass over the batches; what it sends is what changed ([`rank`],
//!   [`outbox`]).

mod attend;
mod audit;
mod batch;
mod drains;
mod durable;
mod ended;
mod explain;
mod host;
mod intake;
mod members;
mod outbox;
mod policy;
mod publish;
mod quota;
mod rank;
mod summary;
mod table;
mod tokens;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::RandomState;

use laxity_policy::admission::{Admission, AdmissionConfig, AdmissionCounters};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{PortId, Span, Time};
use laxity_wire::v1::{self, FromCoordinator, SORT_KEY_LAST};

pub use self::durable::Durable;
pub use self::ended::Ended;
pub use self::host::HostId;
pub use self::policy::{ClusterPolicy, PolicyError};

use self::batch::{Batch, Request};
use self::drains::Drain;
use self::host::{Host, HostCounters, Tenant};
use self::policy::Revisions;
use self::quota::Quota;
use self::summary::Since;
use self::table::{Key, Table};
use self::tokens::{FetchRank, Need, Tokens};
use crate::limits::Limits;
use crate::tenants::Tenants;

/// What an event is worth, in entries that are only looked at.
const EVENT_WORK: usize = 8;
/// What a request is worth that is announced.
const REQUEST_WORK: usize = 4;
/// Time between two runs, in durations of the last one: admission has at most half of the core.
const REST: u64 = 1;

/// What this release can do beyond the first version of the protocol.
pub const CAPABILITIES: [v1::Capability; 3] = [
    v1::Capability::OrderDeltas,
    v1::Capability::FetchTokens,
    v1::Capability::PruneCauses,
];

/// What is fixed between two configurations.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Caps.
    pub limits: Limits,
    /// Who shares ids with whom.
    pub tenants: Tenants,
    /// Silence of three times this long ends a stream.
    pub heartbeat: Span,
    /// How long what a host said holds after its stream has ended.
    pub host_grace: Span,
    /// How long daemons should follow an order.
    pub order_age_max: Span,
}

/// What a run did, for metrics and those who watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunReport {
    /// Batches that have a rank.
    pub batches: usize,
    /// Requests known.
    pub requests: usize,
    /// Requests pruned.
    pub pruned: usize,
    /// Batches whose sort key changed.
    pub ranks_changed: usize,
    /// Hosts that have an order waiting now.
    pub hosts_told: usize,
}

/// What a stream gets from [`Cluster::take`].
#[derive(Debug)]
pub enum Taken {
    /// To be sent in this order; may be empty.
    Frames(Vec<FromCoordinator>),
    /// Another stream speaks for this host.
    Replaced,
}

/// Sums for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounters {
    /// Hosts known, and of them connected.
    pub hosts: usize,
    /// Hosts with a stream.
    pub connected: usize,
    /// Batches known.
    pub batches: usize,
    /// Requests known.
    pub requests: usize,
    /// Pruned requests.
    pub pruned: usize,
    /// Reports taken.
    pub reports: u64,
    /// Events taken or refused.
    pub events: u64,
    /// Events refused.
    pub refused_events: u64,
    /// Orders handed to streams.
    pub orders: u64,
    /// Orders merged into a later one because the host had not read.
    pub coalesced_orders: u64,
    /// How requests ended.
    pub ended: Ended,
}

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    settings: Settings,
    term: u64,
    /// Of the newest order.
    sequence: u64,
    streams: u64,
    revisions: Revisions,
    admission: Admission,
    hosts: Vec<Option<Host>>,
    host_names: HashMap<String, HostId>,
    /// Hosts without a stream, by when they are forgotten.
    lost: BTreeSet<(Time, HostId)>,
    drained: BTreeMap<String, Drain>,
    /// By port number: whose it is.
    port_hosts: Vec<Option<HostId>>,
    /// Egress ports by address. Of hosts that name the same, the first has it.
    addresses: HashMap<(Tenant, [u8; 16]), PortId>,
    /// Makes the numbers of [`Batch::invited`]; nobody can guess which names would meet.
    invitations: RandomState,
    batches: Table<Batch>,
    batch_names: HashMap<(Tenant, u64), Key>,
    requests: Table<Request>,
    request_names: HashMap<(Tenant, u64), Key>,
    tokens: Tokens,
    /// Whose a fetch is, and under which number.
    fetchers: HashMap<Key, (HostId, u64)>,
    quotas: Quotas,
    /// Requests that daemons know as pruned, ascending.
    pruned: Vec<Key>,
    /// Hosts with reports that no run has seen.
    unconsidered: BTreeSet<HostId>,
    /// When those are due though admission has no run to make.
    settle_at: Option<Time>,
    rested_at: Time,
    ready: Vec<HostId>,
    /// Of hosts that are gone.
    past: HostCounters,
    ended: Ended,
    since: Since,
    /// See [`Cluster::take_work`].
    work: usize,
}

#[derive(Debug)]
struct Quotas {
    batches: Quota,
    requests: Quota,
    loads: Quota,
    fetches: Quota,
}

impl Quotas {
    fn new(limits: &Limits) -> Self {
        let quota = |total, host_max| Quota::new(total, limits.hosts_max, host_max);
        Self {
            batches: quota(limits.batches_max, limits.batches_per_host_max),
            requests: quota(limits.requests_max, limits.requests_per_host_max),
            loads: quota(limits.loads_max, limits.loads_per_host_max),
            fetches: quota(limits.fetches_max, limits.fetches_per_host_max),
        }
    }
}

fn admission_config(policy: &ClusterPolicy, limits: &Limits) -> AdmissionConfig {
    AdmissionConfig {
        drop_budget: policy.drop_budget,
        debounce: policy.debounce,
        correction_permille: policy.correction_permille,
        batches_max: limits.batches_max,
        requests_max: limits.requests_max,
        loads_max: limits.loads_max,
        ports_max: limits.hosts_max * limits.ports_per_host_max,
        ..AdmissionConfig::for_policy(policy.policy)
    }
}

impl Cluster {
    /// A cluster of which nothing is known. `term` fences its orders.
    ///
    /// # Errors
    /// A limit or a parameter makes no sense; the configuration's check finds these first.
    pub fn new(
        now: Time,
        settings: Settings,
        policy: ClusterPolicy,
        term: u64,
    ) -> Result<Self, InvalidConfig> {
        let admission = Admission::new(admission_config(&policy, &settings.limits))?;
        Ok(Self {
            quotas: Quotas::new(&settings.limits),
            settings,
            term,
            sequence: 0,
            streams: 0,
            revisions: Revisions::new(policy, now),
            admission,
            hosts: Vec::new(),
            host_names: HashMap::new(),
            lost: BTreeSet::new(),
            drained: BTreeMap::new(),
            port_hosts: Vec::new(),
            addresses: HashMap::new(),
            invitations: RandomState::new(),
            batches: Table::default(),
            batch_names: HashMap::new(),
            requests: Table::default(),
            request_names: HashMap::new(),
            tokens: Tokens::default(),
            fetchers: HashMap::new(),
            pruned: Vec::new(),
            unconsidered: BTreeSet::new(),
            settle_at: None,
            rested_at: Time::ZERO,
            ready: Vec::new(),
            past: HostCounters::default(),
            ended: Ended::default(),
            since: Since::default(),
            work: 0,
        })
    }

    /// The policy that holds.
    #[must_use]
    pub fn policy(&self) -> &ClusterPolicy {
        &self.revisions.current().policy
    }

    /// Settings that can change while streams are open: spans. Limits and tenants need a restart.
    pub fn set_spans(&mut self, heartbeat: Span, host_grace: Span, order_age_max: Span) {
        self.settings.heartbeat = heartbeat;
        self.settings.host_grace = host_grace;
        self.settings.order_age_max = order_age_max;
    }

    /// Changes the policy.
    ///
    /// # Errors
    /// [`PolicyError`]; nothing has changed then.
    pub fn set_policy(
        &mut self,
        now: Time,
        change: &v1::SetPolicyRequest,
        author: &str,
    ) -> Result<v1::PolicyRevision, PolicyError> {
        let nothing = v1::Policy::default();
        let wanted = change.change.as_ref().unwrap_or(&nothing);
        let policy = self.revisions.check(wanted, change.expected_revision)?;
        if !change.dry_run {
            self.admission
                .set_config(now, admission_config(&policy, &self.settings.limits))
                .map_err(|invalid| PolicyError::Invalid {
                    field: invalid.field,
                    problem: invalid.problem,
                })?;
            self.revisions.set(policy, author, &change.comment, now);
            self.tokens.reopen();
        }
        Ok(self.revisions.current().to_wire(now))
    }

    /// The policy with its history, for operators.
    #[must_use]
    pub fn policy_history(&self, now: Time, most: u32) -> v1::GetPolicyResponse {
        let older = self.revisions.older().take(most as usize);
        v1::GetPolicyResponse {
            current: Some(self.revisions.current().to_wire(now)),
            history: older.map(|revision| revision.to_wire(now)).collect(),
        }
    }

    /// What reports and other messages have cost since this was asked last, in events of the usual
    /// kind: a small message may have the coordinator walk through much that others said, and
    /// whoever reads from a stream takes as long as that is worth.
    pub fn take_work(&mut self) -> usize {
        core::mem::take(&mut self.work).div_ceil(EVENT_WORK)
    }

    fn host(&self, id: HostId) -> Option<&Host> {
        self.hosts.get(id.0 as usize)?.as_ref()
    }

    fn host_mut(&mut self, id: HostId) -> Option<&mut Host> {
        self.hosts.get_mut(id.0 as usize)?.as_mut()
    }

    /// When to call [`Cluster::poll`] though nothing happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let lost = self.lost.first().map(|&(at, _)| at);
        let tokens = self.tokens.next_deadline();
        [self.run_at(), tokens, lost].into_iter().flatten().min()
    }

    fn run_at(&self) -> Option<Time> {
        let due = [self.admission.next_deadline(), self.settle_at];
        let due = due.into_iter().flatten().min()?;
        Some(due.max(self.rested_at))
    }

    /// Does what is due. Gives what a run did, if there was one: pass its duration to
    /// [`Cluster::rest`].
    pub fn poll(&mut self, now: Time) -> Option<RunReport> {
        while let Some(&(at, id)) = self.lost.first()
            && at <= now
        {
            self.forget_host(now, id);
        }
        let report = self.run_at().is_some_and(|at| at <= now).then(|| {
            self.settle_at = None;
            self.run(now)
        });
        self.grant(now);
        report
    }

    /// The last [`Cluster::poll`] that ran took this long, until `now`.
    pub fn rest(&mut self, now: Time, took: Span) {
        self.rested_at = now + took.times(REST);
        self.since.took = self.since.took + took;
    }

    fn run(&mut self, now: Time) -> RunReport {
        let runs = self.admission.counters().runs;
        let _ = self.admission.poll_action(now);
        let mut ranks_changed = 0;
        if self.admission.counters().runs != runs {
            ranks_changed = self.publish_ranks();
            self.since.ranks_changed = self
                .since
                .ranks_changed
                .saturating_add(ranks_changed as u32);
            self.publish_pruned();
        }
        for id in core::mem::take(&mut self.unconsidered) {
            let Some(host) = self.host_mut(id) else {
                continue;
            };
            host.considered = host.reported;
            if core::mem::take(&mut host.owed) && host.gets_orders() {
                if host.outbox.answer {
                    host.counters.coalesced_orders += 1;
                }
                host.outbox.answer = true;
                self.list(id);
            }
        }
        RunReport {
            batches: self.batches.len(),
            requests: self.requests.len(),
            pruned: self.pruned.len(),
            ranks_changed,
            hosts_told: self.ready.len(),
        }
    }

    fn grant(&mut self, now: Time) {
        if self.tokens.next_deadline().is_none_or(|at| at > now) {
            return;
        }
        let policy = self.policy().tokens();
        for key in self.tokens.grant(now, policy) {
            if let Some(&(id, fetch)) = self.fetchers.get(&key) {
                self.note_turn(id, fetch);
            }
        }
    }

    /// A host is to be told where one of its fetches stands.
    fn note_turn(&mut self, id: HostId, fetch: u64) {
        if let Some(host) = self.host_mut(id)
            && host.gets_orders()
        {
            host.outbox.tokens.insert(fetch);
            host.outbox.trim();
            self.list(id);
        }
    }

    /// Sums for metrics.
    #[must_use]
    pub fn counters(&self) -> (ClusterCounters, AdmissionCounters) {
        let living = self.hosts.iter().flatten();
        let mut sum = ClusterCounters {
            hosts: self.host_names.len(),
            connected: living.clone().filter(|host| host.stream.is_some()).count(),
            batches: self.batches.len(),
            requests: self.requests.len(),
            pruned: self.pruned.len(),
            ended: self.ended,
            ..ClusterCounters::default()
        };
        for counters in living.map(|host| host.counters).chain([self.past]) {
            sum.reports += counters.reports;
            sum.events += counters.events;
            sum.refused_events += counters.refused_events;
            sum.orders += counters.orders;
            sum.coalesced_orders += counters.coalesced_orders;
        }
        (sum, *self.admission.counters())
    }

    /// The key that fetches of a batch wait with.
    fn fetch_rank(&self, batch: Key, request: Option<Key>) -> FetchRank {
        let pruned = request
            .and_then(|key| self.requests.get(key))
            .is_some_and(|request| request.pruned);
        let known = self.batches.get(batch);
        let need = if known.is_some_and(|batch| batch.started.is_some()) {
            Need::Blocking
        } else if pruned || known.is_none() {
            Need::Doomed
        } else {
            Need::Ahead
        };
        let sort_key = known.and_then(|batch| batch.sort_key);
        FetchRank {
            need,
            sort_key: sort_key.unwrap_or(SORT_KEY_LAST),
        }
    }

    /// Something changed by which the fetches of a batch are ranked.
    fn rerank_fetches(&mut self, batch: Key) {
        let Some(known) = self.batches.get(batch) else {
            return;
        };
        for key in known.fetches.iter().copied().collect::<Vec<_>>() {
            let Some(&(id, number)) = self.fetchers.get(&key) else {
                continue;
            };
            let fetch = self.host(id).and_then(|host| {
                let fetch = host.fetches.get(&number)?;
                let request = self.request_names.get(&(host.tenant, fetch.request));
                Some(request.copied())
            });
            let rank = self.fetch_rank(batch, fetch.flatten());
            self.tokens.rerank(key, rank);
        }
    }
}

#[cfg(test)]
mod tests;
