//! Coordinators of one cluster with their etcd, and the rule by which daemons fence orders.

use std::cell::RefCell;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use laxity_tests::{Need, skip};
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{GoodbyeReason, ListHostsRequest, Order, from_coordinator::Message};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::daemon::{Daemon, arrived};
use crate::netns::{ETCD_HOST, Net};
use crate::process::Process;
use crate::proxy::{self, Delays};

/// The lease's TTL in seconds: the shortest that is allowed, so that a fault takes seconds.
pub(crate) const TTL_S: u64 = 2;
/// Longest wait for a new leader on a busy machine.
pub(crate) const ELECTED_MAX: Duration = Duration::from_secs(60);

fn free_port(host: &str) -> u16 {
    let listener = TcpListener::bind((host, 0)).expect("a free port");
    listener.local_addr().expect("bound").port()
}

struct EtcdMember {
    child: Option<Child>,
    client: String,
    peer: String,
}

pub(crate) struct Etcd {
    members: Vec<EtcdMember>,
    folder: tempfile::TempDir,
}

impl Etcd {
    /// Starts etcd. Returns `None`, and the test is skipped, if etcd is not installed.
    fn start(host: &str, count: usize) -> Option<Self> {
        let address = || format!("{host}:{}", free_port(host));
        let member = |_| EtcdMember { child: None, client: address(), peer: address() };
        let mut etcd = Self {
            members: (0..count).map(member).collect(),
            folder: tempfile::tempdir().expect("a folder"),
        };
        for nth in 0..count {
            if let Err(error) = etcd.run(nth) {
                let why = format!("no etcd here ({error}); `apt-get install etcd-server`");
                skip(Need::Machine, why);
                return None;
            }
        }
        Some(etcd)
    }

    /// Starts a member with the data that it saved.
    pub(crate) fn run(&mut self, nth: usize) -> std::io::Result<()> {
        let members = self.members.iter().enumerate();
        let cluster = members.map(|(nth, member)| format!("m{nth}=http://{}", member.peer));
        let cluster: Vec<String> = cluster.collect();
        let EtcdMember { client, peer, .. } = &self.members[nth];
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.folder.path().join(format!("m{nth}")))
            .args(["--name", &format!("m{nth}"), "--log-level", "error"])
            .arg(format!("--listen-client-urls=http://{client}"))
            .arg(format!("--advertise-client-urls=http://{client}"))
            .arg(format!("--listen-peer-urls=http://{peer}"))
            .arg(format!("--initial-advertise-peer-urls=http://{peer}"))
            .arg(format!("--initial-cluster={}", cluster.join(",")))
            .arg("--unsafe-no-fsync")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        self.members[nth].child = Some(child);
        Ok(())
    }

    pub(crate) fn kill(&mut self, nth: usize) {
        if let Some(mut child) = self.members[nth].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        for child in self.members.iter().filter_map(|m| m.child.as_ref()) {
            kill(Pid::from_raw(child.id() as i32), signal).expect("a process of this test");
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for nth in 0..self.members.len() {
            self.kill(nth);
        }
    }
}

pub(crate) async fn connect(address: &str) -> Option<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URL");
    let endpoint = endpoint.timeout(Duration::from_secs(2)).connect_timeout(Duration::from_secs(2));
    endpoint.connect().await.ok()
}

/// Returns the coordinator's term if it leads.
async fn leads(address: &str) -> Option<u64> {
    let channel = connect(address).await?;
    let asked = OperatorClient::new(channel).list_hosts(ListHostsRequest {}).await;
    let told = asked.ok()?.into_inner();
    told.leading.then_some(told.term)
}

/// Coordinators of one cluster. Fields are dropped in the order in which they are declared.
pub(crate) struct Group {
    pub(crate) members: Vec<Process>,
    pub(crate) etcd: Etcd,
    folder: tempfile::TempDir,
    pub(crate) net: Option<Net>,
    /// The addresses at which coordinators reach etcd.
    endpoints: Vec<String>,
}

impl Group {
    pub(crate) fn start(count: usize) -> Option<Self> {
        Self::of(count, 1, None, None)
    }

    /// Starts `count` coordinators with an etcd of `etcds` members behind two proxies each. Each
    /// coordinator has its own network namespace, if there is more than one and it is possible.
    pub(crate) fn delayed(count: usize, etcds: usize, delays: &Delays) -> Option<Self> {
        let net = (count > 1).then(|| Net::lay(count)).flatten();
        Self::of(count, etcds, net, Some(delays))
    }

    /// Starts `count` coordinators, each in its own network namespace.
    pub(crate) fn apart(count: usize) -> Option<Self> {
        Self::of(count, 1, Some(Net::lay(count)?), None)
    }

    fn of(count: usize, etcds: usize, net: Option<Net>, delays: Option<&Delays>) -> Option<Self> {
        let host = if net.is_some() { ETCD_HOST } else { "127.0.0.1" };
        let etcd = Etcd::start(host, etcds)?;
        let mut endpoints: Vec<String> = etcd.members.iter().map(|it| it.client.clone()).collect();
        if let Some(delays) = delays {
            let twice = endpoints.iter().chain(&endpoints);
            endpoints = twice.map(|etcd| proxy::start(host, etcd, delays)).collect();
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut group = Self { members: Vec::new(), etcd, folder, net, endpoints };
        for nth in 0..count {
            let process = group.member(nth);
            group.members.push(process);
        }
        Some(group)
    }

    pub(crate) fn net(&self) -> &Net {
        self.net.as_ref().expect("started apart")
    }

    pub(crate) fn member(&self, nth: usize) -> Process {
        let path = self.folder.path().join(format!("{nth}.toml"));
        // A member keeps its address over restarts, so that others still name the right one.
        if !path.exists() {
            let address = match self.net {
                Some(_) => Net::address(nth),
                None => format!("127.0.0.1:{}", free_port("127.0.0.1")),
            };
            let etcd = self.endpoints.iter().map(|etcd| format!("\"http://{etcd}\""));
            let text = format!(
                "listen = \"{address}\"\ninsecure = true\nlog = \"error\"\nheartbeat \
                 = \"10s\"\n[policy]\ndebounce = \"1ms\"\n[etcd]\nendpoints = [{}]\nadvertise \
                 = \"{address}\"\nttl = \"{TTL_S}s\"\n",
                etcd.collect::<Vec<String>>().join(", ")
            );
            fs::write(&path, text).expect("written");
        }
        let namespace = self.net.as_ref().map(|net| net.namespace(nth));
        Process::start_in(namespace.as_deref(), Path::new(&path))
    }

    pub(crate) fn member_again(&mut self, nth: usize) {
        let _ = self.members[nth].child.kill();
        let _ = self.members[nth].child.wait();
        self.members[nth] = self.member(nth);
    }

    pub(crate) async fn channel(&self, nth: usize) -> Option<Channel> {
        connect(&self.members[nth].address).await
    }

    /// Returns the coordinator that leads and its term. If several say so, the largest term counts.
    pub(crate) async fn leader(&self) -> (usize, u64) {
        let begun = Instant::now();
        loop {
            let mut asked = JoinSet::new();
            for (nth, member) in self.members.iter().enumerate() {
                let address = member.address.clone();
                asked.spawn(async move { Some((leads(&address).await?, nth)) });
            }
            let mut found = None;
            // A member that is paused or cut off does not answer.
            let mut patience = ELECTED_MAX;
            while let Ok(Some(told)) = tokio::time::timeout(patience, asked.join_next()).await {
                found = found.max(told.expect("no panic"));
                if found.is_some() {
                    patience = Duration::from_millis(100);
                }
            }
            if let Some((term, nth)) = found {
                return (nth, term);
            }
            assert!(begun.elapsed() < ELECTED_MAX, "nobody leads");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    largest: u64,
    accepted: Vec<u64>,
    refused: u64,
}

/// The rule by which daemons fence orders (docs/coordinator.md), and what it saw.
#[derive(Debug, Default)]
pub(crate) struct Fence(RefCell<Seen>);

impl Fence {
    pub(crate) fn largest(&self) -> u64 {
        self.0.borrow().largest
    }

    pub(crate) fn accepted(&self) -> usize {
        self.0.borrow().accepted.len()
    }

    pub(crate) fn refused(&self) -> u64 {
        self.0.borrow().refused
    }

    /// Checks an order. `known` is the largest term at the time of the report that the order
    /// considers. An order of an older term was made after another coordinator led.
    fn sees(&self, order: &Order, known: u64) {
        let term = order.epoch.expect("an order has an epoch").term;
        assert!(
            term >= known,
            "an order of term {term} considers report {}, which was made after an order of term \
             {known} was seen",
            order.considered_report
        );
        let mut seen = self.0.borrow_mut();
        if term < seen.largest {
            seen.refused += 1;
            return;
        }
        seen.largest = term;
        seen.accepted.push(term);
    }

    pub(crate) fn check(&self) {
        let seen = self.0.borrow();
        assert!(seen.accepted.is_sorted(), "an older order was accepted: {:?}", seen.accepted);
    }
}

/// A daemon's stream with the fence.
pub(crate) struct Fenced<'a> {
    daemon: Daemon,
    fence: &'a Fence,
    /// The largest term when the daemon attended, and when it sent each report.
    known: Vec<u64>,
}

impl<'a> Fenced<'a> {
    async fn attend(member: &Process, fence: &'a Fence) -> Option<Self> {
        let known = vec![fence.largest()];
        let daemon = member.daemon("a").await?;
        Some(Self { daemon, fence, known })
    }

    pub(crate) async fn report(&mut self, batch: u64) {
        self.known.push(self.fence.largest());
        self.daemon.report(vec![arrived(batch, 50_000)]).await;
    }

    pub(crate) async fn next(&mut self) -> Result<Message, Status> {
        let message = self.daemon.next().await?;
        if let Message::Order(order) = &message {
            let considered = usize::try_from(order.considered_report).expect("few");
            self.fence.sees(order, self.known[considered]);
        }
        Ok(message)
    }

    /// Reads the stream until it ends or is silent for `silence`.
    pub(crate) async fn rest(&mut self, silence: Duration) -> Option<GoodbyeReason> {
        while let Ok(Ok(message)) = tokio::time::timeout(silence, self.next()).await {
            if let Message::Goodbye(goodbye) = message {
                return Some(goodbye.reason());
            }
        }
        None
    }
}

/// Attends the leader and gets an order from it.
pub(crate) async fn ordered<'a>(
    group: &Group,
    fence: &'a Fence,
    batch: u64,
) -> (usize, Fenced<'a>) {
    let begun = Instant::now();
    loop {
        let (leader, _) = group.leader().await;
        let stream = async {
            let mut stream = Fenced::attend(&group.members[leader], fence).await?;
            stream.known.push(fence.largest());
            stream.daemon.snapshot(vec![arrived(batch, 60_000)]).await;
            loop {
                match stream.next().await.ok()? {
                    Message::Order(order) if order.considered_report >= 1 => return Some(stream),
                    Message::Goodbye(_) => return None,
                    _ => {}
                }
            }
        };
        if let Some(stream) = stream.await {
            return (leader, stream);
        }
        assert!(begun.elapsed() < ELECTED_MAX, "no order from any leader");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
