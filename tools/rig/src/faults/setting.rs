//! What a campaign runs: the daemon, and the programs of each path that this machine has.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::engines::EngineAnswers;
use super::oracle::WAIT_MAX;
use super::plant::Plant;
use super::schedule::FaultKind;
use crate::config::LabConfig;
use crate::error::LabError;
use crate::probe::{
    CannotRun, Lack, find_daemon, find_engine, find_library, find_nccl_plugin, find_own, lack,
};
use crate::sandbox::find_program;
use crate::vm::network::DEVICES;
use crate::vm::verbs::{plugin, prepare};

pub const PATHS: [&str; 6] = ["client", "c", "nccl", "mooncake", "mooncake_c", "engine"];

/// Number of paths in a round, if nobody named them.
const ROUND_PATHS: usize = 3;
/// Longest wait beside a path of Python or of engines. They take so much of a small machine that
/// one that holds permits may have no processor for a while, and nothing measures that.
const BESIDE_HEAVY_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PathPrograms {
    /// The program of a worker that is no part of the lab, or that it starts: Python that has
    /// Mooncake, `campaign` of `tests/verbs`, or the engine.
    pub program: PathBuf,
    /// Laxity's library: the C library, the NCCL plugin, the compiled part of the package `laxity`,
    /// or the preload library.
    pub library: PathBuf,
    /// Folder with the rest of the package `laxity`.
    pub sources: PathBuf,
    /// Libraries that the initiator preloads, in their order: Laxity's two, as `laxity run` does,
    /// and the one with Mooncake's C interface.
    pub preload: Vec<PathBuf>,
    pub gid_index: u32,
    /// File with the secret of bundles, if queue pairs are to get some.
    pub secret: Option<PathBuf>,
}

impl PathPrograms {
    /// Finds the programs of a path, or says what it needs.
    fn find(path: &str) -> Result<Self, &'static str> {
        let of = |library| Self { library, ..Self::default() };
        match path {
            "c" => {
                let library = find_library("liblaxity_client.so");
                library
                    .filter(|_| find_program("python3").is_some())
                    .map(of)
                    .ok_or("needs python3 and liblaxity_client.so (cargo build -p laxity-client-c)")
            }
            "nccl" => find_nccl_plugin(&LabConfig::default())
                .map(of)
                .map_err(|_| "needs libnccl-net-laxity.so (cargo build -p laxity-nccl)"),
            "mooncake" => Self::on_mooncake(),
            "mooncake_c" => Self::on_mooncakes_c_interface(),
            "engine" => find_engine(None)
                .map(|program| Self { program, ..Self::default() })
                .map_err(|_| "needs laxity-engine (cargo build -p laxity-engine)"),
            _ => Ok(Self::default()),
        }
    }

    fn on_mooncake() -> Result<Self, &'static str> {
        let library = find_library("lib_laxity.so");
        let program = std::env::current_exe().unwrap_or_default();
        // This program lies in target/PROFILE of the repository, or is started there.
        let checkouts = program.ancestors().nth(3).into_iter().chain([Path::new(".")]);
        let mut sources = checkouts.map(|checkout| checkout.join("mooncake-adapter/python"));
        Ok(Self {
            program: prepare::prepared_python()
                .ok_or("needs Mooncake from PyPI (laxity lab faults --prepare)")?,
            library: library.ok_or("needs lib_laxity.so (cargo build -p laxity-python)")?,
            sources: sources
                .find(|folder| folder.is_dir())
                .ok_or("needs mooncake-adapter/python, which only a checkout has")?,
            ..Self::default()
        })
    }

    fn on_mooncakes_c_interface() -> Result<Self, &'static str> {
        let mooncake = Self::on_mooncake()?;
        let built = "needs liblaxity.so and liblaxity_mooncake.so (cargo build -p laxity-verbs -p \
                     laxity-mooncake)";
        let engine = prepare::prepared_c_interface()
            .ok_or("needs a library with Mooncake's C interface (laxity lab faults --prepare)")?;
        let [verbs, own] = ["liblaxity.so", "liblaxity_mooncake.so"].map(find_library);
        Ok(Self { preload: vec![verbs.ok_or(built)?, own.ok_or(built)?, engine], ..mooncake })
    }
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

#[derive(Clone, Copy, Debug)]
pub(super) struct NcclNetwork {
    pub(super) settings: &'static [(&'static str, &'static str)],
    /// Number of each worker's device.
    pub(super) receiver: usize,
    pub(super) sender: usize,
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
    /// Programs of the paths that are used. Only the guest uses `verbs`, as it has the devices.
    programs: BTreeMap<&'static str, PathPrograms>,
    pub(super) answers: EngineAnswers,
    pub plant: Option<Plant>,
    pub plant_on: String,
    pub coordinator: Option<PathBuf>,
    pub full_rate: bool,
    is_named: bool,
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
        let is_named = !paths.is_empty();
        let is_wanted = |path: &&str| !is_named || paths.iter().any(|other| other == path);
        let (mut programs, mut lacks) = (BTreeMap::new(), Vec::new());
        for path in PATHS.into_iter().filter(is_wanted) {
            match PathPrograms::find(path) {
                Ok(found) => drop(programs.insert(path, found)),
                Err(needs) => lacks.push(lack(path, needs)),
            }
        }
        if is_named && !lacks.is_empty() {
            return Err(CannotRun(lacks));
        }
        let coordinator = find_own("laxity-coordinator");
        if coordinator.is_none() {
            let needs = "need laxity-coordinator (cargo build -p laxity-coordinator)";
            lacks.push(lack("faults of the coordinator", needs));
        }
        let daemon = |named| find_daemon(named).map_err(|lack| CannotRun(vec![lack]));
        Ok(Self {
            laxityd: daemon(laxityd)?,
            then: then.map(|_| daemon(then)).transpose()?,
            programs,
            answers: EngineAnswers::default(),
            plant,
            plant_on: plant_on.to_owned(),
            coordinator,
            full_rate: false,
            is_named,
            pace: HERE,
            left_out: lacks.iter().map(Lack::to_string).collect(),
        })
    }

    /// Returns the setting of a campaign on verbs in the guest, and with the NCCL plugin over verbs
    /// if there is one.
    pub fn in_guest(
        laxityd: PathBuf,
        verbs: PathPrograms,
        nccl_plugin: Option<PathBuf>,
        plant: Option<Plant>,
    ) -> Self {
        let (mut programs, mut left_out) = (BTreeMap::from([("verbs", verbs)]), Vec::new());
        match nccl_plugin {
            Some(library) => {
                programs.insert("nccl", PathPrograms { library, ..PathPrograms::default() });
            }
            None => left_out.push("nccl: needs libnccl-net-laxity.so (--nccl-plugin)".to_owned()),
        }
        Self {
            laxityd,
            then: None,
            programs,
            answers: EngineAnswers::default(),
            plant,
            plant_on: "verbs".to_owned(),
            coordinator: None,
            full_rate: false,
            is_named: true,
            pace: IN_GUEST,
            left_out,
        }
    }

    pub(super) fn kinds(&self) -> Vec<FaultKind> {
        let can = |kind: &FaultKind| self.coordinator.is_some() || !kind.needs_coordinator();
        let more = if self.uses("verbs") { &FaultKind::VERBS[..] } else { &[] };
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
        if !self.is_named {
            round.keep(&self.draw_paths(seed));
        }
        let heavy = ["mooncake", "mooncake_c", "engine"];
        if round.programs.len() > 1 && heavy.iter().any(|path| round.uses(path)) {
            round.pace.wait_max = round.pace.wait_max.max(BESIDE_HEAVY_MAX);
        }
        round
    }

    /// Returns the setting of a soak: workers send as fast as they can, and of Mooncake's two paths
    /// one is used, unless somebody named them.
    pub(super) fn for_soak(&self) -> Self {
        let mut soak = Self { full_rate: true, ..self.clone() };
        if !self.is_named && self.uses("mooncake") {
            soak.programs.remove("mooncake_c");
        }
        soak
    }

    /// Asks an engine alone for the answers, if engines are used.
    pub(super) fn prepare(&self) -> Result<(), LabError> {
        self.programs.get("engine").map_or(Ok(()), |it| self.answers.of(&it.program).map(drop))
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

    pub(super) fn keep(&mut self, paths: &[&str]) {
        self.programs.retain(|path, _| paths.contains(path));
    }

    fn usable(&self) -> Vec<&'static str> {
        PATHS.into_iter().filter(|path| self.uses(path)).collect()
    }

    pub fn uses(&self, path: &str) -> bool {
        self.programs.contains_key(path)
    }

    pub(super) fn programs(&self, path: &str) -> PathPrograms {
        self.programs.get(path).cloned().unwrap_or_default()
    }

    /// Whether all paths of the campaign are among these.
    pub(super) fn has_only(&self, paths: &[&str]) -> bool {
        self.programs.keys().all(|path| paths.contains(path))
    }

    /// Returns the paths of the round with this seed, if processes play it.
    pub(super) fn paths_of(&self, seed: u64) -> Vec<String> {
        self.of_round(seed).usable().into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_guest() -> Setting {
        Setting::in_guest("laxityd".into(), PathPrograms::default(), Some("n".into()), None)
    }

    /// A setting with each path, none of which can be played.
    fn with_all_paths() -> Setting {
        let programs = PATHS.map(|path| (path, PathPrograms::default())).into();
        Setting { programs, is_named: false, pace: HERE, ..in_guest() }
    }

    #[test]
    fn rounds_take_turns_over_all_paths_and_a_seed_gives_the_same() {
        let setting = with_all_paths();
        let of = |seed| setting.of_round(seed).usable();
        let mut seen: Vec<&str> = (0..20).flat_map(of).collect();
        assert_eq!(seen.len(), 20 * ROUND_PATHS);
        let mooncakes = |path: &&&str| path.starts_with("mooncake");
        assert!(seen.chunks(ROUND_PATHS).all(|round| {
            let clients = round.iter().filter(|path| ["client", "c"].contains(path));
            let mooncakes = round.iter().filter(mooncakes).count();
            mooncakes == 0 || mooncakes == 1 && clients.count() == 0
        }));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), PATHS.len());
        for seed in 0..20 {
            let round = setting.of_round(seed);
            assert_eq!(round.usable(), of(seed));
            let heavy = ["mooncake", "mooncake_c", "engine"].iter().any(|path| round.uses(path));
            assert_eq!(round.pace.wait_max > WAIT_MAX, heavy, "{:?}", round.usable());
        }
    }

    #[test]
    fn named_paths_and_the_path_of_a_planted_bug_are_in_each_round() {
        let named = Setting { is_named: true, ..with_all_paths() };
        assert_eq!(named.of_round(1).usable(), PATHS);
        let plant_on = "mooncake".to_owned();
        let bugged = Setting { plant: Some(Plant::Drop), plant_on, ..with_all_paths() };
        assert!((0..20).all(|seed| bugged.of_round(seed).uses("mooncake")));
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
        assert!(in_guest().kinds().contains(&FaultKind::ClientForked));
    }

    #[test]
    fn the_daemon_has_the_nic_that_nccls_messages_name() {
        let mut settings = HERE.nccl.settings.iter();
        let interface = settings.find(|(name, _)| *name == "NCCL_SOCKET_IFNAME");
        assert!(interface.is_some_and(|(_, nic)| HERE.nics.contains(nic)), "{interface:?}");
    }
}
