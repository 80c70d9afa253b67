//! Where the lab lives: namespaces of its own, which cannot outlive it.
//!
//! ```text
//! the caller ──pipe──▶ enter ──▶ init (pid 1 of a new pid namespace)
//! ```
//!
//! *enter* leaves the caller's mount, net and pid namespaces (and user namespace, unless it has
//! the privileges without) and starts *init* as the first process of the new pid namespace. When
//! that one dies the kernel kills everything in there; with the last process go the network
//! namespaces, veths, bridge and qdiscs. *init* dies when its standard input ends, which the
//! kernel does for whatever reason the caller goes: return, Ctrl-C, SIGKILL.
//!
//! Names and sockets live in a tmpfs over `/run` that only this mount namespace sees.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

/// First argument of a call that is not for people.
pub const INTERNAL: &str = "lab-internal";

/// Folder of the lab inside the sandbox.
pub const FOLDER: &str = "/run/lab";

/// This program, also where the sandbox has hidden the path that it was started by.
const SELF: &str = "/proc/self/exe";

/// A command that runs this program again for one of the lab's parts. What the caller has set for a
/// daemon, a client or an NCCL of its own (`LAXITY_SOCKET`, `NCCL_SOCKET_IFNAME` and all the
/// others) stays behind: it would override what the lab configures.
#[must_use]
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

/// *enter*: leaves the caller's namespaces, starts *init* and waits for it.
///
/// # Errors
/// The kernel, or whoever confines this process, allows none of the ways in. Says which and what
/// to do.
pub fn enter() -> anyhow::Result<i32> {
    leave(CloneFlags::CLONE_NEWPID)?;
    let status = internal("init")
        .stdin(Stdio::inherit())
        .stdout(Stdio::inherit())
        .status()
        .context("starting the lab's first process")?;
    Ok(status.code().unwrap_or(1))
}

/// Leaves the caller's mount and network namespaces, and those in `also`. Must be called by a
/// process with a single thread.
///
/// # Errors
/// As [`enter`].
pub fn leave(also: CloneFlags) -> anyhow::Result<()> {
    let lab = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | also;
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    if user.is_root() && unshare(lab).is_ok() {
        return Ok(());
    }
    // Some kernels refuse the namespace, others (Ubuntu's) allow it and refuse to fill it.
    unshare(lab | CloneFlags::CLONE_NEWUSER)
        .map_err(std::io::Error::from)
        .and_then(|()| fs::write("/proc/self/setgroups", "deny"))
        .and_then(|()| fs::write("/proc/self/uid_map", format!("0 {user} 1")))
        .and_then(|()| fs::write("/proc/self/gid_map", format!("0 {group} 1")))
        .context(NO_NAMESPACES)
}

const NO_NAMESPACES: &str = "the kernel allows this user no namespaces of its own: run as root, or \
     set kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0 and, on Ubuntu, \
     kernel.apparmor_restrict_unprivileged_userns=0";

/// *init*: makes the mount namespace the lab's own.
///
/// # Errors
/// A mount is refused.
pub fn furnish() -> anyhow::Result<()> {
    let nothing = None::<&Path>;
    mount(
        nothing,
        "/",
        nothing,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        nothing,
    )
    .context(NO_NAMESPACES)
    .context("making mounts private")?;
    // Processes of the new pid namespace see themselves in a new /proc. Where a container hides
    // parts of /proc this is refused, and the old one serves too.
    let _ = mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        MsFlags::empty(),
        nothing,
    );
    mount(
        Some("lab"),
        "/run",
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=0755"),
    )
    .context("mounting a tmpfs over /run")?;
    for folder in ["/run/netns", FOLDER] {
        fs::create_dir_all(folder).with_context(|| format!("creating {folder}"))?;
    }
    Ok(())
}

/// Moves this process into the network namespace of a host.
///
/// # Errors
/// There is no such namespace.
pub fn enter_host(namespace: &str) -> anyhow::Result<()> {
    let path = Path::new("/run/netns").join(namespace);
    let file = fs::File::open(&path).with_context(|| format!("opening {}", path.display()))?;
    setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("entering {namespace}"))
}

/// *in*: becomes a program inside the network namespace of a host. (`ip netns exec` would mount
/// a new /sys, which containers refuse.)
///
/// # Errors
/// There is no such namespace or program; else this does not return.
pub fn become_program(namespace: &str, program: &OsString, args: &[OsString]) -> anyhow::Error {
    match enter_host(namespace) {
        Ok(()) => {
            let error = Command::new(program).args(args).exec();
            anyhow::Error::from(error).context(format!("starting {}", Path::new(program).display()))
        }
        Err(error) => error,
    }
}

/// Finds a program: in `PATH`, and where distributions keep administrative tools that are not in
/// everybody's `PATH`. Links are resolved, so that what hides behind `/run` stays reachable.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .map(|file| fs::canonicalize(&file).unwrap_or(file))
}
