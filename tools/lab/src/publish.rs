//! Where reports go: to files, and to standard output, which an argument names by `-`.

use std::path::Path;

use anyhow::Result;
use laxity_cli::output::{self, say};
use serde::Serialize;

pub(crate) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Checks that the files can be written, before something takes minutes to make their content.
pub(crate) fn check(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<()> {
    for path in paths.into_iter().filter(|path| !is_stdout(path.as_ref())) {
        output::check(path.as_ref())?;
    }
    Ok(())
}

/// Writes a text to a file or to standard output.
#[cfg(feature = "clusters")]
pub(crate) fn write(path: &Path, text: &str) -> Result<(), output::OutputError> {
    let bytes = text.as_bytes();
    if is_stdout(path) { output::put(bytes) } else { output::replace(path, bytes) }
}

/// Writes a report as JSON, if that is asked for. Its table goes to standard output, or to standard
/// error if the JSON goes there.
pub(crate) fn publish(json: Option<&Path>, report: &impl Serialize, table: &str) -> Result<()> {
    match json {
        Some(path) if is_stdout(path) => {
            say(output::json(report)?)?;
            eprintln!("{table}");
            return Ok(());
        }
        Some(path) => output::replace(path, output::json(report)?.as_bytes())?,
        None => {}
    }
    Ok(say(table)?)
}
