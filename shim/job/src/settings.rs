//! The settings of a process, from its profile and its environment. They are read once, by the
//! first part of Laxity that needs them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_quantity::Nanos;
use laxity_shm::layout::Mode;

use crate::fork::Leaked;
use crate::{BundleSecret, Environment, Profile};

/// The variable that names the profile of a process. `laxity run --profile` sets it.
pub const PROFILE_ENV: &str = "LAXITY_PROFILE";

/// The profile of this process, with the environment's settings.
#[derive(Clone, Debug)]
pub struct Job {
    /// The profile that `$LAXITY_PROFILE` names, or `default`.
    pub profile: Profile,
    /// Objective on the time to first token for requests that have none: `$LAXITY_SLO_TTFT`, or
    /// else the profile's.
    pub slo_ttft: Option<Duration>,
    /// The lower of the profile's mode and `$LAXITY_MODE`. The daemon's own may be lower.
    pub mode: Mode,
    /// `$LAXITY_STALL_MS`: the stall timeout.
    pub stall_timeout: Option<Duration>,
    /// `$LAXITY_ATTACH_MS`: longest wait for a daemon when attaching.
    pub attach_timeout: Option<Duration>,
    /// The NICs of transfers whose library doesn't name one: `$LAXITY_NIC`, or else
    /// `$UCX_NET_DEVICES`.
    pub nics: Vec<String>,
    /// The secret in the file that `$LAXITY_BUNDLES` names. `None` means that no queue pairs are
    /// bundled.
    pub bundle_secret: Option<BundleSecret>,
    problems: Vec<String>,
}

impl Job {
    /// Returns the objective in nanoseconds, or 0 for none.
    pub fn objective_ns(&self) -> u64 {
        self.slo_ttft.map_or(0, |objective| u64::try_from(objective.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns the job of this process. No setting stops a process: an unusable one is replaced.
    #[inline]
    pub fn of_this_process() -> &'static Self {
        static JOB: Leaked<Job> = Leaked::none();
        JOB.get_or_make(|| Self::read(Environment::of_this_process()))
    }

    /// Returns the unusable settings and their replacements for the log. Only the first call in a
    /// process returns them, so that they are logged once.
    pub fn take_problems(&self) -> &[String] {
        // Relaxed, because only one caller has to get them.
        static TAKEN: AtomicBool = AtomicBool::new(false);
        if TAKEN.swap(true, Ordering::Relaxed) {
            return &[];
        }
        &self.problems
    }

    /// Prints [`Job::take_problems`] on standard error.
    pub fn complain(&self) {
        for problem in self.take_problems() {
            eprintln!("laxity: {problem}");
        }
    }

    /// Returns the unusable settings and their replacements.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Returns the job of an environment.
    pub fn read(mut from: Environment<'_>) -> Self {
        let name = from.text(PROFILE_ENV);
        let profile = Profile::load(name.as_deref().unwrap_or("default")).unwrap_or_else(|error| {
            from.note(error, "the profile `default`");
            Profile::default()
        });
        let own = from.text("LAXITY_SLO_TTFT").map(|_| {
            from.parsed("LAXITY_SLO_TTFT", "no objective", |text| {
                text.parse::<Nanos>().map(Duration::from)
            })
        });
        let mut millis =
            |name, holds| from.number(name, "milliseconds", holds).map(Duration::from_millis);
        let stall_timeout = millis("LAXITY_STALL_MS", "100");
        let attach_timeout = millis("LAXITY_ATTACH_MS", "the default");
        let nics = from.text("LAXITY_NIC").or_else(|| from.text("UCX_NET_DEVICES"));
        let bundle_secret = from.parsed("LAXITY_BUNDLES", "no bundles", BundleSecret::read);
        Self {
            slo_ttft: own.unwrap_or(profile.slo_ttft),
            mode: lower(&profile, &mut from),
            stall_timeout,
            attach_timeout,
            nics: nics.as_deref().map_or_else(Vec::new, devices),
            bundle_secret,
            profile,
            problems: from.into_problems(),
        }
    }
}

/// Returns the devices in a list such as `mlx5_0:1,mlx5_1:1`. Numbers of ports are left out.
fn devices(list: &str) -> Vec<String> {
    let names = list.split(',').map(|entry| entry.split(':').next().unwrap_or_default().trim());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the name of a process for people: `$LAXITY_NAME`, or the name of the executable.
pub fn process_name() -> Option<String> {
    let given = Environment::of_this_process().text("LAXITY_NAME");
    given.or_else(executable)
}

pub(crate) fn executable() -> Option<String> {
    let path = std::env::current_exe().ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// Returns the lower of the profile's mode and the environment's.
fn lower(profile: &Profile, from: &mut Environment<'_>) -> Mode {
    let own = from.text("LAXITY_MODE").map(|_| {
        let read = |text: &str| Mode::from_name(text).ok_or("write off, observe or enforce");
        // A misspelt mode must not delay traffic.
        from.parsed("LAXITY_MODE", "off", read).unwrap_or(Mode::Off)
    });
    own.unwrap_or_default().min(profile.mode.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Job {
        Job::read(Environment::new(&|name| {
            let found = pairs.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        }))
    }

    #[test]
    fn the_lower_of_the_modes_holds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.toml");
        let path = path.to_str().unwrap();
        for (profile, own, lower) in [
            ("", "", Mode::Enforce),
            ("observe", "", Mode::Observe),
            ("observe", "enforce", Mode::Observe),
            ("enforce", "observe", Mode::Observe),
            ("off", "enforce", Mode::Off),
            ("", "fast", Mode::Off),
        ] {
            let line = format!("mode = \"{profile}\"");
            std::fs::write(path, if profile.is_empty() { "" } else { &line }).unwrap();
            let job = of(&[(PROFILE_ENV, path), ("LAXITY_MODE", own)]);
            assert_eq!(job.mode, lower, "{profile} {own}");
        }
    }

    #[test]
    fn the_nics_of_a_process_are_laxitys_or_those_of_ucx() {
        let ucx = ("UCX_NET_DEVICES", "mlx5_0:1, mlx5_1:1,");
        assert_eq!(of(&[ucx]).nics, ["mlx5_0", "mlx5_1"]);
        assert_eq!(of(&[("LAXITY_NIC", "mlx5_3"), ucx]).nics, ["mlx5_3"]);
        assert_eq!(of(&[]).nics, Vec::<String>::new());
    }

    #[test]
    fn what_cannot_be_used_is_said_and_the_job_goes_on() {
        let job = of(&[
            (PROFILE_ENV, "no-such-profile"),
            ("LAXITY_SLO_TTFT", "soon"),
            ("LAXITY_MODE", "fast"),
            ("LAXITY_STALL_MS", "1s"),
            ("LAXITY_ATTACH_MS", "-1"),
            ("LAXITY_BUNDLES", "/no/such/secret"),
        ]);
        assert_eq!((job.profile, job.mode), (Profile::default(), Mode::Off));
        assert_eq!((job.slo_ttft, job.stall_timeout, job.attach_timeout), (None, None, None));
        assert_eq!(job.bundle_secret, None);
        let names = [
            "no-such", "LAXITY_SLO_TTFT", "STALL_MS", "ATTACH_MS", "LAXITY_BUNDLES",
            "LAXITY_MODE is `fast`",
        ];
        assert_eq!(job.problems.len(), names.len(), "{:?}", job.problems);
        for (problem, name) in job.problems.iter().zip(names) {
            assert!(problem.contains(name) && problem.contains("going on with"), "{problem}");
        }
        assert_eq!(of(&[]).problems, Vec::<String>::new());
    }
}
