//! `laxity lab exec`: runs a program in the guest of the SoftRoCE lab.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use laxity_cli::output::{self, say};
use laxity_rig::vm::{self, Exec, Input, NetworkConfig, Stream, VmConfig, VmError, VmJob};

use crate::publish;

/// Exit codes of the lab itself. A timeout has the code of timeout(1).
const TIMED_OUT: u8 = 124;
const LAB_FAILED: u8 = 125;

pub(crate) const EXEC_HELP: &str = "\
The guest is a virtual machine with Debian's stock kernel, two SoftRoCE devices, and this machine's
files at the same paths. What it writes stays in its memory, except in the folders given by --share.
The command runs as root in the current folder, with the current environment and these variables:
  LAXITY_LAB=1               LAXITY_LAB_GID=1           (index of the RoCEv2 GIDs)
  LAXITY_LAB_DEV0=rxe0       LAXITY_LAB_DEV1=rxe1       (RDMA devices)
  LAXITY_LAB_NETDEV0=v0      LAXITY_LAB_NETDEV1=v1      (their interfaces)
  LAXITY_LAB_ADDR0=10.77.0.1 LAXITY_LAB_ADDR1=10.77.1.1 (their addresses)
  LAXITY_LAB_ROUTER=router   (network namespace of the router between them)
Standard input is passed on unless it is a terminal.

Exit status: that of the command, 128 + n if signal n ended it, 127 if there is no such program; 124
after --timeout; 125 if the lab itself failed.

Examples:
  laxity lab exec -- ibv_devinfo -d rxe0
  laxity lab exec --rate-mbit 24 --json - -- sh -c '
      ib_write_bw -d rxe0 -x 1 & sleep 1; ib_write_bw -d rxe1 -x 1 --tclass=184 10.77.0.1; wait'";

#[derive(Args)]
pub(crate) struct ExecArgs {
    /// Rate of each port of the router, in Mbit/s [default: not limited]
    #[arg(long, value_name = "N")]
    rate_mbit: Option<u32>,
    /// DSCPs in strict order of priority, highest first; 0 stands for all others
    #[arg(long, value_name = "DSCP,…", value_delimiter = ',')]
    dscp_order: Option<Vec<u8>>,
    /// Folder that the guest may write to, at the same path
    #[arg(long, value_name = "FOLDER")]
    share: Vec<PathBuf>,
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory_mib: u32,
    /// Maximum duration in seconds, after which the guest is killed
    #[arg(long, value_name = "S")]
    timeout: Option<f64>,
    /// Write times, exit status and the router's counters as JSON; `-` is standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

impl ExecArgs {
    fn config(&self) -> Result<VmConfig> {
        let mut network = NetworkConfig { rate_mbit: self.rate_mbit, ..NetworkConfig::default() };
        if let Some(order) = &self.dscp_order {
            network.dscp_order.clone_from(order);
        }
        network.validate()?;
        let limit = self
            .timeout
            .map(|s| Duration::try_from_secs_f64(s).with_context(|| format!("--timeout {s}")));
        Ok(VmConfig {
            network,
            limit: limit.transpose()?,
            memory_mib: self.memory_mib,
            writable: self.share.clone(),
            ..VmConfig::default()
        })
    }
}

fn like_this(argv: Vec<String>) -> Result<Exec> {
    Ok(Exec {
        argv,
        // Variables that are not UTF-8 are left out. Nothing in the guest needs them.
        env: std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect(),
        cwd: std::env::current_dir().context("cannot tell the current folder")?,
    })
}

/// Writes output of the command to the stream that it came from.
pub(crate) fn print(stream: Stream, bytes: &[u8]) -> io::Result<()> {
    match stream {
        Stream::Stdout => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        Stream::Stderr => io::stderr().write_all(bytes),
    }
}

pub(crate) fn failed(error: &VmError) -> ExitCode {
    eprintln!("laxity: {error}");
    ExitCode::from(match error {
        VmError::TimedOut { .. } => TIMED_OUT,
        _ => LAB_FAILED,
    })
}

pub(crate) fn probe() -> Result<()> {
    let lacks = vm::lacks(&VmConfig::default());
    for lack in &lacks {
        say(format!("   MISSING  {lack}"))?;
    }
    if !lacks.is_empty() {
        bail!("this machine cannot run the SoftRoCE lab; see above for what is missing");
    }
    Ok(say("this machine can run the SoftRoCE lab")?)
}

pub(crate) fn exec(args: &ExecArgs) -> Result<ExitCode> {
    let config = args.config()?;
    let to_stderr = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let file = args.json.as_ref().filter(|_| !to_stderr);
    publish::check(file)?;
    let job = VmJob::Exec(like_this(args.command.clone())?);
    let input = if io::stdin().is_terminal() { Input::Empty } else { Input::Stdin };
    let report = match vm::run(&config, &job, input, &mut print) {
        Ok(report) => report,
        Err(error) => return Ok(failed(&error)),
    };
    let json = output::json(&report)?;
    if to_stderr {
        eprintln!("{json}");
    }
    file.map_or(Ok(()), |path| output::replace(path, json.as_bytes()))?;
    Ok(ExitCode::from(u8::try_from(report.finished.exit_code).unwrap_or(1)))
}
