//! The log of a service, on standard error.

use std::io::IsTerminal;

use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, Layer, reload};

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Text for people and the journal.
    #[default]
    Text,
    /// JSON, with one object per line.
    Json,
}

/// Changes the filter of the log. An invalid filter changes nothing.
pub type SetLog = Box<dyn Fn(&str) + Send + Sync>;

/// The reason why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is invalid.
    #[error(transparent)]
    Filter(#[from] ParseError),
    /// The process has a log already.
    #[error(transparent)]
    Started(#[from] TryInitError),
}

/// Words that are a level by themselves. `EnvFilter` takes any other word for the name of a target
/// and logs only that target. So a misspelt level would silence the service.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Checks the filter of a log.
///
/// # Errors
/// Returns what is wrong with it, as the rest of a sentence that begins with the key.
pub fn check_filter(filter: &str) -> Result<(), String> {
    let known = LOG_LEVELS.join(", ");
    let bare = |part: &str| !part.contains(['=', '[']);
    if filter.trim().is_empty() {
        return Err(format!("is empty; the levels are {known}"));
    }
    for part in filter.split(',').map(str::trim).filter(|p| bare(p)) {
        let level = LOG_LEVELS.iter().any(|l| l.eq_ignore_ascii_case(part));
        if !level && !part.is_empty() {
            return Err(format!(
                "`{part}` is not a level; they are {known}. For a part of the program write \
                 TARGET=LEVEL"
            ));
        }
    }
    EnvFilter::try_new(filter)
        .map(drop)
        .map_err(|error| format!("`{filter}`: {error}; the levels are {known}"))
}

/// Starts the log. `filter` is a level, or directives such as `info,laxity_daemon::driver=debug`.
pub fn start_log(filter: &str, format: LogFormat) -> Result<SetLog, LogError> {
    let (filter, handle) = reload::Layer::new(EnvFilter::try_new(filter)?);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => {
            lines.with_target(false).with_ansi(std::io::stderr().is_terminal()).boxed()
        }
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).try_init()?;
    Ok(Box::new(move |text| {
        if let Ok(filter) = EnvFilter::try_new(text) {
            let _ = handle.reload(filter);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_no_target() {
        assert_eq!(check_filter("INFO,laxity_daemon::driver=debug"), Ok(()));
        for (filter, problem) in [("inf", "`inf` is not a level"), (" ", "empty"), ("a=b", "`a=b`")]
        {
            let said = check_filter(filter).expect_err("invalid");
            assert!(said.contains(problem), "{said}");
        }
    }
}
