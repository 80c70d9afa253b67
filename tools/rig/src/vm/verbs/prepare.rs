//! Preparation on the host before the boot. It builds the check programs and downloads the Mooncake
//! Transfer Engine and pyverbs into the lab's cache, each once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context as _, bail};

use crate::sandbox::find_program;
use crate::vm::image;

/// Version of the Transfer Engine for which the matrix was written.
pub const TRANSFER_ENGINE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";

/// Returns the folder for the programs, next to the guest's kernel.
#[must_use]
pub fn folder() -> PathBuf {
    image::cache_folder().join("verbs")
}

/// Runs a program to its end and returns its output.
fn call(command: &mut Command) -> anyhow::Result<String> {
    let what = format!("{command:?}");
    let output = command.output().with_context(|| format!("starting {what}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{what} ended with {}: {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

/// Builds the programs of `sources` (`tests/verbs` or `tests/nccl` of the repository), with a
/// sanitizer or without. Programs that are newer than their sources are kept.
///
/// # Errors
/// Fails if there is no compiler or no libibverbs. The message names the packages.
pub fn checks(sources: &Path, sanitizer: Option<&str>) -> anyhow::Result<PathBuf> {
    let script = sources.join("build.sh");
    if !script.is_file() {
        bail!(
            "{} is missing: run this in the repository, or name its folders with --sources and \
             --nccl-sources",
            script.display()
        );
    }
    // One folder per source tree, so that several trees can be tested in turn.
    let tree: String = (sources.canonicalize().unwrap_or_else(|_| sources.to_owned()))
        .to_string_lossy()
        .replace('/', "-");
    let out = folder().join(format!("checks{tree}{}", sanitizer.unwrap_or_default()));
    let newest = fs::read_dir(sources)
        .context("the check programs' sources")?
        .flatten()
        .filter_map(|entry| modified(&entry.path()))
        .max();
    if modified(&out.join("built")) < newest || newest.is_none() {
        let mut command = Command::new("bash");
        command.arg(&script).arg(&out);
        if let Some(sanitizer) = sanitizer {
            command.env("SANITIZE", sanitizer);
        }
        call(&mut command).context("building the check programs; `tools/setup.sh verbs` helps")?;
        fs::write(out.join("built"), "").context("noting what was built")?;
    }
    Ok(out)
}

/// Returns the address sanitizer's library, which has to be preloaded before `liblaxity.so`.
///
/// # Errors
/// Fails if the compiler has none.
pub fn libasan() -> anyhow::Result<PathBuf> {
    let path = call(Command::new("cc").arg("-print-file-name=libasan.so"))?;
    let path = Path::new(&path)
        .canonicalize()
        .with_context(|| format!("the compiler has no address sanitizer ({path})"))?;
    Ok(path)
}

/// Returns a Python that has the Transfer Engine, in a virtual environment in the cache.
///
/// # Errors
/// Fails if no Python can make the environment, or the package cannot be downloaded.
pub fn python() -> anyhow::Result<PathBuf> {
    let environment = folder().join("venv");
    let python = environment.join("bin/python");
    let done = environment.join("laxity-has");
    if fs::read_to_string(&done).is_ok_and(|has| has == TRANSFER_ENGINE) && python.is_file() {
        return Ok(python);
    }
    eprintln!("laxity: getting {TRANSFER_ENGINE} (46 MB) into {}", environment.display());
    let _ = fs::remove_dir_all(&environment);
    fs::create_dir_all(folder()).context("creating the cache")?;
    let base = find_program("python3").context("python3 is missing; run `tools/setup.sh verbs`")?;
    // The engine's wheels exist only for some versions of Python, so the system's is tried first.
    let base = ["/usr/bin/python3".into(), base]
        .into_iter()
        .find(|python: &PathBuf| {
            let has = Command::new(python).args(["-c", "import venv, ensurepip"]).output();
            has.is_ok_and(|output| output.status.success())
        })
        .context("no python3 can make virtual environments; install python3-venv")?;
    call(Command::new(base).args(["-m", "venv"]).arg(&environment))?;
    call(
        Command::new(&python)
            .args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"])
            .args(["--no-cache-dir", TRANSFER_ENGINE]),
    )
    .context("getting the Mooncake Transfer Engine from PyPI; --without-mooncake does without")?;
    fs::write(&done, TRANSFER_ENGINE).context("noting what was installed")?;
    Ok(python)
}

/// Debian's package of pyverbs, which includes rdma-core's own tests.
const PYVERBS: &str = "python3-pyverbs";

/// Returns the folder with pyverbs (`modules`) and its test suite (`tests`), as Debian packages
/// them. Their release is that of the host's libibverbs.
///
/// # Errors
/// Fails if the host has no Debian archive, or the package has an unexpected form.
pub fn pyverbs() -> anyhow::Result<PathBuf> {
    let release = call(Command::new("dpkg-query").args(["-W", "-f", "${Version}", "libibverbs1"]))
        .context("pyverbs is got from Debian; --without-pyverbs does without")?;
    let out = folder().join("pyverbs");
    let done = out.join("laxity-has");
    if fs::read_to_string(&done).is_ok_and(|has| has == release) {
        return Ok(out);
    }
    eprintln!("laxity: getting {PYVERBS} {release} into {}", out.display());
    let _ = fs::remove_dir_all(&out);
    let package = out.join("package");
    fs::create_dir_all(&package).context("creating the cache")?;
    call(
        Command::new("apt-get")
            .args(["download", "-q", &format!("{PYVERBS}={release}")])
            .current_dir(&out),
    )
    .context(
        "getting pyverbs from Debian's archive; `apt-get update` helps, --without-pyverbs \
        does without",
    )?;
    let file = fs::read_dir(&out)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .context("apt-get downloaded no package")?;
    call(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&package))?;
    let tests = package.join("usr/share/doc/rdma-core/tests");
    let packed: Vec<PathBuf> = fs::read_dir(&tests)
        .with_context(|| format!("{PYVERBS} {release} brings no tests"))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "gz"))
        .collect();
    call(Command::new("gzip").arg("-d").args(packed))?;
    fs::rename(&tests, out.join("tests")).context("moving pyverbs' tests")?;
    fs::rename(package.join("usr/lib/python3/dist-packages"), out.join("modules"))
        .context("moving pyverbs")?;
    fs::write(&done, release).context("noting what was got")?;
    Ok(out)
}
