//! Several coordinators and an etcd, under faults.
//!
//! A daemon goes to whoever leads and keeps the rule that fences: an order is in force only if its term is none
//! smaller than the largest seen. Beside that, everything that any coordinator sends is looked at: leadership is a lease, so once
//! an order of a term has been sent, nobody may begin to *make* one of an older term.
//!
//! `LAXITY_HA_FAULTS` (default 6) faults are made from the seed `LAXITY_HA_SEED` (default 1), both of which are printed.
//! Without Debian's `etcd-server` these tests do nothing, and say so.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{
    Epoch, GetPolicyRequest, GoodbyeReason, ListHostsRequest, Policy, SetPolicyRequest,
    from_coordinator::Message,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use tonic::transport::{Channel, Endpoint};

use crate::daemon::{Daemon, arrived};
use crate::process::Process;

/// The shortest that is allowed, so that a fault takes seconds.
const TTL_S: u64 = 2;
/// How long until somebody leads again, at the very most: the machine may be busy.
const ELECTED_MAX: Duration = Duration::from_secs(60);

struct Etcd {
    child: Child,
    endpoint: String,
    _folder: tempfile::TempDir,
}

impl Etcd {
    /// `None`, loudly, if it is not installed.
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let port = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.local_addr().expect("bound").port()
        };
        let endpoint = format!("http://127.0.0.1:{}", port());
        let peers = format!("http://127.0.0.1:{}", port());
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path())
            .args(["--name", "default", "--log-level", "error"])
            .args([
                "--listen-client-urls",
                &endpoint,
                "--advertise-client-urls",
                &endpoint,
            ])
            .args([
                "--listen-peer-urls",
                &peers,
                "--initial-advertise-peer-urls",
                &peers,
            ])
            .arg(format!("--initial-cluster=default={peers}"))
            .arg("--unsafe-no-fsync")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match child {
            Ok(child) => Some(Self {
                child,
                endpoint,
                _folder: folder,
            }),
            Err(error) => {
                eprintln!("SKIPPED: no etcd here ({error}); apt-get install etcd-server");
                None
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("a process of this test");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Coordinators of one cluster.
struct Group {
    etcd: Etcd,
    folder: tempfile::TempDir,
    members: Vec<Process>,
}

impl Group {
    fn start(count: usize) -> Option<Self> {
        let etcd = Etcd::start()?;
        let folder = tempfile::tempdir().expect("a folder");
        let mut group = Self {
            etcd,
            folder,
            members: Vec::new(),
        };
        for nth in 0..count {
            let process = group.member(nth);
            group.members.push(process);
        }
        Some(group)
    }

    fn member(&self, nth: usize) -> Process {
        let path = self.folder.path().join(format!("{nth}.toml"));
        // A port of its own that it keeps over restarts, so that what others say of it stays true.
        if !path.exists() {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("bound");
            let text = format!(
                "listen = \"{address}\"\nlog = \"error\"\nheartbeat = \"10s\"\n[policy]\ndebounce = \"1ms\"\n[etcd]\nendpoints = [\"{}\"]\nadvertise = \"{address}\"\nttl = \"{TTL_S}s\"\n",
                self.etcd.endpoint
            );
            fs::write(&path, text).expect("written");
        }
        Process::start(Path::new(&path))
    }

    async fn channel(&self, nth: usize) -> Option<Channel> {
        let url = format!("http://{}", self.members[nth].address);
        let endpoint = Endpoint::from_shared(url).expect("a URL");
        let endpoint = endpoint
            .timeout(Duration::from_secs(2))
            .connect_timeout(Duration::from_secs(2));
        endpoint.connect().await.ok()
    }

    /// Who says that it leads, with its term.
    async fn leader(&self) -> (usize, u64) {
        let begun = Instant::now();
        loop {
            for nth in 0..self.members.len() {
                let Some(channel) = self.channel(nth).await else {
                    continue;
                };
                let asked = OperatorClient::new(channel)
                    .list_hosts(ListHostsRequest {})
                    .await;
                if let Ok(told) = asked
                    && told.get_ref().leading
                {
                    return (nth, told.get_ref().term);
                }
            }
            assert!(begun.elapsed() < ELECTED_MAX, "nobody leads");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The rule of docs/coordinator.md, and what it saw.
#[derive(Debug, Default)]
struct Fence {
    largest: u64,
    accepted: Vec<u64>,
    refused: u64,
}

impl Fence {
    fn sees(&mut self, epoch: Option<Epoch>) {
        let term = epoch.expect("an order has an epoch").term;
        if term < self.largest {
            self.refused += 1;
            return;
        }
        self.largest = term;
        self.accepted.push(term);
    }

    fn check(&self) {
        assert!(
            self.accepted.is_sorted(),
            "an older order was accepted: {:?}",
            self.accepted
        );
    }
}

/// Attends the leader and gets an order from it.
async fn ordered(group: &Group, fence: &mut Fence, batch: u64) -> (usize, Daemon) {
    let begun = Instant::now();
    loop {
        let (leader, _) = group.leader().await;
        let daemon = async {
            let mut daemon = group.members[leader].daemon("a").await?;
            daemon.snapshot(vec![arrived(batch, 60_000)]).await;
            loop {
                match daemon.next().await.ok()? {
                    Message::Order(order) => {
                        let done = order.considered_report >= 1;
                        fence.sees(order.epoch);
                        if done {
                            return Some(daemon);
                        }
                    }
                    Message::Goodbye(_) => return None,
                    _ => {}
                }
            }
        };
        if let Some(daemon) = daemon.await {
            return (leader, daemon);
        }
        assert!(begun.elapsed() < ELECTED_MAX, "no order from any leader");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// All that a stream still brings, until it ends or is silent for so long.
async fn rest(daemon: &mut Daemon, fence: &mut Fence, silence: Duration) -> Option<GoodbyeReason> {
    while let Ok(Ok(message)) = tokio::time::timeout(silence, daemon.next()).await {
        match message {
            Message::Order(order) => fence.sees(order.epoch),
            Message::Goodbye(goodbye) => return Some(goodbye.reason()),
            _ => {}
        }
    }
    None
}

#[tokio::test]
async fn one_leads_others_say_who_and_its_successor_knows_policy_and_fences() {
    let Some(mut group) = Group::start(2) else {
        return;
    };
    let (leader, term) = group.leader().await;
    let other = 1 - leader;
    let mut turned_away = group.members[other].daemon("a").await.expect("answered");
    let goodbye = turned_away.goodbye().await;
    assert_eq!(goodbye.reason(), GoodbyeReason::NotLeader);
    // It may not have asked etcd yet.
    assert!(goodbye.leader.is_empty() || goodbye.leader == group.members[leader].address);

    let set = || SetPolicyRequest {
        change: Some(Policy {
            drop_budget: Some(13),
            ..Policy::default()
        }),
        ..SetPolicyRequest::default()
    };
    let channel = group.channel(other).await.expect("it runs");
    let refused = OperatorClient::new(channel).set_policy(set()).await;
    assert!(refused.is_err(), "only the leader changes things");
    let channel = group.channel(leader).await.expect("it runs");
    OperatorClient::new(channel)
        .set_policy(set())
        .await
        .expect("set and saved");

    let mut fence = Fence::default();
    let (_, mut daemon) = ordered(&group, &mut fence, 1).await;
    group.members[leader].child.kill().expect("killed");
    assert_eq!(
        rest(&mut daemon, &mut fence, Duration::from_secs(5)).await,
        None
    );
    let (next, _daemon) = ordered(&group, &mut fence, 1).await;
    assert_eq!(next, other);
    assert!(fence.largest > term, "terms grow");
    fence.check();
    let channel = group.channel(next).await.expect("it runs");
    let told = OperatorClient::new(channel)
        .get_policy(GetPolicyRequest { history: 9 })
        .await;
    let told = told.expect("told").into_inner();
    let policy = told.current.and_then(|current| current.policy);
    assert_eq!(policy.and_then(|policy| policy.drop_budget), Some(13));
    assert_eq!(told.history.len(), 1);
    group.members[leader] = group.member(leader);
}

#[tokio::test]
async fn a_leader_that_was_paused_sends_no_order_when_it_goes_on() {
    let Some(group) = Group::start(2) else {
        return;
    };
    let mut fence = Fence::default();
    let (first, mut old) = ordered(&group, &mut fence, 1).await;
    group.members[first].signal(Signal::SIGSTOP);
    // Work that it will find when it goes on.
    old.report(vec![arrived(2, 50_000)]).await;
    let waited = Instant::now();
    let (second, _new) = loop {
        let (leader, daemon) = ordered(&group, &mut fence, 1).await;
        if leader != first {
            break (leader, daemon);
        }
        assert!(waited.elapsed() < ELECTED_MAX);
    };
    assert_ne!(first, second);
    let before = fence.accepted.len();
    group.members[first].signal(Signal::SIGCONT);
    let last = rest(&mut old, &mut fence, Duration::from_secs(5)).await;
    assert_eq!(last, Some(GoodbyeReason::NotLeader));
    assert_eq!(
        fence.accepted.len(),
        before,
        "nothing of the old leader is in force"
    );
    assert_eq!(fence.refused, 0, "and nothing was sent");
    fence.check();
}

#[tokio::test]
async fn without_etcd_nobody_leads_for_longer_than_the_lease_and_with_it_somebody_does_again() {
    let Some(group) = Group::start(1) else {
        return;
    };
    let mut fence = Fence::default();
    let (_, mut daemon) = ordered(&group, &mut fence, 1).await;
    let term = fence.largest;
    group.etcd.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    let last = rest(&mut daemon, &mut fence, Duration::from_secs(20)).await;
    assert_eq!(last, Some(GoodbyeReason::NotLeader));
    println!(
        "stepped down {:?} after etcd went silent",
        stopped.elapsed()
    );
    group.etcd.signal(Signal::SIGCONT);
    let (_, _daemon) = ordered(&group, &mut fence, 1).await;
    assert!(fence.largest > term, "a term of its own");
    fence.check();
}

#[tokio::test]
async fn no_order_of_a_fenced_leader_is_in_force_whatever_fails() {
    let number = |name: &str, default: u64| {
        let text = std::env::var(name).ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (faults, seed) = (number("LAXITY_HA_FAULTS", 6), number("LAXITY_HA_SEED", 1));
    let Some(mut group) = Group::start(3) else {
        return;
    };
    println!("LAXITY_HA_FAULTS={faults} LAXITY_HA_SEED={seed}");
    let mut random = rand::rngs::SmallRng::seed_from_u64(seed);
    let mut fence = Fence::default();
    let mut streams: Vec<Daemon> = Vec::new();
    for fault in 1..=faults {
        let (leader, daemon) = ordered(&group, &mut fence, fault).await;
        streams.push(daemon);
        let wait = Duration::from_millis(random.random_range(0..TTL_S * 1500));
        let kind = random.random_range(0..5);
        println!(
            "fault {fault}: kind {kind} at {leader}, {wait:?}, term {}",
            fence.largest
        );
        match kind {
            0 => {
                group.members[leader].child.kill().expect("killed");
                tokio::time::sleep(wait).await;
                group.members[leader].child.wait().expect("a child");
                group.members[leader] = group.member(leader);
            }
            1 => {
                group.members[leader].signal(Signal::SIGTERM);
                tokio::time::sleep(wait).await;
                group.members[leader] = group.member_again(leader);
            }
            2 | 3 => {
                group.members[leader].signal(Signal::SIGSTOP);
                if let Some(stream) = streams.last_mut() {
                    stream.report(vec![arrived(1000 + fault, 40_000)]).await;
                }
                tokio::time::sleep(wait).await;
                group.members[leader].signal(Signal::SIGCONT);
            }
            _ => {
                group.etcd.signal(Signal::SIGSTOP);
                tokio::time::sleep(wait).await;
                group.etcd.signal(Signal::SIGCONT);
            }
        }
        // Whoever leads now is heard first, then what earlier streams still bring.
        let (_, daemon) = ordered(&group, &mut fence, fault).await;
        for stream in &mut streams {
            rest(stream, &mut fence, Duration::from_millis(50)).await;
        }
        streams = vec![daemon];
        fence.check();
    }
    println!(
        "{faults} faults: {} orders in force, {} refused, last term {}",
        fence.accepted.len(),
        fence.refused,
        fence.largest
    );
}

impl Group {
    /// Waits for a member that was told to end, and starts it anew.
    fn member_again(&mut self, nth: usize) -> Process {
        let _ = self.members[nth].child.kill();
        let _ = self.members[nth].child.wait();
        self.member(nth)
    }
}
