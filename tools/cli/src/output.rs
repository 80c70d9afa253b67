//! Output of results: to standard output, which the reader may close, and to files, which are
//! replaced as a whole.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

/// The reason why a result could not be written. The text contains the cause, so there is no
/// `source`, which would print it twice.
#[derive(Debug, Error)]
pub enum OutputError {
    /// A write to standard output failed. A closed pipe is no error.
    #[error("cannot write to standard output: {0}")]
    Stdout(io::Error),
    /// The file or folder cannot be written: name another one, or make room.
    #[error("cannot write {path}: {cause}", path = .path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// The value has no form in JSON, which is a mistake in this program.
    #[error("cannot write this as JSON: {0}")]
    Json(serde_json::Error),
}

impl OutputError {
    fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        |cause| Self::File { path, cause }
    }
}

/// Writes a line to standard output.
pub fn say(line: impl Display) -> Result<(), OutputError> {
    put(format!("{line}\n").as_bytes())
}

/// Returns a value as JSON that people can read.
pub fn json(value: &impl Serialize) -> Result<String, OutputError> {
    serde_json::to_string_pretty(value).map_err(OutputError::Json)
}

/// Writes to standard output. It is no error if the reader has closed the pipe (`… | head -1`).
pub fn put(bytes: &[u8]) -> Result<(), OutputError> {
    if cfg!(test) {
        // The test harness captures `print!` and shows it if the test fails.
        print!("{}", String::from_utf8_lossy(bytes));
        return Ok(());
    }
    laxity_files::print(bytes).map_err(|error| OutputError::Stdout(error.0))
}

/// Checks that `path` can be written later, without a change to its content.
pub fn check(path: &Path) -> Result<(), OutputError> {
    if fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        // To open a FIFO would wait for a reader.
        return Ok(());
    }
    let attempt = || match File::options().write(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let trial = beside(path);
            File::create(&trial)?;
            fs::remove_file(trial)
        }
        other => other.map(drop),
    };
    attempt().map_err(OutputError::of(path))
}

/// Replaces the content of `path`, all of it or nothing. Other things than files, such as
/// `/dev/null` or a FIFO, are written to.
pub fn replace(path: &Path, content: &[u8]) -> Result<(), OutputError> {
    let attempt = || match fs::canonicalize(path) {
        // `canonicalize` resolves links to the file that they name.
        Ok(file) if file.is_file() => rename_over(&file, content),
        Ok(other) => File::options().write(true).open(other)?.write_all(content),
        Err(error) if error.kind() == ErrorKind::NotFound => rename_over(path, content),
        Err(error) => Err(error),
    };
    attempt().map_err(OutputError::of(path))
}

fn rename_over(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = beside(path);
    let written = File::create(&new)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| {
            if let Ok(old) = fs::metadata(path) {
                fs::set_permissions(&new, old.permissions())?;
            }
            fs::rename(&new, path)
        });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

/// Returns an unused name in the same folder, from which the file can be renamed.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_through_links_and_what_is_no_file_is_written_to() {
        let folder = std::env::temp_dir().join(format!("laxity-output-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let (file, link) = (folder.join("file"), folder.join("link"));
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        check(&file).expect("writable");
        assert!(!file.exists(), "a check leaves nothing");
        replace(&file, b"one").expect("written");
        check(&link).expect("writable");
        replace(&link, b"two").expect("written");
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).expect("read"), b"two");
        check(Path::new("/dev/null")).expect("writable");
        replace(Path::new("/dev/null"), b"gone").expect("written");
        assert_eq!(fs::read_dir(&folder).expect("read").count(), 2);
        fs::remove_dir_all(folder).expect("removed");
    }
}
