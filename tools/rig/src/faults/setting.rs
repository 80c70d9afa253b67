//! What a campaign runs: the daemon, and the programs of each path that this machine has.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::engines::EngineProgram;
use super::oracle::WAIT_MAX;
use super::plant::Plant;
use super::schedule::FaultKind;
use super::task::Role;
use crate::config::LabConfig;
use crate::error::LabError;
use crate::probe::{
    CannotRun, Lack, find_coordinator, find_daemon, find_engine, find_library, find_nccl_plugin,
};
use crate::sandbox::find_program;
use crate::vm::network::DEVICES;
use crate::vm::verbs::{plugin, prepare};

/// Paths of a campaign with processes.
pub const PATHS: [&str; 6] = ["client", "c", "nccl", "mooncake", "mooncake_c", "engine"];

/// Number of paths in a round, if nobody named them.
const ROUND_PATHS: usize = 3;
/// Longest wait beside a path of Python or of engines. They take so much of a small machine that
/// one that holds permits may have no processor for a while, and nothing measures that.
const BESIDE_HEAVY_MAX: Duration = Duration::from_secs(1);

/// What workers on Mooncake need.
#[derive(Clone, Debug)]
pub struct MooncakePrograms {
    /// Python that has the Transfer Engine.
    pub(super) python: PathBuf,
    /// Path of the compiled part of the package `laxity`.
    pub(super) library: PathBuf,
    /// Folder with the rest of the package.
    pub(super) sources: PathBuf,
}

impl MooncakePrograms {
    fn find() -> Result<Self, &'static str> {
        let library = find_library("lib_laxity.so");
        let program = std::env::current_exe().unwrap_or_default();
        // This program lies in target/PROFILE of the repository, or is started there.
        let checkouts = program.ancestors().nth(3).into_iter().chain([Path::new(".")]);
        let mut sources = checkouts.map(|checkout| checkout.join("mooncake-adapter/python"));
        Ok(Self {
            python: prepare::prepared_python()
                .ok_or("needs Mooncake from PyPI (laxity lab faults --prepare)")?,
            library: library.ok_or("needs lib_laxity.so (cargo build -p laxity-python)")?,
            sources: sources
                .find(|folder| folder.is_dir())
                .ok_or("needs mooncake-adapter/python, which only a checkout has")?,
        })
    }
}

/// What workers on Mooncake's C interface need.
#[derive(Clone, Debug)]
pub struct MooncakeCPrograms {
    pub(super) mooncake: MooncakePrograms,
    /// Paths of the libraries that the initiator preloads, in their order: Laxity's two, as `laxity
    /// run` does, and the one with Mooncake's C interface.
    pub(super) preload: [PathBuf; 3],
}

impl MooncakeCPrograms {
    fn find() -> Result<Self, &'static str> {
        let mooncake = MooncakePrograms::find()?;
        let built = "needs liblaxity.so and liblaxity_mooncake.so (cargo build -p laxity-verbs -p \
                     laxity-mooncake)";
        let engine = prepare::prepared_c_interface()
            .ok_or("needs a library with Mooncake's C interface (laxity lab faults --prepare)")?;
        let [verbs, own] = ["liblaxity.so", "liblaxity_mooncake.so"].map(find_library);
        Ok(Self { mooncake, preload: [verbs.ok_or(built)?, own.ok_or(built)?, engine] })
    }
}

/// What workers on verbs need, in the guest that has the devices.
#[derive(Clone, Debug)]
pub struct VerbsPrograms {
    /// Path of `campaign` of `tests/verbs`.
    pub worker: PathBuf,
    /// Path of the preload library.
    pub library: PathBuf,
    pub gid_index: u32,
}

/// What differs between machines on which a campaign runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Factor of all times and time limits. An emulated processor is slow.
    pub(super) slowness: u32,
    /// Longest wait that is no violation.
    pub(super) wait_max: Duration,
    /// Names and rate of the NICs in the daemon's configuration.
    pub(super) nics: &'static [&'static str],
    pub(super) rate: &'static str,
    pub(super) nccl: NcclNetwork,
}

/// The network of NCCL's two workers.
#[derive(Clone, Copy, Debug)]
pub(super) struct NcclNetwork {
    /// Settings of the plugin.
    pub(super) settings: &'static [(&'static str, &'static str)],
    /// Number of each worker's device.
    pub(super) receiver: usize,
    pub(super) sender: usize,
}

impl NcclNetwork {
    pub(super) fn device(self, role: Role) -> usize {
        if role == Role::NcclSender { self.sender } else { self.receiver }
    }
}

impl Pace {
    pub(super) fn slow(self, time: Duration) -> Duration {
        time * self.slowness
    }
}

/// The pace of campaigns on this machine. NCCL's flows name their NIC, `lo`, and those of engines
/// the third. The others go by the first. On one NIC, messages of NCCL or collectives of engines,
/// which hardly pause, would let flows of later stages wait for longer than `wait_max`, as the
/// policy says.
const HERE: Pace = Pace {
    slowness: 1,
    wait_max: WAIT_MAX,
    nics: &["test", "lo", "engines"],
    rate: "1Gbit",
    nccl: NcclNetwork {
        settings: &[("LAXITY_NET", "tcp"), ("NCCL_SOCKET_IFNAME", "lo")],
        receiver: 0,
        sender: 0,
    },
};

/// The stall timeout of libraries in the guest. An emulated daemon that lives may be silent for the
/// 100 ms that are the default.
pub(super) const STALL_IN_GUEST: (&str, &str) = ("LAXITY_STALL_MS", "1000");

/// The pace in the guest with SoftRoCE. A work request waits for its permit, for packets that were
/// lost, which are sent again after two seconds, and for a link that is down for a second.
const IN_GUEST: Pace = Pace {
    slowness: 4,
    wait_max: Duration::from_secs(20),
    nics: &DEVICES,
    rate: "200Mbit",
    nccl: NcclNetwork {
        settings: &[STALL_IN_GUEST, plugin::SETTINGS[0], plugin::SETTINGS[1], plugin::SETTINGS[2]],
        receiver: 0,
        sender: 1,
    },
};

#[derive(Clone, Debug)]
pub struct Setting {
    pub laxityd: PathBuf,
    /// Path of the `laxityd` that takes turns with it, such as another release's.
    pub then: Option<PathBuf>,
    /// Path of the C library, if the path is used.
    pub c_library: Option<PathBuf>,
    /// Path of the NCCL plugin, if the path is used.
    pub nccl_plugin: Option<PathBuf>,
    /// Programs of Mooncake, if the path is used.
    pub mooncake: Option<MooncakePrograms>,
    /// The engine, if the path is used.
    pub engine: Option<EngineProgram>,
    /// Programs of Mooncake's C interface, if the path is used.
    pub mooncake_c: Option<MooncakeCPrograms>,
    /// Programs on verbs, if this is the guest that has the devices.
    pub verbs: Option<VerbsPrograms>,
    pub plant: Option<Plant>,
    /// Path whose workers have the planted bug.
    pub plant_on: String,
    /// Path of the coordinator, if there is one.
    pub coordinator: Option<PathBuf>,
    /// Whether workers send as fast as they can.
    pub full_rate: bool,
    paths: Vec<String>,
    pub(super) pace: Pace,
    /// Paths that are not used, with what they need.
    pub left_out: Vec<String>,
}

impl Setting {
    /// Finds the programs of `paths`, all of which must be there. If `paths` is empty, finds those
    /// that are there.
    pub fn find(
        laxityd: Option<&PathBuf>,
        then: Option<&PathBuf>,
        paths: &[String],
        (plant, plant_on): (Option<Plant>, &str),
    ) -> Result<Self, CannotRun> {
        let is_wanted = |path: &str| paths.is_empty() || paths.iter().any(|other| other == path);
        let mut lacks = Vec::new();
        let mut lacking = |path: &str, next_step: &str| {
            lacks.push(Lack { what: path.to_owned(), next_step: next_step.to_owned() });
        };
        let c_library = find_library("liblaxity_client.so")
            .filter(|_| find_program("python3").is_some() && is_wanted("c"));
        if c_library.is_none() {
            let needs = "needs python3 and liblaxity_client.so (cargo build -p laxity-client-c)";
            lacking("c", needs);
        }
        let nccl_plugin = find_nccl_plugin(&LabConfig::default()).ok();
        let nccl_plugin = nccl_plugin.filter(|_| is_wanted("nccl"));
        if nccl_plugin.is_none() {
            lacking("nccl", "needs libnccl-net-laxity.so (cargo build -p laxity-nccl)");
        }
        let mooncake = MooncakePrograms::find().map_err(|needs| lacking("mooncake", needs)).ok();
        let engine = find_engine(None).ok().filter(|_| is_wanted("engine"));
        if engine.is_none() {
            lacking("engine", "needs laxity-engine (cargo build -p laxity-engine)");
        }
        let mooncake_c =
            MooncakeCPrograms::find().map_err(|needs| lacking("mooncake_c", needs)).ok();
        lacks.retain(|lack| is_wanted(&lack.what));
        if !paths.is_empty() && !lacks.is_empty() {
            return Err(CannotRun(lacks));
        }
        let coordinator = find_coordinator();
        if coordinator.is_none() {
            let needs = "need laxity-coordinator (cargo build -p laxity-coordinator)";
            lacks.push(Lack {
                what: "faults of the coordinator".to_owned(),
                next_step: needs.to_owned(),
            });
        }
        Ok(Self {
            laxityd: find_daemon(laxityd).map_err(|lack| CannotRun(vec![lack]))?,
            then: match then {
                Some(_) => Some(find_daemon(then).map_err(|lack| CannotRun(vec![lack]))?),
                None => None,
            },
            c_library,
            nccl_plugin,
            mooncake: mooncake.filter(|_| is_wanted("mooncake")),
            engine: engine.map(EngineProgram::new),
            mooncake_c: mooncake_c.filter(|_| is_wanted("mooncake_c")),
            verbs: None,
            plant,
            plant_on: plant_on.to_owned(),
            coordinator,
            full_rate: false,
            paths: paths.to_vec(),
            pace: HERE,
            left_out: lacks.iter().map(Lack::to_string).collect(),
        })
    }

    /// Returns the setting of a campaign on verbs in the guest, and with the NCCL plugin over verbs
    /// if there is one.
    pub fn in_guest(
        laxityd: PathBuf,
        verbs: VerbsPrograms,
        nccl_plugin: Option<PathBuf>,
        plant: Option<Plant>,
    ) -> Self {
        let mut left_out = Vec::new();
        if nccl_plugin.is_none() {
            left_out.push("nccl: needs libnccl-net-laxity.so (--nccl-plugin)".to_owned());
        }
        Self {
            laxityd,
            then: None,
            c_library: None,
            nccl_plugin,
            mooncake: None,
            engine: None,
            mooncake_c: None,
            verbs: Some(verbs),
            plant,
            plant_on: "verbs".to_owned(),
            coordinator: None,
            full_rate: false,
            paths: ["verbs", "nccl"].map(str::to_owned).to_vec(),
            pace: IN_GUEST,
            left_out,
        }
    }

    /// Returns the kinds of faults that can be drawn here.
    pub(super) fn kinds(&self) -> Vec<FaultKind> {
        let can = |kind: &FaultKind| self.coordinator.is_some() || !kind.needs_coordinator();
        let more = self.verbs.as_ref().map_or(&[][..], |_| &FaultKind::VERBS);
        let all = FaultKind::ALL.into_iter().filter(can).chain(more.iter().copied());
        // NCCL's workers can't be told to fork or to lose a thread, and engines can't be told to
        // fork.
        let deaf: &[FaultKind] = if self.has_only(&["nccl"]) {
            &[FaultKind::ClientForked, FaultKind::ThreadLost]
        } else if self.has_only(&["nccl", "engine"]) {
            &[FaultKind::ClientForked]
        } else {
            &[]
        };
        all.filter(|kind| !deaf.contains(kind)).collect()
    }

    /// Returns the setting of a round. If nobody named the paths, a round uses three of those that
    /// can be used, so that a campaign over many paths takes no longer.
    pub(super) fn of_round(&self, seed: u64) -> Self {
        let mut round = self.clone();
        if self.paths.is_empty() {
            round.keep(&self.draw_paths(seed));
        }
        let heavy = ["mooncake", "mooncake_c", "engine"];
        if round.usable().len() > 1 && heavy.iter().any(|path| round.uses(path)) {
            round.pace.wait_max = round.pace.wait_max.max(BESIDE_HEAVY_MAX);
        }
        round
    }

    /// Returns the setting of a soak: workers send as fast as they can, and of Mooncake's two paths
    /// one is used, unless somebody named them.
    pub(super) fn for_soak(&self) -> Self {
        let mut soak = Self { full_rate: true, ..self.clone() };
        if self.paths.is_empty() && self.mooncake.is_some() {
            soak.mooncake_c = None;
        }
        soak
    }

    /// Asks an engine alone for the answers, if engines are used.
    pub(super) fn prepare(&self) -> Result<(), LabError> {
        self.engine.as_ref().map_or(Ok(()), |engine| engine.answers().map(drop))
    }

    fn draw_paths(&self, seed: u64) -> Vec<&'static str> {
        let mut paths = self.usable();
        // The path of a planted bug comes first.
        paths.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        paths.sort_by_key(|path| self.plant.is_none() || *path != self.plant_on);
        // Workers of these paths share a NIC, and Mooncake's alone keep its window full. So others
        // would wait for as long as the policy lets them starve.
        let is_mooncakes = |path: &str| path.starts_with("mooncake");
        let shares = |path: &&str| is_mooncakes(path) || ["client", "c"].contains(path);
        let first = paths.iter().copied().find(shares);
        let mooncake_is_first = first.is_some_and(is_mooncakes);
        paths.retain(|path| {
            !shares(path) || first == Some(*path) || !mooncake_is_first && !is_mooncakes(path)
        });
        paths.truncate(ROUND_PATHS);
        paths
    }

    /// Leaves out the other paths.
    pub(super) fn keep(&mut self, paths: &[&str]) {
        self.c_library.take_if(|_| !paths.contains(&"c"));
        self.nccl_plugin.take_if(|_| !paths.contains(&"nccl"));
        self.mooncake.take_if(|_| !paths.contains(&"mooncake"));
        self.mooncake_c.take_if(|_| !paths.contains(&"mooncake_c"));
        self.engine.take_if(|_| !paths.contains(&"engine"));
        self.paths = paths.iter().map(|&path| path.to_owned()).collect();
    }

    /// Returns the paths of [`PATHS`] that can be used.
    fn usable(&self) -> Vec<&'static str> {
        let can = |path: &&str| match *path {
            "c" => self.c_library.is_some(),
            "nccl" => self.nccl_plugin.is_some(),
            "mooncake" => self.mooncake.is_some(),
            "mooncake_c" => self.mooncake_c.is_some(),
            "engine" => self.engine.is_some(),
            _ => true,
        };
        let is_named =
            |path: &str| self.paths.is_empty() || self.paths.iter().any(|other| other == path);
        PATHS.into_iter().filter(can).filter(|path| is_named(path)).collect()
    }

    /// Whether the campaign uses a path.
    pub(super) fn uses(&self, path: &str) -> bool {
        self.usable().contains(&path)
    }

    /// Whether all paths of the campaign are among these.
    pub(super) fn has_only(&self, paths: &[&str]) -> bool {
        self.verbs.is_none() && self.usable().iter().all(|path| paths.contains(path))
    }

    /// Returns the paths of the round with this seed, if processes play it.
    pub(super) fn paths_of(&self, seed: u64) -> Vec<String> {
        self.of_round(seed).usable().into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A setting with each path, none of which can be played.
    fn with_all_paths() -> Setting {
        let verbs = VerbsPrograms { worker: "w".into(), library: "l".into(), gid_index: 0 };
        let mooncake =
            MooncakePrograms { python: "p".into(), library: "l".into(), sources: "s".into() };
        Setting {
            c_library: Some("c".into()),
            engine: Some(EngineProgram::new("e".into())),
            mooncake_c: Some(MooncakeCPrograms {
                mooncake: mooncake.clone(),
                preload: ["a", "b", "c"].map(PathBuf::from),
            }),
            mooncake: Some(mooncake),
            verbs: None,
            paths: Vec::new(),
            pace: HERE,
            ..Setting::in_guest("laxityd".into(), verbs, Some("n".into()), None)
        }
    }

    #[test]
    fn rounds_take_turns_over_all_paths_and_a_seed_gives_the_same() {
        let setting = with_all_paths();
        let of = |seed| setting.of_round(seed).paths;
        let mut seen: Vec<String> = (0..20).flat_map(of).collect();
        assert_eq!(seen.len(), 20 * ROUND_PATHS);
        let mooncakes = |path: &&String| path.starts_with("mooncake");
        assert!(seen.chunks(ROUND_PATHS).all(|round| {
            let clients = round.iter().filter(|path| ["client", "c"].contains(&path.as_str()));
            let mooncakes = round.iter().filter(mooncakes).count();
            mooncakes == 0 || mooncakes == 1 && clients.count() == 0
        }));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), PATHS.len());
        for seed in 0..20 {
            let round = setting.of_round(seed);
            assert_eq!(round.paths, of(seed));
            assert_eq!(round.c_library.is_some(), round.uses("c"));
            assert_eq!(round.mooncake.is_some(), round.uses("mooncake"));
            let heavy = ["mooncake", "mooncake_c", "engine"].iter().any(|path| round.uses(path));
            assert_eq!(round.pace.wait_max > WAIT_MAX, heavy, "{:?}", round.paths);
        }
    }

    #[test]
    fn named_paths_and_the_path_of_a_planted_bug_are_in_each_round() {
        let named = Setting { paths: PATHS.map(str::to_owned).to_vec(), ..with_all_paths() };
        assert_eq!(named.of_round(1).paths, PATHS);
        let plant_on = "mooncake".to_owned();
        let bugged = Setting { plant: Some(Plant::Drop), plant_on, ..with_all_paths() };
        assert!((0..20).all(|seed| bugged.of_round(seed).mooncake.is_some()));
    }

    #[test]
    fn faults_that_no_worker_knows_are_not_drawn() {
        let has = |paths: &[&str], kind| {
            let mut setting = with_all_paths();
            setting.keep(paths);
            setting.kinds().contains(&kind)
        };
        assert!(!has(&["nccl"], FaultKind::ThreadLost));
        assert!(!has(&["nccl", "engine"], FaultKind::ClientForked));
        assert!(has(&["engine"], FaultKind::ThreadLost));
        assert!(has(&["mooncake_c"], FaultKind::ClientForked));
        let verbs = VerbsPrograms { worker: "w".into(), library: "l".into(), gid_index: 0 };
        let guest = Setting::in_guest("laxityd".into(), verbs, Some("n".into()), None);
        assert!(guest.kinds().contains(&FaultKind::ClientForked));
    }

    #[test]
    fn the_daemon_has_the_nic_that_nccls_messages_name() {
        let mut settings = HERE.nccl.settings.iter();
        let interface = settings.find(|(name, _)| *name == "NCCL_SOCKET_IFNAME");
        assert!(interface.is_some_and(|(_, nic)| HERE.nics.contains(nic)), "{interface:?}");
    }
}
