//! What `laxity run`, or whoever sets `LD_PRELOAD`, wants of this process.

use std::sync::OnceLock;
use std::time::Duration;

use laxity_client::{Mode, Stage};
use laxity_profile::{Job, Profile};

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

    fn from_env() -> Self {
        let job = Job::of_this_process();
        job.complain();
        Self {
            profile: job.profile.clone(),
            slo_ttft: job.slo_ttft,
            is_off: job.mode == Mode::Off,
        }
    }

    /// What a transfer is for if nobody says so: a WRITE and a READ of RDMA are, in this kind of
    /// job.
    pub(crate) fn stage(&self, opcode: core::ffi::c_int) -> Stage {
        match opcode {
            abi::WRITE => self.profile.stage.write,
            _ => self.profile.stage.read,
        }
    }
}
