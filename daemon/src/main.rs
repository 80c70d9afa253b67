//! The `laxityd` program: arguments, log and runtime. The library has everything else.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory as _, Parser};
use laxity_daemon::config::Config;
use laxity_daemon::daemon::Daemon;
use laxity_daemon::service::Source;
use laxity_daemon::sockets::PassedSockets;
use laxity_daemon::standby;
use laxity_files::print;
use laxity_listen::{InstallArgs, LogFormat, ServicePages, start_log};
use tracing::warn;

/// Schedules the network traffic of LLM inference on this host.
///
/// The daemon needs no configuration. SIGHUP makes the daemon read its configuration again. SIGTERM
/// stops the daemon: its clients are released and continue unscheduled.
#[derive(Debug, Parser)]
#[command(name = "laxityd", version, max_term_width = 100)]
struct Arguments {
    /// Configuration file [default: /etc/laxity/laxityd.toml, if it exists]
    #[arg(long, value_name = "FILE", env = "LAXITY_CONFIG")]
    config: Option<PathBuf>,
    /// Checks the configuration, and the certificates that it names, and exits
    #[arg(long)]
    check_config: bool,
    /// Prints the configuration in effect, as TOML, and exits
    #[arg(long)]
    show_config: bool,
    /// Socket that clients register at (`socket` of the configuration)
    #[arg(long, value_name = "PATH", env = "LAXITY_SOCKET")]
    socket: Option<PathBuf>,
    /// Socket that operators use (`control` of the configuration)
    #[arg(long, value_name = "PATH", env = "LAXITY_CONTROL")]
    control: Option<PathBuf>,
    /// Address that serves metrics (`metrics` of the configuration)
    #[arg(long, value_name = "ADDRESS:PORT", env = "LAXITY_METRICS")]
    metrics: Option<String>,
    /// Format of log lines (`log_format` of the configuration)
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Log filter: a level or directives (`log` of the configuration)
    #[arg(long, value_name = "FILTER", env = "LAXITY_LOG")]
    log: Option<String>,
    /// Overrides one key of the configuration, such as scheduler.spin_us=0 or nic.0.rate=25Gbit
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Waits for the end of a laxityd that runs already, and takes over its sockets and clients
    #[arg(long)]
    standby: bool,
    #[command(flatten)]
    install: InstallArgs,
}

const PAGES: ServicePages = ServicePages {
    end: concat!(
        ".SH FILES\n.TP\n/etc/laxity/laxityd.toml\nconfiguration; optional\n",
        ".TP\n/run/laxity/\nsockets, and the marker of a bypass that is on\n",
        ".TP\n/var/lib/laxity/mode\nthe mode that laxity enforce ordered\n",
        ".SH \"SEE ALSO\"\nlaxityd.toml(5), laxity(1)\n",
    ),
    path: "/etc/laxity/laxityd.toml",
    sample: include_str!("../../dist/laxityd.toml"),
    see: "laxityd(8), laxity(1)",
};

impl Arguments {
    /// Returns all overrides as `key=value`. The last one wins.
    fn sets(&self) -> Vec<String> {
        let path = |path: &Option<PathBuf>| Some(path.as_ref()?.to_string_lossy().into_owned());
        let format = |format| if format == LogFormat::Json { "json" } else { "text" };
        // An empty variable counts as unset.
        let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let named = [
            ("socket", path(&self.socket)),
            ("control", path(&self.control)),
            ("metrics", text(&self.metrics)),
            ("log_format", self.log_format.map(|it| format(it).to_owned())),
            ("log", text(&self.log)),
        ];
        let set = |(key, text)| Some(format!("{key}={}", toml::Value::String(text?)));
        named.into_iter().filter_map(set).chain(self.sets.iter().cloned()).collect()
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laxityd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(text) = arguments.install.text(Arguments::command(), &PAGES)? {
        return Ok(print(text)?);
    }
    let source = Source { file: arguments.config.clone(), sets: arguments.sets() };
    let mut config = Config::load(source.file.as_deref(), &source.sets)?;
    if arguments.show_config {
        return Ok(print(config.to_toml())?);
    }
    if arguments.check_config {
        for warning in config.warnings() {
            eprintln!("laxityd: warning: {warning}");
        }
        config.check_files(source.file.as_deref(), &source.sets)?;
        return Ok(print("the configuration is valid\n")?);
    }
    let set_log = start_log(&config.log, config.log_format)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()
        .context("cannot start the runtime")?;
    let mut passed = PassedSockets::take();
    if arguments.standby {
        let Some(turn) = runtime.block_on(standby::wait_for_turn(&config))? else { return Ok(()) };
        passed = passed.with(turn);
        config = config.at_turn(&source);
        set_log(&config.log);
    }
    for warning in config.warnings() {
        warn!("{warning}");
    }
    runtime.block_on(async { Daemon::bind(config, source, set_log, passed)?.run().await })?;
    Ok(())
}
