//! The mode that an operator set with `laxity enforce`, in place of the configured one.
//!
//! A file keeps this mode over reloads, restarts and upgrades. The file is in the state folder of
//! systemd, or else beside the control socket, where no file survives a reboot. The operator's mode
//! ends when the configured mode changes: the newest decision counts.

use std::env;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::{info, warn};

use crate::config::Mode;
use crate::sockets::beside;

/// systemd's name for the folder of `StateDirectory=`.
const STATE_FOLDER: &str = "STATE_DIRECTORY";
const BYTES_MAX: u64 = 64;

/// The configured mode and the operator's.
#[derive(Debug)]
pub struct ModeOrder {
    file: Arc<OrderFile>,
    configured: Mode,
    ordered: Option<Mode>,
}

impl ModeOrder {
    /// Reads the mode that an operator set before this start, for a daemon with the control socket
    /// `control` and the mode `configured`. The caller stores the file once it serves: a daemon
    /// that finds another one running must not change the other's file.
    pub fn read(control: &Path, configured: Mode) -> Self {
        let file = match env::var_os(STATE_FOLDER).filter(|folder| !folder.is_empty()) {
            Some(folder) => PathBuf::from(folder).join("mode"),
            None => beside(control, ".mode"),
        };
        Self::from_file(file, configured)
    }

    fn from_file(path: PathBuf, configured: Mode) -> Self {
        let text = laxity_files::read_to_string(&path, BYTES_MAX);
        let file = Arc::new(OrderFile { path, unstored: Mutex::default() });
        let mut order = Self { file: Arc::clone(&file), configured, ordered: None };
        let path = file.path.display();
        match text.as_deref().map(parsed) {
            Ok(Some((mode, instead))) if instead == configured => order.ordered = Some(mode),
            Ok(Some(_)) => order.end(),
            Ok(None) => warn!(file = %path, "the file has no mode in it and is ignored"),
            Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => {}
            Err(error) => warn!(file = %path, %error, "the operator's mode can't be read"),
        }
        order
    }

    pub fn mode(&self) -> Mode {
        self.ordered.unwrap_or(self.configured)
    }

    /// Returns the configured mode if the operator's replaces it.
    pub fn replaced(&self) -> Option<Mode> {
        self.ordered.map(|_| self.configured)
    }

    /// Takes the mode of a configuration that was read again, and returns the mode in force. The
    /// caller stores the file afterwards.
    pub fn configure(&mut self, configured: Mode) -> Mode {
        if configured != self.configured {
            self.configured = configured;
            self.end();
        }
        self.mode()
    }

    /// Puts the operator's mode in force. The caller stores the file afterwards.
    pub fn order(&mut self, mode: Mode) {
        self.ordered = (mode != self.configured).then_some(mode);
        let text = |mode: Mode| format!("{} instead of {}\n", mode.name(), self.configured.name());
        *self.file.unstored.lock() = Some(self.ordered.map(text));
    }

    fn end(&mut self) {
        self.ordered = None;
        *self.file.unstored.lock() = Some(None);
        let mode = self.configured.name();
        info!(mode, "the configured mode changed, and that of `laxity enforce` no longer holds");
    }

    pub fn file(&self) -> Arc<OrderFile> {
        Arc::clone(&self.file)
    }
}

/// The file that keeps the operator's mode.
#[derive(Debug)]
pub struct OrderFile {
    path: PathBuf,
    /// The text that is not in the file yet, or `Some(None)` if there should be no file.
    unstored: Mutex<Option<Option<String>>>,
}

impl OrderFile {
    /// Writes the operator's mode to the file and to the disk, or removes the file. May wait for
    /// the disk. A mode that is set meanwhile is stored as well.
    pub fn store(&self) -> io::Result<()> {
        loop {
            let unstored = self.unstored.lock().clone();
            let Some(wanted) = &unstored else { return Ok(()) };
            match wanted {
                Some(text) => self.write(text)?,
                None => removed(&self.path)?,
            }
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
            let mut now = self.unstored.lock();
            if *now == unstored {
                *now = None;
            }
        }
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let new = self.path.with_extension("new");
        removed(&new)?;
        let mut file = File::create_new(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn parsed(text: &str) -> Option<(Mode, Mode)> {
    let (mode, configured) = text.trim_end().split_once(" instead of ")?;
    Some((Mode::from_name(mode)?, Mode::from_name(configured)?))
}

/// Removes a file that may be gone already.
pub(super) fn removed(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordered(order: &mut ModeOrder, mode: Mode) -> io::Result<()> {
        order.order(mode);
        order.file().store()
    }

    #[test]
    fn an_order_lasts_until_the_configured_mode_changes_or_is_ordered() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("mode");
        let read = |configured| ModeOrder::from_file(file.clone(), configured);
        let mut order = read(Mode::Observe);
        assert_eq!((order.mode(), order.replaced()), (Mode::Observe, None));
        ordered(&mut order, Mode::Enforce).expect("written");
        assert_eq!((order.mode(), order.replaced()), (Mode::Enforce, Some(Mode::Observe)));
        assert_eq!(order.configure(Mode::Observe), Mode::Enforce);
        assert_eq!(read(Mode::Observe).mode(), Mode::Enforce);
        // The configured mode changed while the daemon ran.
        assert_eq!(order.configure(Mode::Off), Mode::Off);
        order.file().store().expect("removed");
        assert_eq!(read(Mode::Observe).mode(), Mode::Observe);
        // The configured mode changed before the daemon started.
        ordered(&mut read(Mode::Observe), Mode::Enforce).expect("written");
        let order = read(Mode::Off);
        assert_eq!(order.mode(), Mode::Off);
        order.file().store().expect("removed");
        assert!(!file.exists(), "a later return to observe is not an order to enforce");
        let mut order = read(Mode::Observe);
        ordered(&mut order, Mode::Enforce).expect("written");
        ordered(&mut order, Mode::Observe).expect("removed");
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
        let mut order = ModeOrder::from_file(folder.path().join("missing/mode"), Mode::Observe);
        assert!(ordered(&mut order, Mode::Enforce).is_err());
        assert_eq!(order.mode(), Mode::Enforce, "it holds until a restart");
    }
}
