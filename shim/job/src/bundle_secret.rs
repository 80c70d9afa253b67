//! The secret of a job that bundles queue pairs, from the file that `LAXITY_BUNDLES` names.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Largest secret that is read, in bytes.
const BYTES_MAX: u64 = 4096;
/// Shortest secret, in bytes. A shorter one could be guessed from a recorded message.
const BYTES_MIN: usize = 16;
/// Permissions of a file's mode for users that are neither its owner nor in its group.
const OTHERS: u32 = 0o007;

/// The secret by which two processes of a job know each other. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct BundleSecret(Vec<u8>);

impl fmt::Debug for BundleSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BundleSecret(…)")
    }
}

impl BundleSecret {
    /// Returns the secret with these bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// Reads a secret. A line break at its end doesn't count.
    ///
    /// # Errors
    /// The file can't be read, other users have access to it, or it is too short. The job then runs
    /// without bundles.
    pub fn read(path: &str) -> Result<Self, String> {
        let file = laxity_files::open(Path::new(path)).map_err(|error| error.to_string())?;
        let mode = file.metadata().map_err(|error| error.to_string())?.mode();
        if mode & OTHERS != 0 {
            return Err(String::from("other users have access to the file; use mode 0600 or 0640"));
        }
        let mut bytes = Vec::new();
        laxity_files::limited(file, BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|error| error.to_string())?;
        while bytes.last().is_some_and(|last| matches!(last, b'\n' | b'\r')) {
            bytes.pop();
        }
        if bytes.len() < BYTES_MIN {
            return Err(format!("the secret has fewer than {BYTES_MIN} bytes"));
        }
        Ok(Self(bytes))
    }

    /// Returns the bytes of the secret, the key of the messages between the two libraries.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_secret_is_long_enough_and_hidden_from_other_users() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let name = path.to_str().unwrap();
        assert!(BundleSecret::read(name).is_err(), "there is no file");
        let write = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            BundleSecret::read(name)
        };
        let secret = write("0123456789abcdef\n", 0o600).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "BundleSecret(…)");
        assert!(write("0123456789abcdef\n", 0o604).unwrap_err().contains("other users"));
        assert!(write("0123456789abcde\n", 0o600).unwrap_err().contains("16 bytes"));
    }
}
