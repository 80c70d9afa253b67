//! The sandbox of the lab: namespaces of its own that end with the lab.
//!
//! ```text
//! the caller ──pipe──▶ enter ──▶ init (pid 1 of a new pid namespace)
//! ```
//!
//! *enter* leaves the caller's mount, net and pid namespaces (and its user namespace if it lacks
//! the privileges). It starts *init* as the first process of the new pid namespace. When *init*
//! dies the kernel kills all processes in there, and removes the network namespaces, veths, bridge
//! and qdiscs. *init* exits when its standard input ends. The kernel closes that pipe however the
//! caller ends: return, Ctrl-C or SIGKILL.
//!
//! Names and sockets are in a tmpfs over `/run` that only this mount namespace sees.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::error::LabError;

pub const INTERNAL: &str = "lab-internal";
pub const FOLDER: &str = "/run/lab";

/// Path of this program that works even where the sandbox hides the original path.
const SELF: &str = "/proc/self/exe";

/// Returns a command that runs this program again as a part of the lab. It removes the caller's
/// variables for Laxity and NCCL (`LAXITY_SOCKET`, `NCCL_SOCKET_IFNAME` and all others), because
/// they would override the lab's configuration.
pub fn internal(part: &str) -> Command {
    let mut command = Command::new(SELF);
    command.arg0("laxity-lab").arg(INTERNAL).arg(part);
    for (name, _) in std::env::vars_os() {
        let bytes = name.as_encoded_bytes();
        if bytes.starts_with(b"LAXITY_") || bytes.starts_with(b"NCCL_") {
            command.env_remove(name);
        }
    }
    command
}

pub fn enter() -> Result<i32, LabError> {
    leave(CloneFlags::CLONE_NEWPID)?;
    let status = internal("init")
        .stdin(Stdio::inherit())
        .stdout(Stdio::inherit())
        .status()
        .map_err(LabError::start("the lab's first process"))?;
    Ok(status.code().unwrap_or(1))
}

/// Leaves the caller's mount and network namespaces, and the namespaces that `also` names. The
/// process must have a single thread.
pub fn leave(also: CloneFlags) -> Result<(), LabError> {
    let lab = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | also;
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if user.is_root() && unshare(lab).is_ok() {
        return Ok(());
    }
    // Some kernels refuse the user namespace. Others (Ubuntu's) allow it but refuse the mappings.
    unshare(lab | CloneFlags::CLONE_NEWUSER)
        .map_err(std::io::Error::from)
        .and_then(|()| fs::write("/proc/self/setgroups", "deny"))
        .and_then(|()| fs::write("/proc/self/uid_map", format!("0 {user} 1")))
        .and_then(|()| fs::write("/proc/self/gid_map", format!("0 {group} 1")))
        .map_err(LabError::system(NO_NAMESPACES))
}

const NO_NAMESPACES: &str = "the kernel allows this user no namespaces of its own: run as root, or \
     set kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0 and, on Ubuntu, \
     kernel.apparmor_restrict_unprivileged_userns=0";

pub fn furnish() -> Result<(), LabError> {
    let nothing = None::<&Path>;
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)
        .map_err(LabError::system(NO_NAMESPACES))
        .map_err(LabError::step("making mounts private"))?;
    // A new /proc shows the processes of the new pid namespace. A container that hides parts of
    // /proc refuses the mount, and the old /proc works, too.
    let _ = mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), nothing);
    mount(Some("lab"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .map_err(LabError::system("mounting a tmpfs over /run"))?;
    for folder in ["/run/netns", FOLDER] {
        fs::create_dir_all(folder).map_err(LabError::file("creating", &folder))?;
    }
    Ok(())
}

pub fn enter_host(namespace: &str) -> Result<(), LabError> {
    let path = Path::new("/run/netns").join(namespace);
    let file = fs::File::open(&path).map_err(LabError::file("opening", &path))?;
    setns(file, CloneFlags::CLONE_NEWNET)
        .map_err(LabError::system("entering a namespace"))
        .map_err(LabError::step(namespace))
}

/// *in*: executes a program inside the network namespace of a host. (`ip netns exec` would mount a
/// new /sys, which containers refuse.)
pub fn become_program(namespace: &str, program: &OsString, args: &[OsString]) -> LabError {
    match enter_host(namespace) {
        Ok(()) => {
            let error = Command::new(program).args(args).exec();
            LabError::start(Path::new(program).display())(error)
        }
        Err(error) => error,
    }
}

/// Finds a program in `PATH` and in the folders of administrative tools that may be missing in
/// `PATH`. Links are resolved, so that targets that `/run` hides stay reachable.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .map(|file| fs::canonicalize(&file).unwrap_or(file))
}
