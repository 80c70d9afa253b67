//! `laxity support-bundle`: one archive with what a remote helper needs.
//!
//! Everything that goes in is text and passes [`redact`]. `manifest.json` comes last. It lists the
//! files, what could not be read and why, and how many secrets were removed. A part that fails or
//! hangs never keeps the others out.

mod redact;

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use flate2::Compression;
use flate2::write::GzEncoder;
use laxity_cli::output::{OutputError, check, json, replace, say};
use nix::unistd::geteuid;
use serde::Serialize;
use thiserror::Error;

use self::redact::Redaction;
use crate::external::find;
use crate::host::Endpoint;
use crate::{scrape, trace};

pub(crate) const HELP: &str = "\
The archive has: doctor, status and verify as JSON, the configurations of laxityd and of the \
coordinator (if this host has one), versions, the text of the metrics endpoint, the journal of \
laxityd and laxity-coordinator, counters of RDMA ports, and a trace: the file that --trace names, \
or laxity-trace.json in this folder, where `laxity trace` puts it. manifest.json lists these \
parts, and those that could not be read.

Values that look like secrets (passwords, tokens, keys) are removed. Addresses and names of hosts \
are replaced by numbers unless --with-addresses is given. An address has the same number in all \
parts. Read the archive before you send it: the command can't recognize every secret.

Run the command as root, so that it can read the journal and the control socket.";

/// Longest time for one program. `laxity verify` watches for a second.
const PROGRAM_MAX: Duration = Duration::from_secs(20);
/// Maximum number of bytes of one file in the archive. Of more, the end is kept.
const PART_BYTES_MAX: usize = 16 << 20;
/// Longest trace that is read. Its end goes into the bundle.
const TRACE_BYTES_MAX: u64 = 256 << 20;
const JOURNAL_LINES: &str = "5000";
const DAEMON_CONFIG: &str = "/etc/laxity/laxityd.toml";
const COORDINATOR_CONFIG: &str = "/etc/laxity/coordinator.toml";

#[derive(Args)]
pub(crate) struct SupportBundleArgs {
    /// The archive to write, `-` for standard output [default: laxity-support-SECONDS.tar.gz in
    /// this folder]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Keep addresses and names of hosts
    #[arg(long)]
    with_addresses: bool,
    /// Include this output of `laxity trace` [default: laxity-trace.json in this folder, if it is
    /// there]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Configuration of laxityd [default: $LAXITY_CONFIG, or the default of laxityd]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Configuration of laxity-coordinator [default: /etc/laxity/coordinator.toml, if it exists]
    #[arg(long, value_name = "FILE", env = "LAXITY_COORDINATOR_CONFIG")]
    coordinator_config: Option<PathBuf>,
    #[command(flatten)]
    endpoint: Endpoint,
}

#[derive(Debug, Error)]
pub(crate) enum BundleError {
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("cannot make the archive: {0}")]
    Archive(#[from] std::io::Error),
}

/// `manifest.json`. Fields may be added.
#[derive(Default, Serialize)]
struct Manifest {
    version: &'static str,
    /// Seconds since 1970.
    made_at_s: u64,
    files: Vec<Listed>,
    missing: Vec<Missing>,
    /// Number of values that were removed because they looked like secrets.
    secrets_removed: usize,
    /// Number of distinct addresses and names of hosts that were replaced. `None`: they were kept.
    addresses_replaced: Option<usize>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    bytes: usize,
    source: String,
}

#[derive(Serialize)]
struct Missing {
    name: String,
    why: String,
}

/// The archive while it is made.
struct Bundle {
    archive: tar::Builder<GzEncoder<Vec<u8>>>,
    redaction: Redaction,
    manifest: Manifest,
}

impl Bundle {
    /// Adds a part, or the reason why it could not be read.
    fn add(&mut self, name: &str, source: &str, part: Result<String, String>) {
        let added = part.and_then(|text| {
            let text = self.redaction.text(tail(&text));
            let appended = self.append(name, text.as_bytes());
            appended.map(|()| text.len()).map_err(|error| error.to_string())
        });
        let name = name.to_owned();
        match added {
            Ok(bytes) => {
                let source = self.redaction.text(source);
                self.manifest.files.push(Listed { name, bytes, source });
            }
            Err(why) => {
                let why = self.redaction.text(&why);
                self.manifest.missing.push(Missing { name, why });
            }
        }
    }

    fn append(&mut self, name: &str, content: &[u8]) -> std::io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.manifest.made_at_s);
        self.archive.append_data(&mut header, format!("laxity-support/{name}"), content)
    }

    fn finish(mut self) -> Result<(Vec<u8>, Manifest), BundleError> {
        self.manifest.secrets_removed = self.redaction.secrets();
        self.manifest.addresses_replaced = self.redaction.addresses();
        let text = json(&self.manifest)?;
        self.append("manifest.json", text.as_bytes())?;
        Ok((self.archive.into_inner()?.finish()?, self.manifest))
    }
}

/// Returns the end of a text that is too long, from the beginning of a line.
fn tail(text: &str) -> &str {
    let mut from = text.len().saturating_sub(PART_BYTES_MAX);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let rest = &text[from..];
    if from == 0 { rest } else { rest.split_once('\n').map_or(rest, |(_, rest)| rest) }
}

/// Writes the archive and prints what could not be read.
pub(crate) fn support_bundle(args: &SupportBundleArgs) -> Result<(), BundleError> {
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let path = args.output.clone();
    let path = path.unwrap_or_else(|| format!("laxity-support-{now_s}.tar.gz").into());
    let is_piped = path.as_os_str() == "-";
    if !is_piped {
        check(&path)?;
    }
    let host = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host.map(|name| name.trim().to_owned());
    let mut bundle = Bundle {
        archive: tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default())),
        redaction: Redaction::new(args.with_addresses, host),
        manifest: Manifest {
            version: env!("CARGO_PKG_VERSION"),
            made_at_s: now_s,
            ..Manifest::default()
        },
    };
    collect(args, &mut bundle);
    let (archive, manifest) = bundle.finish()?;
    let lines = manifest.missing.iter().map(|it| format!("\n  not had: {}: {}", it.name, it.why));
    let summary = format!(
        "{}: {} files, {} values removed that looked like secrets{}",
        path.display(),
        manifest.files.len() + 1,
        manifest.secrets_removed,
        lines.collect::<String>()
    );
    if is_piped {
        std::io::stdout().write_all(&archive)?;
        eprintln!("{summary}");
        return Ok(());
    }
    // The mode is set before the file has content, because only root may read some of it.
    let private = || fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    private().map_err(|cause| OutputError::File { path: path.clone(), cause })?;
    replace(&path, &archive)?;
    Ok(say(summary)?)
}

fn collect(args: &SupportBundleArgs, bundle: &mut Bundle) {
    let own = std::env::current_exe().unwrap_or_else(|_| "laxity".into());
    let control = args.endpoint.path().display().to_string();
    for (name, words) in [
        ("doctor.json", &["doctor", "--json"][..]),
        ("status.json", &["status", "--json"]),
        ("verify.json", &["verify", "--json", "--seconds", "1"]),
    ] {
        let words = [words, &["--control", &control]].concat();
        bundle.add(name, &format!("laxity {}", words.join(" ")), program(&own, &words, true));
    }
    let daemon = find("laxityd".as_ref()).unwrap_or_else(|| "laxityd".into());
    let config = args.config.as_ref().map(|path| path.display().to_string());
    let mut words = vec!["--show-config"];
    words.extend(config.iter().flat_map(|path| ["--config", path]));
    let shown = program(&daemon, &words, false);
    let address = shown.as_deref().ok().and_then(metrics_address);
    let is_shown = shown.is_ok();
    bundle.add("laxityd.toml", &format!("laxityd {}", words.join(" ")), shown);
    // A file that laxityd refuses may be what the operator asks about.
    let named = config.or_else(|| std::env::var("LAXITY_CONFIG").ok());
    let file = named.filter(|it| !it.is_empty()).unwrap_or_else(|| DAEMON_CONFIG.to_owned());
    if !is_shown && Path::new(&file).exists() {
        let read = laxity_files::read_to_string(Path::new(&file), PART_BYTES_MAX as u64);
        bundle.add("laxityd-as-written.toml", &file, read.map_err(|error| error.to_string()));
    }
    if let Some((source, config)) = coordinator_config(args.coordinator_config.as_deref()) {
        bundle.add("coordinator.toml", &source, config);
    }
    let metrics = match address {
        Some(address) => scrape::metrics(address),
        None => Err("the configuration has no address for metrics".to_owned()),
    };
    bundle.add("metrics.txt", "the metrics endpoint", metrics);

    let mut versions = format!("laxity {}\n", env!("CARGO_PKG_VERSION"));
    for (tool, words) in [(daemon.as_path(), "--version"), (Path::new("uname"), "-srvm")] {
        versions.push_str(&program(tool, &[words], false).unwrap_or_else(|why| why + "\n"));
    }
    for file in ["/etc/os-release", "/proc/cmdline"] {
        versions.push_str(&fs::read_to_string(file).unwrap_or_default());
    }
    bundle.add(
        "versions.txt",
        "laxity, laxityd, uname, /etc/os-release, /proc/cmdline",
        Ok(versions),
    );
    for unit in ["laxityd", "laxity-coordinator"] {
        let words =
            ["--unit", unit, "--lines", JOURNAL_LINES, "--no-pager", "--output", "short-iso"];
        let journal = program(Path::new("journalctl"), &words, false);
        bundle.add(&format!("journal-{unit}.txt"), &format!("journalctl --unit {unit}"), journal);
    }
    bundle.add("rdma.txt", "/sys/class/infiniband", rdma(Path::new("/sys/class/infiniband")));
    let last = Path::new(trace::OUT_DEFAULT);
    if let Some(path) = args.trace.as_deref().or_else(|| last.exists().then_some(last)) {
        let trace = laxity_files::read_to_string(path, TRACE_BYTES_MAX);
        let trace = match fs::symlink_metadata(path) {
            // Nobody asked for this file, and in a folder like /tmp it may be another user's.
            Ok(file)
                if args.trace.is_none()
                    && (file.is_symlink() || file.uid() != geteuid().as_raw()) =>
            {
                Err("it is a link or another user's; name it with --trace if it is wanted".into())
            }
            _ => trace.map_err(|error| error.to_string()),
        };
        bundle.add("trace.json", &written(path, SystemTime::now()), trace);
    }
}

/// Returns the coordinator's configuration and where it comes from. `None` if this host has none.
///
/// A file that laxity-coordinator refuses is taken as it is, because the error may be what the
/// operator asks about.
fn coordinator_config(path: Option<&Path>) -> Option<(String, Result<String, String>)> {
    let path = path.filter(|path| !path.as_os_str().is_empty());
    let default = Path::new(COORDINATOR_CONFIG);
    let path = path.or_else(|| default.exists().then_some(default))?;
    let file = path.display().to_string();
    let words = ["--show-config", "--config", &file];
    let shown = find("laxity-coordinator".as_ref()).map(|it| program(&it, &words, false));
    if let Some(Ok(shown)) = shown {
        return Some((format!("laxity-coordinator {}", words.join(" ")), Ok(shown)));
    }
    let read = laxity_files::read_to_string(path, PART_BYTES_MAX as u64);
    Some((file, read.map_err(|error| error.to_string())))
}

/// Returns the path of a file, with its age.
fn written(path: &Path, now: SystemTime) -> String {
    let at = fs::metadata(path).and_then(|file| file.modified());
    let age = at.ok().and_then(|at| now.duration_since(at).ok());
    let said = age.map(|age| format!(", written {} min ago", age.as_secs() / 60));
    format!("{}{}", path.display(), said.unwrap_or_default())
}

/// Returns the output of a program, which may take [`PROGRAM_MAX`]. `any_status` accepts the output
/// of one that fails, as `laxity doctor` does if it finds an error.
fn program(path: &Path, words: &[&str], any_status: bool) -> Result<String, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut child = Command::new(path)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{name}: {error}"))?;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let (done, ended) = mpsc::channel();
    // The threads end with the program, which is killed if it takes too long.
    std::thread::spawn(move || {
        let said = std::thread::spawn(move || read(err.as_mut()));
        let _ = done.send((read(out.as_mut()), said.join().unwrap_or_default()));
    });
    let seen = ended.recv_timeout(PROGRAM_MAX);
    if seen.is_err() {
        let _ = child.kill();
    }
    let succeeded = child.wait().is_ok_and(|status| status.success());
    let (output, said) = seen.map_err(|_| format!("{name} did not end within {PROGRAM_MAX:?}"))?;
    match succeeded || (any_status && !output.is_empty()) {
        true => Ok(output),
        false => Err(format!("{name} failed: {}", said.trim())),
    }
}

fn read(from: Option<&mut impl std::io::Read>) -> String {
    let mut bytes = Vec::new();
    let _ = from.map(|from| from.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn metrics_address(config: &str) -> Option<SocketAddr> {
    let config: toml::Table = config.parse().ok()?;
    config.get("metrics")?.as_str()?.parse().ok()
}

fn rdma(class: &Path) -> Result<String, String> {
    let names = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let mut text = String::new();
    for device in names(class) {
        let ports = names(&device.join("ports"));
        let folders = ports.iter().flat_map(|port| {
            ["", "counters", "hw_counters"].into_iter().map(|folder| port.join(folder))
        });
        for file in [device.join("fw_ver")].into_iter().chain(folders.flat_map(|f| names(&f))) {
            if let Ok(value) = laxity_files::read_to_string(&file, 4096) {
                text.push_str(&format!("{} {}\n", file.display(), value.trim()));
            }
        }
    }
    if text.is_empty() { Err("there is no RDMA device".to_owned()) } else { Ok(text) }
}
