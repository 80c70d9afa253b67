//! The mode that an operator ordered with `laxity enforce`, instead of the configured one.
//!
//! A file keeps the order, so that it outlasts reloads, restarts and upgrades. The file is in the
//! state folder of systemd, or else beside the control socket, where no file survives a reboot. An
//! order ends when the configured mode changes: the newest word of an operator counts.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use crate::config::Mode;

/// systemd's name for the folder of `StateDirectory=`.
const STATE_FOLDER: &str = "STATE_DIRECTORY";
const BYTES_MAX: u64 = 64;

/// The configured mode and the ordered one.
#[derive(Debug)]
pub struct ModeOrder {
    file: PathBuf,
    configured: Mode,
    ordered: Option<Mode>,
}

impl ModeOrder {
    /// Reads the order that was given before this start, for a daemon with the control socket
    /// `control` and the mode `configured`.
    pub fn read(control: &Path, configured: Mode) -> Self {
        let file = match env::var_os(STATE_FOLDER).filter(|folder| !folder.is_empty()) {
            Some(folder) => PathBuf::from(folder).join("mode"),
            None => {
                let mut beside = control.as_os_str().to_owned();
                beside.push(".mode");
                beside.into()
            }
        };
        Self::from_file(file, configured)
    }

    fn from_file(file: PathBuf, configured: Mode) -> Self {
        let mut order = Self { file, configured, ordered: None };
        match laxity_files::read_to_string(&order.file, BYTES_MAX) {
            Ok(text) => match parsed(&text) {
                Some((mode, instead_of)) if instead_of == configured => order.ordered = Some(mode),
                Some(_) => order.end(),
                None => warn!(file = %order.file.display(), "no mode is in it; it is ignored"),
            },
            Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => {}
            Err(error) => {
                warn!(file = %order.file.display(), %error, "the ordered mode can't be read");
            }
        }
        order
    }

    /// Returns the mode in force.
    pub fn mode(&self) -> Mode {
        self.ordered.unwrap_or(self.configured)
    }

    /// Returns the configured mode if another one is ordered.
    pub fn replaced(&self) -> Option<Mode> {
        self.ordered.map(|_| self.configured)
    }

    /// Takes the mode of a configuration that was read again, and returns the mode in force.
    pub fn configure(&mut self, configured: Mode) -> Mode {
        if configured != self.configured {
            self.configured = configured;
            self.end();
        }
        self.mode()
    }

    /// Puts an ordered mode in force, and keeps it in the file.
    ///
    /// # Errors
    /// The file can't be written. The order is in force until a restart.
    pub fn order(&mut self, mode: Mode) -> io::Result<()> {
        self.ordered = (mode != self.configured).then_some(mode);
        if self.ordered.is_none() {
            return removed(&self.file);
        }
        let text = format!("{} instead of {}\n", mode.name(), self.configured.name());
        let new = self.file.with_extension("new");
        removed(&new)?;
        fs::write(&new, text)?;
        fs::rename(&new, &self.file)
    }

    fn end(&mut self) {
        self.ordered = None;
        let (file, mode) = (self.file.display(), self.configured.name());
        match removed(&self.file) {
            Ok(()) => info!(mode, "the configured mode changed, so that of `laxity enforce` ended"),
            Err(error) => warn!(%file, %error, "the ordered mode has ended; remove its file"),
        }
    }

    /// Returns the file that keeps the order.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

fn parsed(text: &str) -> Option<(Mode, Mode)> {
    let (mode, configured) = text.trim_end().split_once(" instead of ")?;
    Some((Mode::from_name(mode)?, Mode::from_name(configured)?))
}

fn removed(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_lasts_until_the_configured_mode_changes_or_is_ordered() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("mode");
        let read = |configured| ModeOrder::from_file(file.clone(), configured);
        let mut order = read(Mode::Observe);
        assert_eq!((order.mode(), order.replaced()), (Mode::Observe, None));
        order.order(Mode::Enforce).expect("written");
        assert_eq!((order.mode(), order.replaced()), (Mode::Enforce, Some(Mode::Observe)));
        assert_eq!(order.configure(Mode::Observe), Mode::Enforce);
        assert_eq!(read(Mode::Observe).mode(), Mode::Enforce);
        // The configured mode changed while the daemon ran, or before it started.
        assert_eq!(order.configure(Mode::Off), Mode::Off);
        assert_eq!(read(Mode::Observe).mode(), Mode::Observe);
        read(Mode::Observe).order(Mode::Enforce).expect("written");
        assert_eq!(read(Mode::Off).mode(), Mode::Off);
        assert!(!file.exists(), "a later return to observe is not an order to enforce");
        let mut order = read(Mode::Observe);
        order.order(Mode::Enforce).expect("written");
        order.order(Mode::Observe).expect("removed");
        assert!(order.replaced().is_none() && !file.exists());
    }

    #[test]
    fn what_is_no_order_is_ignored() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("mode");
        let long = "enforce".repeat(100);
        for text in ["", "enforce", "enforce instead of nothing", "x instead of observe", &long] {
            fs::write(&file, text).expect("written");
            assert_eq!(ModeOrder::from_file(file.clone(), Mode::Observe).mode(), Mode::Observe);
        }
        let nowhere = folder.path().join("missing/mode");
        let mut order = ModeOrder::from_file(nowhere, Mode::Observe);
        assert!(order.order(Mode::Enforce).is_err());
        assert_eq!(order.mode(), Mode::Enforce, "it holds until a restart");
    }
}
