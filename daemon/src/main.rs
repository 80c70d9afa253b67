//! The `laxityd` program: arguments, log and runtime. The library has everything else.
#![forbid(unsafe_code)]

mod manual;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use laxity_daemon::config::Config;
use laxity_daemon::daemon::Daemon;
use laxity_daemon::service::Source;
use laxity_files::print;
use laxity_listen::{LogFormat, start_log};
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
    /// Format of log lines (`log_format` of the configuration)
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Log filter: a level or directives (`log` of the configuration)
    #[arg(long, value_name = "FILTER", env = "LAXITY_LOG")]
    log: Option<String>,
    /// Overrides one key of the configuration, such as scheduler.spin_us=0 or nic.0.rate=25Gbit
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Prints a manual page and exits (for installing)
    #[arg(long, value_name = "PAGE", hide = true)]
    manual: Option<manual::Page>,
    /// Prints a shell's completion script and exits (for installing)
    #[arg(long, value_name = "SHELL", hide = true)]
    completions: Option<clap_complete::Shell>,
}

impl Arguments {
    /// Returns all overrides as `key=value`. The last one wins.
    fn sets(&self) -> Vec<String> {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let mut sets = Vec::new();
        if let Some(path) = &self.socket {
            sets.push(format!("socket={}", quoted(&path.to_string_lossy())));
        }
        if let Some(path) = &self.control {
            sets.push(format!("control={}", quoted(&path.to_string_lossy())));
        }
        if let Some(format) = self.log_format {
            let name = if format == LogFormat::Json { "json" } else { "text" };
            sets.push(format!("log_format={}", quoted(name)));
        }
        // An empty variable counts as unset.
        if let Some(filter) = self.log.as_ref().filter(|filter| !filter.is_empty()) {
            sets.push(format!("log={}", quoted(filter)));
        }
        sets.extend(self.sets.iter().cloned());
        sets
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
    if let Some(page) = arguments.manual {
        return Ok(print(manual::page(page)?)?);
    }
    if let Some(shell) = arguments.completions {
        return Ok(print(manual::completions(shell))?);
    }
    let source = Source { file: arguments.config.clone(), sets: arguments.sets() };
    let config = Config::load(source.file.as_deref(), &source.sets)?;
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
    for warning in config.warnings() {
        warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async { Daemon::bind(config, source, set_log)?.run().await })?;
    Ok(())
}
