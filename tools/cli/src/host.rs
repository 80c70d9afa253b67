//! Commands for the daemon of this host: `status`, `bypass`, `enforce` and `reload`.

pub(crate) mod overview;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use laxity_cli::output::{OutputError, json, say};
use laxity_wire::{ControlClient, ControlError, Status};
use serde::Serialize;
use thiserror::Error;

use crate::doctor::fabric;
use crate::doctor::map::{self, Row};
use crate::doctor::root::Root;

/// The reason why a command for the daemon failed.
#[derive(Debug, Error)]
pub(crate) enum HostError {
    #[error(transparent)]
    Daemon(#[from] ControlError),
    #[error("the daemon has no NIC `{name}`; its NICs are {known}")]
    NoNic { name: String, known: String },
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Where the daemon's control socket is.
#[derive(Args)]
pub(crate) struct Endpoint {
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", env = laxity_wire::control::SOCKET_ENV,
          default_value = laxity_wire::control::SOCKET_DEFAULT)]
    control: PathBuf,
    /// How long to wait for an answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    timeout_ms: u64,
}

impl Endpoint {
    pub(crate) const fn new(control: PathBuf, timeout_ms: u64) -> Self {
        Self { control, timeout_ms }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.control
    }

    pub(crate) fn connect(&self) -> Result<ControlClient, ControlError> {
        ControlClient::connect(&self.control, Duration::from_millis(self.timeout_ms))
    }
}

#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Print all that the daemon reports and the map of processes, as JSON
    #[arg(long)]
    json: bool,
    /// Show the levels of this NIC
    #[arg(long, value_name = "NAME", conflicts_with = "json")]
    nic: Option<String>,
    /// Show every problem, level, job and process, without a limit on the number of lines
    #[arg(long, conflicts_with_all = ["json", "nic"])]
    full: bool,
    /// Ask only the daemon and do not inspect the host's processes. For liveness probes
    #[arg(long)]
    brief: bool,
    /// Look at another host's /sys and /proc, copied below this folder
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Overview<'a> {
    #[serde(flatten)]
    status: &'a Status,
    processes: &'a [Row],
}

#[derive(Args)]
pub(crate) struct BypassArgs {
    /// `on` sends all traffic unscheduled from now on; `off` schedules it again
    state: Switch,
    #[command(flatten)]
    endpoint: Endpoint,
}

#[derive(Args)]
pub(crate) struct EnforceArgs {
    /// `on` makes clients wait for permits from now on; `off` only observes them. Reloads and
    /// restarts keep it, until the mode in the configuration changes
    state: Switch,
    #[command(flatten)]
    endpoint: Endpoint,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

pub(crate) fn status(args: &StatusArgs) -> Result<(), HostError> {
    let status = &args.endpoint.connect()?.status()?;
    let root = Root::new(&args.root);
    let ports = if args.brief { Vec::new() } else { fabric::ports(&root) };
    let processes = if args.brief { Vec::new() } else { map::of_host(&root, &ports, status) };
    let text = match &args.nic {
        Some(name) => overview::nic(status, &ports, name).ok_or_else(|| HostError::NoNic {
            name: name.clone(),
            known: Vec::from_iter(overview::nic_names(status)).join(", "),
        })?,
        None if args.json => json(&Overview { status, processes: &processes })?,
        None => overview::page(status, &ports, &processes, args.full),
    };
    Ok(say(text)?)
}

pub(crate) fn bypass(args: &BypassArgs) -> Result<(), HostError> {
    let words = args.endpoint.connect()?.bypass(args.state == Switch::On)?;
    Ok(say(words)?)
}

pub(crate) fn enforce(args: &EnforceArgs) -> Result<(), HostError> {
    let mode = if args.state == Switch::On { "enforce" } else { "observe" };
    let words = args.endpoint.connect()?.set_mode(mode)?;
    Ok(say(words)?)
}

pub(crate) fn reload(endpoint: &Endpoint) -> Result<(), HostError> {
    let words = endpoint.connect()?.reload()?;
    Ok(say(words)?)
}
