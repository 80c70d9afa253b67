//! What this process's environment asks for, read once by whatever part of Laxity asks first.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_shm::layout::Mode;

use crate::Profile;

/// Says how far the scheduler may go in a process: what `--mode` of `laxity run` sets.
pub const MODE_ENV: &str = "LAXITY_MODE";

/// The profile of this process, and what the environment says beside it.
///
/// Every part of Laxity that attaches to a daemon takes the mode from here: the libraries for
/// verbs, NCCL and Mooncake, and programs that link `laxity.h` or import the Python package. So one
/// process has one mode.
#[derive(Clone, Debug)]
pub struct Job {
    /// The profile that `$LAXITY_PROFILE` names, or `default`.
    pub profile: Profile,
    /// Objective on the time to first token for requests that say none.
    pub slo_ttft: Option<Duration>,
    /// How far the scheduler may go: the lower of the profile's mode and `$LAXITY_MODE`. The
    /// daemon's own mode may be lower still.
    pub mode: Mode,
    problems: Vec<String>,
}

impl Job {
    /// The job of this process. Nothing in the environment stops a process: what can't be used is
    /// replaced by what is cautious.
    #[must_use]
    pub fn of_this_process() -> &'static Self {
        static JOB: OnceLock<Job> = OnceLock::new();
        JOB.get_or_init(Self::read)
    }

    /// What of the environment can't be used, and what holds instead, for the log of whoever asks.
    /// The first to ask in a process gets it, nobody else, so that it is said once.
    pub fn take_problems(&self) -> &[String] {
        // Relaxed: only one of those who ask must get it.
        static TAKEN: AtomicBool = AtomicBool::new(false);
        if TAKEN.swap(true, Ordering::Relaxed) {
            return &[];
        }
        &self.problems
    }

    /// [`Job::take_problems`], on standard error.
    pub fn complain(&self) {
        for problem in self.take_problems() {
            eprintln!("laxity: {problem}");
        }
    }

    fn read() -> Self {
        let mut problems = Vec::new();
        let profile = Profile::from_env().unwrap_or_else(|error| {
            problems.push(format!("{error}; going on with the profile `default`"));
            Profile::default()
        });
        let slo_ttft = profile.objective().unwrap_or_else(|error| {
            problems.push(format!("{error}; going on without an objective"));
            None
        });
        let own = std::env::var(MODE_ENV).ok().filter(|text| !text.is_empty());
        let mode = lower(profile.mode, own.as_deref(), &mut problems);
        Self {
            profile,
            slo_ttft,
            mode,
            problems,
        }
    }
}

/// The lower of what the profile and the environment say.
fn lower(profile: Option<Mode>, own: Option<&str>, problems: &mut Vec<String>) -> Mode {
    let own = own.map_or(Mode::default(), |text| {
        Mode::from_name(text).unwrap_or_else(|| {
            problems.push(format!(
                "{MODE_ENV} is `{text}`, which is no mode: write off, observe or enforce; going on \
                 with off"
            ));
            // A misspelt wish must not delay traffic.
            Mode::Off
        })
    });
    own.min(profile.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_of_the_modes_holds() {
        let mut problems = Vec::new();
        let mut of = |profile, own| lower(profile, own, &mut problems);
        assert_eq!(of(None, None), Mode::Enforce);
        assert_eq!(of(Some(Mode::Observe), None), Mode::Observe);
        assert_eq!(of(Some(Mode::Observe), Some("enforce")), Mode::Observe);
        assert_eq!(of(Some(Mode::Enforce), Some("observe")), Mode::Observe);
        assert_eq!(of(Some(Mode::Off), Some("enforce")), Mode::Off);
        assert_eq!(problems, Vec::<String>::new());
    }

    #[test]
    fn a_misspelt_mode_is_off_and_is_said() {
        let mut problems = Vec::new();
        assert_eq!(lower(None, Some("fast"), &mut problems), Mode::Off);
        assert!(problems[0].contains("`fast`"), "{problems:?}");
    }
}
