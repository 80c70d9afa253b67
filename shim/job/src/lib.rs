//! The common parts of Laxity's libraries inside an application: settings and profiles, per-process
//! state, the report at exit, symbols of other libraries, and threads.
//!
//! The libraries are those for verbs, NCCL, Mooncake, NIXL, C and Python. Nothing here waits for a
//! daemon, and no setting stops a job. An unusable value is reported once, with its replacement
//! ([`settings`]).

mod bundle_secret;
pub mod environment;
pub mod exit;
mod file;
pub mod fork;
mod locate;
pub mod monitor;
mod profile;
pub mod report;
mod settings;
pub mod symbol;
#[cfg(test)]
mod tests;
pub mod thread;

pub use bundle_secret::BundleSecret;
pub use environment::Environment;
pub use profile::{
    FILE_BYTES_MAX, FOLDER, FOLDER_ENV, Origin, Profile, ProfileError, QueuePairSettings, Stages,
};
pub use settings::{Job, PROFILE_ENV, process_name};
