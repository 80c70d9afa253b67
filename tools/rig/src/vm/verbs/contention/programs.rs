//! The programs of a phase: starts them, under Laxity or not, and reads their results.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::outcome::{CollectiveLine, Deadlines};
use super::{COLLECTIVE, ContentionConfig, JITTER, Load, P2D, Phase, READS};
use crate::error::LabError;
use crate::vm::guest::Guest;
use crate::vm::network::DEVICES;
use crate::vm::task::Running;
use crate::vm::verbs::case::{LibraryReport, read_report};
use crate::vm::verbs::daemon::Daemon;
use crate::vm::verbs::{Programs, plugin};

const MOONCAKE_P2D: &str = include_str!("../mooncake_p2d.py");

/// Traffic classes that an operator would set by hand: expedited forwarding for collectives.
const STATIC_COLLECTIVE: u8 = 46 << 2;
const STATIC_BULK: u8 = 10 << 2;

/// TCP ports by which the two sides of each pair find each other.
const COLLECTIVE_PORT: u16 = 7471;
const READS_PORT: u16 = 7472;
const P2D_PORT: u16 = 7473;

/// Stall timeout of the library, in ms. All programs share two emulated processors, so a daemon may
/// get no processor for 100 ms.
const STALL_MS: &str = "3000";

const MOONCAKE_STARTS_WITHIN: Duration = Duration::from_secs(90);

/// The programs of a phase that is being played.
pub(super) struct PhasePrograms<'a> {
    pub(super) guest: &'a Guest,
    pub(super) programs: &'a Programs,
    pub(super) config: &'a ContentionConfig,
    pub(super) phase: Phase,
    pub(super) seed: u64,
    pub(super) folder: PathBuf,
}

/// The two sides of a transfer. The active side does the work and prints the result.
pub(super) struct Pair {
    active: Running,
    passive: Running,
}

/// Bulk programs that wait for their start signal.
pub(super) struct Bulk<'a> {
    programs: &'a PhasePrograms<'a>,
    p2d: Option<Pair>,
}

/// Bulk programs that are running.
pub(super) struct Playing {
    p2d: Pair,
    reads: Pair,
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Splits a command line without quotes into words.
fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

impl PhasePrograms<'_> {
    fn file(&self, name: &str) -> String {
        text(&self.folder.join(name))
    }

    fn socket(&self, host: usize) -> String {
        self.file(&format!("laxityd{host}.sock"))
    }

    /// Starts a `laxityd` for each host, if the phase is under Laxity.
    pub(super) fn daemons(&self) -> Result<Vec<Daemon>, LabError> {
        if self.phase != Phase::Laxity {
            return Ok(Vec::new());
        }
        let start = |host: usize| {
            let control = self.file(&format!("control{host}.sock"));
            // The two processors are shared by all programs, so the scheduler thread must not spin.
            let config = format!(
                "socket = {:?}\ncontrol = {control:?}\nmetrics = \"\"\n[scheduler]\nspin_us = 0\n\
                 [[nic]]\nname = {:?}\nrate = \"{}Mbit\"\n",
                self.socket(host),
                DEVICES[host],
                self.config.rate_mbit
            );
            let path = self.folder.join(format!("laxityd{host}.toml"));
            Daemon::start_with(self.guest, self.programs, &control, &path, &config)
        };
        (0..DEVICES.len()).map(start).collect()
    }

    fn start(
        &self,
        host: usize,
        profile: &str,
        objective_us: Option<u64>,
        line: &str,
    ) -> Result<Running, LabError> {
        let mut argv = Vec::new();
        if self.phase == Phase::Laxity {
            let (laxity, library) = (&self.programs.laxity, &self.programs.library);
            argv = words(&format!(
                "{} run --require --profile {profile} --library {} --socket {} --report {}",
                text(laxity),
                text(library),
                self.socket(host),
                self.report_file()
            ));
            if let Some(us) = objective_us {
                argv.extend(["--slo-ttft".into(), format!("{us}us")]);
            }
            argv.push("--".into());
        }
        argv.extend(words(line));
        // Starting Mooncake takes seconds, and all programs are slower under load.
        let limit = Duration::from_secs_f64(60.0 + 6.0 * self.config.seconds);
        let mut task = self.guest.task(argv, limit);
        let gid = self.guest.facts.gid_index.to_string();
        let patient = self.program("patient.so");
        let bulk = STATIC_BULK.to_string();
        let mut env = vec![
            ("VERBS_GID_INDEX", &*gid),
            ("MC_GID_INDEX", &gid),
            ("LD_PRELOAD", &patient),
            ("LAXITY_STALL_MS", STALL_MS),
            ("MC_LOG_LEVEL", "WARNING"),
        ];
        if self.phase != Phase::Laxity {
            env.push(("LAXITY_MODE", "off"));
        }
        if self.phase == Phase::StaticMarks {
            env.push(("MC_IB_TC", &bulk));
        }
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        task.env.extend(env.into_iter().map(owned));
        task.env.extend(plugin::settings("lo"));
        Ok(task.start()?)
    }

    fn report_file(&self) -> String {
        self.file("reports.jsonl")
    }

    fn program(&self, name: &str) -> String {
        text(&self.programs.checks.join(name))
    }

    fn class(&self, by_hand: u8) -> u8 {
        let marked = self.phase == Phase::StaticMarks;
        if marked { by_hand } else { 0 }
    }

    /// Returns the arguments about rounds, which both kinds of collectives take.
    fn rounds(&self) -> String {
        let rounds = self.config.rounds();
        let (bytes, messages, period) =
            (COLLECTIVE.bytes, COLLECTIVE.messages, COLLECTIVE.period_us);
        format!("--rounds {rounds} --bytes {bytes} --messages {messages} --period-us {period}")
    }

    /// Starts the collective of the NCCL plugin. Rank 0 prints the result.
    fn plugin_collective(&self) -> Result<Pair, LabError> {
        let nccl = self.programs.nccl.as_ref();
        let nccl = nccl.ok_or_else(plugin::missing)?;
        let folder = self.folder.join("nccl");
        fs::create_dir_all(&folder).map_err(LabError::file("creating", &folder))?;
        let tclass = match self.phase {
            Phase::StaticMarks => format!("--tclass {STATIC_COLLECTIVE}"),
            _ => String::new(),
        };
        let rank = |rank: usize| {
            // `--slow` is a factor on time limits. All programs are slow in the guest.
            let line = format!(
                "{} --plugin {} --folder {} --rank {rank} --device {rank} --slow 10 {} {tclass}",
                text(&nccl.checks.join("nccl_rounds")),
                text(&nccl.plugin),
                text(&folder),
                self.rounds()
            );
            self.start(rank, "nccl", None, &line)
        };
        Ok(Pair { passive: rank(1)?, active: rank(0)? })
    }

    pub(super) fn collective(&self) -> Result<Pair, LabError> {
        if self.config.plugin {
            return self.plugin_collective();
        }
        let program = self.program("collective");
        let common = format!("--port {COLLECTIVE_PORT} --tclass {}", self.class(STATIC_COLLECTIVE));
        let server = format!("{program} --server -b {} {common}", DEVICES[1]);
        let rounds = self.rounds();
        let client =
            format!("{program} --connect 127.0.0.1 -a {} {common} {rounds} --samples", DEVICES[0]);
        Ok(Pair {
            passive: self.start(1, "nccl", None, &server)?,
            active: self.start(0, "nccl", None, &client)?,
        })
    }

    /// Prepares the transfers, so that they can begin.
    pub(super) fn bulk(&self) -> Result<Bulk<'_>, LabError> {
        let python = self.programs.python.as_ref();
        let p2d = python.map(|python| self.mooncake(python)).transpose()?;
        Ok(Bulk { programs: self, p2d })
    }

    fn mooncake(&self, python: &Path) -> Result<Pair, LabError> {
        let script = self.file("mooncake_p2d.py");
        fs::write(&script, MOONCAKE_P2D).map_err(LabError::file("writing", &script))?;
        let start = |role: &str, host: usize| {
            let line = format!(
                "{} {script} {role} --device {} --port {P2D_PORT} --bytes {} --transfers {} \
                 --period-us {} --deadline-us {} --jitter {JITTER} --seed {} --go {}",
                text(python),
                DEVICES[host],
                P2D.bytes,
                self.config.transfers(&P2D),
                P2D.period_us,
                P2D.deadline_us,
                self.seed,
                self.file("go")
            );
            self.start(host, "mooncake", Some(P2D.deadline_us), &line)
        };
        let passive = start("target", 1)?;
        let mut active = start("initiator", 0)?;
        if let Err(error) = active.wait_for("ready", MOONCAKE_STARTS_WITHIN) {
            let how = format!("does not start: {error}; its peer: {}", passive.kill());
            return Err(LabError::program("the initiator of transfers", how));
        }
        Ok(Pair { active, passive })
    }

    fn pair(&self, client: usize, port: u16, op: &str, load: &Load) -> Result<Pair, LabError> {
        let program = self.program("bulk");
        let server = format!("{program} --server -b {} --port {port}", DEVICES[1 - client]);
        let line = format!(
            "{program} --connect 127.0.0.1 -a {} --port {port} --op {op} --bytes {} --transfer {} \
             --period-us {} --deadline-us {} --tclass {}",
            DEVICES[client],
            load.bytes * self.config.transfers(load),
            load.bytes,
            load.period_us,
            load.deadline_us,
            self.class(STATIC_BULK)
        );
        let objective = Some(load.deadline_us);
        Ok(Pair {
            passive: self.start(1 - client, "mooncake", objective, &server)?,
            active: self.start(client, "mooncake", objective, &line)?,
        })
    }

    pub(super) fn reports(&self) -> Result<LibraryReport, LabError> {
        if self.phase != Phase::Laxity {
            return Ok(LibraryReport::default());
        }
        read_report(&self.report_file())?
            .ok_or_else(|| LabError::program("the libraries", "wrote no reports"))
    }
}

impl Bulk<'_> {
    pub(super) fn go(self) -> Result<Playing, LabError> {
        let programs = self.programs;
        let p2d = match self.p2d {
            Some(pair) => pair,
            None => programs.pair(0, P2D_PORT, "write", &P2D)?,
        };
        let go = programs.file("go");
        fs::write(&go, "").map_err(LabError::file("writing", &go))?;
        // With each seed, reads are shifted differently against transfers.
        let part = programs.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        let period = Duration::from_micros(READS.period_us);
        std::thread::sleep(period * part as u32 / 65536);
        let reads = programs.pair(1, READS_PORT, "read", &READS)?;
        Ok(Playing { p2d, reads })
    }
}

impl Playing {
    /// Waits for both and returns the results of the transfers and of the reads.
    pub(super) fn finish(self) -> Result<(Deadlines, Deadlines), LabError> {
        let reads = self.reads.finish()?;
        Ok((self.p2d.finish()?, reads))
    }
}

impl Pair {
    pub(super) fn finish_rounds(self) -> Result<CollectiveLine, LabError> {
        self.finish()
    }

    /// Waits for both sides and returns the last line of the active one.
    fn finish<T: DeserializeOwned>(self) -> Result<T, LabError> {
        let active = self.active.wait();
        let passive = self.passive.wait();
        if !active.succeeded() || !passive.succeeded() {
            return Err(LabError::Pair { active: active.into(), passive: passive.into() });
        }
        let mut lines = active.stdout.lines().rev();
        let line = lines.find(|line| line.starts_with('{'));
        let line = line.ok_or_else(|| LabError::unreadable("no report", active.to_string()))?;
        serde_json::from_str(line)
            .map_err(|error| LabError::unreadable(format!("not a report: {line}"), error))
    }
}
