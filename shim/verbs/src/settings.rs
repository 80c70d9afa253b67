//! What `laxity run`, or whoever sets `LD_PRELOAD`, wants of this process.

use std::sync::OnceLock;
use std::time::Duration;

use laxity_client::{Client, Mode, Options};
use laxity_profile::Profile;

/// Read once, when the first device is opened.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) profile: Profile,
    /// Objective on the time to first token for requests that say none.
    pub(crate) slo_ttft: Option<Duration>,
    pub(crate) options: Options,
}

impl Settings {
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(Self::from_env)
    }

    /// Nothing here stops a job: what can't be used is said once and replaced by what is cautious.
    fn from_env() -> Self {
        let profile = Profile::from_env().unwrap_or_else(|error| {
            eprintln!("laxity: {error}; going on with the profile `default`");
            Profile::default()
        });
        let mut options = Options::from_env();
        // Whoever wants less has it.
        options.mode = options.mode.min(profile.mode.unwrap_or_default());
        let slo_ttft = profile.objective().unwrap_or_else(|error| {
            eprintln!("laxity: {error}; going on without an objective");
            None
        });
        Self {
            profile,
            slo_ttft,
            options,
        }
    }

    pub(crate) fn is_off(&self) -> bool {
        self.options.mode == Mode::Off
    }

    pub(crate) fn client(&self) -> Client {
        Client::attach(self.options.clone())
    }
}
