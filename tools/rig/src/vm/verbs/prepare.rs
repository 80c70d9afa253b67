//! Preparation on the host before the boot. It builds the check programs and downloads the Mooncake
//! Transfer Engine and pyverbs into the lab's cache, each once. For fault campaigns, it builds the
//! library with Mooncake's C interface.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::child::run;
use crate::error::LabError;
use crate::sandbox::find_program;
use crate::vm::image;

pub const TRANSFER_ENGINE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";

/// Returns the folder for the programs, next to the guest's kernel.
pub fn folder() -> PathBuf {
    image::cache_folder().join("verbs")
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

/// Builds the programs of `sources` (`tests/verbs` or `tests/nccl` of the repository), with a
/// sanitizer or without. Programs that are newer than their sources are kept.
pub fn checks(sources: &Path, sanitizer: Option<&str>) -> Result<PathBuf, LabError> {
    let script = sources.join("build.sh");
    if !script.is_file() {
        let next_step = "run this in the repository, or name its folders with --sources and \
                         --nccl-sources";
        return Err(LabError::missing(script.display().to_string(), next_step));
    }
    // One folder per source tree, so that several trees can be tested in turn.
    let tree: String = (sources.canonicalize().unwrap_or_else(|_| sources.to_owned()))
        .to_string_lossy()
        .replace('/', "-");
    let out = folder().join(format!("checks{tree}{}", sanitizer.unwrap_or_default()));
    let newest = fs::read_dir(sources)
        .map_err(LabError::file("reading", sources))?
        .flatten()
        .filter_map(|entry| modified(&entry.path()))
        .max();
    if modified(&out.join("built")) < newest || newest.is_none() {
        let mut command = Command::new("bash");
        command.arg(&script).arg(&out);
        if let Some(sanitizer) = sanitizer {
            command.env("SANITIZE", sanitizer);
        }
        let step = "building the check programs; `tools/setup.sh verbs` helps";
        run(&mut command).map_err(LabError::step(step))?;
        let built = out.join("built");
        fs::write(&built, "").map_err(LabError::file("writing", &built))?;
    }
    Ok(out)
}

pub fn libasan() -> Result<PathBuf, LabError> {
    let path = run(Command::new("cc").arg("-print-file-name=libasan.so"))?;
    Path::new(&path)
        .canonicalize()
        .map_err(LabError::file("finding the compiler's address sanitizer", &path))
}

/// Returns the virtual environment in the cache for the Transfer Engine, and its file that says
/// what it has.
fn environment() -> (PathBuf, PathBuf) {
    let environment = folder().join("venv");
    let done = environment.join("laxity-has");
    (environment, done)
}

/// Returns a Python that has the Transfer Engine, if [`python`] got it before.
pub fn prepared_python() -> Option<PathBuf> {
    let (environment, done) = environment();
    let python = environment.join("bin/python");
    let is_done = fs::read_to_string(&done).is_ok_and(|has| has == TRANSFER_ENGINE);
    (is_done && python.is_file()).then_some(python)
}

fn lock(name: &str) -> Result<fs::File, LabError> {
    fs::create_dir_all(folder()).map_err(LabError::file("creating", &folder()))?;
    let lock = folder().join(name);
    let held = fs::File::create(&lock).map_err(LabError::file("making", &lock))?;
    held.lock().map_err(LabError::file("locking", &lock))?;
    Ok(held)
}

/// Returns a Python that has the Transfer Engine, in a virtual environment in the cache.
pub fn python() -> Result<PathBuf, LabError> {
    if let Some(python) = prepared_python() {
        return Ok(python);
    }
    let _held = lock("venv.lock")?;
    // Another process may have got it meanwhile.
    if let Some(python) = prepared_python() {
        return Ok(python);
    }
    let (environment, done) = environment();
    let python = environment.join("bin/python");
    eprintln!("laxity: getting {TRANSFER_ENGINE} (46 MB) into {}", environment.display());
    let _ = fs::remove_dir_all(&environment);
    let base = find_program("python3")
        .ok_or_else(|| LabError::missing("python3", "run `tools/setup.sh verbs`"))?;
    // The engine's wheels exist only for some versions of Python, so the system's is tried first.
    let base = ["/usr/bin/python3".into(), base]
        .into_iter()
        .find(|python: &PathBuf| {
            let has = Command::new(python).args(["-c", "import venv, ensurepip"]).output();
            has.is_ok_and(|output| output.status.success())
        })
        .ok_or_else(|| LabError::missing("python3's `venv`", "install python3-venv"))?;
    run(Command::new(base).args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"])
        .args(["--no-cache-dir", TRANSFER_ENGINE]))
    .map_err(LabError::step(
        "getting the Mooncake Transfer Engine from PyPI; --without-mooncake does without",
    ))?;
    fs::write(&done, TRANSFER_ENGINE).map_err(LabError::file("writing", &done))?;
    Ok(python)
}

/// Sources of a library with Mooncake's C interface, which PyPI does not have. It calls the engine
/// of the Python package.
const C_INTERFACE: [(&str, &str); 2] = [
    ("real_engine.cc", include_str!("../../../../../shim/mooncake/tests/standin/real_engine.cc")),
    (
        "mooncake_facts.h",
        include_str!("../../../../../shim/mooncake/tests/standin/mooncake_facts.h"),
    ),
];

/// Returns the folder for that library, and what its file `laxity-has` says when it is built.
fn c_interface_folder() -> (PathBuf, String) {
    let sources: String = C_INTERFACE.iter().map(|(_, text)| *text).collect();
    (folder().join("mooncake_c"), format!("{TRANSFER_ENGINE}\n{sources}"))
}

/// Returns the library with Mooncake's C interface, if [`c_interface`] built it before.
pub fn prepared_c_interface() -> Option<PathBuf> {
    prepared_python()?;
    let (folder, has) = c_interface_folder();
    let library = folder.join("libtransfer_engine.so");
    let is_done = fs::read_to_string(folder.join("laxity-has")).is_ok_and(|found| found == has);
    (is_done && library.is_file()).then_some(library)
}

/// Returns a library with Mooncake's C interface, for programs that a Python of [`python`] runs.
pub fn c_interface() -> Result<PathBuf, LabError> {
    let python = python()?;
    let _held = lock("mooncake_c.lock")?;
    if let Some(library) = prepared_c_interface() {
        return Ok(library);
    }
    let compiler = find_program("c++")
        .ok_or_else(|| LabError::missing("c++", "install g++ for Mooncake's C interface"))?;
    let (folder, has) = c_interface_folder();
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(LabError::file("creating", &folder))?;
    for (name, text) in C_INTERFACE {
        let file = folder.join(name);
        fs::write(&file, text).map_err(LabError::file("writing", &file))?;
    }
    let package = "import importlib.util as u; print(u.find_spec('mooncake.engine').origin)";
    let engine = run(Command::new(&python).args(["-c", package]))?;
    let beside = Path::new(&engine).parent().unwrap_or(Path::new("/"));
    let library = folder.join("libtransfer_engine.so");
    // The engine refers to functions of the interpreter, which the process has.
    run(Command::new(compiler)
        .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,--allow-shlib-undefined"])
        .arg("-o")
        .arg(&library)
        .arg(folder.join(C_INTERFACE[0].0))
        .args(["-Wl,--no-as-needed", &engine])
        .arg(format!("-Wl,-rpath,{}", beside.display())))
    .map_err(LabError::step("building a library with Mooncake's C interface"))?;
    let done = folder.join("laxity-has");
    fs::write(&done, has).map_err(LabError::file("writing", &done))?;
    Ok(library)
}

const PYVERBS: &str = "python3-pyverbs";

/// Returns the folder with pyverbs (`modules`) and its test suite (`tests`), as Debian packages
/// them. Their release is that of the host's libibverbs.
pub fn pyverbs() -> Result<PathBuf, LabError> {
    let asked = ["-W", "-f", "${Version}", "libibverbs1"];
    let release = run(Command::new("dpkg-query").args(asked))
        .map_err(LabError::step("pyverbs is got from Debian; --without-pyverbs does without"))?;
    let out = folder().join("pyverbs");
    let done = out.join("laxity-has");
    if fs::read_to_string(&done).is_ok_and(|has| has == release) {
        return Ok(out);
    }
    eprintln!("laxity: getting {PYVERBS} {release} into {}", out.display());
    let _ = fs::remove_dir_all(&out);
    let package = out.join("package");
    fs::create_dir_all(&package).map_err(LabError::file("creating", &package))?;
    let file = image::download(&format!("{PYVERBS}={release}"), &out).map_err(LabError::step(
        "getting pyverbs from Debian's archive; `apt-get update` helps, --without-pyverbs \
        does without",
    ))?;
    run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&package))?;
    let tests = package.join("usr/share/doc/rdma-core/tests");
    let packed: Vec<PathBuf> = fs::read_dir(&tests)
        .map_err(LabError::file("reading pyverbs' tests in", &tests))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "gz"))
        .collect();
    run(Command::new("gzip").arg("-d").args(packed))?;
    fs::rename(&tests, out.join("tests")).map_err(LabError::file("moving", &tests))?;
    let modules = package.join("usr/lib/python3/dist-packages");
    fs::rename(&modules, out.join("modules")).map_err(LabError::file("moving", &modules))?;
    fs::write(&done, release).map_err(LabError::file("writing", &done))?;
    Ok(out)
}
