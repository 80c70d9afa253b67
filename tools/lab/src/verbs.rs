//! `laxity lab verbs`: runs unmodified RDMA programs under the scheduler in the SoftRoCE guest.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use laxity_rig::config::LabConfig;
use laxity_rig::faults::Plant;
use laxity_rig::probe::{find_nccl_plugin, find_own};
use laxity_rig::vm::verbs::plugin::Nccl;
use laxity_rig::vm::verbs::{self, Matrix, Programs, VerbsConfig, VerbsReport, prepare};
use laxity_rig::vm::{self, Input, Stream, VmConfig, VmJob};

use laxity_cli::library;
use laxity_cli::output::say;

use crate::lab::named;
use crate::{exit_code, publish};

pub(crate) const HELP: &str = "\
Boots the SoftRoCE lab once and runs each program unmodified, with the library preloaded on both
sides. The daemon enforces a rate at which work requests have to wait. The command checks the
program's exit codes and data, that the library counted every work request, that each work request
is one message on the wire, that the DSCPs are those of the profile, and that nothing was bypassed.
Programs with bundles have barriers on the wire as well, and the classes of P2D and KV reuse.
Then it kills daemons and applications, and runs a campaign of faults in combination. The test suite
of pyverbs has to pass the same tests with the library as without it. The NCCL plugin is
driven over verbs, with and without the daemon.

Exit status: 0 if all checks passed, 1 if not, 125 if the lab itself failed.

Examples:
  laxity lab verbs
  laxity lab verbs --keep-going --json report.json
  laxity lab verbs --only write_bw,mooncake
  laxity lab verbs --only applications_killed --cycles 1000
  laxity lab verbs --only campaign --faults 2000 --seed 7 --timeout 3600
  laxity lab verbs --only nccl_versions,nccl_collectives";

#[derive(Args)]
pub(crate) struct VerbsArgs {
    /// Write the report as JSON. With `-` it goes to standard output, and nothing else does
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave out programs that need the Mooncake Transfer Engine, which is downloaded from PyPI
    #[arg(long)]
    without_mooncake: bool,
    /// Skip pyverbs' own test suite, which is downloaded from Debian's archive
    #[arg(long)]
    without_pyverbs: bool,
    /// Folder with the sources of the check programs
    #[arg(long, value_name = "FOLDER", default_value = "tests/verbs")]
    sources: PathBuf,
    /// Daemon to run [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "PATH")]
    laxityd: Option<PathBuf>,
    /// Preload library [default: $LAXITY_LIBRARY, or where it is installed]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Folder with the sources of the programs that drive the NCCL plugin
    #[arg(long, value_name = "FOLDER", default_value = "tests/nccl")]
    nccl_sources: PathBuf,
    /// NCCL plugin [default: $LAXITY_NCCL_PLUGIN, or beside this program]. Without a plugin, its
    /// checks are left out
    #[arg(long, value_name = "PATH")]
    nccl_plugin: Option<PathBuf>,
    /// Maximum duration in seconds, after which the guest is killed
    #[arg(long, value_name = "S", default_value_t = 3600)]
    timeout: u64,
    /// Run only these programs and faults; --list prints their names
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<String>,
    /// Print the names of programs and faults, and exit
    #[arg(long)]
    list: bool,
    /// Continue after a failure
    #[arg(long)]
    keep_going: bool,
    /// Number of applications that are killed while their work requests wait
    #[arg(long, value_name = "N", default_value_t = 100)]
    cycles: u32,
    /// Number of faults of the case `campaign`, see `laxity lab faults`
    #[arg(long, value_name = "N", default_value_t = 50)]
    faults: u64,
    /// Seed of the case `campaign`
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Plant a bug in the case `campaign`, to test its oracle: twice, drop or swap
    #[arg(long, hide = true, value_parser = named::<Plant>)]
    plant: Option<Plant>,
    /// Only prepare what the guest needs: kernel, check programs, Transfer Engine
    #[arg(long)]
    prepare: bool,
}

impl VerbsArgs {
    /// Returns the programs. Downloads or builds those that are missing.
    fn programs(&self) -> Result<Programs> {
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))
        };
        Ok(Programs {
            laxityd: match &self.laxityd {
                Some(path) => absolute(path)?,
                None => program("laxityd", "name it with --laxityd")?,
            },
            nccl: match self.nccl_plugin()? {
                None => None,
                Some(plugin) => {
                    Some(Nccl { plugin, checks: prepare::checks(&self.nccl_sources, None)? })
                }
            },
            laxity: program("laxity", "install it beside this program")?,
            library: absolute(&library::find(self.library.as_deref())?)?,
            checks: prepare::checks(&self.sources, None)?,
            python: (!self.without_mooncake).then(prepare::python).transpose()?,
            pyverbs: (!self.without_pyverbs).then(prepare::pyverbs).transpose()?,
        })
    }

    /// Returns the path of the NCCL plugin, or `None` if none was named and none is installed.
    fn nccl_plugin(&self) -> Result<Option<PathBuf>> {
        let config = LabConfig { nccl_plugin: self.nccl_plugin.clone(), ..LabConfig::default() };
        match find_nccl_plugin(&config) {
            Ok(plugin) => Ok(Some(plugin)),
            Err(lack) if self.nccl_plugin.is_some() => bail!("{lack}"),
            Err(lack) => {
                eprintln!("laxity: what needs the NCCL plugin is left out: {lack}");
                Ok(None)
            }
        }
    }

    fn machine(&self) -> VmConfig {
        VmConfig {
            memory_mib: 3072,
            limit: Some(Duration::from_secs(self.timeout)),
            ..VmConfig::default()
        }
    }

    fn play(&self) -> Result<ExitCode> {
        publish::check(&self.json)?;
        let job = VmJob::Verbs(Box::new(self.config()?));
        // Progress goes to standard error because standard output may carry the report.
        let mut show = |_: Stream, bytes: &[u8]| io::stderr().write_all(bytes);
        let outcome = match vm::run(&self.machine(), &job, Input::Empty, &mut show) {
            Ok(outcome) => outcome,
            Err(error) => return Ok(crate::vm::failed(&error)),
        };
        let report: VerbsReport = serde_json::from_value(outcome.finished.details)
            .context("the guest's report cannot be read")?;
        publish::publish(self.json.as_deref(), &report, &verbs::table(&report))?;
        Ok(exit_code(report.passed()))
    }

    fn config(&self) -> Result<VerbsConfig> {
        let programs = self.programs()?;
        let matrix = Matrix {
            checks_asan: prepare::checks(&self.sources, Some("address"))?,
            libasan: prepare::libasan()?,
            only: self.only.clone(),
            keep_going: self.keep_going,
            cycles: self.cycles,
            faults: self.faults,
            seed: self.seed,
            plant: self.plant,
        };
        Ok(VerbsConfig { programs, matrix })
    }
}

/// Returns the path of one of Laxity's programs, next to this program or in PATH. The error says
/// what to do `otherwise`.
fn program(name: &str, otherwise: &str) -> Result<PathBuf> {
    find_own(name)
        .with_context(|| format!("{name} is neither beside this program nor in PATH; {otherwise}"))
}

pub(crate) fn run(args: &VerbsArgs) -> Result<ExitCode> {
    if args.list {
        say(verbs::names(0).join("\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.prepare {
        args.config()?;
        vm::image::prepare(&args.machine().cache, &|text| {
            eprintln!("laxity: {text}");
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    args.play()
}
