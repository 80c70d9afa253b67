//! Operators that ask and command several coordinators at once. What they hear is a history.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use laxity_coordinator::cluster::ClusterPolicy;
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{DrainRequest, GetPolicyRequest, ListHostsRequest, Policy, SetPolicyRequest};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::group::{Group, connect};
use crate::history::{History, Operation};

const POLICY: &str = "the policy";

/// The state that all operators of a test share: addresses of coordinators, and the history.
pub(crate) struct Operators {
    addresses: Vec<String>,
    pub(crate) history: Mutex<History>,
    /// The number of the host that is drained. It changes, so that each has a short history.
    pub(crate) host: AtomicU64,
    /// The last value that was written. Each is written once.
    value: AtomicU64,
    pub(crate) over: AtomicBool,
}

impl Operators {
    pub(crate) fn new(group: &Group) -> Arc<Self> {
        let value = ClusterPolicy::default().drop_budget as u64;
        let operators = Self {
            addresses: group.members.iter().map(|member| member.address.clone()).collect(),
            history: Mutex::default(),
            host: AtomicU64::new(0),
            value: AtomicU64::new(value),
            over: AtomicBool::new(false),
        };
        let configured = Operation::Set { value, expected: 0, revision: Some(1) };
        operators.add(POLICY, Instant::now(), true, configured);
        Arc::new(operators)
    }

    fn add(&self, object: &str, called: Instant, is_known: bool, operation: Operation) {
        let answered = is_known.then(Instant::now);
        self.history.lock().expect("no panic").add(object, called, answered, operation);
    }

    /// Adds a command: `made` with its answer, if any, or `refused`. Returns `None` if the
    /// coordinator does not lead.
    fn command<T>(
        &self,
        (object, called): (&str, Instant),
        answer: Result<Response<T>, Status>,
        made: impl Fn(Option<T>) -> Operation,
        refused: Operation,
    ) -> Option<()> {
        match answer {
            Ok(answer) => self.add(object, called, true, made(Some(answer.into_inner()))),
            Err(status) if status.code() != Code::FailedPrecondition => {
                self.add(object, called, false, made(None));
            }
            Err(status) if status.message().contains("does not lead") => return None,
            Err(_) => self.add(object, called, true, refused),
        }
        Some(())
    }

    /// Does something at random. `revision` is the last one that this operator saw. Returns `None`
    /// if the coordinator does not lead.
    async fn act(
        &self,
        random: &mut SmallRng,
        mut operator: OperatorClient<Channel>,
        revision: &mut u64,
    ) -> Option<()> {
        let host = format!("host{}", self.host.load(Ordering::Relaxed));
        let value = 1 + self.value.fetch_add(1, Ordering::Relaxed);
        let (what, called) = (random.random_range(0..8), Instant::now());
        match what {
            0 | 1 => {
                let expected = what * *revision;
                let asked = SetPolicyRequest {
                    change: Some(Policy { drop_budget: Some(value as u32), ..Policy::default() }),
                    expected_revision: expected,
                    ..SetPolicyRequest::default()
                };
                let answer = operator.set_policy(asked).await.map(|it| it.map(|it| it.current));
                let set = |current: Option<Option<_>>| {
                    let current: Option<laxity_wire::v1::PolicyRevision> = current.flatten();
                    Operation::Set { value, expected, revision: current.map(|it| it.revision) }
                };
                self.command((POLICY, called), answer, set, Operation::Stale(expected))
            }
            2 | 3 => {
                let (drain, comment) = (what == 2, value.to_string());
                let made = if drain { Operation::Drain(value) } else { Operation::Undrain };
                let asked = DrainRequest { host: host.clone(), drain, comment };
                let answer = operator.drain(asked).await;
                self.command((&host, called), answer, |_| made, Operation::NotDrained)
            }
            4 | 5 => {
                let told = operator.list_hosts(ListHostsRequest {}).await.ok()?.into_inner();
                let found = told.hosts.into_iter().find(|it| it.host == host);
                let note = found.and_then(|it| it.drain);
                let drain = note.map_or(0, |note| note.comment.parse().expect("a value"));
                told.leading.then(|| self.add(&host, called, true, Operation::Sees((0, drain))))
            }
            _ => {
                let told = operator.get_policy(GetPolicyRequest { history: 0 }).await.ok()?;
                let told = told.into_inner();
                let current = told.current.filter(|_| told.leading == Some(true))?;
                *revision = current.revision;
                let seen = (current.revision, u64::from(current.policy?.drop_budget?));
                self.add(POLICY, called, true, Operation::Sees(seen));
                Some(())
            }
        }
    }

    /// Acts until `over`. It stays with a coordinator while that one leads.
    pub(crate) async fn operate(self: Arc<Self>, seed: u64) {
        let (mut random, mut nth, mut revision) = (SmallRng::seed_from_u64(seed), 0, 0);
        while !self.over.load(Ordering::Relaxed) {
            let done = match connect(&self.addresses[nth]).await {
                Some(channel) => {
                    self.act(&mut random, OperatorClient::new(channel), &mut revision).await
                }
                None => None,
            };
            if done.is_none() {
                nth = random.random_range(0..self.addresses.len());
            }
            tokio::time::sleep(Duration::from_millis(random.random_range(0..30))).await;
        }
    }
}
