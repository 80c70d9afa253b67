//! Commands that another program carries out, as with `git` and `cargo`.
//!
//! `laxity-lab` has the laboratory: the lab, the simulator, certificates and load for a trial. An
//! operator's host does without it. `laxity lab …` starts it in the place of this program, so its
//! output, signals and exit code are its own. Any other unknown command `laxity X` starts
//! `laxity-X` in the same way, if there is one.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The program of the laboratory.
pub(crate) const LAB: &str = "laxity-lab";
/// The first words of its commands.
const LAB_COMMANDS: [&str; 4] = ["lab", "sim", "certs", "cluster-load"];
/// As clap's exit code for wrong arguments.
const WRONG_ARGUMENTS: u8 = 2;

/// Said below the list of commands.
pub(crate) const HELP: &str = "\
Commands of the laboratory, if laxity-lab is installed (`make install-lab`):
  lab           Real hosts on one machine: network namespaces, real TCP, a shaped fabric
  sim           A cluster of thousands of GPUs in virtual time
  certs         Make a CA and certificates for a trial of the coordinator with TLS
  cluster load  Put a coordinator under load as thousands of daemons would";

/// Starts the program that `words`, a command and its arguments, are for. Returns if it can't.
pub(crate) fn run(words: &[OsString]) -> ExitCode {
    let Some((name, arguments)) = words.split_first() else {
        return ExitCode::from(WRONG_ARGUMENTS);
    };
    let is_lab = LAB_COMMANDS.iter().any(|command| name == command);
    let program = match is_lab {
        true => OsString::from(LAB),
        false => [OsStr::new("laxity-"), name].into_iter().collect(),
    };
    let Some(path) = find(&program) else {
        let name = name.display();
        if is_lab {
            eprintln!(
                "laxity: `laxity {name}` needs {LAB}, which is neither beside laxity nor in PATH; \
                 install it (`make install-lab` in Laxity's sources)"
            );
            return ExitCode::FAILURE;
        }
        eprintln!("laxity: there is no command `{name}`; `laxity --help` lists them");
        return ExitCode::from(WRONG_ARGUMENTS);
    };
    let passed = if is_lab { words } else { arguments };
    let error = Command::new(&path).args(passed).exec();
    eprintln!("laxity: {} can't be started: {error}", path.display());
    ExitCode::FAILURE
}

/// The program of this name: beside this one, else in PATH.
fn find(program: &OsStr) -> Option<PathBuf> {
    let own = env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = env::var_os("PATH").unwrap_or_default();
    (beside.into_iter().chain(env::split_paths(&path)))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}
