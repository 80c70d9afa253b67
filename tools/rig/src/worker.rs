//! The worker of one host: one thread, one epoll loop, around the state machines of
//! [`prefill`](crate::prefill) (or a decode host's bookkeeping), the data connections, the
//! mailbox and the gate to the host's `laxityd`.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use laxity_nccl_host::Handle;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use serde::{Deserialize, Serialize};

use crate::carrier::{self, Carrier, CarrierRecord, Report};
use crate::config::LabConfig;
use crate::fabric::WireClass;
use crate::frame::{Head, Kind};
use crate::gate::{Gate, Read, Way};
use crate::ledger::Arrival;
use crate::mailbox::Mailbox;
use crate::message::{self, Message, Notice, WorkerCommand, WorkerReport};
use crate::plan::PlannedRequest;
use crate::prefill::{Effect, NewFlow, Rank, Setting};
use crate::transport::Transport;

/// What a worker is told when it is started, in the file [`SPEC_FILE`] of the run's folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunSpec {
    /// Configuration of the lab.
    pub config: LabConfig,
    /// The requests.
    pub plan: Vec<PlannedRequest>,
    /// The hosts have daemons.
    pub scheduled: bool,
    /// The NCCL net plugin that carries collectives; none if the replay's own connections do.
    #[serde(default)]
    pub nccl_plugin: Option<PathBuf>,
}

/// Name of the file with the [`RunSpec`].
pub const SPEC_FILE: &str = "run.json";

/// Socket on which the daemon of a host takes clients.
#[must_use]
pub fn daemon_socket(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("laxityd{host}.sock"))
}

/// How often a waiting permit is looked for. A chunk takes more than 1 ms on the lab's ports, and
/// the window holds several, so this adds no gap to a loaded port.
const PERMIT_POLL_NS: u64 = 150_000;

/// How long after its plugin failed a worker gives up, if the run goes on.
const CARRIER_LOST_AFTER_NS: u64 = 2_000_000_000;

/// Reading of CLOCK_MONOTONIC, ns.
///
/// # Errors
/// Never on Linux.
pub fn now_ns() -> io::Result<u64> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    Ok(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Arrival(u64),
    Compute,
    /// The plugin failed, and that was not because the run is over.
    CarrierLost,
}

/// What an epoll event is about; the upper half of its number, the lower half is an index.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Source {
    Orders,
    Timer,
    MailListener,
    MailIncoming,
    DataListener,
    DataIncoming,
    DataOutgoing,
    Carrier,
}

fn token(source: Source, index: usize) -> u64 {
    u64::from(source as u32) << 32 | index as u64
}

/// A request whose KV cache a decode host is waiting for.
#[derive(Clone, Copy, Default)]
struct Handover {
    received: u64,
}

struct Worker {
    host: usize,
    setting: Rc<Setting>,
    rank: Option<Rank>,
    handovers: HashMap<u64, Handover>,
    transport: Transport,
    mailbox: Mailbox,
    gate: Gate,
    /// What carries collectives, if not the transport.
    carrier: Option<Carrier>,
    /// Where the plugin listens for each peer, until they are told.
    handles: Vec<(usize, Handle)>,
    carrier_failure: Option<anyhow::Error>,
    buffers_unbounded: bool,
    scheduled: bool,
    flow_last: u64,
    due: BinaryHeap<Reverse<(u64, Due)>>,
    epoll: Epoll,
    timer: TimerFd,
    orders: Vec<u8>,
    acknowledge: HashMap<usize, Vec<(u64, u64)>>,
    /// Time without a scheduler before the run began: attaching takes a moment.
    unscheduled_before_ns: u64,
    finished: bool,
}

/// Runs the worker of `host`; the folder holds the [`RunSpec`].
///
/// # Errors
/// Whatever the operating system refuses; the controller shows it.
pub fn run(folder: &Path, host: usize) -> anyhow::Result<()> {
    let spec: RunSpec = serde_json::from_slice(&std::fs::read(folder.join(SPEC_FILE))?)?;
    let mut worker = Worker::new(folder, host, spec)?;
    // Where there is a plugin, its report is the notice.
    if worker.carrier.is_none() {
        worker.notify(&Notice::Listening)?;
    }
    while !worker.finished {
        worker.turn()?;
    }
    let report = worker.report();
    worker.notify(&Notice::Report(Box::new(report)))
}

impl Worker {
    fn new(folder: &Path, host: usize, spec: RunSpec) -> anyhow::Result<Self> {
        let config = spec.config;
        let Some(classes) = WireClass::table(&config.level_dscp, config.scavenger_dscp) else {
            anyhow::bail!("level_dscp: the fabric cannot keep this order");
        };
        let scaling = config.scaling();
        let prefill_hosts = config.units * config.ranks;
        let rank = (host < prefill_hosts).then_some((host / config.ranks, host % config.ranks));
        let gate = if spec.scheduled {
            Gate::scheduled(
                &daemon_socket(folder, host),
                &config.host_name(host),
                &classes,
            )
        } else {
            Gate::open(&classes)
        };
        let transport = Transport::listen(host, classes, config.socket_buffer_bytes)?;
        let mut buffers_unbounded = false;
        let carrier = match (spec.nccl_plugin, rank) {
            (Some(plugin), Some((unit, own))) => {
                buffers_unbounded = !carrier::bound_buffers(config.socket_buffer_bytes);
                let peers = config.unit_peers(unit, own).collect();
                Some(Carrier::start(plugin, peers)?)
            }
            _ => None,
        };
        let setting = Rc::new(Setting {
            config,
            scaling,
            plan: spec.plan,
            begin_ns: 0,
        });
        let worker = Self {
            host,
            rank: rank.map(|(unit, rank)| Rank::new(Rc::clone(&setting), unit, rank)),
            setting,
            handovers: HashMap::new(),
            transport,
            mailbox: Mailbox::listen(folder, host)?,
            gate,
            carrier,
            handles: Vec::new(),
            carrier_failure: None,
            buffers_unbounded,
            scheduled: spec.scheduled,
            flow_last: 0,
            due: BinaryHeap::new(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            timer: TimerFd::new(
                ClockId::CLOCK_MONOTONIC,
                TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
            )?,
            orders: Vec::new(),
            acknowledge: HashMap::new(),
            unscheduled_before_ns: 0,
            finished: false,
        };
        let stdin = io::stdin();
        let flags = OFlag::from_bits_retain(fcntl(&stdin, FcntlArg::F_GETFL)?);
        fcntl(&stdin, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        worker.watch(stdin.as_fd(), Source::Orders, 0)?;
        worker.watch(worker.timer.as_fd(), Source::Timer, 0)?;
        worker.watch(worker.mailbox.listener(), Source::MailListener, 0)?;
        for (index, listener) in worker.transport.listeners().enumerate() {
            worker.watch(listener, Source::DataListener, index)?;
        }
        if let Some(carrier) = &worker.carrier {
            worker.watch(carrier.wake(), Source::Carrier, 0)?;
        }
        Ok(worker)
    }

    fn watch(&self, fd: BorrowedFd<'_>, source: Source, index: usize) -> nix::Result<()> {
        let interest = match source {
            Source::DataOutgoing => EpollFlags::EPOLLOUT | EpollFlags::EPOLLET,
            _ => EpollFlags::EPOLLIN,
        };
        self.epoll
            .add(fd, EpollEvent::new(interest, token(source, index)))
    }

    fn notify(&self, notice: &Notice) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(&message::line(notice))?;
        Ok(stdout.flush()?)
    }

    /// One turn of the loop: what is due, what it causes, then sleep until something happens.
    fn turn(&mut self) -> anyhow::Result<()> {
        let now = now_ns()?;
        while let Some(&Reverse((at, due))) = self.due.peek() {
            if at > now {
                break;
            }
            self.due.pop();
            match (due, self.rank.as_mut()) {
                (Due::Arrival(request), Some(rank)) => rank.request_arrived(now, request),
                (Due::Compute, Some(rank)) => rank.computed(now),
                (Due::CarrierLost, _) => {
                    if let Some(error) = self.carrier_failure.take() {
                        return Err(error.context("the NCCL plugin"));
                    }
                }
                (_, None) => {}
            }
        }
        self.carry_out(now);
        self.gate.poll(&mut self.transport);
        for Read { from, head, bytes } in self.gate.take_reads() {
            let to = self.host;
            self.mailbox.post(from, &Message::Read { to, head, bytes });
        }
        for (host, flows) in self.acknowledge.drain() {
            self.mailbox.post(host, &Message::Arrived(flows));
        }
        self.transport.flush()?;
        let mail_left = self.mailbox.flush()?;

        let mut wake = self.due.peek().map_or(u64::MAX, |Reverse((at, _))| *at);
        if mail_left || self.gate.is_waiting() {
            wake = wake.min(now + PERMIT_POLL_NS);
        }
        if wake != u64::MAX {
            let at = TimeSpec::new((wake / 1_000_000_000) as i64, (wake % 1_000_000_000) as i64);
            self.timer.set(
                Expiration::OneShot(at),
                TimerSetTimeFlags::TFD_TIMER_ABSTIME,
            )?;
        }
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(nix::errno::Errno::EINTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &events[..count] {
            self.event(event.data())?;
        }
        Ok(())
    }

    fn event(&mut self, token: u64) -> anyhow::Result<()> {
        let index = (token & u64::from(u32::MAX)) as usize;
        let is = |source: Source| token >> 32 == u64::from(source as u32);
        if is(Source::Orders) {
            self.take_orders()?;
        } else if is(Source::Timer) {
            // An error means that the timer was set anew since it fired.
            let _ = nix::unistd::read(&self.timer, &mut [0; 8]);
        } else if is(Source::MailListener) {
            for number in self.mailbox.accept()? {
                if let Some(fd) = self.mailbox.incoming(number) {
                    self.watch(fd, Source::MailIncoming, number)?;
                }
            }
        } else if is(Source::MailIncoming) {
            let messages = self.mailbox.receive(index)?;
            let now = now_ns()?;
            for message in &messages {
                self.message(now, message)?;
            }
        } else if is(Source::DataListener) {
            for number in self.transport.accept(index)? {
                if let Some(fd) = self.transport.incoming(number) {
                    self.watch(fd, Source::DataIncoming, number)?;
                }
            }
        } else if is(Source::DataIncoming) {
            let mut arrivals = Vec::new();
            self.transport.receive(index, &mut arrivals)?;
            let now = now_ns()?;
            for arrival in &arrivals {
                self.arrived(now, arrival)?;
            }
        } else if is(Source::DataOutgoing) {
            self.transport.unblock(index);
        } else if is(Source::Carrier) {
            let reports = self.carrier.as_ref().map(Carrier::take);
            for report in reports.unwrap_or_default() {
                self.carrier_reports(report)?;
            }
        }
        Ok(())
    }

    fn take_orders(&mut self) -> anyhow::Result<()> {
        let mut buffer = [0; 4096];
        match nix::unistd::read(io::stdin(), &mut buffer) {
            // The controller is gone; so is the lab.
            Ok(0) => self.finished = true,
            Ok(count) => self.orders.extend_from_slice(&buffer[..count]),
            Err(nix::errno::Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        for order in message::lines(&mut self.orders)? {
            match order {
                WorkerCommand::Connect => {
                    self.connect()?;
                    // The plugin's connections take their time; its report is then the notice.
                    if self.carrier.is_none() {
                        self.notify(&Notice::Connected)?;
                    }
                }
                WorkerCommand::Begin(at_ns) => self.begin(at_ns),
                WorkerCommand::Finish => self.finished = true,
            }
        }
        Ok(())
    }

    /// Connects the mailbox to everybody and the data plane to those that this host sends to.
    fn connect(&mut self) -> anyhow::Result<()> {
        let config = self.setting.config.clone();
        let (hosts, ranks) = (config.hosts(), config.ranks);
        for peer in (0..hosts).filter(|&peer| peer != self.host) {
            self.mailbox.connect(peer)?;
        }
        if self.rank.is_none() {
            return Ok(());
        }
        let (unit, rank) = (self.host / ranks, self.host % ranks);
        for (peer, handle) in std::mem::take(&mut self.handles) {
            let from = self.host;
            let handle = handle.to_vec();
            self.mailbox.post(peer, &Message::Handle { from, handle });
        }
        // With a plugin there is no other way for collectives, so nothing of them can go past it.
        let sockets = self.carrier.is_none();
        let collective = config.unit_peers(unit, rank).filter(|_| sockets);
        let fetchers = (0..config.units)
            .filter(|&u| u != unit)
            .map(|u| config.prefill_host(u, rank));
        let decodes = (0..config.decodes).map(|decode| config.decode_host(decode));
        for peer in collective.chain(fetchers).chain(decodes) {
            for number in self.transport.connect(peer)? {
                self.watch(
                    self.transport.outgoing(number),
                    Source::DataOutgoing,
                    number,
                )?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, at_ns: u64) {
        self.unscheduled_before_ns = self.gate.record().unscheduled_ns;
        let old = &self.setting;
        let setting = Rc::new(Setting {
            config: old.config.clone(),
            scaling: old.scaling.clone(),
            plan: old.plan.clone(),
            begin_ns: at_ns,
        });
        let ranks = setting.config.ranks;
        if self.rank.is_some() {
            let (unit, rank) = (self.host / ranks, self.host % ranks);
            self.rank = Some(Rank::new(Rc::clone(&setting), unit, rank));
            if rank == 0 {
                let arrivals = setting.plan.iter().filter(|request| request.unit == unit);
                self.due
                    .extend(arrivals.map(|r| Reverse((at_ns + r.arrival_ns, Due::Arrival(r.id)))));
            }
        }
        self.setting = setting;
    }

    fn message(&mut self, now: u64, message: &Message) -> anyhow::Result<()> {
        match message {
            Message::Arrived(flows) => {
                for &(flow, bytes) in flows {
                    self.gate.arrived(flow, bytes);
                }
            }
            Message::Handle { from, handle } => {
                if let Some(carrier) = &self.carrier {
                    carrier.connect(*from, carrier::handle_from(handle)?);
                }
            }
            Message::Read { to, head, bytes } => {
                self.gate.answer(*to, head, *bytes, &mut self.transport);
            }
            _ => {
                if let Some(rank) = self.rank.as_mut() {
                    rank.message(now, message);
                }
            }
        }
        self.carry_out(now);
        Ok(())
    }

    fn arrived(&mut self, now: u64, arrival: &Arrival) -> anyhow::Result<()> {
        let head = &arrival.head;
        if head.owner() == self.host {
            // What it read itself.
            self.gate.arrived(head.flow, u64::from(head.len));
        } else if self.scheduled {
            let flows = self.acknowledge.entry(usize::from(head.from)).or_default();
            match flows.last_mut() {
                Some((flow, bytes)) if *flow == head.flow => *bytes += u64::from(head.len),
                _ => flows.push((head.flow, u64::from(head.len))),
            }
        }
        if arrival.complete {
            self.complete(now, head)?;
        }
        Ok(())
    }

    /// What the plugin's thread has to say.
    fn carrier_reports(&mut self, report: Report) -> anyhow::Result<()> {
        match report {
            Report::Listening(handles) => {
                self.handles = handles;
                self.notify(&Notice::Listening)?;
            }
            Report::Connected => self.notify(&Notice::Connected)?,
            // Nobody waits for a word that it has arrived: the flow is the plugin's.
            Report::Arrived(arrival) if arrival.complete => {
                self.complete(now_ns()?, &arrival.head)?;
            }
            Report::Arrived(_) => {}
            Report::Failed(error) => {
                self.carrier_failure = Some(error);
                // At the end of a run a peer may close its connections before this host is told to.
                let at = now_ns()? + CARRIER_LOST_AFTER_NS;
                self.due.push(Reverse((at, Due::CarrierLost)));
            }
        }
        Ok(())
    }

    /// The last byte of a flow is here.
    fn complete(&mut self, now: u64, head: &Head) -> anyhow::Result<()> {
        if let Some(rank) = self.rank.as_mut() {
            rank.received(now, head);
            self.carry_out(now);
            return Ok(());
        }
        let setting = Rc::clone(&self.setting);
        let Some(request) = setting
            .request(head.request)
            .filter(|_| head.kind == Kind::P2d)
        else {
            return Ok(());
        };
        let handover = self.handovers.entry(request.id).or_default();
        handover.received += head.total;
        let scaling = &setting.scaling;
        let flows = u64::from(scaling.layers) * scaling.ranks as u64;
        if handover.received >= flows * scaling.kv_bytes(request.tokens()) {
            self.handovers.remove(&request.id);
            self.notify(&Notice::Finished {
                request: request.id,
                at_ns: now,
            })?;
            for rank in 0..setting.config.ranks {
                let host = setting.config.prefill_host(request.unit, rank);
                self.mailbox.post(
                    host,
                    &Message::Finished {
                        request: request.id,
                    },
                );
            }
        }
        Ok(())
    }

    /// Does what the rank wants done.
    fn carry_out(&mut self, now: u64) {
        loop {
            let Some(rank) = self.rank.as_mut() else {
                return;
            };
            let effects = rank.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Send(flow) => self.submit(&flow, Way::To(flow.to)),
                    Effect::Read { from, flow } => self.submit(&flow, Way::From(from)),
                    Effect::Hint(progress) => self.gate.hint(now, progress),
                    Effect::ComputeUntil(at) => self.due.push(Reverse((at, Due::Compute))),
                    // Where a unit fetches from itself nothing is fetched, so a message to
                    // oneself does not occur.
                    Effect::Post(to, message) => self.mailbox.post(to, &message),
                }
            }
        }
    }

    fn submit(&mut self, flow: &NewFlow, way: Way) {
        self.flow_last += 1;
        let sender = match way {
            Way::To(_) => self.host,
            Way::From(holder) => holder,
        };
        let head = Head {
            flow: Head::name(self.host, self.flow_last),
            offset: 0,
            total: flow.bytes,
            len: 0,
            kind: flow.kind,
            layer: flow.layer,
            batch: flow.batch,
            request: flow.request,
            from: sender as u16,
        };
        match &self.carrier {
            Some(carrier) if flow.kind.is_collective() => carrier.exchange(flow.to, head),
            _ => self.gate.submit(flow, head, way, &mut self.transport),
        }
    }

    fn report(&mut self) -> WorkerReport {
        let (collective_ns, batches) = self
            .rank
            .as_mut()
            .map(Rank::take_records)
            .unwrap_or_default();
        let mut client = self.gate.record();
        client.unscheduled_ns -= self.unscheduled_before_ns.min(client.unscheduled_ns);
        let mut traffic = self.transport.traffic();
        let carrier = self.carrier.take().map(|carrier| {
            let (record, carried) = carrier.finish();
            traffic.add(&carried);
            CarrierRecord {
                buffers_unbounded: self.buffers_unbounded,
                ..record
            }
        });
        WorkerReport {
            host: self.host,
            collective_ns,
            batches,
            traffic,
            client,
            carrier,
        }
    }
}
