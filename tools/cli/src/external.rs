//! Commands that another program carries out, as with `git` and `cargo`.
//!
//! `laxity-lab` has the lab, the simulator, certificates and load tests, which an operator's host
//! does not need. `laxity lab …` executes it in place of this program, so output, signals and exit
//! code are its own. An unknown command `laxity X` executes `laxity-X` in the same way, if it
//! exists.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Args, CommandFactory};
use laxity_cli::program::resolve;

const LAB: &str = "laxity-lab";

/// The arguments of a command that `laxity-lab` carries out.
#[derive(Debug, Args)]
pub(crate) struct ExternalArguments {
    /// Arguments for laxity-lab; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Executes the laboratory's program for `command`. Returns only if that fails.
pub(crate) fn lab(command: &str, arguments: &ExternalArguments) -> ExitCode {
    let Some(path) = find(OsStr::new(LAB)) else {
        eprintln!(
            "laxity: this command needs {LAB}, which is neither beside laxity nor in PATH; \
             install the package {LAB}, or run `make install-lab` in Laxity's sources"
        );
        return ExitCode::FAILURE;
    };
    start(Command::new(path).arg(command).args(&arguments.arguments))
}

/// Executes the program of the unknown command `words`. Without one, this ends as clap does.
pub(crate) fn other<Cli: CommandFactory>(words: &[OsString]) -> ExitCode {
    let program = words.first().map(|name| {
        let parts = [OsStr::new("laxity-"), name];
        parts.into_iter().collect::<OsString>()
    });
    if let Some(path) = program.and_then(|program| find(&program)) {
        return start(Command::new(path).args(&words[1..]));
    }
    // The same commands without the one for unknown names: clap names the command that is meant.
    let known = Cli::command();
    clap::Command::new("laxity")
        .subcommand_required(true)
        .subcommands(known.get_subcommands().cloned())
        .get_matches_from([OsString::from("laxity")].iter().chain(words.first()));
    ExitCode::FAILURE
}

/// Executes the program in place of this one. Returns only if that fails.
fn start(command: &mut Command) -> ExitCode {
    let error = command.exec();
    let program = Path::new(command.get_program());
    eprintln!("laxity: {} can't be started: {error}", program.display());
    ExitCode::FAILURE
}

pub(crate) fn find(program: &OsStr) -> Option<PathBuf> {
    let own = env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = beside.into_iter().chain(env::split_paths(&path));
    resolve(program, Some(&env::join_paths(folders).ok()?))
}
