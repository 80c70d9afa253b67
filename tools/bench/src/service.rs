//! The measured daemon: the shipped `laxityd` as a separate process with a generated configuration
//! and its own core.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use laxity_client::{Client, Mode, Options};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::error::{BenchError, Result};
use crate::machine::{Cores, with_all_cores};
use crate::peer::Running;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// A rate and a window so large that no flow waits for bandwidth. The figure then measures the
    /// path and not the policy.
    Open,
    /// The rate, chunk and window of a daemon without a configuration file.
    Bounded,
}

pub(crate) struct Laxityd {
    child: Running,
    folder: TempDir,
}

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("LAXITY_LAXITYD") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(BenchError::system("find this program"))?;
    let path = own.with_file_name("laxityd");
    if !path.exists() {
        return Err(BenchError::Skip(format!(
            "no laxityd beside {}: build it with `cargo build --release -p laxity-daemon`, or name \
             it in LAXITY_LAXITYD",
            own.display()
        )));
    }
    Ok(path)
}

impl Laxityd {
    /// Starts a daemon on `core` with a port that never delays flows.
    pub(crate) fn open(cores: &Cores, core: usize) -> Result<Self> {
        Self::start(cores, core, Port::Open, "")
    }

    /// Starts a daemon and waits until it listens. `core` is that of the scheduler thread, and
    /// `scheduler` is more configuration of that thread.
    pub(crate) fn start(cores: &Cores, core: usize, port: Port, scheduler: &str) -> Result<Self> {
        let folder =
            TempDir::with_prefix("laxity-bench-").map_err(BenchError::system("make a folder"))?;
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
        fs::write(path("laxityd.toml"), config)
            .map_err(BenchError::system("write the configuration"))?;
        let log = fs::File::create(path("log")).map_err(BenchError::system("create the log"))?;
        let program = binary()?;
        let child = with_all_cores(cores, || {
            let errors = log.try_clone().map_err(BenchError::system("share the log"))?;
            Command::new(&program)
                .arg("--config")
                .arg(path("laxityd.toml"))
                .stdin(Stdio::null())
                .stdout(log)
                .stderr(errors)
                .spawn()
                .map_err(BenchError::system(format!("start {}", program.display())))
        })?;
        let mut daemon = Self { child: Running(child), folder };
        let begin = Instant::now();
        while !daemon.socket().exists() {
            let ended =
                daemon.child.0.try_wait().map_err(BenchError::system("wait for laxityd"))?;
            if ended.is_some() || begin.elapsed() > PATIENCE {
                return Err(BenchError::Failed(format!("laxityd did not start: {}", daemon.log())));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(daemon)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("laxityd.sock")
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.0.id().cast_signed())
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        text.lines().rev().take(3).collect::<Vec<_>>().join(" / ")
    }

    pub(crate) fn attach(&self, name: &str) -> Result<Client> {
        attach(self.socket(), name)
            .map_err(|error| BenchError::Failed(format!("laxityd says: {}: {error}", self.log())))
    }

    pub(crate) fn cpu_time(&self) -> Result<Duration> {
        let clock = nix::time::clock_getcpuclockid(self.pid())
            .map_err(BenchError::system("clock of laxityd"))?;
        let time = nix::time::clock_gettime(clock);
        Ok(time.map_err(BenchError::system("CPU time of laxityd"))?.into())
    }
}

/// Attaches a scheduled client to the daemon at `socket`. It tries until it succeeds, because the
/// socket may exist before the daemon listens, and a client tries again only when it submits.
pub(crate) fn attach(socket: PathBuf, name: &str) -> Result<Client> {
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
            return Err(BenchError::Failed(format!("no client could attach within {PATIENCE:?}")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
