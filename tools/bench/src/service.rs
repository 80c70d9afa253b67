//! The measured daemon: the shipped `laxityd`, as a process of its own, with a generated
//! configuration, on a core of its own.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use laxity_client::{Client, Mode, Options};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::bench::Skip;
use crate::machine::{Cores, with_all_cores};

/// What the daemon's only port looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// So fast, and with so many bytes allowed in flight, that no flow ever waits for bandwidth:
    /// what is measured is the path and not the policy's patience.
    Open,
    /// Rate, chunk and window as without a configuration file.
    Bounded,
}

/// A running daemon; killed when dropped.
pub(crate) struct Laxityd {
    child: Child,
    folder: TempDir,
}

/// How long a start or an attach may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// The shipped binary: `$LAXITY_LAXITYD`, or the one beside this program.
pub(crate) fn binary() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("LAXITY_LAXITYD") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().context("find this program")?;
    let path = own.with_file_name("laxityd");
    if !path.exists() {
        return Err(Skip(format!(
            "no laxityd beside {}: build it with `cargo build --release -p laxity-daemon`, or name \
             it in LAXITY_LAXITYD",
            own.display()
        ))
        .into());
    }
    Ok(path)
}

impl Laxityd {
    /// Starts it on `core`, with a port that lets everything out.
    pub(crate) fn open(cores: &Cores, core: usize) -> anyhow::Result<Self> {
        Self::start(cores, core, Port::Open, "")
    }

    /// Starts it and waits until it listens. `core` is its scheduler thread's, and `scheduler` is
    /// more configuration of that thread.
    pub(crate) fn start(
        cores: &Cores,
        core: usize,
        port: Port,
        scheduler: &str,
    ) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("laxity-bench-").context("make a folder")?;
        let path = |name: &str| folder.path().join(name);
        let mut config = format!(
            "socket = {:?}\ncontrol = {:?}\nmetrics = \"\"\nlog = \"warn\"\n\
             [scheduler]\ncpu = {core}\n{scheduler}\n",
            path("laxityd.sock"),
            path("control.sock"),
        );
        if port == Port::Open {
            config += "[[nic]]\nname = \"open\"\nrate = \"1000GB/s\"\nchunk = \"1MiB\"\nwindow \
                = \"1048576GiB\"\n";
        }
        fs::write(path("laxityd.toml"), config).context("write the configuration")?;
        let log = fs::File::create(path("log")).context("create the log")?;
        let program = binary()?;
        let child = with_all_cores(cores, || {
            Command::new(&program)
                .arg("--config")
                .arg(path("laxityd.toml"))
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .with_context(|| format!("start {}", program.display()))
        })?;
        let mut daemon = Self { child, folder };
        let begin = Instant::now();
        while !daemon.socket().exists() {
            if daemon.child.try_wait()?.is_some() || begin.elapsed() > PATIENCE {
                bail!("laxityd did not start: {}", daemon.log());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(daemon)
    }

    /// Where clients register.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("laxityd.sock")
    }

    /// Its process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        text.lines().rev().take(3).collect::<Vec<_>>().join(" / ")
    }

    /// A client that is under its scheduling.
    pub(crate) fn attach(&self, name: &str) -> anyhow::Result<Client> {
        attach(self.socket(), name).with_context(|| format!("laxityd says: {}", self.log()))
    }

    /// CPU time that all its threads have used.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        let clock = nix::time::clock_getcpuclockid(self.pid()).context("clock of laxityd")?;
        Ok(nix::time::clock_gettime(clock)
            .context("CPU time of laxityd")?
            .into())
    }

    /// Its threads and the CPU time of each, in nanoseconds.
    fn threads(&self) -> anyhow::Result<Vec<(Pid, u64)>> {
        let mut threads = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let entry = entry?;
            let tid: i32 = entry.file_name().to_string_lossy().parse()?;
            let stat = fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
            let ns = stat
                .split_whitespace()
                .next()
                .and_then(|n| n.parse().ok())
                .unwrap_or(0);
            threads.push((Pid::from_raw(tid), ns));
        }
        Ok(threads)
    }

    /// The thread that schedules: the one that is busy now.
    pub(crate) fn scheduler_thread(&self) -> anyhow::Result<Pid> {
        let before = self.threads()?;
        std::thread::sleep(Duration::from_millis(30));
        self.threads()?
            .into_iter()
            .max_by_key(|(tid, ns)| {
                let earlier = before
                    .iter()
                    .find(|(t, _)| t == tid)
                    .map_or(0, |(_, ns)| *ns);
                ns - earlier
            })
            .map(|(tid, _)| tid)
            .context("laxityd has no threads")
    }
}

impl Drop for Laxityd {
    fn drop(&mut self) {
        // It may be gone already, and then there is nothing left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client of the daemon at `socket` that is scheduled. A socket that exists is not one that
/// listens yet, and a client looks again only when it submits: attach until it works.
pub(crate) fn attach(socket: PathBuf, name: &str) -> anyhow::Result<Client> {
    let options = Options {
        socket,
        name: name.to_owned(),
        mode: Mode::Enforce,
        attach_timeout: Duration::from_secs(1),
        ..Options::default()
    };
    let begin = Instant::now();
    loop {
        let client = Client::attach(options.clone());
        if client.is_scheduled() {
            return Ok(client);
        }
        if begin.elapsed() > PATIENCE {
            bail!("no client could attach within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
