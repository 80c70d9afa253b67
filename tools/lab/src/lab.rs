//! `laxity lab`: parses the arguments of the lab and calls `laxity-rig`.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand};
use laxity_rig::config::{Collectives, Engine, LabConfig, WorkloadSource};
use laxity_rig::lab::{self, LabReport};
use laxity_rig::probe;
use laxity_rig::report;
use laxity_rig::vllm::{Connector, restart};
use serde::de::DeserializeOwned;

use crate::publish::{self, is_stdout};
use crate::{faults, verbs, vm};
use laxity_cli::output::{self, say};

/// Context of an error while a configuration is printed.
const SHOWN: &str = "cannot show the configuration";

/// The commands of the lab.
#[derive(Subcommand)]
pub(crate) enum LabCommand {
    /// Run the same requests under several policies, and compare their TTFT attainment
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Check whether this machine can run the lab, and print what is missing
    Probe {
        /// Check the needs of the SoftRoCE lab (`laxity lab exec`) instead
        #[arg(long)]
        verbs: bool,
    },
    /// Run one command in the SoftRoCE lab: a virtual machine with two RDMA devices
    #[command(after_help = vm::EXEC_HELP)]
    Exec(vm::ExecArgs),
    /// Run unmodified RDMA programs under the scheduler in the SoftRoCE lab, and check the results
    #[command(after_help = verbs::HELP)]
    Verbs(Box<verbs::VerbsArgs>),
    /// Cause thousands of faults in a real daemon and its clients, and check that nothing is lost
    #[command(after_help = faults::HELP)]
    Faults(faults::FaultsArgs),
}

const RUN_HELP: &str = "\
Policies: none (no daemon at all), fair, sjf, edf, edf_low, karuna, karuna_wc, two_class,
two_class_99, tent_edf, tent, mfs, laxity.

Examples:
  laxity lab run
  laxity lab run --policies none,two_class,mfs,laxity --seed 7 --json -
  laxity lab run --workload agent --load 0.9 --html report.html
  laxity lab run --workload trace.jsonl.gz --duration 40 --requests-per-second 4
  laxity lab run --policies laxity --kill-daemon-at 8
  laxity lab run --policies laxity --foreign 0.5 --residual on
  laxity lab run --collectives nccl-plugin
  laxity lab run --engine real
  laxity lab run --engine real --requests-per-second 2 --html report.html

  laxity lab run --engine vllm --html report.html

laxity-engine processes serve in the hosts' namespaces, and clients ask their endpoints. They take \
the time of computing
(timed), or compute a small model with experts (real). All answers have to be the same tokens \
under every policy, or the
command fails. A request's objective is --slo-scale times what it takes alone: computed for the \
timed engine, measured
for the real one. --load, --victim-share, --collectives and --nccl-plugin mean nothing to the \
real one and are refused;
its model is under [real] of --config (--show-config shows it). With --engine vllm, released vLLM \
processes serve
(`make setup-vllm`), and policies may end in `_no_hints`: transfers then wait for permits, and the \
engine says nothing
of requests and layers.";

/// Arguments of `laxity lab run`. Missing values come from --config, or else from the defaults.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// Whether laxity-engine computes the model (real) or only takes the time of it (timed), or
    /// vLLM computes it
    #[arg(long, value_name = "timed|real|vllm", value_parser = named::<Engine>)]
    engine: Option<Engine>,
    /// Connector by which vLLM moves KV: nixl (decode hosts read it) or mooncake (prefill hosts
    /// write it)
    #[arg(long, value_name = "nixl|mooncake", value_parser = named::<Connector>)]
    connector: Option<Connector>,
    /// Policies to compare; each runs on the same arrivals
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    policies: Option<Vec<String>>,
    /// Seed of all random numbers
    #[arg(long)]
    seed: Option<u64>,
    /// conversation, agent, or a request file: Mooncake .jsonl or Azure .csv, gzipped or not
    #[arg(long, value_name = "NAME|FILE")]
    workload: Option<String>,
    /// Seconds over which requests arrive, for each policy
    #[arg(long, value_name = "S")]
    duration: Option<f64>,
    /// Seconds to wait for unfinished requests after the last arrival
    #[arg(long, value_name = "S")]
    drain: Option<f64>,
    /// Offered load: the arrival rate as a share of what the prefill units can do on an idle fabric
    #[arg(long)]
    load: Option<f64>,
    /// Arrival rate over all units; overrides --load
    #[arg(long, value_name = "R")]
    requests_per_second: Option<f64>,
    /// Deadline of a request, as a multiple of its TTFT without contention
    #[arg(long, value_name = "X")]
    slo_scale: Option<f64>,
    /// Number of prefill units
    #[arg(long)]
    units: Option<usize>,
    /// Number of hosts of one prefill unit
    #[arg(long)]
    ranks: Option<usize>,
    /// Number of decode hosts
    #[arg(long)]
    decodes: Option<usize>,
    /// Rate of every port, in Mbit/s
    #[arg(long, value_name = "MBIT")]
    port_mbit: Option<u32>,
    /// Share of the reused tokens whose KV is on the first unit
    #[arg(long, value_name = "SHARE")]
    victim_share: Option<f64>,
    /// The host that needs a block reads it (RDMA READ). The daemon of the block's host does not
    /// see that. By default, that host sends the block
    #[arg(long)]
    reads: bool,
    /// Transport of the exchanges with experts: the engine's own connections, or the NCCL net
    /// plugin, which each prefill host's engine loads as NCCL does
    #[arg(long, value_name = "sockets|nccl-plugin", value_parser = named::<Collectives>)]
    collectives: Option<Collectives>,
    /// Path of the NCCL plugin [default: beside this program, or where it is installed]
    #[arg(long, value_name = "PATH")]
    nccl_plugin: Option<PathBuf>,
    /// Share of each port, from 0 to 0.95, that traffic without permits takes in both directions
    #[arg(long, value_name = "SHARE")]
    foreign: Option<f64>,
    /// DSCP of that traffic, 0 for unmarked [default: that of the highest level, which does most
    /// harm]
    #[arg(long, value_name = "DSCP")]
    foreign_dscp: Option<u8>,
    /// Whether daemons lower a port's rate by foreign traffic (on) or only measure foreign traffic
    /// (off)
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    residual: Option<bool>,
    /// Kill the victim unit's daemon (SIGKILL) this many seconds into each scheduled run
    #[arg(long, value_name = "S")]
    kill_daemon_at: Option<f64>,
    /// Run one laxity-coordinator for all hosts in each scheduled run
    #[arg(long)]
    coordinator: bool,
    /// Configuration file of the coordinator, such as its [policy]
    #[arg(long, value_name = "FILE", requires = "coordinator")]
    coordinator_config: Option<PathBuf>,
    /// Kill the coordinator (SIGKILL) this many seconds into each scheduled run
    #[arg(long, value_name = "S", requires = "coordinator")]
    kill_coordinator_at: Option<f64>,
    /// Configuration of the lab as TOML; --show-config prints all keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the configuration that would run, as TOML, and stop
    #[arg(long)]
    show_config: bool,
    /// Daemon to run [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "PATH")]
    laxityd: Option<PathBuf>,
    /// laxity-engine to run [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "PATH")]
    laxity_engine: Option<PathBuf>,
    /// Write the report as JSON. With `-` it goes to standard output, the table to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

impl RunArgs {
    /// Returns the configuration file or the defaults, overridden by the flags.
    fn lab_config(&self) -> Result<LabConfig> {
        let mut config = self.base()?;
        self.refuse_what_means_nothing_to(config.engine)?;
        macro_rules! lay_over {
            ($($field:ident <- $flag:ident),* $(,)?) => {
                $(if let Some(value) = self.$flag.clone() { config.$field = value; })*
            };
        }
        lay_over!(policies <- policies, seed <- seed, duration_s <- duration, drain_s <- drain,
            load <- load, slo_scale <- slo_scale, units <- units, ranks <- ranks,
            decodes <- decodes, port_mbit <- port_mbit, victim_share <- victim_share,
            collectives <- collectives, foreign <- foreign, residual <- residual);
        config.foreign_dscp = self.foreign_dscp.or(config.foreign_dscp);
        if let Some(connector) = self.connector {
            config.vllm.get_or_insert_default().connector = connector;
        }
        if let Some(workload) = &self.workload {
            config.workload = match workload.as_str() {
                "conversation" => WorkloadSource::Conversation,
                "agent" => WorkloadSource::Agent,
                file => WorkloadSource::File(existing_file(file)?),
            };
        }
        config.requests_per_second = self.requests_per_second.or(config.requests_per_second);
        config.kill_daemon_at = self.kill_daemon_at.or(config.kill_daemon_at);
        config.reads |= self.reads;
        config.coordinator |= self.coordinator;
        config.coordinator_config = self.coordinator_config.clone().or(config.coordinator_config);
        config.kill_coordinator_at = self.kill_coordinator_at.or(config.kill_coordinator_at);
        config.nccl_plugin = self.nccl_plugin.clone().or(config.nccl_plugin);
        config.laxityd = self.laxityd.clone().or(config.laxityd);
        config.laxity_engine = self.laxity_engine.clone().or(config.laxity_engine);
        config.validate()?;
        Ok(config)
    }

    /// Returns the configuration file, or the defaults of the requested engine.
    fn base(&self) -> Result<LabConfig> {
        let defaults = |engine| match engine {
            Engine::Real => LabConfig::real(),
            Engine::Timed => LabConfig::timed(),
            Engine::Vllm => LabConfig::vllm(),
        };
        let Some(path) = &self.config else { return Ok(defaults(self.engine.unwrap_or_default())) };
        let text = laxity_files::read_to_string(path, laxity_files::CONFIG_BYTES_MAX)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let wrong = || format!("{} is no lab configuration", path.display());
        // Parsing the text into the struct first gives errors that name a line.
        let read: LabConfig = toml::from_str(&text).with_context(wrong)?;
        let table: toml::Table = toml::from_str(&text).with_context(wrong)?;
        let named = table.contains_key("engine").then_some(read.engine);
        if let (Some(asked), Some(named)) = (self.engine, named)
            && asked != named
        {
            bail!(
                "--engine is another one than that of {} (engine): leave one of them out",
                path.display()
            );
        }
        let engine = self.engine.or(named).unwrap_or_default();
        // Keys that the file does not set take the defaults of that engine.
        let mut merged = toml::Table::try_from(defaults(engine)).context(SHOWN)?;
        for (key, value) in table {
            match (merged.get_mut(&key), value) {
                (Some(toml::Value::Table(whole)), toml::Value::Table(part)) => whole.extend(part),
                (_, value) => drop(merged.insert(key, value)),
            }
        }
        merged.try_into().with_context(wrong)
    }

    fn refuse_what_means_nothing_to(&self, engine: Engine) -> Result<()> {
        for (given, flag, field) in [
            (self.load.is_some(), "--load", "load"),
            (self.victim_share.is_some(), "--victim-share", "victim_share"),
            (self.connector.is_some(), "--connector", "connector"),
            (self.collectives.is_some(), "--collectives", "collectives"),
            (self.nccl_plugin.is_some(), "--nccl-plugin", "nccl_plugin"),
        ] {
            if let Some(why) = LabConfig::no_use_with(engine, field).filter(|_| given) {
                bail!("{flag} means nothing with --engine {}: {why}", engine.name());
            }
        }
        Ok(())
    }
}

/// Parses a value by its name in the configuration.
pub(crate) fn named<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(name.into()).map_err(|error| error.to_string())
}

fn on_or_off(name: &str) -> Result<bool, String> {
    match name {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("it is `on` or `off`".to_owned()),
    }
}

fn existing_file(name: &str) -> Result<PathBuf> {
    let path = Path::new(name);
    if !path.is_file() {
        bail!("workload `{name}` is neither `conversation` nor `agent` nor a file that exists");
    }
    // The processes of the lab run in another folder, where a relative path is wrong.
    path.canonicalize().with_context(|| format!("cannot resolve {name}"))
}

pub(crate) fn run(command: LabCommand) -> Result<ExitCode> {
    match command {
        LabCommand::Probe { verbs } => {
            if verbs { vm::probe() } else { check() }.map(|()| ExitCode::SUCCESS)
        }
        LabCommand::Run(args) => compare(&args).map(|()| ExitCode::SUCCESS),
        LabCommand::Exec(args) => vm::exec(&args),
        LabCommand::Verbs(args) => verbs::run(&args),
        LabCommand::Faults(args) => faults::run(&args),
    }
}

fn check() -> Result<()> {
    let found = probe::findings(&LabConfig::default());
    say(&found)?;
    if !found.can_run() {
        bail!("this machine cannot run the lab; see above for what is missing");
    }
    Ok(())
}

fn compare(args: &RunArgs) -> Result<()> {
    let config = args.lab_config()?;
    if args.html.as_deref().is_some_and(is_stdout) {
        bail!(
            "a page goes into a file: give --html a name (only --json writes to standard output)"
        );
    }
    if args.show_config {
        let shown = config.to_toml().context(SHOWN)?;
        return Ok(say(shown.trim_end())?);
    }
    publish::check([&args.json, &args.html].into_iter().flatten())?;
    let progress = !args.quiet && io::stderr().is_terminal();
    let outcome = lab::run(&config, progress)?;
    write(args, &outcome)?;
    let differ = outcome.disagreements();
    if let (Some((policy, requests)), true) = (differ.first(), outcome.must_agree()) {
        bail!(
            "under `{policy}` {} requests were answered with other tokens than before (the first \
             is request {}): \
             the engine's answers must not depend on how its transfers are scheduled",
            requests.len(),
            requests[0]
        );
    }
    if let Some(run) = outcome.runs.iter().find(|run| run.bytes_lost > 0) {
        bail!(
            "under `{}` {} bytes are not accounted for: the counts of vLLM's connector, of the \
             daemons and of the requests alone differ (`kv` in the JSON), or those of exchanges \
             (`collectives`)",
            run.policy,
            run.bytes_lost
        );
    }
    let kills = restart::victim(&config).is_some();
    if let Some(run) = outcome.runs.iter().find(|run| kills && run.restart.is_none()) {
        bail!(
            "under `{}` no vLLM was killed: after vllm.kill_prefill_at or kill_decode_at no \
             request of the last such host took long enough",
            run.policy
        );
    }
    let fault = outcome.runs.iter().find_map(|run| Some((run, run.restart.as_ref()?.fault()?)));
    if let Some((run, fault)) = fault {
        bail!("under `{}` {fault} (`restart` and `errors` in the JSON)", run.policy);
    }
    Ok(())
}

fn write(args: &RunArgs, outcome: &LabReport) -> Result<()> {
    if let Some(path) = &args.html {
        output::replace(path, report::html(outcome).as_bytes())?;
    }
    publish::publish(args.json.as_deref(), outcome, &report::table(outcome))?;
    if args.json.as_deref().is_some_and(is_stdout) {
        return Ok(());
    }
    for (what, path) in [("data", &args.json), ("page", &args.html)] {
        if let Some(path) = path {
            let shown = path.canonicalize().unwrap_or_else(|_| path.clone());
            say(format!("{what}: {}", shown.display()))?;
        }
    }
    Ok(())
}
