//! The guest's kernel and initramfs, which are kept in a cache.
//!
//! The kernel is Debian's stock one (`linux-image-amd64`), because a host's own kernel seldom has
//! RDMA. Its package is downloaded and unpacked, never installed. The cache has this layout:
//!
//! ```text
//! CACHE/6.1.0-56-amd64/vmlinux             the ELF kernel
//!                     /lib/modules/…       its modules, with depmod's tables
//!                     /initrd-<hash>       busybox, modules and init.sh; the hash is of all three
//! ```
//!
//! A cached kernel is used without asking the network for a newer one. Remove the folder to get a
//! newer one. All files are made in temporary places and renamed, under a lock. So several
//! processes may start at once, and an interrupted one leaves nothing broken.

use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::vmlinux;
use crate::child::run;
use crate::error::LabError;
use crate::probe::{Lack, lack};
use crate::sandbox::find_program;

pub const CACHE_VARIABLE: &str = "LAXITY_VM_CACHE";

/// Debian's package that depends on the current stock kernel.
const META_PACKAGE: &str = "linux-image-amd64";

/// Modules to load before the root is mounted: transport and file systems, RDMA, and the router.
/// rxe computes checksums with `crc32_generic` (`crc32-pclmul` is slower when emulated).
const MODULES: &[&str] = &[
    "virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "crc32_generic", "veth",
    "rdma_rxe", "rdma_ucm", "sch_ingress", "sch_tbf", "sch_prio", "cls_flower", "act_gact",
];

/// Parts of the kernel's package that no guest needs. They are three quarters of it.
const LEFT_OUT: &[&str] = &[
    "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/net/ethernet", "drivers/scsi",
    "drivers/staging", "drivers/iio", "drivers/usb", "drivers/hwmon", "drivers/isdn", "sound",
];

const INIT: &str = include_str!("init.sh");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub kernel: PathBuf,
    /// The archive (cpio) that the kernel unpacks as its first file system.
    pub initrd: PathBuf,
    /// Path of `lib/modules` of this kernel.
    pub modules: PathBuf,
    /// The kernel's release, such as `6.1.0-56-amd64`.
    pub release: String,
}

pub fn cache_folder() -> PathBuf {
    let named = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    named(CACHE_VARIABLE)
        .or_else(|| named("XDG_CACHE_HOME").map(|folder| folder.join("laxity/vm")))
        .or_else(|| named("HOME").map(|folder| folder.join(".cache/laxity/vm")))
        .unwrap_or_else(|| std::env::temp_dir().join("laxity-vm-cache"))
}

pub fn cached_kernel(cache: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(cache).ok()?.flatten().map(|e| e.path());
    entries
        .filter(|folder| !file_name(folder).starts_with('.') && folder.join("vmlinux").is_file())
        .max_by_key(|folder| release_key(&file_name(folder)))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the numbers of a release as a sort key, so that 6.1.0-9 is older than 6.1.0-56.
fn release_key(release: &str) -> Vec<u64> {
    let numbers = release.split(|c: char| !c.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

pub fn lacks(cache: &Path) -> Vec<Lack> {
    let setup = "run `tools/setup.sh verbs`";
    let mut lacks = Vec::new();
    match find_program("busybox").map(fs::read) {
        Some(Ok(content)) if is_static(&content) => {}
        _ => {
            let next_step = format!("{setup} (Debian, Ubuntu: apt install busybox-static)");
            lacks.push(lack("busybox, statically linked", next_step));
        }
    }
    let without_kernel = cached_kernel(cache).is_none();
    let mut wanted = vec![("modprobe", "kmod")];
    if without_kernel {
        let more = [("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("tar", "tar"), ("depmod", "kmod")];
        wanted.extend(more);
    }
    for (program, package) in wanted {
        if find_program(program).is_none() {
            lacks.push(lack(program, format!("{setup} (package {package})")));
        }
    }
    if without_kernel && lacks.is_empty() && kernel_package().is_none() {
        let next_step = "this machine's package lists do not have it: run `apt-get update` as \
                         root; it is in Debian's main archive";
        lacks.push(lack(&format!("the package {META_PACKAGE}"), next_step));
    }
    lacks
}

fn kernel_package() -> Option<String> {
    let output = Command::new(program("apt-cache"))
        .args(["depends", META_PACKAGE])
        .env("LC_ALL", "C")
        .stderr(Stdio::null())
        .output()
        .ok()?;
    package_of(&String::from_utf8_lossy(&output.stdout))
}

fn package_of(depends: &str) -> Option<String> {
    let named = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    named
        .map(str::trim)
        .find(|name| {
            name.starts_with("linux-image-") && !name.contains("-cloud") && !name.contains("-rt")
        })
        .map(str::to_owned)
}

fn is_static(elf: &[u8]) -> bool {
    const INTERPRETER: u32 = 3;
    let number = |at: usize, bytes: usize| {
        elf.get(at..at + bytes).map(|b| b.iter().rev().fold(0, |sum, &b| sum << 8 | u64::from(b)))
    };
    let headers = || {
        let (first, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        (0..count)
            .map(|index| number((first + index * size) as usize, 4))
            .collect::<Option<Vec<_>>>()
    };
    elf.starts_with(vmlinux::ELF_MAGIC)
        && headers().is_some_and(|kinds| !kinds.contains(&u64::from(INTERPRETER)))
}

/// Returns the image, and makes it if it is not in the cache. `say` gets messages about slow steps.
pub fn prepare(cache: &Path, say: &dyn Fn(&str)) -> Result<Image, LabError> {
    fs::create_dir_all(cache)
        .map_err(LabError::file("creating", cache))
        .map_err(LabError::step(format_args!("name another cache folder in {CACHE_VARIABLE}")))?;
    let lock = fs::File::create(cache.join(".lock"))
        .and_then(|file| file.lock().map(|()| file))
        .map_err(LabError::file("locking", &cache))?;
    let folder = match cached_kernel(cache) {
        Some(folder) => folder,
        None => unpack_kernel(cache, say)?,
    };
    let release = file_name(&folder);
    let modules = folder.join("lib/modules").join(&release);
    let initrd = initrd(&folder, &release)?;
    drop(lock);
    Ok(Image { kernel: folder.join("vmlinux"), initrd, modules, release })
}

/// Downloads and unpacks the kernel, and returns its folder.
fn unpack_kernel(cache: &Path, say: &dyn Fn(&str)) -> Result<PathBuf, LabError> {
    let package = kernel_package()
        .ok_or_else(|| LabError::missing(META_PACKAGE, "run `apt-get update` as root"))?;
    say(&format!("getting the guest's kernel, once: {package} (70 MB) into {}", cache.display()));
    let new = cache.join(format!(".new-{}", std::process::id()));
    let _ = fs::remove_dir_all(&new);
    fs::create_dir_all(&new).map_err(LabError::file("creating", &new))?;
    let made = (|| -> Result<PathBuf, LabError> {
        let package_file = download(&package, &new).map_err(LabError::step(format_args!(
            "downloading {package} (no network, or old package lists?)"
        )))?;
        unpack(&package_file, &new)?;
        let release = package.trim_start_matches("linux-image-").to_owned();
        let compressed = new.join(format!("boot/vmlinuz-{release}"));
        let compressed =
            fs::read(&compressed).map_err(LabError::file("reading the kernel", &compressed))?;
        let kernel = vmlinux::extract(&compressed).unwrap_or(compressed);
        fs::write(new.join("vmlinux"), kernel).map_err(LabError::system("writing the kernel"))?;
        // `depmod` is a link to kmod, which chooses its function by the name in `argv[0]`.
        run(Command::new(program("depmod"))
            .arg0("depmod")
            .arg("-b")
            .args([new.as_os_str(), OsStr::new(&release)]))?;
        fs::remove_file(&package_file).map_err(LabError::system("removing the package"))?;
        fs::remove_dir_all(new.join("boot"))
            .map_err(LabError::system("removing the compressed kernel"))?;
        let folder = cache.join(&release);
        // An incomplete folder may remain from an earlier attempt.
        let _ = fs::remove_dir_all(&folder);
        fs::rename(&new, &folder).map_err(LabError::file("creating", &folder))?;
        Ok(folder)
    })();
    if made.is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    made
}

/// Downloads a package from Debian's archive into `folder`, and returns its file.
pub(super) fn download(package: &str, folder: &Path) -> Result<PathBuf, LabError> {
    run(Command::new(program("apt-get")).args(["-q", "download", package]).current_dir(folder))?;
    let files = fs::read_dir(folder).map_err(LabError::file("reading", folder))?.flatten();
    files
        .map(|entry| entry.path())
        .find(|path| path.extension() == Some(OsStr::new("deb")))
        .ok_or_else(|| LabError::program("apt-get", format!("downloaded no package {package}")))
}

fn program(name: &str) -> PathBuf {
    find_program(name).unwrap_or_else(|| name.into())
}

/// Unpacks `boot` and `lib/modules` like `dpkg-deb -x`, without the parts that no guest needs.
fn unpack(package: &Path, into: &Path) -> Result<(), LabError> {
    let mut unpacked = Command::new(program("dpkg-deb"))
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(LabError::start("dpkg-deb"))?;
    let archive = unpacked.stdout.take().ok_or_else(LabError::no_pipe)?;
    let left_out = LEFT_OUT.iter().map(|part| format!("--exclude=./lib/modules/*/kernel/{part}"));
    run(Command::new(program("tar"))
        .args(["-x", "--no-same-owner", "--wildcards", "-f", "-", "-C"])
        .arg(into)
        .args(left_out)
        .args(["./boot", "./lib/modules"])
        .stdin(archive))?;
    let status = unpacked.wait().map_err(LabError::system("waiting for dpkg-deb"))?;
    if !status.success() {
        let how = format!("cannot unpack {}: {status}", package.display());
        return Err(LabError::program("dpkg-deb", how));
    }
    Ok(())
}

/// Returns the modules to load, each after its dependencies, as modprobe(8) lists them. The host's
/// own configuration of modules is ignored.
fn load_order(folder: &Path, release: &str) -> Result<Vec<PathBuf>, LabError> {
    let said = run(Command::new(program("modprobe"))
        .arg0("modprobe")
        .args(["--show-depends", "--config=/dev/null", "--set-version"])
        .args([release, "--dirname"])
        .arg(folder)
        .arg("--all")
        .args(MODULES))
    .map_err(LabError::step(format_args!("remove {} to have it made again", folder.display())))?;
    let mut order = Vec::new();
    for path in said.lines().filter_map(|line| line.strip_prefix("insmod ")) {
        let path = PathBuf::from(path.trim());
        if !order.contains(&path) {
            order.push(path);
        }
    }
    Ok(order)
}

/// Makes the initramfs of busybox, the modules and `init.sh`, and returns its path. It is an
/// uncompressed cpio archive, because an emulated processor decompresses slowly.
fn initrd(folder: &Path, release: &str) -> Result<PathBuf, LabError> {
    let busybox = program("busybox");
    let reading = || LabError::file("reading", &busybox);
    let writing = || LabError::file("writing below", folder);
    let order = load_order(folder, release)?;
    let mut hasher = DefaultHasher::new();
    (INIT, fs::read(&busybox).map_err(reading())?, &order).hash(&mut hasher);
    let initrd = folder.join(format!("initrd-{:016x}", hasher.finish()));
    if initrd.is_file() {
        return Ok(initrd);
    }
    let staged =
        tempfile::Builder::new().prefix(".initrd-").tempdir_in(folder).map_err(writing())?;
    let root = staged.path().join("root");
    let mut names = Vec::from(["bin", "dev", "lower", "modules", "proc", "sys", "upper"]);
    for name in &names {
        fs::create_dir_all(root.join(name)).map_err(writing())?;
    }
    fs::copy(&busybox, root.join("bin/busybox")).map_err(reading())?;
    fs::write(root.join("init"), INIT).map_err(writing())?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).map_err(writing())?;
    let mut modules = String::new();
    for path in &order {
        let content = fs::read(path).map_err(LabError::file("reading", &path))?;
        // busybox loads only uncompressed modules.
        let name = file_name(path);
        let name = name.split_once(".ko").map_or(&*name, |(name, _)| name);
        let plain = vmlinux::plain(content);
        fs::write(root.join(format!("modules/{name}.ko")), plain).map_err(writing())?;
        modules.push_str(&format!("{name}.ko\n"));
    }
    fs::write(root.join("modules/order"), &modules).map_err(writing())?;
    let modules: Vec<_> = modules.lines().map(|name| format!("modules/{name}")).collect();
    names.extend(["init", "bin/busybox", "modules/order"]);
    names.extend(modules.iter().map(String::as_str));
    let (list, archive) = (staged.path().join("list"), staged.path().join("archive"));
    fs::write(&list, names.join("\n")).map_err(writing())?;
    run(Command::new(&busybox)
        .args(["cpio", "-o", "-H", "newc"])
        .current_dir(&root)
        .stdin(fs::File::open(&list).map_err(LabError::file("reading", &list))?)
        .stdout(fs::File::create(&archive).map_err(writing())?))?;
    fs::rename(&archive, &initrd).map_err(LabError::file("writing", &initrd))?;
    Ok(initrd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stock_kernel_is_taken_and_no_variant() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(package_of(depends).as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(package_of("  Depends: linux-image-6.1.0-56-cloud-amd64"), None);
        assert_eq!(package_of(""), None);
    }

    #[test]
    fn the_newest_complete_kernel_is_used() {
        let cache = tempfile::tempdir().expect("a folder");
        let made = |name: &str| {
            fs::create_dir(cache.path().join(name)).expect("a folder");
            fs::write(cache.path().join(name).join("vmlinux"), "").expect("a file");
        };
        assert_eq!(cached_kernel(cache.path()), None);
        made("6.1.0-9-amd64");
        made("6.1.0-56-amd64");
        made(".new-1");
        fs::create_dir(cache.path().join("6.9.0-1-amd64")).expect("an incomplete one");
        assert_eq!(cached_kernel(cache.path()), Some(cache.path().join("6.1.0-56-amd64")));
    }

    #[test]
    fn a_program_that_wants_an_interpreter_is_not_static() {
        let mut elf = vec![0; 64 + 2 * 56];
        elf[..4].copy_from_slice(vmlinux::ELF_MAGIC);
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 2;
        elf[64] = 1;
        elf[64 + 56] = 1;
        assert!(is_static(&elf));
        elf[64 + 56] = 3;
        assert!(!is_static(&elf));
        assert!(!is_static(b"#!/bin/sh"));
    }
}
