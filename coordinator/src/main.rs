//! The program `laxity-coordinator`: arguments, log, runtime and signals around the library.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::{CommandFactory as _, Parser};
use laxity_coordinator::config::Config;
use laxity_coordinator::server::{Coordinator, CoordinatorHandle};
use laxity_files::print;
use laxity_listen::{InstallArgs, ServicePages, SetLog, start_log};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{debug, info, warn};

/// Orders batches across the hosts of a cluster.
///
/// Without a configuration, the coordinator listens on loopback. SIGHUP makes it read the
/// configuration again. SIGTERM stops the coordinator: it notifies the daemons, which continue with
/// their own order.
#[derive(Debug, Parser)]
#[command(name = "laxity-coordinator", version, max_term_width = 100)]
struct Arguments {
    /// Configuration file [default: /etc/laxity/coordinator.toml, if it exists]
    #[arg(long, value_name = "FILE", env = "LAXITY_COORDINATOR_CONFIG")]
    config: Option<PathBuf>,
    /// Check the configuration and exit
    #[arg(long)]
    check: bool,
    /// Print the complete configuration as TOML, and exit
    #[arg(long)]
    show_config: bool,
    /// Address for daemons and operators (`listen` of the configuration). Port 0 takes a free port
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Serve other hosts without TLS (`insecure` of the configuration)
    #[arg(long)]
    insecure: bool,
    /// Address at which daemons reach this coordinator (`etcd.advertise` of the configuration)
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Address of the web page (`web.listen` of the configuration)
    #[arg(long, value_name = "ADDRESS")]
    web: Option<SocketAddr>,
    /// Level of the log, or a filter (`log` of the configuration)
    #[arg(long, value_name = "FILTER", env = "LAXITY_LOG")]
    log: Option<String>,
    /// Process id of the parent. Exits when the parent exits (for `laxity cluster load`)
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,
    #[command(flatten)]
    install: InstallArgs,
}

const PAGES: ServicePages = ServicePages {
    end: concat!(
        ".SH FILES\n.TP\n/etc/laxity/coordinator.toml\nconfiguration; optional\n",
        ".SH \"SEE ALSO\"\nlaxity-coordinator.toml(5), laxity(1), laxityd(8)\n",
    ),
    path: "/etc/laxity/coordinator.toml",
    sample: include_str!("../../dist/laxity-coordinator.toml"),
    see: "laxity-coordinator(8), laxity(1)",
};

impl Arguments {
    /// Reads the configuration and applies the command line to it.
    fn load(&self) -> anyhow::Result<Config> {
        let mut config = Config::load(self.config.as_deref())?;
        config.listen = self.listen.unwrap_or(config.listen);
        config.insecure |= self.insecure;
        if let (Some(etcd), Some(advertise)) = (&mut config.etcd, &self.advertise) {
            etcd.advertise.clone_from(advertise);
        }
        if let Some(web) = self.web {
            config.web.listen = web.to_string();
        }
        // An empty variable counts as unset.
        if let Some(log) = self.log.as_ref().filter(|log| !log.is_empty()) {
            config.log.clone_from(log);
        }
        config.check()?;
        Ok(config)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laxity-coordinator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(text) = arguments.install.text(Arguments::command(), &PAGES)? {
        return Ok(print(text)?);
    }
    if let Some(parent) = arguments.parent {
        end_with(parent)?;
    }
    let config = arguments.load()?;
    if arguments.show_config {
        return Ok(print(config.to_toml())?);
    }
    if arguments.check {
        for key in &config.retired {
            eprintln!(
                "laxity-coordinator: warning: {key}: this release has no such key; remove it"
            );
        }
        config.check_files()?;
        return Ok(print("the configuration is valid\n")?);
    }
    let set_log = start_log(&config.log, config.log_format)?;
    for key in &config.retired {
        warn!("{key}: this release has no such key, so it does nothing; remove it");
    }
    if let Err(error) = config.check_files() {
        // Files that the server cannot use at all make the start fail below.
        warn!(%error, "peers may refuse these certificates");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(serve(arguments, config, set_log))
}

/// Makes this process end when its parent ends, even by SIGKILL.
fn end_with(parent: i32) -> anyhow::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM)
        .context("cannot ask to end with the parent")?;
    // The parent may have ended before the call above.
    anyhow::ensure!(
        nix::unistd::getppid().as_raw() == parent,
        "the process that started this one, {parent}, has ended"
    );
    Ok(())
}

/// Returns the term of a coordinator without a lease. It grows with every start, unless the clock
/// was set back by more than the downtime.
fn term_of_start() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_millis() as u64)
}

async fn serve(arguments: &Arguments, config: Config, set_log: SetLog) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let policy = config.policy.name.clone();
    let coordinator = Coordinator::bind(config, term_of_start()).await?;
    let handle = coordinator.handle();
    let address = coordinator.address()?;
    info!(version = env!("CARGO_PKG_VERSION"), %address, %policy, "laxity-coordinator is ready");
    print(format!("listening on {address}\n"))?;
    if let Some(web) = coordinator.web_address() {
        print(format!("page at http://{web}/\n"))?;
    }
    let serving = coordinator.run();
    tokio::pin!(serving);
    notify(&[NotifyState::Ready]);
    let watchdog = sd_notify::watchdog_enabled().map(|period| period / 2);
    loop {
        tokio::select! {
            served = &mut serving => return Ok(served?),
            _ = terminate.recv() => stop(&handle),
            _ = interrupt.recv() => stop(&handle),
            _ = hangup.recv() => reread(arguments, &handle, &set_log),
            () = tick(watchdog) => notify(&[NotifyState::Watchdog]),
        }
    }
}

/// Waits for half of the watchdog's period. If the runtime hangs, no tick reaches the watchdog.
async fn tick(period: Option<std::time::Duration>) {
    match period {
        Some(period) => tokio::time::sleep(period).await,
        None => std::future::pending().await,
    }
}

fn stop(handle: &CoordinatorHandle) {
    notify(&[NotifyState::Stopping]);
    info!("laxity-coordinator stops");
    handle.stop();
}

fn reread(arguments: &Arguments, handle: &CoordinatorHandle, set_log: &SetLog) {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, now]);
    }
    match arguments.load() {
        Ok(config) => {
            set_log(&config.log);
            match handle.reload(config) {
                Ok(keys) => {
                    for key in keys {
                        warn!(
                            key,
                            "changed in the configuration; takes effect after a restart only"
                        );
                    }
                    info!("the configuration was reloaded");
                }
                Err(error) => {
                    warn!(%error, "the certificates were not reloaded; the old ones hold");
                }
            }
        }
        Err(error) => {
            warn!(error = %format!("{error:#}"), "the configuration was not reloaded; the old one \
                holds");
        }
    }
    notify(&[NotifyState::Ready]);
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        debug!(%error, "cannot notify the service manager");
    }
}
