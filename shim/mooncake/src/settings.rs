//! What `laxity run`, or whoever sets `LD_PRELOAD`, wants of this process.

use std::sync::OnceLock;
use std::time::Duration;

use laxity_client::{Mode, Options, Stage, hints};
use laxity_profile::Profile;

use crate::abi;

/// Read once, when the first engine is made.
#[derive(Debug)]
pub(crate) struct Settings {
    profile: Profile,
    /// Objective on the time to first token for requests that say none.
    pub(crate) slo_ttft: Option<Duration>,
    pub(crate) is_off: bool,
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
        let wanted = profile.mode.unwrap_or_default();
        hints::limit_mode(wanted);
        let slo_ttft = profile.objective().unwrap_or_else(|error| {
            eprintln!("laxity: {error}; going on without an objective");
            None
        });
        Self {
            profile,
            slo_ttft,
            is_off: wanted.min(Options::from_env().mode) == Mode::Off,
        }
    }

    /// What a transfer is for if nobody says so: a WRITE and a READ of RDMA are, in this kind of job.
    pub(crate) fn stage(&self, opcode: core::ffi::c_int) -> Stage {
        match opcode {
            abi::WRITE => self.profile.stage.write,
            _ => self.profile.stage.read,
        }
    }
}
