//! What `laxity run`, or whoever sets `LD_PRELOAD`, wants of this process.

use std::sync::OnceLock;
use std::time::Duration;

use laxity_client::{Client, Mode, Options};
use laxity_profile::{Job, Profile};

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

    fn from_env() -> Self {
        let job = Job::of_this_process();
        Self {
            profile: job.profile.clone(),
            slo_ttft: job.slo_ttft,
            options: Options::from_env(),
        }
    }

    pub(crate) fn is_off(&self) -> bool {
        self.options.mode == Mode::Off
    }

    pub(crate) fn client(&self) -> Client {
        Client::attach(self.options.clone())
    }
}
