//! A whole daemon: the scheduler thread, and one tokio thread beside it for everything else.
//!
//! At the start, all listeners are bound before anything runs. So a second daemon, or a path that
//! can't be bound, is an error at once. At a stop, the daemon removes the registration socket, so
//! that no client attaches any more. Then the scheduler releases its clients, and the control
//! socket is removed last. Sockets that the next daemon takes over are kept.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use laxity_listen::SetLog;
use laxity_listen::http::{HttpEndpoint, HttpLimits, HttpListener, rendered};
use sd_notify::NotifyState;
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tracing::{debug, info, warn};

use crate::config::{Config, ConfigInForce};
use crate::coordinator::addresses::own_host;
use crate::coordinator::attendant::Attendant;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::coordinator::stream::StreamTask;
use crate::descriptors::TooFew;
use crate::driver::{Driver, DriverError};
use crate::mailbox::{LOOK_EVERY, LOOKS_MAX, Mailbox, SchedulerCommand, SnapshotSlot, mailbox};
use crate::service::problems::{DaemonPart, RunningMarker};
use crate::service::{ModeOrder, SchedulerHandle, Service, Source};
use crate::sockets::{self, BindError, Bound, PassedSockets};
use crate::standby::StandbySocket;
use crate::stats::Snapshot;
use crate::watched::{Watched, watch};
use crate::{control, descriptors, metrics, registration, residual, treatments, web};

/// Why the daemon did not start, or ended. A `cause` is no `source`, because the text contains it.
#[derive(Debug, Error)]
pub enum DaemonError {
    #[error("cannot listen at {path}: {cause} (`{key}` in the \
        configuration)", path = .path.display())]
    Listen { path: PathBuf, key: &'static str, cause: BindError },
    #[error(
        "the limit of open files is {}, and laxityd needs {} at least; raise `LimitNOFILE` of the \
         unit (`ulimit -n`)", .0.limit, .0.needed
    )]
    Descriptors(TooFew),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("cannot start")]
    System(#[from] io::Error),
    /// The scheduler thread died, which is a bug. Its clients were released.
    #[error(
        "the scheduler thread died; its clients continue unscheduled. Please report this with the \
         log above"
    )]
    SchedulerDied,
}

/// A daemon that has bound its sockets and does not serve yet.
#[derive(Debug)]
pub struct Daemon {
    config: ConfigInForce,
    client_room: usize,
    service: Arc<Service>,
    mailbox: Mailbox,
    snapshot_slot: Arc<SnapshotSlot>,
    /// Becomes readable when the scheduler published a snapshot.
    published: Watched,
    snapshots: watch::Sender<Option<Arc<Snapshot>>>,
    registration: Watched,
    registration_path: Bound,
    control: UnixListener,
    control_path: Bound,
    standby: Option<StandbySocket>,
    metrics: Option<HttpEndpoint>,
    web: Option<HttpEndpoint>,
    driver: Driver,
    attendant: Option<StreamTask>,
    signals: Signals,
}

/// The signals that the daemon handles. SIGTERM and SIGHUP end a process that handles neither, so
/// these exist before the first socket does, by which others see that the daemon is there.
#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn handle() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

impl Daemon {
    /// Binds all sockets, or takes those in `passed`. The caller must be inside a tokio runtime.
    pub fn bind(
        mut config: Config,
        source: Source,
        set_log: SetLog,
        mut passed: PassedSockets,
    ) -> Result<Self, DaemonError> {
        let signals = Signals::handle()?;
        let has_page = config.web.address().is_some();
        let room = descriptors::room_within(laxity_listen::descriptors_max(), has_page)
            .map_err(DaemonError::Descriptors)?;
        let mode = ModeOrder::read(&config.control, config.mode);
        config.mode = mode.mode();
        let in_force = config.into_force();
        let config = in_force.load_full();
        let (mailbox, inbox) = mailbox().map_err(io::Error::from)?;
        let snapshot_slot = Arc::new(SnapshotSlot::new().map_err(io::Error::from)?);
        // Later there may be no descriptor left, and the daemon would have no status.
        let published = watch(snapshot_slot.fd()?)?;
        let exchange = exchange(&config).map(Arc::new);
        let mut driver = Driver::new(inbox, Arc::clone(&snapshot_slot), &config)?;
        if let Some(exchange) = &exchange {
            driver = driver.attending(Arc::clone(exchange));
        }
        let fail = |key, path: &Path| {
            let path = path.to_owned();
            move |cause| DaemonError::Listen { path, key, cause }
        };
        let (registration, registration_path) =
            sockets::bind_registration(&config.socket, config.access.socket_mode, &mut passed)
                .map_err(fail("socket", &config.socket))?;
        let (control, control_path) =
            sockets::bind_control(&config.control, config.access.control_mode, &mut passed)
                .map_err(fail("control", &config.control))?;
        let listeners = [registration.as_fd(), control.as_fd()];
        let standby = StandbySocket::bind(&config.control, listeners);
        let registration = watch(registration)?;
        // Metrics come after the sockets, so that a second daemon fails with the name of the socket
        // in use.
        let metrics = config.metrics_address();
        let metrics = metrics.map(|address| HttpEndpoint::bind("metrics", "metrics", address));
        let web = config.web.address();
        let web = web.map(|address| HttpEndpoint::bind("pages", "web.listen", address));
        let (snapshots, seen) = watch::channel(None);
        let scheduler = SchedulerHandle { mailbox: mailbox.clone(), snapshots: seen, exchange };
        let attendant = StreamTask::new(&in_force, &scheduler);
        let service = Service::new(Arc::clone(&in_force), mode, source, set_log, scheduler, room);
        let service = Arc::new(service);
        if service.is_bypassed() {
            mailbox.send(SchedulerCommand::Bypass(true));
        }
        Ok(Self {
            config: in_force,
            client_room: room,
            service,
            mailbox,
            snapshot_slot,
            published,
            snapshots,
            registration,
            registration_path,
            control,
            control_path,
            standby,
            metrics,
            web,
            driver,
            attendant,
            signals,
        })
    }

    /// Serves until SIGTERM, SIGINT or the death of the scheduler thread.
    pub async fn run(mut self) -> Result<(), DaemonError> {
        let Signals { mut terminate, mut interrupt, hangup } = self.signals;
        let service = Arc::clone(&self.service);
        let _nics = treatments::watch(Arc::clone(&self.config), self.mailbox.clone(), move || {
            service.follow_nics(Path::new("/"));
        })?;
        let _residuals = residual::watch(Arc::clone(&self.config), self.mailbox.clone())?;
        let (scheduler, died) = start(self.driver)?;
        let metrics = shown(self.metrics.as_ref());
        let page = shown(self.web.as_ref());
        let config = self.config.load_full();
        let running = RunningMarker::make(&config.control, self.service.problems());
        let listener = |part, endpoint| bound(Arc::clone(&self.service), part, endpoint);
        let mut tasks = vec![
            tokio::spawn(publish(Arc::clone(&self.snapshot_slot), self.published, self.snapshots)),
            tokio::spawn(registration::serve(self.registration, Arc::clone(&self.service))),
            tokio::spawn(control::serve(self.control, Arc::clone(&self.service))),
            tokio::spawn(reload_on(hangup, Arc::clone(&self.service))),
            tokio::spawn(store_mode(Arc::clone(&self.service))),
        ];
        if let Some(endpoint) = self.metrics {
            let listener = listener(DaemonPart::Metrics, endpoint);
            tasks.push(tokio::spawn(serve_metrics(listener, Arc::clone(&self.service))));
        }
        if let Some(web) = self.web {
            let (names, service) = (config.web.names.clone(), Arc::clone(&self.service));
            tasks.push(tokio::spawn(web::serve(listener(DaemonPart::Page, web), names, service)));
        }
        let attendant = self.attendant.map(Attendant::start);
        if let Some(period) = sd_notify::watchdog_enabled() {
            let (mailbox, snapshot_slot) = (self.mailbox.clone(), Arc::clone(&self.snapshot_slot));
            tasks.push(tokio::spawn(watch_over(mailbox, snapshot_slot, period)));
        }
        info!(
            version = env!("CARGO_PKG_VERSION"), policy = %config.policy,
            mode = config.mode.name(), socket = %config.socket.display(),
            control = %config.control.display(), metrics = %metrics,
            page = %page, nics = config.nic.len(), "laxityd is ready"
        );
        warn_at_start(&self.service, &config, self.client_room);
        notify(&[NotifyState::Ready]);

        let died = tokio::select! {
            _ = terminate.recv() => false,
            _ = interrupt.recv() => false,
            _ = died => true,
        };
        notify(&[NotifyState::Stopping]);
        let taken_over = self.standby.is_some_and(|standby| !died && standby.pass_on());
        if taken_over {
            self.registration_path.keep_file();
            self.control_path.keep_file();
        }
        // Clients wait for the next daemon at a kept socket only.
        let handover = self.registration_path.is_kept() && !died;
        info!(handover, "laxityd stops");
        let attendant = attendant.and_then(|it| it.leave(!died && !taken_over));
        running.remove_unless(died);
        // New clients are refused first, so that the scheduler releases all clients there are.
        for task in &tasks[1..] {
            task.abort();
        }
        drop(self.registration_path);
        self.mailbox.send(SchedulerCommand::Stop { handover });
        let joined = tokio::task::spawn_blocking(move || scheduler.join()).await;
        drop(self.control_path);
        tasks[0].abort();
        Attendant::end(attendant).await;
        match joined {
            Ok(Ok(())) if !died => Ok(()),
            _ => Err(DaemonError::SchedulerDied),
        }
    }
}

/// Warns about a low limit of open files, and about a bypass that is still on.
fn warn_at_start(service: &Service, config: &Config, client_room: usize) {
    if client_room < config.scheduler.clients_max {
        warn!(
            clients_max = config.scheduler.clients_max,
            room = client_room,
            "the limit of open files leaves room for fewer clients than scheduler.clients_max; \
             raise `LimitNOFILE` of the unit (`ulimit -n`)"
        );
    }
    if service.is_bypassed() {
        warn!(
            "bypass is still on, from before this start: nothing is scheduled. `laxity bypass \
             off` ends it"
        );
    }
}

fn exchange(config: &Config) -> Option<CoordinatorExchange> {
    let coordinator = &config.coordinator;
    if coordinator.endpoint.is_empty() {
        return None;
    }
    Some(CoordinatorExchange::new(&coordinator.endpoint, &own_host(coordinator)))
}

/// Starts the scheduler thread. The receiver resolves when the thread ends, even by a panic.
fn start(driver: Driver) -> io::Result<(JoinHandle<()>, oneshot::Receiver<()>)> {
    let (alive, died) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("scheduler".into()).spawn(move || {
        let _alive = alive;
        driver.run();
    })?;
    Ok((thread, died))
}

/// Passes snapshots from the scheduler to the tasks that wait for one or show the latest.
async fn publish(
    snapshot_slot: Arc<SnapshotSlot>,
    wake: Watched,
    snapshots: watch::Sender<Option<Arc<Snapshot>>>,
) {
    loop {
        let Ok(mut ready) = wake.readable().await else { return };
        // The flag is cleared before the read, so that a wake-up after the read sets it again.
        ready.clear_ready();
        drop(ready);
        snapshot_slot.acknowledge();
        let mut looks = 0;
        while looks < LOOKS_MAX {
            match snapshot_slot.take() {
                Some(snapshot) => {
                    looks = 0;
                    snapshots.send_replace(Some(snapshot));
                }
                None => looks += 1,
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                // A task waits for a snapshot.
                woken = wake.readable() => match woken {
                    Ok(mut ready) => {
                        ready.clear_ready();
                        snapshot_slot.acknowledge();
                        // The count restarts even after the last look, because a snapshot is there.
                        looks = 0;
                    }
                    Err(_) => return,
                },
            }
        }
    }
}

/// Serves the metrics at `listener`, once there is one.
async fn serve_metrics(listener: impl Future<Output = HttpListener>, service: Arc<Service>) {
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let answer = rendered(move || {
        let (snapshot, refused) = (service.latest(), service.refusals().count());
        metrics::text(began.as_secs_f64(), snapshot.as_deref(), refused, service.exchange())
    });
    listener.await.serve("the metrics endpoint", HttpLimits::METRICS, answer).await;
}

/// Returns the listener of an endpoint as soon as its address is free. Until then `laxity status`
/// says why not.
fn bound(
    service: Arc<Service>,
    part: DaemonPart,
    endpoint: HttpEndpoint,
) -> impl Future<Output = HttpListener> {
    service.problems().set(part, endpoint.problem().map(str::to_owned));
    async move {
        let listener = endpoint.listener().await;
        service.problems().set(part, None);
        listener
    }
}

/// Updates the file of the operator's mode. That mode may have ended before this start.
async fn store_mode(service: Arc<Service>) {
    // A failure is in the log.
    let _ = service.store_mode().await;
}

async fn reload_on(mut hangup: Signal, service: Arc<Service>) {
    while hangup.recv().await.is_some() {
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            notify(&[NotifyState::Reloading, now]);
        }
        // `reload` has logged the error, and the old configuration stays in force.
        if service.reload().await.is_ok() {
            service.changed(None, "the configuration was read again");
        }
        notify(&[NotifyState::Ready]);
    }
}

/// Returns the endpoint's address as text for the log. The text is empty if none is served.
fn shown(endpoint: Option<&HttpEndpoint>) -> String {
    endpoint.and_then(HttpEndpoint::local_addr).map_or(String::new(), |it| it.to_string())
}

/// Notifies systemd's watchdog for as long as the scheduler answers.
async fn watch_over(mailbox: Mailbox, snapshot_slot: Arc<SnapshotSlot>, period: Duration) {
    let mut ticks = tokio::time::interval(period / 2);
    loop {
        let before = snapshot_slot.signs_of_life();
        mailbox.send(SchedulerCommand::Publish);
        ticks.tick().await;
        if snapshot_slot.signs_of_life() == before {
            // A busy scheduler may need longer than the first interval, and the next check is half
            // a period away.
            tokio::time::sleep(period / 4).await;
        }
        if snapshot_slot.signs_of_life() == before {
            warn!("the scheduler thread gives no sign of life; the watchdog is not notified");
        } else {
            notify(&[NotifyState::Watchdog]);
        }
    }
}

/// Notifies the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        debug!(%error, "cannot notify the service manager");
    }
}
