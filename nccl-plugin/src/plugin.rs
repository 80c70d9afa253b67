//! The process-wide state: the network, the client, connects in progress, and the sweeper thread,
//! which drives connections that nobody tests any more.
//!
//! The first `init` creates it, and nothing frees it. NCCL unloads plugins with their last
//! communicator and loads them again with the next, but the library stays mapped (see `build.rs`).
//! A forked child doesn't use its parent's state and creates its own.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use laxity_client::{Client, Mode, Options};
use laxity_job::Job;
use laxity_job::exit::at_exit;
use laxity_job::fork::{Leaked, PerProcess};
use laxity_job::monitor::Monitor;
use parking_lot::Mutex;
use smallvec::smallvec;

use crate::arbiter::{Arbiter, DaemonArbiter};
use crate::backend::{Backend, Connecting, Device, Listener, Sender, TrafficClasses};
use crate::comm::{Comm, CommSide, ReceiveSide, SendSide, Surroundings};
use crate::context::{Context, Names, TRAFFIC_CLASS_UNSET};
use crate::fault::{Fault, Result};
use crate::handle::{self, Carrier, HANDLE_BYTES, Handle};
use crate::log;
use crate::origin::ProfilerEvents;
use crate::report::Report;
use crate::rma::{Around, RmaListener};
use crate::settings::{Network, Settings};
use crate::tcp::Tcp;

/// Longest wait of `init` for a daemon that exists.
const ATTACH_WITHIN: Duration = Duration::from_secs(2);
/// Time after which a connect counts as abandoned if NCCL doesn't ask about it.
const CONNECT_KEPT: Duration = Duration::from_secs(120);
/// Pause between two runs of the sweeper.
const SWEEP_EVERY: Duration = Duration::from_micros(500);
/// Idle time after which the sweeper sleeps until it is woken.
const SWEEP_IDLE: Duration = Duration::from_millis(10);

/// Events of the profiler interface. NCCL may initialise it before the network.
pub static EVENTS: ProfilerEvents = ProfilerEvents::new();

/// Returns the declared stages of communicators, which the profiler interface also uses.
pub fn names() -> &'static Arc<Names> {
    static NAMES: Leaked<Arc<Names>> = Leaked::none();
    NAMES.get_or_make(Arc::default)
}

pub fn settings() -> &'static Settings {
    static SETTINGS: Leaked<Settings> = Leaked::none();
    SETTINGS.get_or_make(Settings::from_env)
}

/// The process-wide state of the plugin.
pub struct Plugin {
    backend: Box<dyn Backend>,
    arbiter: Arc<dyn Arbiter>,
    /// The class that an operator pinned for all connections.
    pinned_dscp: Option<u8>,
    report: Arc<Report>,
    connects: Mutex<HashMap<u64, PendingConnect>>,
    next_connect: AtomicU64,
    sweeper: Sweeper,
}

struct PendingConnect {
    connecting: Box<dyn Connecting>,
    /// The classes at the beginning of the connect. A daemon may come or go before the connect
    /// ends.
    classes: TrafficClasses,
    asked: Instant,
}

/// A listener, as NCCL holds it.
pub struct Listening {
    listener: Mutex<Option<Box<dyn Listener>>>,
}

static PLUGIN: PerProcess<Plugin> = PerProcess::none();
static MAKING: PerProcess<Mutex<()>> = PerProcess::none();

pub fn get_or_make() -> Result<&'static Plugin> {
    if let Some(plugin) = PLUGIN.get() {
        return Ok(plugin);
    }
    let _making = MAKING.get_or_make(Mutex::default).lock();
    if let Some(plugin) = PLUGIN.get() {
        return Ok(plugin);
    }
    let plugin = Plugin::new(settings())?;
    // The report is the plugin's, and a child has a plugin of its own.
    let _ = at_exit(write_report);
    Ok(PLUGIN.get_or_make(|| plugin))
}

fn write_report() {
    if let Some(plugin) = PLUGIN.get() {
        let stats = plugin.arbiter.stats();
        plugin.report.write(plugin.backend.name(), &stats);
    }
}

/// Returns the plugin.
///
/// # Errors
/// `init` was not called, or only in a parent process.
pub fn get() -> Result<&'static Plugin> {
    PLUGIN
        .get()
        .ok_or_else(|| Fault::Usage("init was not called in this process, or failed".into()))
}

/// Returns the network that the settings ask for, or the first one that works.
fn backend(settings: &Settings) -> Result<Box<dyn Backend>> {
    let verbs = || crate::verbs::open(settings);
    match settings.network {
        Network::Tcp => Ok(Box::new(Tcp::new(settings)?)),
        Network::Verbs => verbs().map_err(|why| {
            Fault::System(format!(
                "LAXITY_NET=verbs: {why}. `ibv_devinfo` shows what the host has; LAXITY_NET=tcp \
                 uses sockets"
            ))
        }),
        Network::Auto => {
            let why = if settings.verbs_disabled {
                String::from("NCCL_IB_DISABLE is set")
            } else {
                match verbs() {
                    Ok(backend) => return Ok(backend),
                    Err(why) => why,
                }
            };
            log::info(&format!("no RDMA ({why}): using sockets"));
            let tcp = Tcp::new(settings).map_err(|fault| {
                Fault::System(format!("neither RDMA ({why}) nor sockets can be used: {fault}"))
            })?;
            Ok(Box::new(tcp))
        }
    }
}

/// Returns the class that the environment pins for this network. NCCL pins none for sockets.
fn pinned_dscp(network: &str, settings: &Settings) -> Option<u8> {
    (network == "verbs").then(|| settings.rdma.pinned_dscp()).flatten()
}

impl Plugin {
    fn new(settings: &Settings) -> Result<Self> {
        let backend = backend(settings)?;
        let job = Job::of_this_process();
        for problem in job.take_problems() {
            log::warn(problem);
        }
        let mut options = Options::from_env();
        options.name.push_str("/nccl");
        // A connection keeps the classes that a daemon names when it is made. `init` therefore
        // waits for a slow daemon. It notices at once if there is none.
        if job.attach_timeout.is_none() {
            options.attach_timeout = ATTACH_WITHIN;
        }
        let off = options.mode == Mode::Off;
        let client = Client::attach(options);
        let standing = match (off, client.is_scheduled()) {
            (true, _) => "off by LAXITY_MODE or the profile: passing through",
            (_, true) => "scheduled by laxityd",
            (_, false) => "no laxityd schedules here: passing through until one does",
        };
        let names: Vec<_> = backend
            .devices()
            .iter()
            .map(|device| device.name.to_string_lossy().into_owned())
            .collect();
        log::info(&format!(
            "Laxity {} over {}: {}; {standing}",
            env!("CARGO_PKG_VERSION"),
            backend.name(),
            names.join(" "),
        ));
        Ok(Self {
            pinned_dscp: pinned_dscp(backend.name(), settings),
            backend,
            arbiter: Arc::new(DaemonArbiter::new(client)),
            report: Arc::default(),
            connects: Mutex::default(),
            next_connect: AtomicU64::new(1),
            sweeper: Sweeper::default(),
        })
    }

    pub fn devices(&self) -> &[Device] {
        self.backend.devices()
    }

    pub fn device(&self, number: i32) -> Result<&Device> {
        let all = self.devices();
        let found = usize::try_from(number).ok().and_then(|number| all.get(number));
        found.ok_or_else(|| Fault::Argument(format!("device {number} of {}", all.len())))
    }

    pub fn context(&self, communicator: u64, traffic_class: i32) -> Arc<Context> {
        Arc::new(Context::new(communicator, traffic_class, Arc::clone(names())))
    }

    /// Returns a new context for calls that name none.
    pub fn context_of_all(&self) -> Arc<Context> {
        self.context(0, TRAFFIC_CLASS_UNSET)
    }

    pub fn listen(&self, device: i32) -> Result<(Box<Listening>, [u8; HANDLE_BYTES])> {
        self.device(device)?;
        let (listener, handle) = self.backend.listen(device as usize)?;
        let listening = Listening { listener: Mutex::new(Some(listener)) };
        Ok((Box::new(listening), handle.encode()))
    }

    /// Does one step of a connect. Returns the connection once it is complete.
    ///
    /// # Errors
    /// The connection can't be established: the handle is not Laxity's, or nobody answers.
    pub fn connect(
        &self,
        context: &Arc<Context>,
        device: i32,
        bytes: &mut [u8; HANDLE_BYTES],
    ) -> Result<Option<Arc<Comm>>> {
        self.device(device)?;
        let mark = handle::mark(bytes);
        let begun = (mark != 0).then(|| self.connects.lock().remove(&mark)).flatten();
        let mut connect = match begun {
            Some(connect) => connect,
            None => {
                let handle = Handle::decode(bytes)?;
                self.check_carrier(&handle)?;
                let classes = self.classes(context);
                let level = self.arbiter.service_level(context.stage());
                let connecting = self.backend.connect(device as usize, &handle, &classes, level)?;
                PendingConnect { connecting, classes, asked: Instant::now() }
            }
        };
        if let Some(sender) = connect.connecting.poll()? {
            handle::set_mark(bytes, 0);
            return Ok(Some(self.connected(context, device, sender, connect.classes)));
        }
        let mark = if mark == 0 { self.next_connect.fetch_add(1, Ordering::Relaxed) } else { mark };
        handle::set_mark(bytes, mark);
        connect.asked = Instant::now();
        let mut connects = self.connects.lock();
        // NCCL doesn't report that it abandons a connect.
        connects.retain(|_, other| other.asked.elapsed() < CONNECT_KEPT);
        connects.insert(mark, connect);
        Ok(None)
    }

    fn check_carrier(&self, handle: &Handle) -> Result<()> {
        let own = match self.backend.name() {
            "verbs" => Carrier::Verbs,
            _ => Carrier::Tcp,
        };
        if handle.carrier == own {
            return Ok(());
        }
        Err(Fault::Usage(format!(
            "the peer listens by {:?}, this process uses {}: set LAXITY_NET to the same on all \
             nodes",
            handle.carrier,
            self.backend.name(),
        )))
    }

    fn classes(&self, context: &Context) -> TrafficClasses {
        // As in NCCL's own transport, the variable precedes a communicator's configuration.
        let stage = context.stage();
        let pinned = self.pinned_dscp.or(context.pinned_dscp());
        match pinned.filter(|_| !self.arbiter.overrides_pins(stage)) {
            Some(dscp) => smallvec![dscp],
            None => self.arbiter.classes(stage),
        }
    }

    fn connected(
        &self,
        context: &Arc<Context>,
        device: i32,
        sender: Box<dyn Sender>,
        classes: TrafficClasses,
    ) -> Arc<Comm> {
        let nic = self.devices()[device as usize].name.to_string_lossy().into_owned();
        let around = Surroundings {
            arbiter: Arc::clone(&self.arbiter),
            context: Arc::clone(context),
            report: Arc::clone(&self.report),
            wait_max: settings().wait_max,
            nic,
            classes,
        };
        let comm = Comm::new(CommSide::Send(Box::new(Mutex::new(SendSide::new(sender, around)))));
        self.sweeper.watch(&comm);
        comm
    }

    /// Does one step of an accept. Returns the connection once it is complete.
    pub fn accept(&self, listening: &Listening) -> Result<Option<Arc<Comm>>> {
        let mut listener = listening.listener.lock();
        let Some(listener) = listener.as_mut() else {
            return Err(Fault::Argument("the listener was closed".into()));
        };
        let receiver = listener.accept()?;
        Ok(receiver.map(|receiver| {
            let side = ReceiveSide::new(receiver, Arc::clone(&self.report));
            Comm::new(CommSide::Receive(Box::new(Mutex::new(side))))
        }))
    }

    /// Returns the number of NICs for one-sided operations: all or none, since NCCL numbers them.
    pub fn one_sided_devices(&self) -> usize {
        let mut all = 0..self.devices().len();
        if all.all(|at| self.backend.one_sided_at(at).is_some()) { self.devices().len() } else { 0 }
    }

    /// Listens for the ranks of a group, at a NIC.
    pub fn listen_one_sided(&self, context: &Context, device: i32) -> Result<RmaListener> {
        self.device(device)?;
        let at = self.backend.one_sided_at(device as usize);
        let Some(at) = at.filter(|_| settings().one_sided) else {
            let text = "LAXITY_RMA is off, or the device has no atomic operations";
            return Err(Fault::Usage(text.to_owned()));
        };
        RmaListener::over(device as usize, at, self.classes(context)[0])
    }

    /// Returns the parts of the process that one-sided operations at a NIC use.
    pub fn around_one_sided(
        &self,
        context: &Context,
        traffic_class: i32,
        device: usize,
    ) -> Result<Around> {
        let context = context.with_class(traffic_class);
        let nic = self.device(device as i32)?.name.to_string_lossy().into_owned();
        Ok(Around {
            arbiter: Arc::clone(&self.arbiter),
            report: Arc::clone(&self.report),
            wait_max: settings().wait_max,
            nic,
            stage: context.stage(),
            dscp: self.classes(&context)[0],
            service_level: self.arbiter.service_level(context.stage()),
        })
    }

    /// Makes the sweeper drive connections for which [`SendSide::lingers`] holds.
    pub fn lingers(&'static self) {
        self.sweeper.call(self);
    }
}

/// The thread that drives connections for which `SendSide::lingers` holds. It begins kept messages
/// if the host tests their receives first. It also reports completions after NCCL is done with the
/// request: over TCP, a request is done when the kernel has the bytes, and a flow is complete when
/// they are acknowledged. Usually the next call on the connection reports that. If there is none,
/// this thread does, since bytes in flight make other flows wait.
#[derive(Default)]
struct Sweeper {
    comms: Mutex<Vec<Weak<Comm>>>,
    awake: AtomicBool,
    started: AtomicBool,
    sleeping: Monitor<()>,
}

impl Sweeper {
    fn watch(&self, comm: &Arc<Comm>) {
        let mut comms = self.comms.lock();
        comms.retain(|comm| comm.strong_count() > 0);
        comms.push(Arc::downgrade(comm));
    }

    /// Wakes the sweeper if it sleeps.
    fn call(&self, plugin: &'static Plugin) {
        // SeqCst, as in `run`. Either the sweeper's last look sees this connection, or this load
        // sees that the sweeper sleeps.
        if self.awake.load(Ordering::SeqCst) {
            return;
        }
        if !self.started.swap(true, Ordering::Relaxed) {
            let builder = thread::Builder::new().name(String::from("laxity-sweep"));
            if let Err(error) = laxity_job::thread::spawn(builder, || plugin.sweeper.run()) {
                log::warn(&format!(
                    "no thread can be started ({error}): completions are told late"
                ));
            }
        }
        let _sleeping = self.sleeping.lock();
        self.awake.store(true, Ordering::SeqCst);
        self.sleeping.notify();
    }

    fn run(&self) {
        let mut quiet_since = Instant::now();
        loop {
            if self.sweep() {
                quiet_since = Instant::now();
            }
            if quiet_since.elapsed() > SWEEP_IDLE {
                // A connection may have begun to linger before this store is visible, so the
                // sweeper looks once more.
                self.awake.store(false, Ordering::SeqCst);
                if self.sweep() {
                    self.awake.store(true, Ordering::SeqCst);
                    continue;
                }
                let mut sleeping = self.sleeping.lock();
                while !self.awake.load(Ordering::SeqCst) {
                    sleeping = self.sleeping.wait(sleeping);
                }
                quiet_since = Instant::now();
            }
            thread::sleep(SWEEP_EVERY);
        }
    }

    /// Drives all connections once. Reports whether any of them still lingers.
    fn sweep(&self) -> bool {
        let comms: Vec<Arc<Comm>> = {
            let comms = self.comms.lock();
            comms.iter().filter_map(Weak::upgrade).collect()
        };
        let mut found = false;
        for comm in comms {
            let CommSide::Send(side) = &comm.side else { continue };
            match side.try_lock() {
                Some(mut side) if side.lingers() => {
                    side.sweep();
                    found = true;
                }
                Some(_) => {}
                // The thread that holds the lock drives the connection. The next run sees whether
                // it lingers.
                None => found = true,
            }
        }
        found
    }
}
