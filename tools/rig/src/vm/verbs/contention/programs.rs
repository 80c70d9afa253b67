//! The programs of a phase: how they are started, under Laxity or not, and what they say at their
//! end.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::de::DeserializeOwned;

use super::outcome::{BulkLine, CollectiveLine, Deadlines, ShimReport};
use super::{ContentionConfig, Load, Phase};
use crate::vm::guest::Guest;
use crate::vm::network::DEVICES;
use crate::vm::task::Running;
use crate::vm::verbs::Programs;
use crate::vm::verbs::plugin;

/// The P2D program.
const MOONCAKE_P2D: &str = include_str!("../mooncake_p2d.py");

/// Classes that an operator would set by hand: expedited forwarding for collectives.
const STATIC_COLLECTIVE: u8 = 46 << 2;
const STATIC_BULK: u8 = 10 << 2;

/// TCP ports on which each pair finds itself.
const COLLECTIVE_PORT: u16 = 7471;
const READS_PORT: u16 = 7472;
const P2D_PORT: u16 = 7473;

/// How long the shim waits for a daemon that does not answer: on two emulated processors that all
/// of the programs share, 100 ms pass without a daemon that is stopped.
const STALL_MS: &str = "3000";

/// How long a daemon, and Mooncake, may take to start.
const DAEMON_STARTS_WITHIN: Duration = Duration::from_secs(20);
const MOONCAKE_STARTS_WITHIN: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A phase that is being played.
pub(super) struct PhasePrograms<'a> {
    pub(super) guest: &'a Guest,
    pub(super) programs: &'a Programs,
    pub(super) config: &'a ContentionConfig,
    pub(super) phase: Phase,
    pub(super) seed: u64,
    pub(super) folder: &'a Path,
    pub(super) limit: Duration,
}

/// The side that does the work and says how it went, and its peer.
pub(super) struct Pair {
    active: Running,
    passive: Running,
}

/// Bulk programs that wait for their cue.
pub(super) struct Bulk<'a> {
    programs: &'a PhasePrograms<'a>,
    p2d: Option<Pair>,
}

/// Bulk programs at work.
pub(super) struct Playing {
    p2d: Pair,
    reads: Pair,
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl PhasePrograms<'_> {
    fn socket(&self, host: usize) -> String {
        text(&self.folder.join(format!("laxityd{host}.sock")))
    }

    /// A `laxityd` for each host.
    pub(super) fn daemons(&self) -> anyhow::Result<Vec<Running>> {
        let mut daemons = Vec::new();
        for (host, device) in DEVICES.iter().enumerate() {
            let socket = self.socket(host);
            let file = self.folder.join(format!("laxityd{host}.toml"));
            let control = self.folder.join(format!("control{host}.sock"));
            // Two processors for all of it: sleep at once.
            let mut toml = format!(
                "socket = {socket:?}\ncontrol = {control:?}\nmetrics = \"\"\n\
                 [scheduler]\nspin_us = 0\n\
                 [[nic]]\nname = {device:?}\nrate = \"{}Mbit\"\n",
                self.config.rate_mbit
            );
            for (key, bytes) in [("chunk", self.config.chunk), ("window", self.config.window)] {
                if let Some(bytes) = bytes {
                    toml.push_str(&format!("{key} = {bytes}\n"));
                }
            }
            fs::write(&file, toml).with_context(|| format!("writing {}", file.display()))?;
            let argv = [text(&self.programs.laxityd), "--config".into(), text(&file)];
            let mut daemon = self.guest.task(argv, self.limit * 2).start()?;
            let give_up = Instant::now() + DAEMON_STARTS_WITHIN;
            while !Path::new(&socket).exists() {
                if !daemon.is_running() || Instant::now() > give_up {
                    bail!("laxityd takes no clients: {}", daemon.kill());
                }
                std::thread::sleep(LOOK_EVERY);
            }
            daemons.push(daemon);
        }
        Ok(daemons)
    }

    /// Starts a program on a host.
    fn start(
        &self,
        host: usize,
        profile: &str,
        objective_us: Option<u64>,
        argv: Vec<String>,
    ) -> anyhow::Result<Running> {
        let mut all: Vec<String> = Vec::new();
        if self.phase == Phase::Laxity {
            let programs = self.programs;
            all.extend(
                [
                    &*text(&programs.laxity),
                    "run",
                    "--require",
                    "--profile",
                    profile,
                    "--library",
                    &text(&programs.library),
                    "--socket",
                    &self.socket(host),
                    "--report",
                    &text(&self.report_file()),
                ]
                .map(str::to_owned),
            );
            if let Some(us) = objective_us {
                all.extend(["--slo-ttft".into(), format!("{us}us")]);
            }
            all.push("--".into());
        }
        all.extend(argv);
        let mut task = self.guest.task(all, self.limit);
        let gid = self.guest.facts.gid_index.to_string();
        task.env.extend([
            ("VERBS_GID_INDEX".into(), gid.clone()),
            ("MC_GID_INDEX".into(), gid),
        ]);
        task.env
            .push(("LD_PRELOAD".into(), self.program("patient.so")));
        task.env.push(("LAXITY_STALL_MS".into(), STALL_MS.into()));
        task.env.push(("MC_LOG_LEVEL".into(), "WARNING".into()));
        task.env.extend(plugin::settings("lo"));
        if self.phase != Phase::Laxity {
            task.env.push(("LAXITY_MODE".into(), "off".into()));
        }
        if self.phase == Phase::StaticMarks {
            task.env.push(("MC_IB_TC".into(), STATIC_BULK.to_string()));
        }
        Ok(task.start()?)
    }

    fn report_file(&self) -> std::path::PathBuf {
        self.folder.join("reports.jsonl")
    }

    fn program(&self, name: &str) -> String {
        text(&self.programs.checks.join(name))
    }

    fn class(&self, by_hand: u8) -> String {
        let marked = self.phase == Phase::StaticMarks;
        if marked { by_hand } else { 0 }.to_string()
    }

    /// Starts the collective of the NCCL plugin: rank 0 says how it went.
    fn plugin_collective(&self) -> anyhow::Result<Pair> {
        let Some(nccl) = &self.programs.nccl else {
            bail!("the NCCL plugin is missing");
        };
        let folder = self.folder.join("nccl");
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let collective = &self.config.collective;
        let rank = |rank: usize| {
            let mut argv = vec![text(&nccl.checks.join("nccl_rounds"))];
            for (option, value) in [
                ("--plugin", text(&nccl.plugin)),
                ("--folder", text(&folder)),
                ("--rank", rank.to_string()),
                ("--device", rank.to_string()),
                // Everything takes longer here.
                ("--slow", "10".to_owned()),
                ("--rounds", self.config.rounds().to_string()),
                ("--bytes", collective.bytes.to_string()),
                ("--messages", collective.messages.to_string()),
                ("--period-us", collective.period_us.to_string()),
            ] {
                argv.extend([option.to_owned(), value]);
            }
            if self.phase == Phase::StaticMarks {
                argv.extend(["--tclass".into(), STATIC_COLLECTIVE.to_string()]);
            }
            self.start(rank, "nccl", None, argv)
        };
        Ok(Pair {
            passive: rank(1)?,
            active: rank(0)?,
        })
    }

    /// Starts the collective.
    pub(super) fn collective(&self) -> anyhow::Result<Pair> {
        if self.config.plugin {
            return self.plugin_collective();
        }
        let port = COLLECTIVE_PORT.to_string();
        let collective = &self.config.collective;
        let server = vec![
            self.program("collective"),
            "--server".into(),
            "-b".into(),
            DEVICES[1].into(),
            "--port".into(),
            port.clone(),
            "--tclass".into(),
            self.class(STATIC_COLLECTIVE),
        ];
        let client = vec![
            self.program("collective"),
            "--connect".into(),
            "127.0.0.1".into(),
            "-a".into(),
            DEVICES[0].into(),
            "--port".into(),
            port,
            "--rounds".into(),
            self.config.rounds().to_string(),
            "--bytes".into(),
            collective.bytes.to_string(),
            "--messages".into(),
            collective.messages.to_string(),
            "--period-us".into(),
            collective.period_us.to_string(),
            "--tclass".into(),
            self.class(STATIC_COLLECTIVE),
            "--samples".into(),
        ];
        Ok(Pair {
            passive: self.start(1, "nccl", None, server)?,
            active: self.start(0, "nccl", None, client)?,
        })
    }

    /// Has transfers ready to begin.
    pub(super) fn bulk(&self) -> anyhow::Result<Bulk<'_>> {
        let p2d = match &self.programs.python {
            Some(python) => Some(self.mooncake(python)?),
            None => None,
        };
        Ok(Bulk {
            programs: self,
            p2d,
        })
    }

    fn go_file(&self) -> std::path::PathBuf {
        self.folder.join("go")
    }

    fn mooncake(&self, python: &Path) -> anyhow::Result<Pair> {
        let script = self.folder.join("mooncake_p2d.py");
        fs::write(&script, MOONCAKE_P2D)
            .with_context(|| format!("writing {}", script.display()))?;
        let load = &self.config.p2d;
        let argv = |role: &str, host: usize| {
            let mut argv = vec![text(python), text(&script), role.into()];
            for (option, value) in [
                ("--device", DEVICES[host].to_owned()),
                ("--port", P2D_PORT.to_string()),
                ("--bytes", load.bytes.to_string()),
                ("--transfers", self.config.transfers(load).to_string()),
                ("--period-us", load.period_us.to_string()),
                ("--deadline-us", load.deadline_us.to_string()),
                ("--jitter", self.config.jitter.to_string()),
                ("--seed", self.seed.to_string()),
                ("--go", text(&self.go_file())),
            ] {
                argv.extend([option.to_owned(), value]);
            }
            argv
        };
        let objective = Some(load.deadline_us);
        let passive = self.start(1, "mooncake", objective, argv("target", 1))?;
        let mut active = self.start(0, "mooncake", objective, argv("initiator", 0))?;
        if let Err(error) = active.wait_for("ready", MOONCAKE_STARTS_WITHIN) {
            bail!("{error}; its peer: {}", passive.kill());
        }
        Ok(Pair { active, passive })
    }

    /// A pair of `bulk`; the client is on `client`.
    fn pair(&self, client: usize, port: u16, op: &str, load: &Load) -> anyhow::Result<Pair> {
        let tclass = self.class(STATIC_BULK);
        let port = port.to_string();
        let server = vec![
            self.program("bulk"),
            "--server".into(),
            "-b".into(),
            DEVICES[1 - client].into(),
            "--port".into(),
            port.clone(),
        ];
        let mut argv = vec![self.program("bulk")];
        for (option, value) in [
            ("--connect", "127.0.0.1".to_owned()),
            ("-a", DEVICES[client].to_owned()),
            ("--port", port),
            ("--op", op.to_owned()),
            (
                "--bytes",
                (load.bytes * self.config.transfers(load)).to_string(),
            ),
            ("--transfer", load.bytes.to_string()),
            ("--period-us", load.period_us.to_string()),
            ("--deadline-us", load.deadline_us.to_string()),
            ("--tclass", tclass),
        ] {
            argv.extend([option.to_owned(), value]);
        }
        let objective = Some(load.deadline_us);
        Ok(Pair {
            passive: self.start(1 - client, "mooncake", objective, server)?,
            active: self.start(client, "mooncake", objective, argv)?,
        })
    }

    /// What the shim says of each process.
    pub(super) fn reports(&self) -> anyhow::Result<Vec<ShimReport>> {
        if self.phase != Phase::Laxity {
            return Ok(Vec::new());
        }
        let path = self.report_file();
        let lines =
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        lines
            .lines()
            // The NCCL plugin writes there, too.
            .filter(|line| !line.contains(plugin::REPORTS))
            .map(|line| serde_json::from_str(line).context("the shim's report"))
            .collect()
    }
}

impl Bulk<'_> {
    /// Has them begin.
    pub(super) fn go(self) -> anyhow::Result<Playing> {
        let programs = self.programs;
        let go = programs.go_file();
        let p2d = match self.p2d {
            Some(pair) => pair,
            None => programs.pair(0, P2D_PORT, "write", &programs.config.p2d)?,
        };
        fs::write(&go, "").with_context(|| format!("writing {}", go.display()))?;
        // Other arrivals of each against the others with each seed.
        let part = programs.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        let period = Duration::from_micros(programs.config.reads.period_us);
        std::thread::sleep(period * part as u32 / 65536);
        let reads = programs.pair(1, READS_PORT, "read", &programs.config.reads)?;
        Ok(Playing { p2d, reads })
    }
}

impl Playing {
    /// Waits for both; what became of the transfers and of the reads.
    pub(super) fn finish(self) -> anyhow::Result<(Deadlines, Deadlines)> {
        let reads: BulkLine = self.reads.finish()?;
        let p2d: BulkLine = self.p2d.finish()?;
        Ok((p2d.into(), reads.into()))
    }
}

impl Pair {
    /// Waits for the collective.
    pub(super) fn finish_rounds(self) -> anyhow::Result<CollectiveLine> {
        self.finish()
    }

    /// Waits for both sides; the last line of the active one.
    fn finish<T: DeserializeOwned>(self) -> anyhow::Result<T> {
        let active = self.active.wait();
        let passive = self.passive.wait();
        if !active.succeeded() || !passive.succeeded() {
            bail!("{active}\nits peer: {passive}");
        }
        let line = active
            .stdout
            .lines()
            .rev()
            .find(|line| line.starts_with('{'))
            .with_context(|| format!("no report: {active}"))?;
        serde_json::from_str(line).with_context(|| format!("not a report: {line}"))
    }
}
