//! Operators that ask and command several coordinators at once. What they hear goes into a history.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{DrainRequest, GetPolicyRequest, ListHostsRequest, Policy, SetPolicyRequest};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::group::{Group, connect};
use crate::history::{History, Operation, State};
use crate::proxy::Delays;

const OPERATORS: u64 = 4;
const POLICY: &str = "the policy";

/// Makes every second save late, or its answer.
pub(crate) fn delays(seed: u64) -> Delays {
    let mut random = SmallRng::seed_from_u64(seed);
    Arc::new(Mutex::new(move || {
        let late = Duration::from_millis(random.random_range(0..1500));
        match random.random_range(0..4) {
            0 => [late, Duration::ZERO],
            1 => [Duration::ZERO, late],
            _ => [Duration::ZERO; 2],
        }
    }))
}

/// Operators at work.
pub(crate) struct Operators {
    scene: Arc<Scene>,
    running: JoinSet<()>,
}

#[derive(Default)]
struct Scene {
    addresses: Vec<String>,
    history: Mutex<History>,
    /// The number of the host that is drained and taken back.
    host: AtomicU64,
    /// The last value that was written. Each is written once.
    value: AtomicU64,
    over: AtomicBool,
}

impl Operators {
    pub(crate) async fn start(group: &Group, seed: u64) -> Self {
        let (leader, _) = group.leader().await;
        let mut operator = OperatorClient::new(group.channel(leader).await.expect("it runs"));
        let addresses = group.members.iter().map(|member| member.address.clone()).collect();
        let scene = Arc::new(Scene { addresses, ..Scene::default() });
        let state = policy(&mut operator).await.expect("it leads");
        scene.history.lock().expect("no panic").begin(POLICY, state);
        scene.value.store(state.1, Ordering::Relaxed);
        let mut running = JoinSet::new();
        for nth in 1..=OPERATORS {
            let random = SmallRng::seed_from_u64(seed ^ nth << 32);
            running.spawn(Arc::clone(&scene).operate(random));
        }
        Self { scene, running }
    }

    /// Lets the operators drain another host, so that each has a short history.
    pub(crate) fn turn(&self) {
        self.scene.host.fetch_add(1, Ordering::Relaxed);
    }

    /// Checks what the operators heard. Returns the number of operations.
    pub(crate) async fn end(self) -> Result<usize, String> {
        self.scene.over.store(true, Ordering::Relaxed);
        self.running.join_all().await;
        self.scene.history.lock().expect("no panic").check()
    }
}

/// Returns revision and drop budget if the coordinator leads.
async fn policy(operator: &mut OperatorClient<Channel>) -> Option<State> {
    let told = operator.get_policy(GetPolicyRequest { history: 0 }).await.ok()?.into_inner();
    let current = told.current.filter(|_| told.leading == Some(true))?;
    Some((current.revision, u64::from(current.policy?.drop_budget?)))
}

impl Scene {
    fn add(&self, object: &str, called: Instant, is_known: bool, operation: Operation) {
        let times = (called, is_known.then(Instant::now));
        self.history.lock().expect("no panic").add(object, times, operation);
    }

    /// Adds a command: `made` by its answer, if there is one, or `refused`. Returns `None` if the
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

    async fn set(&self, mut operator: OperatorClient<Channel>, expected: u64) -> Option<()> {
        let value = 1 + self.value.fetch_add(1, Ordering::Relaxed);
        let called = Instant::now();
        let asked = SetPolicyRequest {
            change: Some(Policy { drop_budget: Some(value as u32), ..Policy::default() }),
            expected_revision: expected,
            ..SetPolicyRequest::default()
        };
        let answer = operator.set_policy(asked).await.map(|set| set.map(|it| it.current));
        let made = |current: Option<Option<_>>| {
            let revision = current.flatten().map(|it: laxity_wire::v1::PolicyRevision| it.revision);
            Operation::Set { value, expected, revision }
        };
        self.command((POLICY, called), answer, made, Operation::Stale(expected))
    }

    async fn drain(
        &self,
        mut operator: OperatorClient<Channel>,
        host: String,
        drain: bool,
    ) -> Option<()> {
        let value = 1 + self.value.fetch_add(1, Ordering::Relaxed);
        let called = Instant::now();
        let asked = DrainRequest { host: host.clone(), drain, comment: value.to_string() };
        let answer = operator.drain(asked).await;
        let made = if drain { Operation::Drain(value) } else { Operation::Undrain };
        self.command((&host, called), answer, |_| made, Operation::NotDrained)
    }

    async fn list(&self, mut operator: OperatorClient<Channel>, host: String) -> Option<()> {
        let called = Instant::now();
        let told = operator.list_hosts(ListHostsRequest {}).await.ok()?.into_inner();
        let note = told.hosts.into_iter().find(|it| it.host == host).and_then(|it| it.drain);
        let value = note.map_or(0, |note| note.comment.parse().expect("a value"));
        told.leading.then(|| self.add(&host, called, true, Operation::Sees((0, value))))
    }

    /// Asks and commands until the scene is over, and stays with a coordinator while that leads.
    async fn operate(self: Arc<Self>, mut random: SmallRng) {
        let (mut nth, mut revision) = (0, 0);
        while !self.over.load(Ordering::Relaxed) {
            let host = format!("host{}", self.host.load(Ordering::Relaxed));
            let done = async {
                let mut operator = OperatorClient::new(connect(&self.addresses[nth]).await?);
                match random.random_range(0..8) {
                    0 => self.set(operator, 0).await,
                    1 => self.set(operator, revision).await,
                    2 => self.drain(operator, host, true).await,
                    3 => self.drain(operator, host, false).await,
                    4 | 5 => self.list(operator, host).await,
                    _ => {
                        let called = Instant::now();
                        let state = policy(&mut operator).await?;
                        self.add(POLICY, called, true, Operation::Sees(state));
                        revision = state.0;
                        Some(())
                    }
                }
            };
            if done.await.is_none() {
                nth = random.random_range(0..self.addresses.len());
            }
            tokio::time::sleep(Duration::from_millis(random.random_range(0..60))).await;
        }
    }
}
