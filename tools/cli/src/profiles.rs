//! `laxity profiles`: lists the job profiles, or prints one.

use clap::Args;
use laxity_cli::output::{OutputError, put, say};
use laxity_cli::table::table;
use laxity_job::{Profile, ProfileError};
use thiserror::Error;

/// The reason why profiles could not be shown.
#[derive(Debug, Error)]
pub(crate) enum ProfilesError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error("{0}")]
    Broken(String),
    #[error(transparent)]
    Output(#[from] OutputError),
}

#[derive(Args)]
pub(crate) struct ProfilesArgs {
    /// Print this profile, which you can copy and change [default: list all profiles]
    #[arg(value_name = "NAME")]
    show: Option<String>,
}

pub(crate) fn profiles(args: &ProfilesArgs) -> Result<(), ProfilesError> {
    match &args.show {
        Some(name) => {
            let (origin, text) = Profile::text(name)?;
            put(format!("# {origin}\n{text}").as_bytes())?;
            // The text is printed before the check, so that a person can find the mistake in it.
            Profile::parse(name, origin, &text)?;
            Ok(())
        }
        None => list(),
    }
}

fn list() -> Result<(), ProfilesError> {
    let mut rows = table(&["profile", "write", "read", "send", "atomic", "from", "for"]);
    let mut broken = Vec::new();
    for name in Profile::names() {
        match Profile::load(&name) {
            Ok(profile) => {
                let stage = profile.stage;
                let stages = [stage.write, stage.read, stage.send, stage.atomic];
                let mut row = vec![profile.name];
                row.extend(stages.map(|stage| stage.to_string()));
                row.extend([profile.origin.to_string(), profile.description]);
                rows.add_row(row);
            }
            Err(error) => broken.push(error.to_string()),
        }
    }
    say(&rows)?;
    if !broken.is_empty() {
        return Err(ProfilesError::Broken(broken.join("\n")));
    }
    Ok(())
}
