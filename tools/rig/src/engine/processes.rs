//! The engines of one run: a process in each host's namespace, its configuration, its end; and clients beside it.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;

use super::client::{ENDPOINT, Job, Said};
use super::config::{Device, ServingConfig};
use super::counts::Counts;
use crate::config::LabConfig;
use crate::daemons::tail;
use crate::fabric;
use crate::message;
use crate::sandbox;
use crate::worker::daemon_socket;

/// Engines listen for each other here.
const PEERS_PORT: u16 = 7500;

/// Weights are drawn within this, of a large model, too. One that ends is noticed at once.
const START_WITHIN: Duration = Duration::from_secs(300);
/// Anything that is not asking is done within this.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// An engine gives answers that are under way 5 s; none are, or nobody wants them.
const STOP_WITHIN: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Serialize)]
struct EngineToml<'a> {
    role: &'a str,
    listen: SocketAddr,
    device: &'a str,
    model: Model<'a>,
    kv: Kv,
    schedule: Schedule<'a>,
    limits: Limits,
    peers: Peers,
    laxity: Daemon,
}

#[derive(Serialize)]
struct Model<'a> {
    name: &'a str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    context: u32,
    moe: Moe,
    weights: Weights,
}

#[derive(Serialize)]
struct Moe {
    experts: usize,
    per_token: usize,
}

#[derive(Serialize)]
struct Weights {
    seed: u64,
}

#[derive(Serialize)]
struct Kv {
    blocks: u32,
    block_tokens: u32,
}

#[derive(Serialize)]
struct Schedule<'a> {
    policy: &'a str,
    tokens: u32,
}

#[derive(Serialize)]
struct Limits {
    requests_max: usize,
    output_max: u32,
}

#[derive(Serialize)]
struct Peers {
    listen: SocketAddr,
    prefill: Vec<SocketAddr>,
    reuse: Vec<SocketAddr>,
    experts: Vec<SocketAddr>,
    patience_ms: u64,
    ask_ms: u64,
}

#[derive(Serialize)]
struct Daemon {
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
    name: String,
    stall_ms: u64,
}

fn peer(host: usize) -> SocketAddr {
    SocketAddr::from((fabric::address(host), PEERS_PORT))
}

/// The configuration of a host's engine.
///
/// # Errors
/// Never: what is in it has a TOML form.
pub fn engine_toml(
    config: &LabConfig,
    folder: &Path,
    host: usize,
    scheduled: bool,
) -> Result<String, toml::ser::Error> {
    let ServingConfig {
        device,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        experts,
        experts_per_token,
        weights_seed,
        kv_blocks,
        block_tokens,
        chunk_tokens,
        ref order,
        output_tokens,
        stall_ms,
        ..
    } = config.serving();
    let prefill_hosts = config.units * config.ranks;
    let prefills = host < prefill_hosts;
    let unit = host / config.ranks;
    // Whoever comes next is asked first, so that not all ask the same.
    let others = (1..prefill_hosts).map(|step| peer((host + step) % prefill_hosts));
    let patience = Duration::from_secs_f64(config.duration_s + config.drain_s);
    toml::to_string(&EngineToml {
        role: if prefills { "prefill" } else { "decode" },
        listen: ENDPOINT,
        device: match device {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        },
        model: Model {
            name: "lab",
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            context: config.serving().context(config.tokens_max),
            moe: Moe {
                experts,
                per_token: experts_per_token,
            },
            weights: Weights { seed: weights_seed },
        },
        kv: Kv {
            blocks: kv_blocks,
            block_tokens,
        },
        schedule: Schedule {
            policy: order,
            tokens: chunk_tokens,
        },
        limits: Limits {
            requests_max: 4096,
            output_max: output_tokens,
        },
        peers: Peers {
            listen: peer(host),
            prefill: if prefills {
                Vec::new()
            } else {
                (0..prefill_hosts).map(peer).collect()
            },
            reuse: if prefills {
                others.collect()
            } else {
                Vec::new()
            },
            experts: if prefills {
                (unit * config.ranks..(unit + 1) * config.ranks)
                    .map(peer)
                    .collect()
            } else {
                Vec::new()
            },
            // Nothing is computed elsewhere because a link is slow: that would hide what is to be seen.
            patience_ms: patience.as_millis() as u64,
            ask_ms: patience.as_millis() as u64,
        },
        laxity: Daemon {
            socket: scheduled.then(|| daemon_socket(folder, host)),
            name: config.host_name(host),
            stall_ms,
        },
    })
}

/// What clients say, with the host of each; `None` is the end of one.
pub type Heard = Receiver<(usize, Option<Said>)>;

/// A client at work in a host's namespace.
pub struct Client {
    child: Child,
}

impl Client {
    /// Gives a client its job; what it says goes to `sender`, and `None` when it ends.
    fn start(
        host: usize,
        job: &Job,
        sender: Sender<(usize, Option<Said>)>,
    ) -> anyhow::Result<Self> {
        let mut child = sandbox::internal("client")
            .arg(host.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a client")?;
        let (Some(mut orders), Some(said)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("a client has no pipes");
        };
        orders
            .write_all(&message::line(job))
            .context("a client takes no job")?;
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines() {
                let said = line
                    .ok()
                    .and_then(|line| serde_json::from_str::<Said>(&line).ok());
                if sender.send((host, said)).is_err() {
                    return;
                }
            }
            // Nobody listens any more if the run is over.
            let _ = sender.send((host, None));
        });
        Ok(Self { child })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The engines of all hosts.
pub struct Engines {
    folder: PathBuf,
    children: Vec<Child>,
    /// A host's sockets have the kernel's own buffers.
    pub buffers_unbounded: bool,
}

impl Engines {
    /// Starts them and waits until all answer.
    ///
    /// # Errors
    /// One does not; its log is in the message.
    pub fn start(
        config: &LabConfig,
        folder: &Path,
        program: &Path,
        scheduled: bool,
    ) -> anyhow::Result<Self> {
        let mut engines = Self {
            folder: folder.to_owned(),
            children: Vec::new(),
            buffers_unbounded: false,
        };
        let hosts: Vec<usize> = (0..config.hosts()).collect();
        let buffers = Job::Buffers(config.socket_buffer_bytes);
        let bounded = engines.each(&hosts, &buffers, ANSWER_WITHIN)?;
        engines.buffers_unbounded = bounded
            .iter()
            .any(|said| matches!(said, Said::Buffers(false)));
        for &host in &hosts {
            let file = folder.join(format!("engine{host}.toml"));
            fs::write(&file, engine_toml(config, folder, host, scheduled)?)?;
            let log = File::create(engines.log(host))?;
            let child = sandbox::internal("in")
                .arg(fabric::namespace(host))
                .arg(program)
                .arg("--config")
                .arg(&file)
                .env("RAYON_NUM_THREADS", config.serving().threads.to_string())
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .context("starting laxity-engine")?;
            engines.children.push(child);
        }
        engines.each(&hosts, &Job::Await, START_WITHIN)?;
        Ok(engines)
    }

    fn log(&self, host: usize) -> PathBuf {
        self.folder.join(format!("engine{host}.log"))
    }

    /// All are there.
    ///
    /// # Errors
    /// One is not; its log is in the message.
    pub fn check(&mut self) -> anyhow::Result<()> {
        for host in 0..self.children.len() {
            if let Some(status) = self.children[host].try_wait()? {
                bail!(
                    "laxity-engine of host {host} ended early ({status}){}",
                    tail(&self.log(host))
                );
            }
        }
        Ok(())
    }

    /// Starts a client on each host with its job.
    ///
    /// # Errors
    /// One cannot be started.
    pub fn clients(
        &self,
        jobs: impl IntoIterator<Item = (usize, Job)>,
    ) -> anyhow::Result<(Vec<Client>, Heard)> {
        let (sender, said) = channel();
        let clients = jobs
            .into_iter()
            .map(|(host, job)| Client::start(host, &job, sender.clone()))
            .collect::<anyhow::Result<_>>()?;
        Ok((clients, said))
    }

    /// Has a job done on some hosts that each answers with one line: the answers, in the hosts' order.
    fn each(&mut self, hosts: &[usize], job: &Job, within: Duration) -> anyhow::Result<Vec<Said>> {
        let (clients, said) = self.clients(hosts.iter().map(|&host| (host, job.clone())))?;
        let until = Instant::now() + within;
        let mut answers: Vec<Option<Said>> = vec![None; hosts.len()];
        while let Some(missing) = answers.iter().position(Option::is_none) {
            match self.hear(&said, until)? {
                None => bail!(
                    "host {} has no answer after {within:?}{}",
                    hosts[missing],
                    tail(&self.log(hosts[missing]))
                ),
                Some((host, answer)) => {
                    if let Some(at) = hosts.iter().position(|&other| other == host) {
                        answers[at] = Some(answer);
                    }
                }
            }
        }
        drop(clients);
        Ok(answers.into_iter().flatten().collect())
    }

    /// The next that a client says, `None` if there is nothing until then.
    ///
    /// # Errors
    /// A client failed, or an engine ended.
    pub fn hear(&mut self, said: &Heard, until: Instant) -> anyhow::Result<Option<(usize, Said)>> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match said.recv_timeout(left.min(Duration::from_millis(200))) {
                Ok((host, Some(Said::Failed(why)))) => {
                    self.check()?;
                    bail!("a client on host {host}: {why}{}", tail(&self.log(host)));
                }
                Ok((host, Some(said))) => return Ok(Some((host, said))),
                // It has said all that it had to say.
                Ok((_, None)) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.check()?;
                    if left.is_zero() {
                        return Ok(None);
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
    }

    /// What each has counted so far.
    ///
    /// # Errors
    /// One does not answer.
    pub fn counts(&mut self) -> anyhow::Result<Vec<Counts>> {
        let hosts: Vec<usize> = (0..self.children.len()).collect();
        let said = self.each(&hosts, &Job::Metrics, ANSWER_WITHIN)?;
        Ok(said
            .iter()
            .map(|said| match said {
                Said::Metrics(text) => Counts::read(text),
                _ => Counts::default(),
            })
            .collect())
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for child in &self.children {
            // That it has just ended is no error.
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
        }
        let until = Instant::now() + STOP_WITHIN;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(LOOK_EVERY);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_its_role_and_knows_the_others() {
        let config = LabConfig::real();
        let table = |host, scheduled| -> toml::Table {
            engine_toml(&config, Path::new("/run/lab/1"), host, scheduled)
                .unwrap()
                .parse()
                .unwrap()
        };
        let prefill = table(0, true);
        assert_eq!(prefill["role"].as_str(), Some("prefill"));
        assert_eq!(prefill["peers"]["experts"].as_array().unwrap().len(), 2);
        assert_eq!(
            prefill["peers"]["reuse"][0].as_str(),
            Some("10.77.0.2:7500")
        );
        assert_eq!(
            prefill["laxity"]["socket"].as_str(),
            Some("/run/lab/1/laxityd0.sock")
        );
        let decode = table(3, false);
        assert_eq!(decode["role"].as_str(), Some("decode"));
        assert_eq!(decode["peers"]["prefill"].as_array().unwrap().len(), 2);
        assert!(
            decode["laxity"].get("socket").is_none(),
            "unscheduled is without a socket"
        );
    }
}
