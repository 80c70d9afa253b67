//! `laxity env`: prints the class variables that `laxity run` sets for a profile, for jobs that are
//! started in another way. Also the part of `laxity run` that sets them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use laxity_cli::output::{OutputError, json, say};
use laxity_job::{Profile, ProfileError};
use laxity_shm::layout::attention;
use laxity_shm::marking::{Marking, Treatments};
use laxity_shm::record::Stage;
use laxity_shm::region::Region;
use laxity_shm::registration::Welcome;
use serde::Serialize;

use crate::class_table::{Layers, Outcome, Rules, SERVICE_LEVEL_MAX, Setting, plan};
use crate::doctor::fabric;
use crate::doctor::root::Root;
use crate::registration;

pub(crate) const HELP: &str = "\
Prints the variables by which NCCL, DeepEP, NVSHMEM, UCCL, MORI, Mooncake and UCX choose the class \
of their traffic, with values that agree with the daemon's levels. Without a daemon, the values \
are those of a daemon without a configuration. A variable that is set in this environment keeps \
its value and is not printed with --format shell.

On RoCE the variables carry traffic classes. On InfiniBand they carry service levels, which only \
the operator of the subnet knows: sl of [levels] in the daemon's configuration names them, or \
--service-level.

Examples:
  # for a shell
  eval \"$(laxity env --profile wide-ep)\"

  # for a container
  docker run $(laxity env --profile wide-ep --format docker) IMAGE

  # for the list `env` of a Kubernetes container
  laxity env --profile wide-ep --format k8s";

/// What `laxity run` and `laxity env` need to know about classes.
#[derive(Args)]
pub(crate) struct ClassArgs {
    /// InfiniBand service level of a stage, such as collective=1, for profiles that set class
    /// variables. May be repeated
    #[arg(long, value_name = "STAGE=N", value_parser = service_level)]
    service_level: Vec<(Stage, u8)>,
    /// The network of the job, for profiles that set class variables
    #[arg(long, value_enum, default_value_t = LinkLayer::Auto)]
    link: LinkLayer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LinkLayer {
    /// The network of this host's RDMA ports, or RoCE if the host has none
    Auto,
    /// RoCE
    Roce,
    /// InfiniBand
    Infiniband,
}

#[derive(Args)]
pub(crate) struct EnvArgs {
    /// Job profile: a name, or a path with a `/` in it
    #[arg(long, short, value_name = "PROFILE", default_value = "wide-ep")]
    profile: String,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Shell)]
    format: Format,
    /// Registration socket of the daemon [default: $LAXITY_SOCKET, or /run/laxity/laxityd.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    classes: ClassArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Commands for a shell
    Shell,
    /// Options of `docker run`
    Docker,
    /// A list for the field `env` of a Kubernetes container
    K8s,
    /// All variables, with what happens to each and why
    Json,
}

/// Why `laxity env` prints nothing. The texts say what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(
        "the profile `{0}` sets no class variables; name wide-ep, or a profile with \
         `class_variables = true`"
    )]
    NoClasses(String),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// One variable in the output of `--format json`. Fields may be added.
#[derive(Serialize)]
struct VariableRow<'a> {
    name: &'a str,
    library: &'a str,
    stage: &'static str,
    value: Option<String>,
    outcome: &'static str,
    why: &'a str,
    /// The class of the library by default.
    default: u8,
    since: &'a str,
    source: &'a str,
    note: &'a str,
}

/// The classes of a job, and where they come from.
pub(crate) struct JobClasses {
    pub(crate) settings: Vec<Setting>,
    pub(crate) origin: &'static str,
}

impl JobClasses {
    pub(crate) fn set(&self) -> impl Iterator<Item = (&'static str, u8)> {
        self.settings.iter().filter_map(|setting| match setting.outcome {
            Outcome::Set(value) => Some((setting.variable.name.as_str(), value)),
            _ => None,
        })
    }

    /// Returns a line that says what is set, and more lines if `verbose`.
    pub(crate) fn notice(&self, verbose: bool) -> String {
        let mut by_value: BTreeMap<u8, Vec<&str>> = BTreeMap::new();
        for (name, value) in self.set() {
            by_value.entry(value).or_default().push(name);
        }
        let kept = self.settings.iter().filter(|s| matches!(s.outcome, Outcome::Kept(_))).count();
        let left = self.settings.iter().filter(|s| matches!(s.outcome, Outcome::Left(_))).count();
        let mut notice = format!(
            "{} class variables set as {} says, {kept} kept, {left} left unset",
            self.set().count(),
            self.origin
        );
        if !verbose {
            notice.push_str("; --verbose lists them");
            return notice;
        }
        for (value, names) in by_value.iter().rev() {
            notice.push_str(&format!("\n  {value}: {}", names.join(" ")));
        }
        for setting in &self.settings {
            let name = &setting.variable.name;
            match &setting.outcome {
                Outcome::Set(_) => {}
                Outcome::Kept(value) => notice.push_str(&format!("\n  kept: {name}={value}")),
                Outcome::Left(why) => notice.push_str(&format!("\n  left: {name}, because {why}")),
            }
        }
        notice
    }
}

/// Returns the classes for a job of this host. `None` if the daemon marks nothing, because it only
/// observes or is bypassed.
pub(crate) fn of_job(args: &ClassArgs, socket: &Path) -> Option<JobClasses> {
    let attached = registration::attach(socket, "laxity env").ok();
    let origin = if attached.is_some() { "the daemon" } else { "a daemon without a configuration" };
    let treatments = || laxity_nic::treatments(Path::new("/"), |_| true, &laxity_nic::query);
    let mut rules = rules(attached, treatments)?;
    for (stage, level) in &args.service_level {
        rules.service_level[stage.index()] = Some(*level);
    }
    let layers = match args.link {
        LinkLayer::Roce => Layers { roce: true, infiniband: false },
        LinkLayer::Infiniband => Layers { roce: false, infiniband: true },
        LinkLayer::Auto => fabric::layers(&fabric::ports(&Root::new("/"))),
    };
    let value = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    Some(JobClasses { settings: plan(layers, &rules, value), origin })
}

/// Returns the rules of the daemon that answered, or those of one without a configuration where the
/// NICs treat DSCPs as `treatments` says. `None` if the daemon marks nothing.
pub(crate) fn rules(
    answer: Option<Welcome>,
    treatments: impl FnOnce() -> Treatments,
) -> Option<Rules> {
    let mut rules = Rules {
        dscp: Rules::DSCP_DEFAULT,
        service_level: [None; Stage::ALL.len()],
        marking: Some(Marking::Preserve),
        treatments: Treatments::UNKNOWN,
    };
    let region = answer.and_then(|welcome| Region::map(welcome.memfd, welcome.geometry).ok());
    let Some(region) = region else {
        rules.treatments = treatments();
        return Some(rules);
    };
    let header = region.header();
    if header.attention() & attention::NOT_ENFORCED != 0 {
        return None;
    }
    (rules.marking, rules.treatments) = (header.marking(), header.treatments());
    for stage in Stage::ALL {
        if let Some(dscp) = header.dscp_of_stage(stage) {
            rules.dscp[stage.index()] = dscp;
        }
        rules.service_level[stage.index()] = header.sl_of_stage(stage);
    }
    Some(rules)
}

fn service_level(text: &str) -> Result<(Stage, u8), String> {
    let (name, number) = text.split_once('=').ok_or("write STAGE=N, such as collective=1")?;
    let stage = Stage::from_name(name).ok_or_else(|| {
        format!("no stage is called `{name}`; write {}", Stage::ALL.map(Stage::name).join(", "))
    })?;
    match number.parse() {
        Ok(level) if level <= SERVICE_LEVEL_MAX => Ok((stage, level)),
        _ => Err(format!("`{number}` is no service level; write 0 to {SERVICE_LEVEL_MAX}")),
    }
}

pub(crate) fn env(args: &EnvArgs) -> Result<(), EnvError> {
    let profile = Profile::load(&args.profile)?;
    if !profile.class_variables {
        return Err(EnvError::NoClasses(args.profile.clone()));
    }
    let socket = registration::socket(args.socket.as_deref());
    let Some(classes) = of_job(&args.classes, &socket) else {
        eprintln!("laxity env: nothing is set, because the daemon observes or is bypassed");
        return Ok(());
    };
    eprintln!("laxity env: {}", classes.notice(false).trim_end_matches("; --verbose lists them"));
    let text = text(&classes, args.format)?;
    if text.is_empty() {
        return Ok(());
    }
    Ok(say(text)?)
}

fn text(classes: &JobClasses, format: Format) -> Result<String, OutputError> {
    let lines = |line: &dyn Fn(&str, u8) -> String| {
        classes.set().map(|(name, value)| line(name, value)).collect::<Vec<_>>().join("\n")
    };
    Ok(match format {
        Format::Shell => lines(&|name, value| format!("export {name}={value}")),
        Format::Docker => lines(&|name, value| format!("--env {name}={value}")),
        Format::K8s => lines(&|name, value| format!("- name: {name}\n  value: \"{value}\"")),
        Format::Json => {
            let rows: Vec<VariableRow<'_>> = classes.settings.iter().map(row).collect();
            json(&rows)?
        }
    })
}

fn row(setting: &Setting) -> VariableRow<'_> {
    let (outcome, value, why) = match &setting.outcome {
        Outcome::Set(value) => ("set", Some(value.to_string()), ""),
        Outcome::Kept(value) => ("kept", Some(value.clone()), ""),
        Outcome::Left(why) => ("left", None, *why),
    };
    let variable = setting.variable;
    VariableRow {
        name: &variable.name,
        library: &variable.library,
        stage: variable.stage.name(),
        value,
        outcome,
        why,
        default: variable.default,
        since: &variable.since,
        source: &variable.source,
        note: &variable.note,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn link_layers_are_those_of_all_ports_and_roce_where_there_is_none() {
        let layers = |ports: &[(&str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            for (device, layer) in ports {
                let port = folder.path().join("sys/class/infiniband").join(device).join("ports/1");
                fs::create_dir_all(&port).unwrap();
                fs::write(port.join("link_layer"), layer).unwrap();
            }
            fabric::layers(&fabric::ports(&Root::new(folder.path())))
        };
        let both = [("mlx5_0", "InfiniBand\n"), ("mlx5_1", "Ethernet\n")];
        assert_eq!(layers(&[]), Layers { roce: true, infiniband: false });
        assert_eq!(layers(&both[..1]), Layers { roce: false, infiniband: true });
        assert_eq!(layers(&both), Layers { roce: true, infiniband: true });
        assert_eq!(layers(&[("efa_0", "Unspecified\n")]), Layers::default());
    }

    #[test]
    fn a_service_level_names_a_stage_and_a_number_of_infiniband() {
        assert_eq!(service_level("collective=1"), Ok((Stage::Collective, 1)));
        for wrong in ["collective", "collectives=1", "p2d=16", "p2d=-1", "p2d="] {
            assert!(service_level(wrong).is_err(), "{wrong}");
        }
    }
}
