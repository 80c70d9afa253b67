//! Finds `liblaxity.so` and checks whether it can be preloaded.

use std::env;
use std::path::{Path, PathBuf};

use laxity_files::ReadError;
use thiserror::Error;

use crate::program::{Binary, FileKind, inspect};

/// Environment variable with the path of the library, as `--library` has it.
pub const LIBRARY_ENV: &str = "LAXITY_LIBRARY";
const NAME: &str = "liblaxity.so";
/// Further libraries for the jobs of a profile, in the order of LD_PRELOAD.
const OF_PROFILES: [(&str, &[&str]); 3] = [
    ("dynamo", &["liblaxity_nixl.so"]),
    ("mooncake", &["liblaxity_mooncake.so", "liblaxity_nixl.so"]),
    ("nixl", &["liblaxity_nixl.so"]),
];

/// The reason why there is no library to preload.
#[derive(Debug, Error)]
pub enum LibraryError {
    /// The option or the variable names something else. Correct it.
    #[error("{path} is no file; --library and ${LIBRARY_ENV} need the path of {NAME}",
        path = .0.display())]
    NotAFile(PathBuf),
    /// None of the usual folders, which the text lists, has it. Name it, or install it.
    #[error(
        "{NAME} is in none of {0}; name it with --library PATH or ${LIBRARY_ENV}, or install it"
    )]
    Missing(String),
    /// LD_PRELOAD can't name the path. A link to the library elsewhere helps.
    #[error(
        "{0} has a space or a colon in its path, where LD_PRELOAD would split it; put a link \
        to the library into another folder"
    )]
    Unquotable(String),
    /// The file can't be read.
    #[error("cannot read {path}: {cause}")]
    Unreadable {
        /// Path of the library.
        path: String,
        /// The cause.
        cause: ReadError,
    },
    /// The file is something else. Install the library again, or name another.
    #[error("{0} is no shared library")]
    NotALibrary(String),
}

/// Returns the library: `chosen`, else `$LAXITY_LIBRARY`, else the first of [`places`] that exists.
pub fn find(chosen: Option<&Path>) -> Result<PathBuf, LibraryError> {
    let named = env::var_os(LIBRARY_ENV).filter(|value| !value.is_empty());
    if let Some(path) = chosen.map(Path::to_owned).or(named.map(PathBuf::from)) {
        if !path.is_file() {
            return Err(LibraryError::NotAFile(path));
        }
        return Ok(path);
    }
    let places = places(env::current_exe().ok().as_deref());
    match places.iter().find(|place| place.is_file()) {
        Some(found) => Ok(found.clone()),
        None => {
            let folders = places.iter().filter_map(|place| place.parent());
            let looked: Vec<String> = folders.map(|folder| folder.display().to_string()).collect();
            Err(LibraryError::Missing(looked.join(", ")))
        }
    }
}

/// Returns the paths to search, most likely first: beside a program in a build folder, where `make
/// install` puts it, and where packages put it.
fn places(executable: Option<&Path>) -> Vec<PathBuf> {
    let multiarch = format!("{}-linux-gnu", env::consts::ARCH);
    let mut folders = Vec::new();
    if let Some(beside) = executable.and_then(Path::parent) {
        folders.push(beside.to_owned());
        if let Some(prefix) = beside.parent() {
            let lib = prefix.join("lib");
            folders.extend([lib.join(&multiarch).join("laxity"), lib.join("laxity"), lib]);
        }
    }
    for lib in ["/usr/local/lib", "/usr/lib"].map(Path::new) {
        folders.extend([lib.join(&multiarch).join("laxity"), lib.join("laxity")]);
        folders.extend([lib.join(&multiarch), lib.to_owned()]);
    }
    folders.extend(["/usr/lib64/laxity", "/usr/lib64"].map(PathBuf::from));
    let mut places: Vec<PathBuf> = Vec::new();
    for place in folders.into_iter().map(|folder| folder.join(NAME)) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// Returns the further libraries for jobs of a profile. They belong beside `library`.
pub fn of_profile(profile: &str, library: &Path) -> Vec<PathBuf> {
    let names =
        OF_PROFILES.iter().filter(|(name, _)| *name == profile).flat_map(|(_, names)| *names);
    names.map(|name| library.with_file_name(name)).collect()
}

/// Checks that the loader can preload the library. Returns the kind of its machine code.
pub fn check(path: &Path) -> Result<Binary, LibraryError> {
    let text = path.to_string_lossy().into_owned();
    // ld.so(8): entries are separated by spaces or colons, which can't be quoted.
    if text.contains([' ', ':']) {
        return Err(LibraryError::Unquotable(text));
    }
    match inspect(path) {
        Err(cause) => Err(LibraryError::Unreadable { path: text, cause }),
        Ok(FileKind::Dynamic(binary) | FileKind::Static(binary)) if binary.shared => Ok(binary),
        Ok(_) => Err(LibraryError::NotALibrary(text)),
    }
}

/// Returns LD_PRELOAD with `library` first and the present entries behind it. An entry that is
/// present already, as with `laxity run` in `laxity run`, is not repeated.
pub fn preload(library: &str, present: Option<&str>) -> String {
    let others = present
        .unwrap_or_default()
        .split([' ', ':'])
        .filter(|entry| !entry.is_empty() && *entry != library);
    let entries: Vec<&str> = [library].into_iter().chain(others).collect();
    entries.join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_preloaded_first_and_the_rest_keeps_its_order() {
        assert_eq!(preload("/a/l.so", None), "/a/l.so");
        assert_eq!(preload("/a/l.so", Some("")), "/a/l.so");
        assert_eq!(preload("/a/l.so", Some("/b.so /c.so:/d.so")), "/a/l.so:/b.so:/c.so:/d.so");
        assert_eq!(preload("/a/l.so", Some("/b.so:/a/l.so")), "/a/l.so:/b.so");
    }

    #[test]
    fn it_is_looked_for_beside_the_program_then_where_packages_put_it_and_nowhere_twice() {
        let places = places(Some("/usr/local/bin/laxity".as_ref()));
        assert_eq!(places[0], Path::new("/usr/local/bin/liblaxity.so"));
        assert!(places.contains(&PathBuf::from("/usr/local/lib/liblaxity.so")));
        let multiarch = format!("/usr/lib/{}-linux-gnu/laxity/liblaxity.so", env::consts::ARCH);
        assert!(places.contains(&PathBuf::from(multiarch)));
        let mut once = places.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), places.len());
    }
}
