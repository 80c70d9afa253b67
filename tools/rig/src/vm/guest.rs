//! The processes of this program inside the guest: the first one, and the one that runs the job.
//!
//! ```text
//! init.sh (initramfs) ─▶ first_process: mounts, reaps, and at the end tells QEMU how it went
//!                          └─ job_process: network, devices, channel; runs the job; writes the answer
//! ```
//!
//! They are two, so that a failing job cannot prevent the guest's orderly end.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::sys::wait::{WaitStatus, wait};

use super::channel::{self, FrameKind};
use super::counters::{self, RouterCounters};
use super::job::{
    self, ANSWER_FILE, CONTROL_FOLDER, Facts, Finished, GUEST_JOB_FILE, GuestJob, VmAnswer,
};
use super::memory_group::GROUPS;
use super::network::{self, ADDRESSES, DEVICES, INTERFACES, NetworkConfig, ROUTER};
use super::qemu::{EXIT_PORT, Farewell};
use super::task::GuestTask;
use crate::child::lock;
use crate::error::LabError;
use crate::sandbox;

pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// Folder in which tasks run. It is in the guest's memory and ends with the guest.
const SCRATCH: &str = "/tmp";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn control(name: &str) -> PathBuf {
    Path::new(CONTROL_FOLDER).join(name)
}

/// *guest*: the guest's first process. It does not return, because the guest ends with it.
pub fn first_process() -> ! {
    let farewell = match furnish().and_then(|()| supervise()) {
        Ok(farewell) => farewell,
        Err(error) => {
            // No other process can report this error to the host.
            let _ = write_answer(&Err(format!("setting up the guest: {error}")));
            Farewell::Finished
        }
    };
    let ended = OpenOptions::new()
        .write(true)
        .open("/dev/port")
        .and_then(|port| port.write_all_at(&[farewell as u8], EXIT_PORT));
    panic!("QEMU does not end: {ended:?}");
}

/// Makes the error of a call that concerns a file and fails with an errno.
fn refused<P: AsRef<Path> + ?Sized>(
    doing: &'static str,
    path: &P,
) -> impl FnOnce(Errno) -> LabError {
    move |errno| LabError::file(doing, path)(errno.into())
}

fn mount_new(kind: &str, at: &str, flags: MsFlags, data: &str) -> Result<(), LabError> {
    fs::create_dir_all(at).map_err(LabError::file("creating", &at))?;
    mount(Some(kind), at, Some(kind), flags, Some(data)).map_err(refused("mounting on", at))
}

/// Mounts the control groups, with the one that limits memory.
fn mount_groups() -> Result<(), LabError> {
    mount_new("cgroup2", GROUPS, MsFlags::empty(), "")?;
    let file = Path::new(GROUPS).join("cgroup.subtree_control");
    fs::write(&file, "+memory").map_err(LabError::file("writing", &file))
}

/// Mounts what programs expect of a system, and the host's folders that the guest job names.
fn furnish() -> Result<(), LabError> {
    let none = MsFlags::empty();
    mount_new("devpts", "/dev/pts", none, "mode=0620,ptmxmode=0666")?;
    mount_new("tmpfs", "/dev/shm", none, "mode=1777")?;
    mount_groups()?;
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let link = format!("/dev/{link}");
        symlink(target, &link).map_err(LabError::file("linking", &link))?;
    }
    setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY)
        .map_err(LabError::system("allowing memory to be locked"))?;
    nix::unistd::sethostname("laxity-lab").map_err(LabError::system("naming the guest"))?;
    let guest_job = read_guest_job()?;
    // modprobe then finds the modules of the guest's kernel instead of the host's.
    let modules = Path::new("/lib/modules").join(&guest_job.release);
    fs::create_dir_all(&modules).map_err(LabError::file("creating", &modules))?;
    mount(Some(&guest_job.modules), &modules, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(refused("mounting on", &modules))?;
    for share in &guest_job.shares {
        mount(
            Some(share.tag.as_str()),
            &share.folder,
            Some("9p"),
            none,
            Some("trans=virtio,version=9p2000.L,msize=512000,cache=mmap"),
        )
        .map_err(refused("mounting on", &share.folder))?;
    }
    Ok(())
}

/// Starts the job's process and waits for its end. Reaps all other children meanwhile.
fn supervise() -> Result<Farewell, LabError> {
    let child = sandbox::internal("guest-job")
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .env("TERM", "linux")
        .spawn()
        .map_err(LabError::start("the job's process"))?;
    loop {
        let ended = match wait() {
            Ok(WaitStatus::Exited(pid, code)) => (pid, ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, ExitStatus::from_raw(signal as i32)),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(error) => return Err(LabError::system("waiting for the job's process")(error)),
        };
        if ended.0.as_raw() == child.id() as i32 {
            let answered = control(ANSWER_FILE).is_file();
            if ended.1.success() && answered {
                return Ok(Farewell::Finished);
            }
            eprintln!("laxity: the job's process ended with {}", ended.1);
            return Ok(Farewell::Lost);
        }
    }
}

fn read_guest_job() -> Result<GuestJob, LabError> {
    let path = control(GUEST_JOB_FILE);
    let bytes = fs::read(&path).map_err(LabError::file("reading", &path))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| LabError::unreadable("the host speaks another version", error))
}

fn write_answer(answer: &VmAnswer) -> Result<(), LabError> {
    let (new, path) = (control(".answer"), control(ANSWER_FILE));
    fs::write(&new, serde_json::to_vec(answer)?)
        .and_then(|()| fs::rename(&new, &path))
        .map_err(LabError::file("writing", &path))
}

pub fn job_process() -> Result<(), LabError> {
    write_answer(&answer().map_err(|error| error.to_string()))
}

fn answer() -> Result<Finished, LabError> {
    let guest_job = read_guest_job()?;
    let mut guest = Guest::set_up(&guest_job)?;
    let (exit_code, details) = job::run(&guest_job.job, &mut guest)?;
    Ok(Finished { exit_code, details, router: guest.counters()? })
}

#[derive(Debug)]
pub struct Guest {
    pub facts: Facts,
    network: NetworkConfig,
    /// Clones of it serve other threads.
    pub output: Output,
    /// The host's standard input in pieces, with an empty one at the end, until somebody takes it.
    pub stdin: Option<Receiver<Vec<u8>>>,
}

impl Guest {
    fn set_up(guest_job: &GuestJob) -> Result<Self, LabError> {
        let began = Instant::now();
        let gid_index =
            network::build(&guest_job.network).map_err(LabError::step("building the network"))?;
        let facts = Facts {
            release: guest_job.release.clone(),
            gid_index,
            rate_mbit: guest_job.network.rate_mbit,
            network_ms: began.elapsed().as_millis() as u64,
        };
        let port = open_port()?;
        let mut reader =
            port.try_clone().map_err(LabError::system("opening the channel to the host"))?;
        let (stdin_in, stdin) = sync_channel(4);
        std::thread::spawn(move || {
            while let Ok((kind, content)) = channel::receive(&mut reader) {
                if kind == FrameKind::Stdin && stdin_in.send(content).is_err() {
                    return;
                }
            }
        });
        let guest = Self {
            facts,
            network: guest_job.network.clone(),
            output: Output(Arc::new(Mutex::new(port))),
            stdin: Some(stdin),
        };
        guest.send(FrameKind::Ready, &serde_json::to_vec(&guest.facts)?)?;
        let output = guest.output.clone();
        std::thread::spawn(move || {
            while output.send(FrameKind::Alive, &[]).is_ok() {
                std::thread::sleep(HEARTBEAT);
            }
        });
        Ok(guest)
    }

    fn send(&self, kind: FrameKind, content: &[u8]) -> Result<(), LabError> {
        self.output.send(kind, content).map_err(LabError::system("writing to the host"))
    }

    /// Writes a line about the job's progress to the host's standard error, without buffering.
    pub fn say(&self, line: &str) -> Result<(), LabError> {
        self.send(FrameKind::Stderr, format!("{line}\n").as_bytes())
    }

    /// Returns the router's counters since its set-up. Callers take the difference of two readings.
    pub fn counters(&self) -> Result<RouterCounters, LabError> {
        counters::read(&self.network).map_err(LabError::step("reading the router's counters"))
    }

    pub fn task<S: Into<String>>(
        &self,
        argv: impl IntoIterator<Item = S>,
        limit: Duration,
    ) -> GuestTask {
        let mut env = self.environment();
        env.extend([("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")].map(pair));
        GuestTask {
            argv: argv.into_iter().map(Into::into).collect(),
            env,
            cwd: SCRATCH.into(),
            limit,
        }
    }

    /// Returns the variables that describe the lab to programs.
    pub fn environment(&self) -> Vec<(String, String)> {
        let gid = self.facts.gid_index.to_string();
        [
            ("LAXITY_LAB", "1"),
            ("LAXITY_LAB_DEV0", DEVICES[0]),
            ("LAXITY_LAB_DEV1", DEVICES[1]),
            ("LAXITY_LAB_NETDEV0", INTERFACES[0]),
            ("LAXITY_LAB_NETDEV1", INTERFACES[1]),
            ("LAXITY_LAB_ADDR0", ADDRESSES[0]),
            ("LAXITY_LAB_ADDR1", ADDRESSES[1]),
            ("LAXITY_LAB_GID", &gid),
            ("LAXITY_LAB_ROUTER", ROUTER),
        ]
        .map(pair)
        .into()
    }
}

fn pair((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Adds variables to an environment, and the folders of administrative programs to its `PATH`. A
/// variable replaces one of the same name.
pub fn with_lab_variables(
    env: &[(String, String)],
    lab: Vec<(String, String)>,
) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> =
        env.iter().filter(|(name, _)| lab.iter().all(|(lab, _)| lab != name)).cloned().collect();
    match all.iter_mut().find(|(name, _)| name == "PATH") {
        Some((_, path)) => {
            let lacking: Vec<&str> = PATH
                .split(':')
                .filter(|folder| path.split(':').all(|has| has != *folder))
                .collect();
            for folder in lacking {
                path.push(':');
                path.push_str(folder);
            }
        }
        None => all.push(pair(("PATH", PATH))),
    }
    all.extend(lab);
    all
}

/// A handle for the host's standard output and error.
#[derive(Clone, Debug)]
pub struct Output(Arc<Mutex<File>>);

impl Output {
    pub fn send(&self, kind: FrameKind, content: &[u8]) -> std::io::Result<()> {
        channel::send(&mut *lock(&self.0), kind, content)
    }
}

fn open_port() -> Result<File, LabError> {
    let ports = fs::read_dir("/sys/class/virtio-ports")
        .map_err(LabError::system("looking for a virtio-serial device"))?;
    for entry in ports.flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == channel::PORT {
            let device = Path::new("/dev").join(entry.file_name());
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&device)
                .map_err(LabError::file("opening", &device));
        }
    }
    Err(LabError::Device {
        device: "QEMU".to_owned(),
        problem: format!("has no port `{}`", channel::PORT),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lab_s_variables_win_and_path_grows() {
        let env = [("A", "1"), ("LAXITY_LAB", "no"), ("PATH", "/mine:/usr/bin")].map(pair);
        let all = with_lab_variables(&env, vec![pair(("LAXITY_LAB", "1"))]);
        let get = |name: &str| {
            let mut found = all.iter().filter(|(n, _)| n == name);
            let value = found.next().map(|(_, value)| value.as_str());
            assert!(found.next().is_none(), "{name} is there twice");
            value
        };
        assert_eq!(get("A"), Some("1"));
        assert_eq!(get("LAXITY_LAB"), Some("1"));
        let path = get("PATH").expect("a path");
        assert!(path.starts_with("/mine:/usr/bin:") && path.contains(":/usr/sbin"));
        assert_eq!(path.matches("/usr/bin").count(), 1, "{path}");
    }
}
