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
//! * *Its parts* own what they change: [`hosts`], [`workload`] (batches, requests, admission) and
//!   [`fetches`]. [`intake`] is what a host says, with the parts that it may change.
//! * *Who may say what* is in docs/coordinator.md; [`intake`] holds it up.
//! * *Debounce.* Triggers of a few milliseconds share a run ([`ClusterPolicy::debounce`]), and a
//!   run is followed by a rest in proportion to what it took ([`Cluster::rest`]), so admission has
//!   at most a bounded part of a core.
//! * *What a run costs* is one pass over the batches; what it sends is what changed ([`rank`],
//!   [`outbox`]).

mod attend;
mod audit;
mod batch;
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
mod tokens;
mod workload;

use laxity_policy::admission::{Admission, AdmissionConfig};
use laxity_policy::config::InvalidConfig;
use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, FromCoordinator};

pub use self::ended::Ended;
pub use self::host::HostId;
pub use self::policy::{ClusterPolicy, PolicyError};

use self::fetches::Fetches;
use self::hosts::Hosts;
use self::policy::Revisions;
use self::workload::Workload;
use crate::limits::Limits;
use crate::tenants::Tenants;

/// What an event is worth, in entries that are only looked at.
const EVENT_WORK: usize = 8;
/// What a request is worth that is announced.
const REQUEST_WORK: usize = 4;
/// Time between two runs, in durations of the last one: admission has at most half of the core.
const REST: u64 = 1;

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

/// Sums since the last [`Cluster::summary`].
#[derive(Debug, Default)]
struct Since {
    ranks_changed: u32,
    /// Runs of Algorithm 1 up to then.
    runs: u64,
    took: Span,
}

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    settings: Settings,
    term: u64,
    /// Of the newest order.
    sequence: u64,
    revisions: Revisions,
    hosts: Hosts,
    workload: Workload,
    fetches: Fetches,
    /// When reports are due that no run has seen, though admission has no run to make.
    settle_at: Option<Time>,
    rested_at: Time,
    since: Since,
    /// See [`Cluster::take_work`].
    work: usize,
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
            hosts: Hosts::new(&settings.limits),
            settings,
            term,
            sequence: 0,
            revisions: Revisions::new(policy, now),
            workload: Workload::new(admission),
            fetches: Fetches::default(),
            settle_at: None,
            rested_at: Time::ZERO,
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
            let config = admission_config(&policy, &self.settings.limits);
            self.workload
                .admission
                .set_config(now, config)
                .map_err(|invalid| PolicyError::Invalid {
                    field: invalid.field,
                    problem: invalid.problem,
                })?;
            self.revisions.set(policy, author, &change.comment, now);
            self.fetches.tokens.reopen();
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

    /// When to call [`Cluster::poll`] though nothing happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let lost = self.hosts.first_lost().map(|(at, _)| at);
        let tokens = self.fetches.tokens.next_deadline();
        [self.run_at(), tokens, lost].into_iter().flatten().min()
    }

    fn run_at(&self) -> Option<Time> {
        let due = [self.workload.admission.next_deadline(), self.settle_at];
        let due = due.into_iter().flatten().min()?;
        Some(due.max(self.rested_at))
    }

    /// Does what is due. Gives what a run did, if there was one: pass its duration to
    /// [`Cluster::rest`].
    pub fn poll(&mut self, now: Time) -> Option<RunReport> {
        while let Some((at, id)) = self.hosts.first_lost()
            && at <= now
        {
            self.forget_host(now, id);
        }
        let report = self.run_at().is_some_and(|at| at <= now).then(|| {
            self.settle_at = None;
            self.run(now)
        });
        self.assign_tokens(now);
        report
    }

    /// The last [`Cluster::poll`] that ran took this long, until `now`.
    pub fn rest(&mut self, now: Time, took: Span) {
        self.rested_at = now + took.times(REST);
        self.since.took = self.since.took + took;
    }

    fn run(&mut self, now: Time) -> RunReport {
        let runs = self.workload.admission.counters().runs;
        let _ = self.workload.admission.poll_action(now);
        let mut ranks_changed = 0;
        if self.workload.admission.counters().runs != runs {
            ranks_changed = self.publish_ranks();
            let sum = &mut self.since.ranks_changed;
            *sum = sum.saturating_add(ranks_changed as u32);
            self.publish_pruned();
        }
        for id in core::mem::take(&mut self.hosts.unconsidered) {
            let Some(host) = self.hosts.get_mut(id) else {
                continue;
            };
            host.considered = host.reported;
            if core::mem::take(&mut host.owed) && host.gets_orders() {
                if host.outbox.answer {
                    host.counters.coalesced_orders += 1;
                }
                host.outbox.answer = true;
                self.hosts.list(id);
            }
        }
        RunReport {
            batches: self.workload.batches.len(),
            requests: self.workload.requests.len(),
            pruned: self.workload.pruned.len(),
            ranks_changed,
            hosts_told: self.hosts.ready_count(),
        }
    }

    fn assign_tokens(&mut self, now: Time) {
        let due = self.fetches.tokens.next_deadline();
        if due.is_none_or(|at| at > now) {
            return;
        }
        let policy = self.policy().tokens();
        for (id, number) in self.fetches.assign_tokens(now, policy) {
            self.hosts.tell(id, |outbox| {
                outbox.tokens.insert(number);
            });
        }
    }
}

#[cfg(test)]
mod tests;
