//! `laxity trace`: makes the daemon record what it does, and writes a file for Perfetto or Chrome.

mod collector;
mod lives;
mod otlp;
mod parts;
mod rows;
pub(crate) mod why;

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::Args;
use laxity_cli::output::{self, OutputError};
use laxity_quantity::Nanos;
use laxity_wire::trace::{TraceEvent, TracePage};
use laxity_wire::{ControlClient, ControlError};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use self::collector::{CollectorError, SpansTarget};
use crate::host::Endpoint;
use crate::signals::Endings;

/// The reason why there is no trace, or not all of it.
#[derive(Debug, Error)]
pub(crate) enum TraceError {
    #[error(transparent)]
    Daemon(#[from] ControlError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Collector(#[from] CollectorError),
    #[error("cannot receive signals: {0}")]
    Signals(std::io::Error),
    #[error("cannot start {program}: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("cannot wait for the command: {0}")]
    Wait(io::Error),
    #[error("--out and --otlp name the same file, {path}; name two", path = .0.display())]
    SameFile(PathBuf),
    #[error(
        "laxityd saw no flow and no hint in that time; `laxity status` lists the attached clients"
    )]
    Nothing,
}

pub(crate) const HELP: &str = "\
Open the file in https://ui.perfetto.dev, which keeps it on this machine, or in chrome://tracing. \
Each port has rows by stage, layer and level. Each flow is a slice from its submission to its last \
completion, and shows how long it waited for permits. Each permit says why it was given at that \
time. Hints of the engine have their own rows: the layers of each batch, and each request. The \
file also shows how the time of each request divides into queue, compute, and waits for permits \
and network by stage. The command prints the same for all requests together.

Ctrl-C, SIGTERM and SIGHUP end the trace early; what was recorded until then is written. SIGTERM \
and SIGHUP are passed on to COMMAND, and laxity waits for it to end.

Examples:
  laxity trace --for 5s --out trace.json
  laxity trace --out trace.json -- python serve_one_batch.py
  laxity trace --for 5s --otlp http://127.0.0.1:4318";

/// The file that a trace is written to, unless the operator names another one.
pub(crate) const OUT_DEFAULT: &str = "laxity-trace.json";
/// Interval at which recorded events are read.
const READ_EVERY: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Maximum duration. With COMMAND, the trace ends when the command does
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    length: Nanos,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = OUT_DEFAULT)]
    out: PathBuf,
    /// File to write the life of each request to, as OpenTelemetry spans, or the http:// address of
    /// a collector to send them to
    #[arg(long, value_name = "FILE|URL")]
    otlp: Option<SpansTarget>,
    /// Maximum number of events that the daemon keeps until they are read. Further events are only
    /// counted
    #[arg(long, value_name = "N", default_value_t = 1 << 18)]
    events: u64,
    /// End a trace that another process began, and write nothing
    #[arg(long, conflicts_with_all = ["length", "out", "otlp", "command"])]
    stop: bool,
    /// Command to run while the daemon is traced
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode, TraceError> {
    let mut daemon = args.endpoint.connect()?;
    if args.stop {
        output::say(daemon.trace_stop()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::check(&args.out)?;
    if let Some(otlp) = &args.otlp {
        if otlp.is(&args.out) {
            return Err(TraceError::SameFile(args.out.clone()));
        }
        match otlp {
            SpansTarget::File(path) => output::check(path)?,
            SpansTarget::Collector(url) => collector::check(url)?,
        }
    }
    let nics = nics(&mut daemon)?;
    let endings = Endings::receive().map_err(TraceError::Signals)?;
    let length = Duration::from(args.length);
    // The daemon counts whole seconds. This program ends at the exact time.
    let seconds = length.as_secs_f64().ceil().max(1.0) as u64;
    daemon.trace_start(seconds, args.events)?;
    let mut command = start(&args.command)?;
    let mut recorded = Recorded::default();
    let followed = recorded.follow(&mut daemon, length, &endings, &mut command);
    // Even after an error, the daemon must stop recording, and events that were read are written.
    let finished = recorded.finish(&mut daemon);
    let written = recorded.write(&args.out, args.otlp.as_ref(), &nics);
    let ended = command.as_mut().map(|command| wait(command, &endings));
    followed?;
    finished?;
    written?;
    let Some(ended) = ended.transpose()? else { return Ok(ExitCode::SUCCESS) };
    // If a signal ended the command, the exit code is that of a shell.
    let signal = ended.signal().map(|signal| 128 + signal);
    let code = ended.code().or(signal).unwrap_or(1);
    Ok(ExitCode::from(code as u8))
}

fn nics(daemon: &mut ControlClient) -> Result<Vec<String>, ControlError> {
    let status = daemon.status()?;
    let mut names = Vec::new();
    for port in status.ports {
        let index = usize::from(port.nic);
        if names.len() <= index {
            names.resize(index + 1, String::new());
        }
        names[index] = port.name;
    }
    Ok(names)
}

fn start(command: &[String]) -> Result<Option<Child>, TraceError> {
    let Some((program, arguments)) = command.split_first() else { return Ok(None) };
    let child = Command::new(program).args(arguments).spawn();
    let program = program.clone();
    child.map(Some).map_err(|cause| TraceError::Start { program, cause })
}

/// Passes a signal on to the command. A terminal sends SIGINT to both, so that one is not passed
/// on.
fn pass_on(signal: Signal, command: &Child) {
    if signal != Signal::SIGINT {
        // The command may have just ended.
        let _ = kill(Pid::from_raw(command.id().cast_signed()), signal);
    }
}

/// Waits for the command and does not end it. Passes signals but SIGINT on to it.
fn wait(command: &mut Child, endings: &Endings) -> Result<ExitStatus, TraceError> {
    let mut is_told = false;
    loop {
        if let Some(status) = command.try_wait().map_err(TraceError::Wait)? {
            return Ok(status);
        }
        if !is_told {
            is_told = true;
            output::say("the trace is over; waiting for the command to end")?;
        }
        if let Some(signal) = endings.wait(READ_EVERY) {
            pass_on(signal, command);
        }
    }
}

/// The part of a trace that was read so far.
#[derive(Default)]
struct Recorded {
    events: Vec<TraceEvent>,
    lost: u64,
}

impl Recorded {
    /// Reads events until the time is over, the command ends, or a signal asks this program to end.
    fn follow(
        &mut self,
        daemon: &mut ControlClient,
        length: Duration,
        endings: &Endings,
        command: &mut Option<Child>,
    ) -> Result<(), ControlError> {
        let end = Instant::now() + length;
        loop {
            if let Some(command) = command
                && let Ok(Some(_)) = command.try_wait()
            {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if let Some(signal) = endings.wait(left.min(READ_EVERY)) {
                if let Some(command) = command {
                    pass_on(signal, command);
                }
                return Ok(());
            }
            if self.read(daemon)?.is_over {
                return Ok(());
            }
        }
    }

    /// Ends the trace and reads the remaining events.
    fn finish(&mut self, daemon: &mut ControlClient) -> Result<(), ControlError> {
        daemon.trace_stop()?;
        loop {
            let page = self.read(daemon)?;
            if page.is_over || page.is_empty {
                return Ok(());
            }
        }
    }

    fn read(&mut self, daemon: &mut ControlClient) -> Result<TracePage, ControlError> {
        let mut page = daemon.trace_read()?;
        self.events.append(&mut page.events);
        self.lost = page.lost;
        Ok(page)
    }

    fn write(
        &self,
        out: &Path,
        otlp: Option<&SpansTarget>,
        nics: &[String],
    ) -> Result<(), TraceError> {
        if self.events.is_empty() {
            return Err(TraceError::Nothing);
        }
        let lives = lives::lives(&self.events);
        let ended = parts::ended(&lives);
        let parts = (ended.iter())
            .map(|ended| (ended.request, parts::parts(ended, lives.last_ns)))
            .collect();
        let picture = serde_json::to_vec(&rows::picture(&lives, &parts, nics, self.lost))
            .map_err(OutputError::Json)?;
        output::replace(out, &picture)?;
        let mut sent = String::new();
        if let Some(otlp) = otlp {
            let spans = otlp::spans(&lives, &ended, &parts, nics, otlp::epoch_ns());
            match otlp {
                SpansTarget::File(path) => {
                    let spans = serde_json::to_vec(&spans).map_err(OutputError::Json)?;
                    output::replace(path, &spans)?;
                }
                SpansTarget::Collector(url) => {
                    let count = collector::send(url, &spans)?;
                    sent = format!("\n{count} spans sent to {url}");
                }
            }
        }
        let permits: usize = lives.flows.iter().map(|life| life.permits.len()).sum();
        let mut said = format!(
            "{} flows, {permits} permits, {} events in {:.3} s: {}",
            lives.flows.len(),
            self.events.len(),
            why::us(lives.last_ns - lives.first_ns) / 1e6,
            out.display()
        );
        if self.lost > 0 {
            said.push_str(&format!(
                "\n{} events found no room and are not in it; --events can be larger",
                self.lost
            ));
        }
        said.push_str(&sent);
        said.extend(parts::line(&parts).map(|line| format!("\n{line}")));
        Ok(output::say(said)?)
    }
}

#[cfg(test)]
mod tests;
