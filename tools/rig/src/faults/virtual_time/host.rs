//! The daemon of a virtual world: the product's scheduler, and registration without a runtime.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use laxity_daemon::clients::{ClientId, Leaving};
use laxity_daemon::config::Config;
use laxity_daemon::coordinator::exchange::CoordinatorExchange;
use laxity_daemon::coordinator::stream::StreamTask;
use laxity_daemon::driver::{Driver, NextStep};
use laxity_daemon::mailbox::{Mailbox, SchedulerCommand, SnapshotSlot, mailbox};
use laxity_daemon::registration::newcomer;
use laxity_daemon::service::SchedulerHandle;
use laxity_daemon::stats::Snapshot;
use laxity_policy::Span;
use laxity_shm::layout::attention;
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Hello, Peer, RegistrationError};
use tokio::sync::{oneshot, watch};

use super::clock;
use crate::error::LabError;

/// Process ids from here on belong to no process: the kernel's are lower.
const PID_MIN: u32 = 5_000_000;
const UID_MIN: u32 = 100_000;
/// Steps in which a scheduler carries a command out.
const COMMAND_STEPS: usize = 16;

enum Phase {
    Greeting,
    Attaching(oneshot::Receiver<()>, OwnedFd),
    Attached,
    Leaving(oneshot::Receiver<Option<Leaving>>),
}

struct Connection {
    socket: OwnedFd,
    id: ClientId,
    process: u32,
    version: u32,
    region: Option<Arc<Region>>,
    phase: Phase,
}

/// The daemon's end of the stream to the coordinator.
pub(super) struct DaemonStream {
    pub(super) task: StreamTask,
    pub(super) exchange: Arc<CoordinatorExchange>,
    pub(super) mailbox: Mailbox,
    seen: watch::Sender<Option<Arc<Snapshot>>>,
}

struct RunningDaemon {
    driver: Driver,
    mailbox: Mailbox,
    stream: DaemonStream,
    snapshots: Arc<SnapshotSlot>,
    connections: Vec<Connection>,
    clients: u64,
    /// Whether the scheduler waits, so that a client or a command has to wake it.
    asleep: bool,
}

/// A host with a daemon, or with none at present.
pub(super) struct VirtualHost {
    pub(super) socket: PathBuf,
    pub(super) config: Config,
    pub(super) bypass: bool,
    listener: Option<OwnedFd>,
    running: Option<RunningDaemon>,
}

/// Returns the name by which a process greets, from which its user follows.
pub(super) fn name_of(process: u32) -> String {
    format!("p{process}")
}

/// Returns the credentials that the kernel would report. Every third process has another user.
fn peer_of(process: u32) -> Peer {
    let uid = UID_MIN + process % 3;
    Peer { pid: PID_MIN + process, uid, gid: uid / 2 }
}

fn broken(error: impl std::fmt::Display) -> LabError {
    LabError::Inside(error.to_string())
}

impl VirtualHost {
    pub(super) fn new(folder: &Path, config: Config) -> Self {
        let socket = folder.join("laxityd.sock");
        Self { socket, config, bypass: false, listener: None, running: None }
    }

    pub(super) fn is_up(&self) -> bool {
        self.running.is_some()
    }

    /// Reports whether the daemon has no connection and nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        let idle = |running: &RunningDaemon| running.asleep && running.connections.is_empty();
        self.running.as_ref().is_some_and(idle)
    }

    pub(super) fn launch(&mut self) -> Result<(), LabError> {
        if self.is_up() {
            return Ok(());
        }
        let (mailbox, inbox) = mailbox().map_err(broken)?;
        let snapshots = Arc::new(SnapshotSlot::new().map_err(broken)?);
        let config = Arc::new(self.config.clone());
        let exchange = Arc::new(CoordinatorExchange::new("http://virtual", "virtual"));
        let driver = Driver::by(clock::OF_SCHEDULER, inbox, Arc::clone(&snapshots), &config)
            .map_err(broken)?
            .attending(Arc::clone(&exchange));
        let stream = DaemonStream::new(&config, &mailbox, exchange)?;
        if self.listener.is_none() {
            self.listener = Some(registration::listen(&self.socket).map_err(broken)?);
        }
        if self.bypass {
            mailbox.send(SchedulerCommand::Bypass(true));
        }
        self.running = Some(RunningDaemon {
            driver,
            mailbox,
            stream,
            snapshots,
            connections: Vec::new(),
            clients: 0,
            asleep: false,
        });
        Ok(())
    }

    /// Runs a step of the scheduler. Returns what it does next, or `None` without a daemon.
    pub(super) fn step(&mut self) -> Option<NextStep> {
        let running = self.running.as_mut()?;
        let next = running.driver.step();
        running.asleep = matches!(next, NextStep::Wait(_));
        Some(next)
    }

    /// Reports whether a sleeping scheduler was woken. It is then awake.
    pub(super) fn is_rung(&mut self) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| running.asleep) else {
            return false;
        };
        running.asleep = !running.driver.wait(Span::ZERO);
        !running.asleep
    }

    pub(super) fn send(&mut self, command: SchedulerCommand) {
        if let Some(running) = &self.running {
            running.mailbox.send(command);
        }
    }

    pub(super) fn configure(&mut self) {
        self.send(SchedulerCommand::Configure(Arc::new(self.config.clone())));
    }

    /// Turns the bypass on or off, as the daemon's service does.
    pub(super) fn set_bypass(&mut self, on: bool) {
        self.bypass = on;
        if on && let Some(running) = &self.running {
            for region in running.connections.iter().filter_map(|it| it.region.as_ref()) {
                region.header().raise(attention::BYPASS);
            }
        }
        self.send(SchedulerCommand::Bypass(on));
    }

    /// Ends the connections of a process that is killed, so that its library writes no more.
    pub(super) fn cut_off(&self, process: u32) {
        for connection in self.running.iter().flat_map(|running| &running.connections) {
            if let Some(region) =
                connection.region.as_ref().filter(|_| connection.process == process)
            {
                region.header().raise(attention::LOST);
            }
        }
    }

    /// Returns the daemon's end of the stream, with the latest snapshot of the scheduler.
    pub(super) fn stream(&mut self) -> Option<&mut DaemonStream> {
        let running = self.running.as_mut()?;
        if let Some(snapshot) = running.snapshots.take() {
            running.stream.seen.send_replace(Some(snapshot));
        }
        Some(&mut running.stream)
    }

    /// Accepts connections, and goes on with those that there are.
    pub(super) fn serve(&mut self) -> Result<(), LabError> {
        let (Some(running), Some(listener)) = (self.running.as_mut(), &self.listener) else {
            return Ok(());
        };
        while let Some(socket) = registration::accept(listener.as_fd()).map_err(broken)? {
            running.connections.push(Connection {
                socket,
                id: ClientId(0),
                process: 0,
                version: 0,
                region: None,
                phase: Phase::Greeting,
            });
        }
        let mut at = 0;
        while at < running.connections.len() {
            if running.goes_on(at, &self.config) {
                at += 1;
            } else {
                running.connections.remove(at);
            }
        }
        Ok(())
    }

    /// Ends the daemon like SIGKILL does: it writes nothing into the memory of its clients.
    pub(super) fn kill(&mut self) {
        let Some(running) = self.running.take() else { return };
        running.driver.abandon();
        self.listener = None;
    }

    /// Ends the daemon like SIGTERM does. With `handover` its socket stays open.
    pub(super) fn stop(&mut self, handover: bool) -> Result<(), LabError> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        if !handover {
            self.listener = None;
            std::fs::remove_file(&self.socket).map_err(LabError::system("removing a socket"))?;
        }
        running.mailbox.send(SchedulerCommand::Stop { handover });
        if !running.carry_out() {
            return Err(LabError::Inside("the scheduler does not stop".to_owned()));
        }
        running.driver.finish();
        Ok(())
    }

    /// Returns a snapshot of the scheduler, or `None` if it makes none.
    pub(super) fn snapshot(&mut self) -> Option<Arc<Snapshot>> {
        let running = self.running.as_mut()?;
        running.snapshots.take();
        running.mailbox.send(SchedulerCommand::Publish);
        running.carry_out();
        running.snapshots.take()
    }
}

impl DaemonStream {
    fn new(
        config: &Config,
        mailbox: &Mailbox,
        exchange: Arc<CoordinatorExchange>,
    ) -> Result<Self, LabError> {
        let (seen, snapshots) = watch::channel(None);
        let mailbox = mailbox.clone();
        let scheduler = SchedulerHandle {
            mailbox: mailbox.clone(),
            snapshots,
            exchange: Some(Arc::clone(&exchange)),
        };
        let task = StreamTask::new(&config.clone().into_force(), &scheduler);
        let task = task.ok_or_else(|| broken("there is no coordinator"))?;
        Ok(Self { task, exchange, mailbox, seen })
    }
}

impl RunningDaemon {
    /// Runs until all commands are carried out. Returns whether the last one was to stop.
    fn carry_out(&mut self) -> bool {
        for _ in 0..COMMAND_STEPS {
            match self.driver.step() {
                NextStep::Stop => return true,
                NextStep::Wait(_) => break,
                _ => {}
            }
        }
        self.asleep = true;
        false
    }

    /// Goes on with a connection. Returns false at its end.
    fn goes_on(&mut self, at: usize, config: &Config) -> bool {
        let connection = &mut self.connections[at];
        match &mut connection.phase {
            Phase::Greeting => match registration::receive_hello(connection.socket.as_fd()) {
                Ok(Some(hello)) => self.attach(at, &hello, config).is_ok(),
                Ok(None) => true,
                Err(_) => false,
            },
            Phase::Attaching(ready, eventfd) => {
                if ready.try_recv().is_err() {
                    return true;
                }
                let sent = connection.region.as_ref().map(|region| {
                    registration::send_welcome(
                        connection.socket.as_fd(),
                        connection.version,
                        region.geometry(),
                        region.memfd(),
                        eventfd.as_fd(),
                    )
                });
                if sent.is_some_and(|sent| sent.is_ok()) {
                    connection.phase = Phase::Attached;
                } else {
                    self.detach(at);
                }
                true
            }
            Phase::Attached => {
                if registration::is_hung_up(connection.socket.as_fd()) {
                    self.detach(at);
                }
                true
            }
            Phase::Leaving(left) => left.try_recv().is_err(),
        }
    }

    fn attach(
        &mut self,
        at: usize,
        hello: &Hello,
        config: &Config,
    ) -> Result<(), RegistrationError> {
        self.clients += 1;
        let id = ClientId(self.clients);
        let process = hello.name().trim_start_matches('p').parse().unwrap_or_default();
        let newcomer = newcomer(hello, peer_of(process), id, config)
            .map_err(|_| RegistrationError::NoAnswer)?;
        let eventfd = newcomer.served.eventfd().try_clone_to_owned();
        let eventfd = eventfd.map_err(|_| RegistrationError::NoAnswer)?;
        let connection = &mut self.connections[at];
        connection.id = id;
        connection.process = process;
        connection.version = newcomer.identity.version;
        connection.region = Some(Arc::clone(newcomer.served.region()));
        let (attached, ready) = oneshot::channel();
        connection.phase = Phase::Attaching(ready, eventfd);
        self.mailbox.send(SchedulerCommand::Attach { newcomer: Box::new(newcomer), attached });
        Ok(())
    }

    fn detach(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        let (leaving, left) = oneshot::channel();
        self.mailbox.send(SchedulerCommand::Detach { client: connection.id, leaving });
        connection.phase = Phase::Leaving(left);
    }
}
