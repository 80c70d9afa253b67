//! The program that a command would start, and whether the dynamic loader would apply LD_PRELOAD to
//! it.
//!
//! This reads only the ELF header and the program headers (System V gABI, chapters 4 and 5), or the
//! first line of a script.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use laxity_files::ReadError;

/// How execve(2) treats a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Machine code that the dynamic loader starts, or a shared library.
    Dynamic(Binary),
    /// Machine code that starts without a loader, so that LD_PRELOAD has no effect.
    Static(Binary),
    /// A script, with the interpreter and its arguments.
    Script(Vec<String>),
    /// Something else. The kernel reports the error.
    Other,
}

/// The properties of a file with machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binary {
    /// The word size: 32 or 64 bits.
    pub bits: u8,
    /// The architecture (`e_machine`).
    pub machine: u16,
    /// Whether the type is `ET_DYN`: a shared library, or a position-independent program.
    pub shared: bool,
}

/// Why LD_PRELOAD would have no effect on a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ignored {
    /// The program is linked statically.
    Static(PathBuf),
    /// The program changes user or group, so the loader ignores LD_PRELOAD.
    Privileged(PathBuf),
    /// The program has another architecture than the library.
    Foreign(PathBuf),
}

const PT_INTERP: u32 = 3;
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
/// Maximum number of interpreters in a chain of scripts. The kernel allows four.
const INTERPRETERS_MAX: usize = 4;

/// Returns the file that execvp(3) would start for `command`.
pub fn resolve(command: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    if command.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(command)).filter(|file| file.exists());
    }
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin"));
    env::split_paths(path)
        .map(|folder| folder.join(command))
        .find(|file| fs::metadata(file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0))
}

/// Determines the kind of a file.
pub fn inspect(path: &Path) -> Result<FileKind, ReadError> {
    let file = laxity_files::open(path)?;
    let mut head = [0; 256];
    let length = file.read_at(&mut head, 0)?;
    let head = &head[..length];
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        return Ok(FileKind::Script(line.split_whitespace().map(str::to_owned).collect()));
    }
    Ok(elf(&file, head).unwrap_or(FileKind::Other))
}

/// Parses `head` as an ELF header, and checks whether the file names a loader. Only little-endian
/// files are accepted, since Laxity runs on nothing else.
fn elf(file: &File, head: &[u8]) -> Option<FileKind> {
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    if head.get(..4)? != b"\x7fELF" || *head.get(5)? != 1 {
        return None;
    }
    let (bits, offset, entry_bytes, entries) = match *head.get(4)? {
        1 => (32, u64::from(word(28)?), half(42)?, half(44)?),
        2 => (64, long(32)?, half(54)?, half(56)?),
        _ => return None,
    };
    let kind = half(16)?;
    if kind != ET_EXEC && kind != ET_DYN {
        return None;
    }
    let binary = Binary { bits, machine: half(18)?, shared: kind == ET_DYN };
    for index in 0..u64::from(entries) {
        let mut kind = [0; 4];
        let at = offset.checked_add(index * u64::from(entry_bytes))?;
        file.read_exact_at(&mut kind, at).ok()?;
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Some(FileKind::Dynamic(binary));
        }
    }
    Some(FileKind::Static(binary))
}

/// Returns why `library` would not be preloaded into `program`, as far as the files show it.
pub fn ignored(program: &Path, library: Binary) -> Option<Ignored> {
    let mut program = program.to_owned();
    for _ in 0..=INTERPRETERS_MAX {
        let kind = inspect(&program);
        // For a script, only the interpreter's user and group count. A program that can be executed
        // but not read may still be privileged.
        if !matches!(kind, Ok(FileKind::Script(_))) && is_privileged(&program) {
            return Some(Ignored::Privileged(program));
        }
        match kind.ok()? {
            FileKind::Static(_) => return Some(Ignored::Static(program)),
            FileKind::Dynamic(binary) => {
                let same = (binary.bits, binary.machine) == (library.bits, library.machine);
                return (!same).then_some(Ignored::Foreign(program));
            }
            FileKind::Script(line) => program = interpreter(&line)?,
            FileKind::Other => return None,
        }
    }
    None
}

/// Returns the interpreter of a `#!` line. If it is env(1), this is the program that env looks up.
fn interpreter(line: &[String]) -> Option<PathBuf> {
    let first = PathBuf::from(line.first()?);
    if first.file_name() != Some(OsStr::new("env")) {
        return Some(first);
    }
    let looked_up = line[1..].iter().find(|word| !word.starts_with('-') && !word.contains('='))?;
    resolve(OsStr::new(looked_up), env::var_os("PATH").as_deref())
}

/// Reports whether `program` would change the effective user or group (AT_SECURE of ld.so).
fn is_privileged(program: &Path) -> bool {
    let (Ok(file), Ok(own)) = (fs::metadata(program), fs::metadata("/proc/self")) else {
        return false;
    };
    (file.mode() & 0o4000 != 0 && file.uid() != own.uid())
        || (file.mode() & 0o2010 == 0o2010 && file.gid() != own.gid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn own() -> Binary {
        match inspect(&env::current_exe().unwrap()).unwrap() {
            FileKind::Dynamic(binary) => binary,
            other => panic!("{other:?}"),
        }
    }

    /// Writes a 64-bit ELF header of `machine` with one program header of type `first`.
    fn written(folder: &Path, machine: u16, first: u32) -> PathBuf {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&ET_EXEC.to_le_bytes());
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1_u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&first.to_le_bytes());
        let path = folder.join(format!("p{machine}-{first}"));
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn a_program_with_a_loader_is_fine_and_one_without_ignores_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let library = own();
        let dynamic = written(folder.path(), library.machine, PT_INTERP);
        assert_eq!(ignored(&dynamic, library), None);
        let fixed = written(folder.path(), library.machine, 1);
        assert_eq!(ignored(&fixed, library), Some(Ignored::Static(fixed)));
        let foreign = written(folder.path(), library.machine + 1, PT_INTERP);
        assert_eq!(ignored(&foreign, library), Some(Ignored::Foreign(foreign)));
    }

    #[test]
    fn a_script_counts_as_its_interpreter_also_through_env() {
        let folder = tempfile::tempdir().unwrap();
        let fixed = written(folder.path(), own().machine, 1);
        let script = folder.path().join("script");
        fs::write(&script, format!("#!{} -x\n", fixed.display())).unwrap();
        assert_eq!(ignored(&script, own()), Some(Ignored::Static(fixed)));
        fs::write(&script, "#!/usr/bin/env -S A=1 sh -e\n").unwrap();
        assert_eq!(ignored(&script, own()), None);
        fs::write(&script, format!("#!{}\n", script.display())).unwrap();
        assert_eq!(ignored(&script, own()), None, "a script that interprets itself ends");
    }

    #[test]
    fn a_setuid_program_of_another_user_ignores_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let program = written(folder.path(), own().machine, PT_INTERP);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(ignored(&program, own()), None, "its owner is who runs it");
        if std::os::unix::fs::chown(&program, Some(12345), None).is_ok() {
            fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
            assert_eq!(ignored(&program, own()), Some(Ignored::Privileged(program)));
        }
    }

    #[test]
    fn truncated_headers_are_nothing_rather_than_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let whole = fs::read(written(folder.path(), 62, PT_INTERP)).unwrap();
        let cut = folder.path().join("cut");
        for end in 0..whole.len() {
            fs::write(&cut, &whole[..end]).unwrap();
            inspect(&cut).unwrap();
        }
    }
}
