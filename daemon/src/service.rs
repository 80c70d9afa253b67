//! The service behind operators and registrations: the configuration in force, the attached clients
//! and the way to the scheduler. It runs on the tokio thread.

mod explain;
mod mode_order;
mod nics;
pub mod problems;
pub mod trace;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use laxity_listen::SetLog;
use laxity_shm::layout::attention;
use laxity_shm::region::Region;
use laxity_shm::sleep::now_ns;
use laxity_wire::{OperatorChange, Status};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

use crate::clients::ClientId;
use crate::config::{Config, ConfigError, ConfigInForce, FILE_DEFAULT, Mode};
use crate::coordinator::exchange::CoordinatorExchange;
use crate::mailbox::{ANSWER_MAX, Mailbox, SchedulerCommand};
use crate::places::{ClientSlots, NoFreeSlot};
use crate::refusals::Refusals;
pub use crate::service::mode_order::ModeOrder;
use crate::service::problems::{DaemonPart, Problems};
use crate::service::trace::Traces;
use crate::sockets::beside;
use crate::stats::Snapshot;
use crate::status::status;

const FILE_WAIT_MAX: Duration = Duration::from_secs(2);
const CHANGES_MAX: usize = 32;

/// The origin of the configuration, for reading it again.
#[derive(Clone, Debug, Default)]
pub struct Source {
    pub file: Option<PathBuf>,
    /// Overrides from the command line, as `key=value`.
    pub sets: Vec<String>,
}

impl Source {
    pub fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or_else(|| Path::new(FILE_DEFAULT))
    }
}

#[derive(Clone, Debug)]
pub struct SchedulerHandle {
    pub mailbox: Mailbox,
    pub snapshots: watch::Receiver<Option<Arc<Snapshot>>>,
    pub exchange: Option<Arc<CoordinatorExchange>>,
}

/// The state that operators and registrations act on.
pub struct Service {
    started: Instant,
    source: Source,
    set_log: SetLog,
    scheduler: SchedulerHandle,
    refusals: Refusals,
    /// Held while the configuration is read.
    reading: Arc<tokio::sync::Mutex<()>>,
    /// Held while the file of the operator's mode is written.
    storing: Arc<tokio::sync::Mutex<()>>,
    /// A file that exists while bypass is on, so that bypass stays on after a crash and restart of
    /// the daemon. It is beside the control socket, where no file survives a reboot.
    marker: PathBuf,
    state: Mutex<ServiceState>,
    /// The configuration in force. It changes only while `state` is locked.
    config: ConfigInForce,
    traces: Traces,
    problems: Problems,
}

#[derive(Debug)]
struct ServiceState {
    bypass: bool,
    mode: ModeOrder,
    places: ClientSlots,
    /// The memory of each client, so that a bypass works even if the scheduler hangs.
    regions: BTreeMap<ClientId, Arc<Region>>,
    /// The last [`CHANGES_MAX`] changes by operators, the latest first.
    changes: VecDeque<(Instant, OperatorChange)>,
}

impl ServiceState {
    /// Adds what the scheduler does not know.
    fn add_to(&self, mut status: Status) -> Status {
        status.configured_mode = self.mode.replaced().map_or("", Mode::name).to_owned();
        status.changes.extend(self.changes.iter().map(|(at, change)| OperatorChange {
            ago_ms: at.elapsed().as_millis() as u64,
            ..change.clone()
        }));
        status
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Service {
    /// Makes a service in front of the scheduler, for at most `client_room` clients whatever the
    /// configuration allows.
    pub fn new(
        config: ConfigInForce,
        mode: ModeOrder,
        source: Source,
        set_log: SetLog,
        scheduler: SchedulerHandle,
        client_room: usize,
    ) -> Self {
        let marker = beside(&config.load().control, ".bypass");
        let bypass = marker.symlink_metadata().is_ok();
        Self {
            started: Instant::now(),
            source,
            set_log,
            refusals: Refusals::default(),
            reading: Arc::default(),
            storing: Arc::default(),
            marker,
            state: Mutex::new(ServiceState {
                bypass,
                mode,
                places: ClientSlots::new(client_room),
                regions: BTreeMap::new(),
                changes: VecDeque::new(),
            }),
            config,
            traces: Traces::new(scheduler.mailbox.clone()),
            problems: Problems::default(),
            scheduler,
        }
    }

    pub const fn traces(&self) -> &Traces {
        &self.traces
    }

    /// Returns what is wrong with the daemon itself.
    pub const fn problems(&self) -> &Problems {
        &self.problems
    }

    pub fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    pub fn exchange(&self) -> Option<&CoordinatorExchange> {
        self.scheduler.exchange.as_deref()
    }

    /// Sends `command` to the scheduler. Returns false if the scheduler has ended.
    pub fn send(&self, command: SchedulerCommand) -> bool {
        self.scheduler.mailbox.send(command)
    }

    /// Takes a place for a client of user `uid` and returns its number.
    pub fn admit(&self, uid: u32) -> Result<ClientId, NoFreeSlot> {
        self.state.lock().places.take(uid, &self.config.load().scheduler)
    }

    pub fn keep_region(&self, id: ClientId, region: Arc<Region>) {
        self.state.lock().regions.insert(id, region);
    }

    pub fn departed(&self, id: ClientId) {
        let mut state = self.state.lock();
        state.places.free(id);
        state.regions.remove(&id);
    }

    pub const fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    pub fn latest(&self) -> Option<Arc<Snapshot>> {
        self.scheduler.snapshots.borrow().clone()
    }

    pub async fn status(&self) -> Result<Status, String> {
        let asked_ns = now_ns();
        if !self.send(SchedulerCommand::Publish) {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        let mut snapshots = self.scheduler.snapshots.clone();
        let fresh = snapshots
            .wait_for(|seen| seen.as_ref().is_some_and(|snapshot| snapshot.at.0 >= asked_ns));
        match tokio::time::timeout(ANSWER_MAX, fresh).await {
            Ok(Ok(seen)) => {
                let uptime_ms = self.started.elapsed().as_millis() as u64;
                let config = self.config();
                let refused = (&self.refusals, &config.access);
                seen.as_ref()
                    .map(|snapshot| status(snapshot, uptime_ms, refused, self.exchange()))
                    .map(|status| self.state.lock().add_to(status))
                    .map(|status| Status { problems: self.problems.all(), ..status })
                    .ok_or_else(|| "there is no snapshot yet; ask again".to_owned())
            }
            Ok(Err(_)) => Err("laxityd is stopping".to_owned()),
            Err(_) => Err(format!(
                "the scheduler did not answer within {ANSWER_MAX:?}; clients go on unscheduled \
                 after their stall timeout. Restart laxityd, and report this with its log"
            )),
        }
    }

    /// Reports whether an operator has turned the bypass on, perhaps under an earlier daemon.
    pub fn is_bypassed(&self) -> bool {
        self.state.lock().bypass
    }

    fn mark_bypass(&self, on: bool) -> io::Result<()> {
        if on {
            // `create_new` does not follow a symbolic link. An existing marker is as good.
            match File::create_new(&self.marker) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        } else {
            mode_order::removed(&self.marker)
        }
    }

    /// Records a change by the operator `uid`, or by a signal (`None`), for `status` and the log.
    pub fn changed(&self, uid: Option<u32>, what: &str) {
        info!(uid, what, "changed by an operator");
        let change = OperatorChange { ago_ms: 0, uid, what: what.to_owned() };
        let mut state = self.state.lock();
        state.changes.truncate(CHANGES_MAX - 1);
        state.changes.push_front((Instant::now(), change));
    }

    /// Turns the bypass on or off and returns the result as text for the operator.
    pub fn bypass(&self, on: bool) -> String {
        let mut state = self.state.lock();
        state.bypass = on;
        // The bypass is set in each region here, so that it works even if the scheduler hangs. The
        // scheduler then wakes the sleepers. Only the scheduler clears it, because it must serve a
        // client before the client waits for permits again.
        if on {
            for region in state.regions.values() {
                region.header().raise(attention::BYPASS);
            }
        }
        let clients = state.places.taken();
        // The marker is written under the lock, so that it matches `bypass` if two operators switch
        // at once.
        let marked = self.mark_bypass(on);
        drop(state);
        self.send(SchedulerCommand::Bypass(on));
        warn!(on, clients, "bypass switched by an operator");
        let lasts = match (on, marked) {
            (true, Ok(())) => ", also after a restart of laxityd, until `laxity bypass off`".into(),
            (false, Ok(())) => String::new(),
            (_, Err(error)) => {
                let marker = self.marker.display();
                warn!(%error, %marker, "a restart of laxityd will not know of this");
                format!("; a restart of laxityd will not know of this ({marker}: {error})")
            }
        };
        let said = if on { "on: everything goes out unscheduled" } else { "off" };
        format!("bypass is {said}{lasts} ({clients} clients attached)")
    }

    /// Changes the mode until an operator or the configuration sets another one.
    pub async fn set_mode(&self, mode: &str) -> Result<String, String> {
        let mode = Mode::from_name(mode)
            .ok_or_else(|| format!("unknown mode `{mode}`; known are off, observe, enforce"))?;
        let replaced = {
            let mut state = self.state.lock();
            state.mode.order(mode);
            self.put_in_force(Arc::new(Config { mode, ..Config::clone(&self.config()) }));
            state.mode.replaced()
        };
        // The mode is in force, even if its file could not be written.
        let lasts = match (self.store_mode().await, replaced) {
            (Err(problem), _) => {
                format!("; a restart of laxityd will not know of this ({problem})")
            }
            (Ok(()), None) => ", as configured".to_owned(),
            (Ok(()), Some(configured)) => format!(
                " until the configured mode, {}, changes; reloads and restarts keep it",
                configured.name()
            ),
        };
        Ok(format!("the mode is {}{lasts}", mode.name()))
    }

    /// Writes the operator's mode to its file, or removes the file if there is none.
    pub async fn store_mode(&self) -> Result<(), String> {
        let file = self.state.lock().mode.file();
        let store = Arc::clone(&file);
        let stored = match on_thread(&self.storing, move || store.store()).await {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => error.to_string(),
            None => format!("not written within {FILE_WAIT_MAX:?}"),
        };
        let problem = format!("{}: {stored}", file.path().display());
        warn!(problem, "after a restart, laxityd will not know the mode that an operator set last");
        Err(problem)
    }

    /// Puts `config` in force, while `state` is locked. The scheduler has the command before others
    /// see the configuration, so it knows all NICs that they may ask it about.
    fn put_in_force(&self, config: Arc<Config>) {
        self.send(SchedulerCommand::Configure(Arc::clone(&config)));
        self.config.store(config);
    }

    /// Reads the configuration again and returns the changed keys that need a restart. Dropping the
    /// future while the file is read changes nothing.
    ///
    /// # Errors
    /// The new configuration is invalid or can't be read. The old one stays in force.
    pub async fn reload(&self) -> Result<Vec<&'static str>, ConfigError> {
        match self.read().await {
            Ok((config, warnings)) => {
                let needs_restart = self.take(&config, &warnings);
                self.problems.set(DaemonPart::Configuration, None);
                // A failure is in the log.
                let _ = self.store_mode().await;
                Ok(needs_restart)
            }
            Err(error) => {
                warn!(%error, "the configuration was not reloaded; the old one holds");
                self.problems.set(
                    DaemonPart::Configuration,
                    Some(format!(
                        "the configuration was not read again, and laxityd will not start with it: \
                         {error}. Correct it, and `laxity reload`"
                    )),
                );
                Err(error)
            }
        }
    }

    async fn read(&self) -> Result<(Config, Vec<String>), ConfigError> {
        let source = self.source.clone();
        let load = move || {
            Config::load(source.file.as_deref(), &source.sets).map(|config| {
                let warnings = config.warnings();
                (config, warnings)
            })
        };
        on_thread(&self.reading, load).await.unwrap_or_else(|| {
            Err(ConfigError::Slow { path: self.source.path().to_owned(), waited: FILE_WAIT_MAX })
        })
    }

    /// Applies the reloadable keys of `file` and returns the others that changed.
    fn take(&self, file: &Config, warnings: &[String]) -> Vec<&'static str> {
        let mut state = self.state.lock();
        let running = self.config();
        let needs_restart = file.needs_restart(&running);
        let mode = state.mode.configure(file.mode);
        let effective = Arc::new(Config { mode, ..file.reloaded_over(&running) });
        let changed = effective != running;
        self.put_in_force(Arc::clone(&effective));
        drop(state);
        (self.set_log)(&effective.log);
        info!(
            changed, policy = %effective.policy, mode = effective.mode.name(),
            "the configuration was reloaded"
        );
        for warning in warnings {
            warn!("{warning}");
        }
        for key in &needs_restart {
            warn!(key, "changed in the configuration; takes effect after a restart only");
        }
        needs_restart
    }
}

/// Does `work` with a file on a thread of its own, one at a time by `lock`. Work that hangs delays
/// neither operators nor the end of the daemon: after [`FILE_WAIT_MAX`], its result is dropped.
async fn on_thread<T: Send + 'static>(
    lock: &Arc<tokio::sync::Mutex<()>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let work = async {
        let held = Arc::clone(lock).lock_owned().await;
        let (done, result) = oneshot::channel();
        std::thread::Builder::new()
            .name("files".into())
            .spawn(move || {
                let _ = done.send(work());
                drop(held);
            })
            .ok()?;
        result.await.ok()
    };
    tokio::time::timeout(FILE_WAIT_MAX, work).await.ok().flatten()
}
