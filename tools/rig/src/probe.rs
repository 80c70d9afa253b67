//! Checks whether this machine can run the lab before anything is started, and says what to do.
//!
//! The kernel is checked by trial: a small fabric with one of each needed feature is built in a
//! sandbox of its own and removed.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use nix::sched::CloneFlags;
use serde::{Deserialize, Serialize};

use crate::child::output;
use crate::collectives;
use crate::config::{Collectives, Engine, LabConfig};
use crate::controller::NONE;
use crate::error::LabError;
use crate::fabric;
use crate::sandbox::{self, find_program};
use crate::vllm;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tools {
    pub ip: PathBuf,
    pub tc: PathBuf,
    pub laxityd: Option<PathBuf>,
    pub coordinator: Option<PathBuf>,
    pub nccl_plugin: Option<PathBuf>,
    pub laxity_engine: Option<PathBuf>,
    pub python: Option<PathBuf>,
}

const NCCL_PLUGIN_VARIABLE: &str = "LAXITY_NCCL_PLUGIN";
const NCCL_PLUGIN: &str = "NCCL plugin";

/// File names of the plugin: the one that NCCL looks for, and the one that cargo builds.
const NCCL_PLUGIN_NAMES: [&str; 2] = ["libnccl-net-laxity.so", "libnccl_net_laxity.so"];
const ENGINE: &str = "laxity-engine";
const VLLM: &str = "vLLM";
const COORDINATOR: &str = "laxity-coordinator";

/// Something that the machine lacks, and how to get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lack {
    pub what: String,
    pub next_step: String,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.next_step)
    }
}

#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("this machine cannot run the \
    lab{}", .0.iter().fold(String::new(), |text, lack| format!("{text}\n  - {lack}")))]
pub struct CannotRun(pub Vec<Lack>);

pub(crate) fn lack(what: &str, next_step: impl Into<String>) -> Lack {
    Lack { what: what.to_owned(), next_step: next_step.into() }
}

/// Finds one of Laxity's programs: the configured one, the one in an environment variable, next to
/// this program, or in `PATH`.
fn find_named(
    name: &'static str,
    package: &str,
    configured: Option<&PathBuf>,
    variable: &str,
) -> Result<PathBuf, Lack> {
    let named = configured.cloned().or_else(|| std::env::var_os(variable).map(PathBuf::from));
    if let Some(path) = named {
        return std::fs::canonicalize(&path)
            .map_err(|error| lack(name, format!("{} is not there: {error}", path.display())));
    }
    find_own(name).ok_or_else(|| {
        lack(
            name,
            format!(
                "not next to this program nor in PATH; build it with `cargo build --release -p \
                 {package}` or name it in {variable}"
            ),
        )
    })
}

/// Returns the path of one of Laxity's programs, next to this program or in PATH.
pub fn find_own(name: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|exe| {
        // Examples and tests of a cargo build are one folder below the programs.
        exe.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|file| file.is_file())
    });
    beside.or_else(|| find_program(name))
}

pub fn find_daemon(configured: Option<&PathBuf>) -> Result<PathBuf, Lack> {
    find_named("laxityd", "laxity-daemon", configured, "LAXITY_LAXITYD")
}

pub fn find_engine(configured: Option<&PathBuf>) -> Result<PathBuf, Lack> {
    find_named(ENGINE, ENGINE, configured, "LAXITY_ENGINE")
}

/// Finds the NCCL net plugin: the configured one, `LAXITY_NCCL_PLUGIN`, next to this program (cargo
/// allows no hyphen in a library's name), or where `make install` or a package puts it.
pub fn find_nccl_plugin(config: &LabConfig) -> Result<PathBuf, Lack> {
    let named = config.nccl_plugin.clone().or_else(|| {
        std::env::var_os(NCCL_PLUGIN_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from)
    });
    if let Some(path) = named {
        return std::fs::canonicalize(&path).map_err(|error| {
            let named = path.display();
            lack(
                NCCL_PLUGIN,
                format!(
                    "{named} is not there: {error}; --nccl-plugin and {NCCL_PLUGIN_VARIABLE} \
                    want the path of {}",
                    NCCL_PLUGIN_NAMES[0]
                ),
            )
        });
    }
    let folders = plugin_folders();
    let found = folders
        .iter()
        .flat_map(|folder| NCCL_PLUGIN_NAMES.map(|name| folder.join(name)))
        .find(|file| file.is_file());
    found.map(|file| std::fs::canonicalize(&file).unwrap_or(file)).ok_or_else(|| {
        let looked: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        lack(
            NCCL_PLUGIN,
            format!(
                "{} is in none of {}; build it with `cargo build --release -p laxity-nccl`, \
                     name it with --nccl-plugin PATH \
                     or {NCCL_PLUGIN_VARIABLE}, or run without it (--collectives sockets, or \
                     vllm.collectives = false)",
                NCCL_PLUGIN_NAMES[0],
                looked.join(", ")
            ),
        )
    })
}

/// Finds one of Laxity's libraries next to this program or where it is installed.
pub fn find_library(name: &str) -> Option<PathBuf> {
    plugin_folders().into_iter().map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Returns the folders that may have Laxity's libraries, most likely first.
fn plugin_folders() -> Vec<PathBuf> {
    let multiarch = format!("{}-linux-gnu", std::env::consts::ARCH);
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Ok(exe) = std::env::current_exe() {
        // A test is one folder below the programs.
        folders.extend(exe.ancestors().skip(1).take(2).map(PathBuf::from));
        folders.extend(exe.ancestors().nth(2).map(|prefix| prefix.join("lib")));
    }
    for lib in ["/usr/local/lib", "/usr/lib"].map(PathBuf::from) {
        folders.extend([lib.join(&multiarch), lib]);
    }
    let mut seen = HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// The result of a check: what this machine has, and what it lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    pub found: Vec<(&'static str, PathBuf)>,
    pub lacks: Vec<Lack>,
}

impl Findings {
    pub fn can_run(&self) -> bool {
        self.lacks.is_empty()
    }

    fn add(&mut self, name: &'static str, found: Result<PathBuf, Lack>) {
        match found {
            Ok(path) => self.found.push((name, path)),
            Err(lack) => self.lacks.push(lack),
        }
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, path) in &self.found {
            writeln!(f, "{what:>10}  {}", path.display())?;
        }
        for lack in &self.lacks {
            writeln!(f, "{:>10}  {lack}", "MISSING")?;
        }
        let verdict = if self.can_run() { "can" } else { "cannot" };
        write!(f, "this machine {verdict} run the lab")
    }
}

/// Checks everything and returns all that is lacking, not only the first.
pub fn findings(config: &LabConfig) -> Findings {
    let mut findings = Findings::default();
    for name in ["ip", "tc"] {
        let install = "install iproute2 (Debian, Ubuntu: apt install iproute2)";
        findings.add(name, find_program(name).ok_or_else(|| lack(name, install)));
    }
    if let [(_, ip), (_, tc)] = &findings.found[..] {
        let tools = Tools { ip: ip.clone(), tc: tc.clone(), ..Tools::default() };
        findings.lacks.extend(probe_kernel(&tools));
    }
    if config.policies.iter().any(|policy| policy != NONE) {
        findings.add("laxityd", find_daemon(config.laxityd.as_ref()));
    }
    if config.engine == Engine::Vllm {
        findings.add(VLLM, vllm::find_python(config).map_err(|next_step| lack(VLLM, next_step)));
    } else {
        findings.add(ENGINE, find_engine(config.laxity_engine.as_ref()));
    }
    if config.coordinator {
        let build = "not next to this program nor in PATH; build it with `cargo build --release -p \
                     laxity-coordinator`, or run without --coordinator";
        findings.add(COORDINATOR, find_own(COORDINATOR).ok_or_else(|| lack(COORDINATOR, build)));
    }
    if config.collectives == Collectives::NcclPlugin || collectives::wanted(config) {
        findings.add(NCCL_PLUGIN, find_nccl_plugin(config));
    }
    findings
}

pub fn find(config: &LabConfig) -> Result<Tools, CannotRun> {
    let findings = findings(config);
    let path = |name| findings.found.iter().find(|(n, _)| *n == name).map(|(_, path)| path.clone());
    match (path("ip"), path("tc")) {
        (Some(ip), Some(tc)) if findings.can_run() => Ok(Tools {
            ip,
            tc,
            laxityd: path("laxityd"),
            coordinator: path(COORDINATOR),
            nccl_plugin: path(NCCL_PLUGIN),
            laxity_engine: path(ENGINE),
            python: path(VLLM),
        }),
        _ => Err(CannotRun(findings.lacks)),
    }
}

/// Tries the kernel's features in a sandbox of its own.
fn probe_kernel(tools: &Tools) -> Vec<Lack> {
    let ask = || -> Result<Vec<Lack>, LabError> {
        let tools = serde_json::to_string(tools)?;
        let lacks = output("this program", &mut sandbox::internal("probe"), &tools)?;
        Ok(serde_json::from_str(&lacks)?)
    };
    ask().unwrap_or_else(|error| {
        vec![lack("the probe", format!("could not run this program again ({error})"))]
    })
}

pub fn try_all() -> Result<(), LabError> {
    let tools: Tools = serde_json::from_reader(std::io::stdin())?;
    let lacks = match sandbox::leave(CloneFlags::empty()) {
        Err(error) => vec![lack("namespaces", error.to_string())],
        Ok(()) => try_kernel(&tools),
    };
    println!("{}", serde_json::to_string(&lacks)?);
    Ok(())
}

fn try_kernel(tools: &Tools) -> Vec<Lack> {
    let config = LabConfig::default();
    let classes = fabric::classes(&config.level_dscp, config.scavenger_dscp).unwrap_or_default();
    let module = |name: &str, option: &str| {
        format!("the kernel has no {name}; load the module `{option}` or use a kernel that has it")
    };
    let (ip, tc) = (&tools.ip, &tools.tc);
    let steps: [(&str, &PathBuf, String, String); 6] = [
        ("bridge", ip, "link add probe0 type bridge".into(), module("bridge", "bridge")),
        ("veth", ip, "link add probe1 type veth peer name probe2".into(), module("veth", "veth")),
        (
            "gso_max_size",
            ip,
            "link set probe1 gso_max_size 16384 up".into(),
            "this iproute2 cannot bound segmentation; 5.19 or later can".into(),
        ),
        (
            "HTB",
            tc,
            "qdisc add dev probe1 root handle 1: htb default 10".into(),
            module("HTB queueing discipline", "sch_htb"),
        ),
        (
            "u32",
            tc,
            "filter add dev probe1 parent 1: protocol ip prio 1 u32 match ip dsfield 0xb8 0xfc \
             flowid 1:10"
                .into(),
            module("u32 classifier", "cls_u32"),
        ),
        (
            "shaping",
            tc,
            fabric::shaping_script("probe2", &config, &classes),
            "tc refused the lab's shaping as a whole; the parts above work".into(),
        ),
    ];
    let mut lacks = Vec::new();
    for (what, tool, script, next_step) in steps {
        if let Err(said) = feed(tool, &script) {
            lacks.push(lack(what, format!("{next_step} ({said})")));
        }
    }
    lacks
}

fn feed(tool: &PathBuf, script: &str) -> Result<(), String> {
    let mut command = Command::new(tool);
    output(tool.display(), command.args(["-batch", "-"]), &format!("{script}\n"))
        .map(drop)
        .map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
}
