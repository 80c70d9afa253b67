//! Read access to `/sys`, `/proc` and `/etc` of this machine, or of another one below a folder.
//!
//! Tools describe this machine only. For another one, their recorded outputs are read, in the form
//! of sosreport: `sos_commands/ANY/COMMAND`, where `_` stands for blanks in the command line.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Maximum size that is read of a file. The `/proc/PID/maps` of a serving engine has about 2 MiB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// The folder that is used in place of `/`.
#[derive(Clone, Debug)]
pub(crate) struct Root(PathBuf);

impl Root {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Returns the trimmed text of a file, or `None` if it can't be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(path)?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(crate) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = laxity_files::open(&self.at(path)).ok()?;
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Returns the sorted names in a folder. There are none if it does not exist.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.parse::<u64>().ok(), name.clone()));
        names
    }

    /// Returns the target of a symbolic link, or `None` if it can't be read.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Reports whether this is the real root, rather than a folder with files of another machine.
    pub(crate) fn is_real(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// Returns the output of a tool, or the recorded one of another machine.
    pub(crate) fn ask(&self, program: &str, arguments: &[&str]) -> Option<String> {
        if self.is_real() { output(program, arguments) } else { self.recorded(program, arguments) }
    }

    /// Returns the first recorded output of a command, whatever its options.
    fn recorded(&self, program: &str, arguments: &[&str]) -> Option<String> {
        const FOLDER: &str = "/sos_commands";
        let words = |text: &str| -> Vec<String> {
            text.split(|c: char| !c.is_alphanumeric()).map(str::to_owned).collect()
        };
        let is_option = |word: &str| word.starts_with('-') || ["show", "dev"].contains(&word);
        let named = arguments.iter().filter(|word| !is_option(word));
        let wanted = words(&named.fold(program.to_owned(), |line, word| line + " " + word));
        let is_of_command = |file: &String| {
            let found = words(file.trim_end_matches(".txt").trim_end_matches(".json"));
            let mut rest = found.iter();
            wanted.iter().all(|word| rest.any(|other| other == word))
                && (found.first(), found.last()) == (wanted.first(), wanted.last())
        };
        let folders = self.names(FOLDER).into_iter().map(|name| format!("{FOLDER}/{name}"));
        folders.chain([FOLDER.to_owned()]).find_map(|folder| {
            let file = self.names(&folder).into_iter().find(is_of_command)?;
            self.text(&format!("{folder}/{file}"))
        })
    }
}

/// Returns the output of a tool, if it is installed and succeeds.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let run = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    run.status.success().then(|| String::from_utf8_lossy(&run.stdout).into_owned())
}
