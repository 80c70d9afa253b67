//! `laxity run`: checks what it can, prepares the environment, and replaces itself with the command
//! by execve(2). Process id, exit status, signals and standard streams are those of the command.

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Args, ValueEnum};
use laxity_cli::library::{self, LibraryError};
use laxity_cli::program::{self, Ignored};
use laxity_job::{PROFILE_ENV, Profile, ProfileError};
use laxity_quantity::{Nanos, NotAQuantity};
use laxity_shm::registration::NAME_MAX;
use thiserror::Error;

use crate::class_variables::{self, ClassArgs, JobClasses};
use crate::registration;

/// Exit code if the command was not started. It and the two below are those of env(1), nice(1) and
/// timeout(1).
const EXIT_OWN: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

pub(crate) const HELP: &str = "\
Preloads liblaxity.so into CMD and into every program that CMD starts, and then becomes CMD. The \
process id, exit code, signals and standard streams are those of CMD. Without a daemon, the job \
runs unscheduled.

The profile says which stage a transfer has if the program gives no hint; `laxity profiles` lists \
the profiles. Laxity keeps a traffic class that was pinned by MC_IB_TC, NCCL_IB_TC, \
UCX_IB_TRAFFIC_CLASS or --tclass.

Examples:
  # vLLM that moves KV cache with Mooncake; start prefill and decode in this way
  laxity run --profile mooncake --slo-ttft 500ms -- \\
      vllm serve MODEL --kv-transfer-config '{…}'

  # a program that uses RDMA only through NCCL
  laxity run --profile nccl -- torchrun --nproc-per-node 8 serve.py

  # a program in C++ or Rust that uses NIXL
  laxity run --profile nixl -- ./program

  # only account for transfers and write a report; nothing is delayed or marked
  laxity run --profile mooncake --mode observe --report job.json -- ./serve.sh

  # experts on many hosts: sets the class variable of each library that is unset
  laxity run --profile wide-ep -- vllm serve MODEL --enable-expert-parallel …

  # perftest: a WRITE has the stage p2d, and a SEND the stage collective
  laxity run --profile perftest -- ib_write_bw -d mlx5_0 HOST

Exit status: that of CMD; 125 if CMD was not started because of a wrong profile or library, or \
because of --require; 126 if CMD can't be executed; 127 if CMD does not exist; 2 for wrong \
arguments.

With the profiles `nixl`, `dynamo` and `mooncake`, liblaxity_nixl.so is preloaded as well, and \
with `mooncake` liblaxity_mooncake.so. They have to be beside liblaxity.so. Programs that \
use NIXL without Python, or Mooncake's C interface, need them.

laxity sets LD_PRELOAD and LAXITY_PROFILE for CMD; it keeps the libraries that LD_PRELOAD has \
already. Options set LAXITY_MODE, LAXITY_SLO_TTFT, LAXITY_SOCKET, LAXITY_NAME and LAXITY_REPORT; \
without the option, a variable that is already set stays. `laxity doctor` finds other problems.";

/// Arguments of `laxity run`.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// Job profile: a name, or a path with a `/` in it [default: $LAXITY_PROFILE, or `default`]
    #[arg(long, short, value_name = "PROFILE")]
    profile: Option<String>,
    /// Objective for the time to first token, such as 500ms. It applies to requests without a
    /// deadline of their own
    #[arg(long, value_name = "DURATION")]
    slo_ttft: Option<Nanos>,
    /// Whether transfers of this job wait for permits. A more cautious mode of the daemon takes
    /// precedence
    #[arg(long, value_enum)]
    mode: Option<RunMode>,
    /// Preload library [default: $LAXITY_LIBRARY, or where it is installed]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Registration socket of the daemon [default: $LAXITY_SOCKET, or /run/laxity/laxityd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Name of the job, of at most 27 bytes [default: the name of the executable]
    #[arg(long)]
    name: Option<String>,
    /// File for the library's report on the transfers, written when the job ends
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Refuse to start if the daemon does not admit the job
    #[arg(long)]
    require: bool,
    /// List the class variables that the profile sets
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    classes: ClassArgs,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RunMode {
    /// Transfers are accounted for, and neither delayed nor marked
    Observe,
    /// Transfers wait for permits
    Enforce,
    /// The library is preloaded and does nothing
    Off,
}

/// The reason why the command is not started. Each is a mistake in the options or the environment,
/// except [`Self::NotAdmitted`].
#[derive(Debug, Error)]
enum RunError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error("LAXITY_MODE is `{0}`; set it to off, observe or enforce")]
    Mode(String),
    #[error("LAXITY_SLO_TTFT: {0}")]
    Objective(NotAQuantity),
    #[error("every request misses an objective of zero; leave it out if there is none")]
    NoObjective,
    #[error("--name needs 1 to {NAME_MAX} bytes, `{0}` has {len}", len = .0.len())]
    Name(String),
    #[error("cannot write a report to {path}: name a file in a folder that exists",
        path = .0.display())]
    Report(PathBuf),
    #[error("cannot resolve `{path}`: {cause}", path = .path.display())]
    Path { path: PathBuf, cause: io::Error },
    #[error("{0}; not started, because of --require (`laxity doctor` says more)")]
    NotAdmitted(String),
}

/// The command to execute and the warnings to print before.
struct LaunchPlan {
    command: Command,
    warnings: Vec<String>,
    /// What was done about class variables, if the profile sets them.
    notice: Option<String>,
}

/// Executes the command in place of this process. Returns only if that fails.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    let mut plan = match plan(args) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("laxity run: {error}");
            return ExitCode::from(EXIT_OWN);
        }
    };
    for warning in &plan.warnings {
        eprintln!("laxity run: warning: {warning}");
    }
    if let Some(notice) = &plan.notice {
        eprintln!("laxity run: {notice}");
    }
    let Err((code, message)) = become_it(&mut plan.command, &args.command[0]);
    eprintln!("laxity run: {message}");
    ExitCode::from(code)
}

fn plan(args: &RunArgs) -> Result<LaunchPlan, RunError> {
    let (mut warnings, mut classes) = (Vec::new(), None);
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);

    let (name, profile) = profile(args)?;
    command.env(PROFILE_ENV, name);
    for variable in &profile.qp.pin_variables {
        if let Some(class) = set(variable) {
            warnings.push(format!(
                "{variable}={} pins the traffic class of this job: Laxity keeps it; unset it to \
                 have transfers marked by their stage",
                class.to_string_lossy()
            ));
        }
    }

    let mode = mode(args)?;
    if let Some(name) = mode.and_then(|mode| mode.to_possible_value()) {
        command.env("LAXITY_MODE", name.get_name());
    }
    if let Some(objective) = objective(args)? {
        command.env("LAXITY_SLO_TTFT", objective.to_string());
    }
    if let Some(name) = &args.name {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(RunError::Name(name.clone()));
        }
        command.env("LAXITY_NAME", name);
    }
    if let Some(report) = &args.report {
        command.env("LAXITY_REPORT", report_file(report)?);
    }
    if let Some(socket) = &args.socket {
        command.env("LAXITY_SOCKET", absolute(socket)?);
    }

    if profile.class_variables && !matches!(mode, Some(RunMode::Observe | RunMode::Off)) {
        let socket = registration::socket(args.socket.as_deref());
        classes = class_variables::of_job(&args.classes, &socket);
        let set = classes.iter().flat_map(JobClasses::set);
        command.envs(set.map(|(name, value)| (name, value.to_string())));
    }
    preload(args, &profile, &mut command, &mut warnings)?;
    if mode != Some(RunMode::Off) || args.require {
        daemon(args, &mut warnings)?;
    }
    let notice = classes.map(|classes| classes.notice(args.verbose));
    Ok(LaunchPlan { command, warnings, notice })
}

/// Returns the profile, and a name of it that does not depend on the job's folder.
fn profile(args: &RunArgs) -> Result<(OsString, Profile), RunError> {
    let inherited = set(PROFILE_ENV).map(|name| name.to_string_lossy().into_owned());
    let name = args.profile.clone().or(inherited);
    let name = name.unwrap_or_else(|| "default".to_owned());
    let profile = Profile::load(&name)?;
    let name =
        if name.contains('/') { absolute(Path::new(&name))?.into_os_string() } else { name.into() };
    Ok((name, profile))
}

/// Returns the mode of the option, or else of the environment. The library takes an unknown mode
/// for `off`, so that is an error here.
fn mode(args: &RunArgs) -> Result<Option<RunMode>, RunError> {
    let Some(inherited) = set("LAXITY_MODE").filter(|_| args.mode.is_none()) else {
        return Ok(args.mode);
    };
    let text = inherited.to_string_lossy();
    match RunMode::from_str(&text, false) {
        Ok(mode) => Ok(Some(mode)),
        Err(_) => Err(RunError::Mode(text.into_owned())),
    }
}

fn objective(args: &RunArgs) -> Result<Option<Nanos>, RunError> {
    let inherited = set("LAXITY_SLO_TTFT").filter(|_| args.slo_ttft.is_none());
    let objective = match inherited {
        None => args.slo_ttft,
        Some(text) => Some(text.to_string_lossy().parse().map_err(RunError::Objective)?),
    };
    if objective == Some(Nanos(0)) {
        return Err(RunError::NoObjective);
    }
    Ok(objective)
}

/// The job writes the report at its end, when it is too late to fix the path.
fn report_file(report: &Path) -> Result<PathBuf, RunError> {
    let report = absolute(report)?;
    match report.parent() {
        Some(folder) if folder.is_dir() && !report.is_dir() => Ok(report),
        _ => Err(RunError::Report(report)),
    }
}

fn preload(
    args: &RunArgs,
    profile: &Profile,
    command: &mut Command,
    warnings: &mut Vec<String>,
) -> Result<(), RunError> {
    let path = absolute(&library::find(args.library.as_deref())?)?;
    let binary = library::check(&path)?;
    let mut present = set("LD_PRELOAD").map(|value| value.to_string_lossy().into_owned());
    // In LD_PRELOAD these libraries follow liblaxity.so, to which programs give their hints.
    for further in library::of_profile(&profile.name, &path).iter().rev() {
        if !further.is_file() {
            warnings.push(format!(
                "{} is not there: what the job sends by the library that it intercepts goes out \
                 unscheduled; install Laxity's libraries together",
                further.display()
            ));
            continue;
        }
        present = Some(library::preload(&further.to_string_lossy(), present.as_deref()));
    }
    command.env("LD_PRELOAD", library::preload(&path.to_string_lossy(), present.as_deref()));

    let search = env::var_os("PATH");
    let resolved = program::resolve(&args.command[0], search.as_deref());
    if let Some(why) = resolved.and_then(|file| program::ignored(&file, binary)) {
        warnings.push(match why {
            Ignored::Static(file) => format!(
                "{} is linked statically: no library can be preloaded, and its transfers go out \
                 unscheduled (those of dynamically linked programs that it starts don't)",
                file.display()
            ),
            Ignored::Privileged(file) => format!(
                "{} is setuid or setgid: the loader ignores LD_PRELOAD, and its transfers go out \
                 unscheduled; run laxity as that user instead",
                file.display()
            ),
            Ignored::Foreign(file) => format!(
                "{} is of another architecture than {}: it can't be preloaded, and its transfers \
                 go out unscheduled",
                file.display(),
                path.display()
            ),
        });
    }
    Ok(())
}

fn daemon(args: &RunArgs, warnings: &mut Vec<String>) -> Result<(), RunError> {
    let socket = registration::socket(args.socket.as_deref());
    let Err(error) = registration::attach(&socket, "laxity run") else { return Ok(()) };
    let problem = format!("laxityd at {} does not admit this job: {error}", socket.display());
    if args.require {
        return Err(RunError::NotAdmitted(problem));
    }
    warnings
        .push(format!("{problem}; it runs unscheduled until one does (`laxity doctor` says more)"));
    Ok(())
}

/// Replaces this process with the command. Returns the exit code and a message if that fails.
fn become_it(command: &mut Command, name: &OsStr) -> Result<Infallible, (u8, String)> {
    let error = command.exec();
    let shown = name.to_string_lossy();
    let found = program::resolve(name, env::var_os("PATH").as_deref());
    Err(match (error.kind(), found) {
        (ErrorKind::NotFound, None) => {
            (EXIT_NOT_FOUND, format!("{shown}: no such command; is it in PATH?"))
        }
        (ErrorKind::NotFound, Some(file)) => (
            EXIT_NOT_FOUND,
            format!("{}: the interpreter that it names does not exist", file.display()),
        ),
        (ErrorKind::PermissionDenied, _) => (
            EXIT_NOT_EXECUTABLE,
            format!("{shown}: not executable by this user; chmod +x, or name its interpreter"),
        ),
        _ => (EXIT_NOT_EXECUTABLE, format!("{shown}: {error}")),
    })
}

/// Returns the value of an environment variable that is set and not empty.
fn set(variable: &str) -> Option<OsString> {
    env::var_os(variable).filter(|value| !value.is_empty())
}

/// Returns an absolute path, since the job may change its folder.
fn absolute(path: &Path) -> Result<PathBuf, RunError> {
    let resolved = std::path::absolute(path);
    resolved.map_err(|cause| RunError::Path { path: path.to_owned(), cause })
}
