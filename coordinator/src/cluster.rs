//! The coordinator's model of the cluster, without I/O and without a clock. Reports of daemons go
//! in and orders come out. Admission (MFS §4.4.2 and Appendix B, `laxity_policy::admission`) runs
//! over all reports together.
//!
//! ```text
//! attend(now, hello)                begins the stream of a daemon
//! report(now, host, report)         takes a report; refusals go into the host's outbox
//! poll(now)                         forgets lost hosts, runs admission
//! next_deadline()                   returns when to call poll if nothing else happens
//! poll_ready(), take(host, stream)  return a host with something to send, and its messages
//! ```
//!
//! * *Parts.* Each owns what it changes: [`hosts`], [`workload`] (batches, requests, admission) and
//!   [`fetches`]. [`intake`] handles what a host reports.
//! * *Authority.* docs/coordinator.md says what each host may report. [`intake`] enforces it.
//! * *Debounce.* Triggers within a few milliseconds share a run ([`ClusterPolicy::debounce`]).
//!   After a run there is a pause in proportion to its duration ([`Cluster::rest`]), so that
//!   admission takes a bounded part of a core.
//! * *Cost.* A run passes over the batches once. It sends only what changed ([`rank`], [`outbox`]).

pub(crate) mod attend;
mod audit;
mod batch;
pub mod change;
pub mod durable;
mod ended;
mod events;
mod explain;
mod fetches;
mod host;
mod hosts;
mod intake;
mod members;
mod note;
mod outbox;
mod policy;
mod publish;
mod quota;
mod rank;
pub(crate) mod refusal;
mod summary;
mod table;
mod workload;

use laxity_policy::admission::{Admission, AdmissionConfig};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, FromCoordinator};

pub use self::ended::EndedRequests;
pub use self::host::{HostCounters, HostId};
pub use self::policy::{ClusterPolicy, PolicyError};

use self::fetches::ClusterFetches;
use self::hosts::Hosts;
use self::policy::Revisions;
use self::workload::Workload;
use crate::limits::Limits;
use crate::tenants::Tenants;

/// Work of an event, in table entries that are looked at.
const EVENT_WORK: usize = 8;
/// Work of a request that is announced, in table entries.
const REQUEST_WORK: usize = 4;
/// Pause after a run, in durations of the run. With 1, admission takes at most half of a core.
const REST: u64 = 1;

/// The part of the configuration that a cluster needs, without its policy.
#[derive(Clone, Debug, Default)]
pub struct ClusterSettings {
    pub limits: Limits,
    pub tenants: Tenants,
    /// Heartbeat period. A stream that is silent for three periods ends.
    pub heartbeat: Span,
    /// How long a host's reports hold after its stream ended.
    pub host_grace: Span,
    pub order_age_max: Span,
}

#[derive(Debug)]
pub enum Taken {
    /// Messages to send in this order. May be empty.
    Frames(Vec<FromCoordinator>),
    Replaced,
}

/// Numbers of hosts, batches and other objects, which metrics show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounters {
    pub hosts: usize,
    pub connected: usize,
    pub batches: usize,
    pub requests: usize,
    pub pruned: usize,
    /// The sums over all hosts, with those that were forgotten.
    pub messages: HostCounters,
    pub ended: EndedRequests,
}

/// Counts since the last [`Cluster::summary`].
#[derive(Debug, Default)]
struct Since {
    ranks_changed: u32,
    /// Runs of Algorithm 1 up to the last summary.
    runs: u64,
    took: Span,
}

/// The coordinator's model of the cluster. See the module documentation.
#[derive(Debug)]
pub struct Cluster {
    settings: ClusterSettings,
    term: u64,
    sequence: u64,
    revisions: Revisions,
    hosts: Hosts,
    workload: Workload,
    fetches: ClusterFetches,
    /// When to answer reports for which admission makes no run of its own.
    settle_at: Option<Time>,
    rested_at: Time,
    since: Since,
    /// Work since the last [`Cluster::take_work`], in table entries.
    work: usize,
}

fn admission_config(policy: &ClusterPolicy, settings: &ClusterSettings) -> AdmissionConfig {
    let limits = &settings.limits;
    AdmissionConfig {
        drop_budget: policy.drop_budget,
        tenant_drop_budgets: settings.tenants.drop_budgets(),
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
    /// Creates an empty cluster. `term` fences its orders.
    pub fn new(
        now: Time,
        settings: ClusterSettings,
        policy: ClusterPolicy,
        term: u64,
    ) -> Result<Self, InvalidConfig> {
        let admission = Admission::new(admission_config(&policy, &settings))?;
        Ok(Self {
            hosts: Hosts::new(&settings.limits),
            settings,
            term,
            sequence: 0,
            revisions: Revisions::new(policy, now),
            workload: Workload::new(admission),
            fetches: ClusterFetches::default(),
            settle_at: None,
            rested_at: Time::ZERO,
            since: Since::default(),
            work: 0,
        })
    }

    pub fn policy(&self) -> &ClusterPolicy {
        &self.revisions.current().policy
    }

    /// Changes the settings that can change while streams are open. Limits and tenants need a
    /// restart.
    pub fn set_spans(&mut self, heartbeat: Span, host_grace: Span, order_age_max: Span) {
        self.settings.heartbeat = heartbeat;
        self.settings.host_grace = host_grace;
        self.settings.order_age_max = order_age_max;
    }

    pub fn policy_history(&self, now: Time, most: u32) -> v1::GetPolicyResponse {
        let older = self.revisions.older().take(most as usize);
        v1::GetPolicyResponse {
            current: Some(self.revisions.current().to_wire(now)),
            history: older.map(|revision| revision.to_wire(now)).collect(),
            leading: Some(true), // Without an election; the server knows better.
        }
    }

    /// Returns the work that messages caused since the last call, in events of the usual kind. A
    /// small message may make the coordinator visit many entries that others reported. The reader
    /// of a stream then pauses in proportion to this work.
    pub fn take_work(&mut self) -> usize {
        core::mem::take(&mut self.work).div_ceil(EVENT_WORK)
    }

    /// Returns when to call [`Cluster::poll`] if nothing else happens.
    pub fn next_deadline(&self) -> Option<Time> {
        let lost = self.hosts.first_lost().map(|(at, _)| at);
        [self.run_at(), lost].into_iter().flatten().min()
    }

    fn run_at(&self) -> Option<Time> {
        let due = [self.workload.admission.next_deadline(), self.settle_at];
        let due = due.into_iter().flatten().min()?;
        Some(due.max(self.rested_at))
    }

    /// Does everything that is due. Returns whether admission ran. The caller then passes the
    /// duration of the run to [`Cluster::rest`].
    pub fn poll(&mut self, now: Time) -> bool {
        while let Some((at, id)) = self.hosts.first_lost()
            && at <= now
        {
            self.forget_host(now, id);
        }
        let is_due = self.run_at().is_some_and(|at| at <= now);
        if is_due {
            self.settle_at = None;
            self.run(now);
        }
        is_due
    }

    /// Records that the run of the last [`Cluster::poll`] took `took` and ended at `now`.
    pub fn rest(&mut self, now: Time, took: Span) {
        self.rested_at = now + took.times(REST);
        self.since.took = self.since.took + took;
    }

    /// Runs admission, and queues its results for the hosts that they concern.
    fn run(&mut self, now: Time) {
        let runs = self.workload.admission.counters().runs;
        let _ = self.workload.admission.poll_action(now);
        if self.workload.admission.counters().runs != runs {
            let changed = self.publish_ranks();
            let sum = &mut self.since.ranks_changed;
            *sum = sum.saturating_add(changed as u32);
            self.publish_pruned();
        }
        for id in core::mem::take(&mut self.hosts.unconsidered) {
            let Some(host) = self.hosts.get_mut(id) else { continue };
            host.considered = host.reported;
            if core::mem::take(&mut host.owed) && host.gets_orders() {
                if host.outbox.answer {
                    host.counters.coalesced_orders += 1;
                }
                host.outbox.answer = true;
                self.hosts.list(id);
            }
        }
    }
}

#[cfg(test)]
mod tests;
