//! Tests of a client that gets permits and completes nothing, beside an honest one. The honest
//! client keeps its rate and gets permits soon, and operators see which client is at fault.
//!
//! The honest client sends small flows one after another, and each takes a millisecond on its
//! simulated wire. So its rate hardly depends on the load of the machine. The same process measures
//! both phases, alone and beside the hostile client, and the result is their ratio.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use laxity_client::{
    Client, Direction, Flow, Hint, LEVEL_SCAVENGER, Lane, Options, Stage, Ticket, peers,
};
use laxity_shm::sleep::now_ns;
use laxity_tests::{Need, skip};
use laxity_wire::ClientStatus;
use nix::sys::signal::Signal;
use nix::unistd::{Uid, geteuid, setresuid};
use serde::{Deserialize, Serialize};

use crate::process::{
    Daemon, Killed, PATIENCE, child, eventually, laxity, role, signal, wait_bounded,
};

const ALONE: Duration = Duration::from_millis(1500);
/// Duration of the phase beside the hostile client. It is shorter than the timeouts by which a
/// daemon without countermeasures would recover.
const BESIDE: Duration = Duration::from_secs(4);
const SHARE_MIN: f64 = 0.4;
const WAIT_MAX: Duration = Duration::from_millis(500);
const ANSWER_MAX: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_millis(100);
const WIRE: Duration = Duration::from_millis(1);
const STRANGER: u32 = 54_321;
const FLOW_BYTES: u64 = 16 * 1024;

/// Words of `laxity status` for a client that holds permitted bytes and does not complete them, or
/// that asks for more than its part while others use the port.
const BLAME: [&str; 3] = ["is distrusted", "is silent", "is limited"];

const SLOW_PORT: &str = "[access]\nanyone = true\n\
    [[nic]]\nname = \"test\"\nrate = \"10Gbit\"\nchunk = \"64KiB\"\nwindow = \"256KiB\"\n";
const FAST_PORT: &str = "[access]\nanyone = true\n\
    [[nic]]\nname = \"test\"\nrate = \"400Gbit\"\nchunk = \"1MiB\"\nwindow = \"4MiB\"\n\
    peer_window = \"2MiB\"\n";

/// The part of a child process. It is not a test by itself.
#[test]
fn hostile_role() {
    match role().as_deref() {
        Some("honest") => honest(),
        Some("reattaching") => attack(|| vec![Attack::begin(), Attack::begin()], reattach),
        Some("gathering") => attack(Vec::new, gather),
        Some("crowd") => attack(
            || (0..16).map(|_| Attack::begin()).collect(),
            |all| all.iter_mut().for_each(Attack::go_on),
        ),
        Some("liar") => attack(|| (0..8).map(|_| Attack::begin()).collect(), lie),
        Some("silent") => attack(|| vec![Attack::uncut()], |all| all[0].look()),
        Some("busy") => busy(),
        _ => {}
    }
}

fn options(name: &str) -> Options {
    Options {
        name: name.to_owned(),
        attach_timeout: Duration::from_secs(5),
        reattach_every: Duration::from_millis(100),
        // A busy machine must not look like a daemon that hangs.
        stall_timeout: PATIENCE,
        ..Options::from_env()
    }
}

fn is_over(start: Instant) -> bool {
    let stop = PathBuf::from(std::env::var_os("STOP").expect("STOP"));
    stop.exists() || start.elapsed() > PATIENCE
}

fn become_another_user() {
    if let Ok(user) = std::env::var("BECOME") {
        let user = Uid::from_raw(user.parse().expect("a number"));
        setresuid(user, user, user).expect("root gives up being root");
    }
}

fn flow(stage: Stage, bytes: u64) -> Flow {
    Flow { stage, direction: Direction::Egress, bytes, batch: 1, request: 1, ..Flow::default() }
}

/// Measures the longest time for which a thread that wants to run each millisecond did not run.
fn watch_starvation() -> Arc<AtomicU64> {
    let worst_ns = Arc::new(AtomicU64::new(0));
    let mine = Arc::clone(&worst_ns);
    std::thread::spawn(move || {
        let mut last = now_ns();
        loop {
            std::thread::sleep(Duration::from_millis(1));
            let now = now_ns();
            mine.fetch_max(now - last, Ordering::Relaxed);
            last = now;
        }
    });
    worst_ns
}

/// What the honest client measured in one window.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Window {
    end_ns: u64,
    length_ns: u64,
    flows: u64,
    /// Flows in the window that the daemon did not schedule.
    unscheduled: u64,
    wait_max_ns: u64,
    starved_ns: u64,
}

/// Sends flows of all stages in turn, one after another, and prints the measured windows.
fn honest() {
    let client = Client::attach(options("honest"));
    assert!(client.is_scheduled(), "no daemon at the start");
    let mut lane = client.lane();
    let start = Instant::now();
    let starved_ns = watch_starvation();
    let mut windows = Vec::new();
    let mut window = Window::default();
    let mut began = now_ns();
    for stage in [Stage::Collective, Stage::KvReuse, Stage::P2d].into_iter().cycle() {
        let submitted = now_ns();
        let mut ticket = lane.submit(&flow(stage, FLOW_BYTES));
        let mut scheduled = true;
        while !ticket.is_done() {
            let permit = lane.wait(&mut ticket);
            scheduled &= !permit.bypassed && permit.level != LEVEL_SCAVENGER;
            window.wait_max_ns = window.wait_max_ns.max(now_ns() - submitted);
            std::thread::sleep(WIRE);
            lane.complete(&ticket, permit.bytes);
        }
        window.flows += 1;
        window.unscheduled += u64::from(!scheduled);
        let now = now_ns();
        if u128::from(now - began) >= WINDOW.as_nanos() {
            window.end_ns = now;
            window.length_ns = now - began;
            window.starved_ns = starved_ns.swap(0, Ordering::Relaxed);
            windows.push(core::mem::take(&mut window));
            began = now;
            if is_over(start) {
                break;
            }
        }
    }
    println!("\nWINDOWS {}", serde_json::to_string(&windows).expect("JSON"));
}

/// A client that submits collectives and never completes what it is permitted.
struct Attack {
    client: Client,
    lane: Lane,
    tickets: Vec<Ticket>,
    is_found_out: bool,
}

impl Attack {
    fn begin() -> Self {
        let client = Client::attach(options("hostile"));
        let lane = client.lane();
        Self { client, lane, tickets: Vec::new(), is_found_out: false }
    }

    /// Begins with 4 MiB of flows that must not be cut, as a verbs program posts them.
    fn uncut() -> Self {
        let mut attack = Self::begin();
        let whole = Flow { whole: true, batch: 0, request: 0, ..flow(Stage::P2d, 64 * 1024) };
        attack.tickets = (0..64).map(|_| attack.lane.submit(&whole)).collect();
        attack
    }

    fn go_on(&mut self) {
        if self.tickets.len() < 64 {
            // Where each peer has a bound of its own, a client that names many gets more.
            let peer = peers::number([self.tickets.len() as u8 + 1; 16]);
            let flow = Flow { peer, ..flow(Stage::Collective, 64 * 1024) };
            self.tickets.push(self.lane.submit(&flow));
        }
        self.look();
        self.tickets.retain(|ticket| !ticket.is_done());
        self.is_found_out |= !self.client.is_scheduled();
    }

    fn look(&mut self) {
        for ticket in &mut self.tickets {
            if let Some(permit) = self.lane.poll(ticket) {
                self.is_found_out |= permit.bypassed || permit.level == LEVEL_SCAVENGER;
            }
        }
    }
}

/// Runs attacks that complete nothing. Each goes on once a millisecond.
fn attack(begin: impl Fn() -> Vec<Attack>, go_on: impl Fn(&mut Vec<Attack>)) {
    become_another_user();
    let start = Instant::now();
    let mut attacks = begin();
    println!("\nREADY");
    while !is_over(start) {
        go_on(&mut attacks);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Keeps lanes full of collectives that are due in a moment, says that they completed at once, and
/// ends the batch and the request of the honest client.
fn lie(attacks: &mut Vec<Attack>) {
    for attack in attacks {
        attack.lane.hint(Hint::RequestEnd { request: 1 });
        attack.lane.hint(Hint::BatchEnd { batch: 1 });
        while attack.tickets.len() < 200 {
            let deadline_ns = now_ns() + 1_000_000;
            let urgent = Flow { deadline_ns, ..flow(Stage::Collective, 64 * 1024) };
            attack.tickets.push(attack.lane.submit(&urgent));
        }
        for ticket in &mut attack.tickets {
            if let Some(permit) = attack.lane.poll(ticket) {
                attack.lane.complete(ticket, permit.bytes);
            }
        }
        attack.tickets.retain(|ticket| !ticket.is_done());
    }
}

/// Replaces each attack as soon as it notices that it is no longer scheduled.
fn reattach(attacks: &mut Vec<Attack>) {
    for attack in attacks {
        attack.go_on();
        if attack.is_found_out {
            *attack = Attack::begin();
        }
    }
}

/// Attaches again and again and holds what each attachment is permitted. It drops no lane, because
/// that would tell the daemon.
fn gather(attacks: &mut Vec<Attack>) {
    let mut attack = Attack::begin();
    for _ in 0..6 {
        attack.go_on();
        std::thread::sleep(Duration::from_millis(1));
    }
    attacks.push(attack);
}

/// Runs an honest client with many flows in flight until the phase ends.
fn busy() {
    become_another_user();
    let start = Instant::now();
    let client = Client::attach(options("stopped"));
    let mut lane = client.lane();
    let mut tickets = Vec::new();
    let mut submitted = 0_u64;
    let mut sent = 0_u64;
    println!("\nREADY");
    loop {
        let over = is_over(start);
        while !over && tickets.len() < 64 {
            let next = flow(Stage::Collective, 64 * 1024);
            submitted += next.bytes;
            tickets.push(lane.submit(&next));
        }
        let mut permits = Vec::new();
        for (index, ticket) in tickets.iter_mut().enumerate() {
            if let Some(permit) = lane.poll(ticket) {
                permits.push((index, permit.bytes));
            }
        }
        // The flows are on the wire for a while, and SIGSTOP comes in that time.
        std::thread::sleep(Duration::from_millis(2));
        for (index, bytes) in permits {
            sent += bytes;
            lane.complete(&tickets[index], bytes);
        }
        tickets.retain(|ticket| !ticket.is_done());
        if over && tickets.is_empty() {
            break;
        }
    }
    println!("\nSENT {submitted} {sent}");
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    /// Another user than the honest client's, if the test runs as root.
    Another,
    Same,
}

/// A daemon, an honest client and another client beside it.
struct Scene {
    folder: tempfile::TempDir,
    daemon: Daemon,
    honest: Option<Child>,
    alone_from: u64,
    alone_until: u64,
}

impl Scene {
    /// Starts the daemon and the honest client, which is alone for a while.
    fn begin(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let open = Permissions::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).expect("open to other users");
        let daemon = Daemon::start(folder.path(), config);
        let honest = start(&daemon, folder.path(), "honest", User::Same);
        eventually("the honest client is attached", || daemon.status().clients.len() == 1);
        let alone_from = now_ns();
        std::thread::sleep(ALONE);
        Self { folder, daemon, honest: Some(honest), alone_from, alone_until: now_ns() }
    }

    fn judge(&mut self, name: &str, user: User) {
        let from = now_ns();
        let start = Instant::now();
        let mut blamed = false;
        while start.elapsed() < BESIDE {
            let asked = Instant::now();
            let text = status_text(&self.daemon);
            let took = asked.elapsed();
            assert!(took < ANSWER_MAX, "`laxity status` took {took:?}");
            blamed |= is_blamed(&text, name);
            assert!(!is_blamed(&text, "honest"), "{text}");
            std::thread::sleep(WINDOW);
        }
        let until = now_ns();
        let served = self.serve_newcomer();
        let text = status_text(&self.daemon);
        std::fs::write(self.folder.path().join("stop"), "").expect("written");
        let (status, output) = wait_bounded(self.honest.take().expect("judged once"));
        assert!(status.success(), "{output}");
        let windows = output.lines().find_map(|line| line.strip_prefix("WINDOWS "));
        let windows: Vec<Window> = serde_json::from_str(windows.expect("windows")).expect("JSON");
        let within = |from: u64, until: u64| -> Vec<Window> {
            let inside = |one: &&Window| one.end_ns - one.length_ns >= from && one.end_ns <= until;
            windows.iter().filter(inside).copied().collect()
        };
        let alone = within(self.alone_from, self.alone_until);
        // A wait that began in the phase counts, even if it ends after it.
        let beside = within(from, until + WAIT_MAX.as_nanos() as u64);
        check(&alone, &beside, from, until, user);
        let (attached, bypassed) = served;
        assert!(attached < ANSWER_MAX, "a new client waited {attached:?}");
        assert!(bypassed < ANSWER_MAX, "`laxity bypass` took {bypassed:?}");
        assert!(blamed, "`laxity status` names nobody:\n{text}");
    }

    /// Returns how long a new client waits for its first permit, and an operator for a bypass.
    fn serve_newcomer(&self) -> (Duration, Duration) {
        let asked = Instant::now();
        let client =
            Client::attach(Options { socket: self.daemon.socket(), ..options("newcomer") });
        assert!(client.is_scheduled(), "a new client is not served");
        let mut lane = client.lane();
        let mut ticket = lane.submit(&flow(Stage::Collective, FLOW_BYTES));
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
        let attached = asked.elapsed();
        let asked = Instant::now();
        self.daemon.operator().bypass(true).expect("done");
        self.daemon.operator().bypass(false).expect("done");
        (attached, asked.elapsed())
    }
}

fn start(daemon: &Daemon, folder: &Path, role: &str, user: User) -> Child {
    let socket = daemon.socket().display().to_string();
    let stop = folder.join("stop").display().to_string();
    let user = (user == User::Another && geteuid().is_root()).then(|| STRANGER.to_string());
    let mut environment = vec![("LAXITY_SOCKET", socket.as_str()), ("STOP", stop.as_str())];
    environment.extend(user.as_deref().map(|user| ("BECOME", user)));
    child("hostile::hostile_role", role, &environment)
}

struct Hostile {
    child: Killed,
    lines: BufReader<ChildStdout>,
}

impl Hostile {
    /// Starts the process and waits until it is attached and has submitted.
    fn start(scene: &Scene, role: &str, user: User) -> Self {
        let mut child = start(&scene.daemon, scene.folder.path(), role, user);
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains("READY") {
            line.clear();
            let read = lines.read_line(&mut line).expect("text");
            assert!(read > 0, "the hostile client ended early");
        }
        Self { child: Killed(child), lines }
    }

    fn signal(&self, what: Signal) {
        signal(self.child.0.id(), what);
    }

    /// Waits until the process has ended well, and returns its remaining output.
    fn finish(&mut self) -> String {
        let mut text = String::new();
        self.lines.read_to_string(&mut text).expect("text");
        assert!(self.child.0.wait().expect("wait").success(), "{text}");
        text
    }
}

fn status_text(daemon: &Daemon) -> String {
    let control = daemon.control().display().to_string();
    laxity(&["status", "--control", &control]).good().stdout
}

fn is_blamed(text: &str, name: &str) -> bool {
    let mut lines = text.lines().filter(|line| line.contains(name));
    lines.any(|line| BLAME.iter().any(|word| line.contains(word)))
}

/// Returns flows per second over all of `windows`.
fn rate(windows: &[Window]) -> f64 {
    let flows: u64 = windows.iter().map(|one| one.flows).sum();
    let time_ns: u64 = windows.iter().map(|one| one.length_ns).sum();
    flows as f64 * 1e9 / time_ns.max(1) as f64
}

fn check(alone: &[Window], beside: &[Window], from: u64, until: u64, user: User) {
    assert!(alone.len() > 3, "nothing measured alone: {alone:?}");
    // Windows in which the machine delayed the client are not the daemon's fault.
    let limit = WAIT_MAX.as_nanos() as u64;
    let fair = |one: &&Window| one.starved_ns < limit / 4;
    let fair: Vec<Window> = beside.iter().filter(fair).copied().collect();
    let covered: u64 = beside.iter().map(|one| one.length_ns).sum();
    assert!(
        covered > (until - from) / 2,
        "the honest client was stuck: {} of {} ms measured: {beside:?}",
        covered / 1_000_000,
        (until - from) / 1_000_000
    );
    assert!(
        fair.len() > beside.len() / 4,
        "the machine is too busy to measure anything: {beside:?}"
    );
    let worst = fair.iter().map(|one| one.wait_max_ns).max().unwrap_or(0);
    assert!(worst <= limit, "the honest client waited {} ms for a permit", worst / 1_000_000);
    let (before, after) = (rate(alone), rate(&fair));
    assert!(
        after >= SHARE_MIN * before,
        "{after:.0} flows/s beside the hostile client, {before:.0} alone"
    );
    if user == User::Another && geteuid().is_root() {
        let flows: u64 = fair.iter().map(|one| one.flows).sum();
        let unscheduled: u64 = fair.iter().map(|one| one.unscheduled).sum();
        assert!(
            unscheduled <= flows / 10,
            "{unscheduled} of the honest client's {flows} flows were not scheduled"
        );
    }
}

/// Checks that the honest client is served beside a hostile one with this role.
fn holds_nobody_up(role: &str, port: &str) {
    let mut scene = Scene::begin(port);
    let _hostile = Hostile::start(&scene, role, User::Another);
    scene.judge("hostile", User::Another);
}

#[test]
fn whoever_completes_nothing_and_attaches_anew_holds_nobody_up() {
    holds_nobody_up("reattaching", SLOW_PORT);
}

#[test]
fn whoever_attaches_again_and_again_and_completes_nothing_holds_nobody_up() {
    holds_nobody_up("gathering", SLOW_PORT);
}

#[test]
fn many_that_complete_nothing_hold_nobody_up_for_longer_than_one() {
    holds_nobody_up("crowd", SLOW_PORT);
}

#[test]
fn whoever_claims_that_all_it_sends_is_urgent_holds_nobody_up() {
    if !geteuid().is_root() {
        return skip(Need::Machine, "only root can become another user");
    }
    holds_nobody_up("liar", SLOW_PORT);
}

#[test]
fn a_client_that_never_looks_for_its_completions_holds_nobody_up() {
    holds_nobody_up("silent", FAST_PORT);
}

/// Stops a client with flows in flight. It goes on afterwards and loses nothing.
fn a_stopped_client(user: User) {
    let mut scene = Scene::begin(SLOW_PORT);
    let mut stopped = Hostile::start(&scene, "busy", user);
    eventually("it is stopped with flows in flight", || {
        stopped.signal(Signal::SIGSTOP);
        // The daemon still reads what the client wrote before.
        std::thread::sleep(Duration::from_millis(20));
        let status = scene.daemon.status();
        let held = |client: &ClientStatus| {
            let holds = client.permitted_bytes >= client.completed_bytes + 65_536;
            // The client waits for more, so it gets the whole window.
            client.name == "stopped" && holds && client.waiting_flows > 0
        };
        let found = status.clients.iter().any(held);
        if !found {
            stopped.signal(Signal::SIGCONT);
        }
        found
    });
    scene.judge("stopped", user);
    stopped.signal(Signal::SIGCONT);
    let text = stopped.finish();
    let sums = text.lines().find_map(|line| line.strip_prefix("SENT "));
    let (submitted, sent) = sums.and_then(|sums| sums.split_once(' ')).expect("sums");
    assert_eq!(submitted, sent, "each byte goes out once");
}

#[test]
fn a_stopped_client_of_another_user_holds_nobody_up_and_loses_nothing() {
    a_stopped_client(User::Another);
}

#[test]
fn a_stopped_client_of_the_same_user_holds_nobody_up_and_loses_nothing() {
    a_stopped_client(User::Same);
}
