//! The configuration of a virtual machine, and its start: writes the files that the guest begins
//! with, and runs QEMU.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::image;
use super::job::{GUEST_JOB_FILE, GuestJob, VmJob};
use super::keeper::{Charge, Keeper};
use super::network::NetworkConfig;
use super::qemu::{self, QemuMachine, Share};
use crate::error::LabError;
use crate::sandbox::{INTERNAL, find_program};

pub(super) const QEMU: &str = "qemu-system-x86_64";

#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Memory, in MiB. It also holds the files that programs write, except in shared folders.
    pub memory_mib: u32,
    pub processors: u32,
    pub network: NetworkConfig,
    /// Host folders that the guest may write to. Changes of other files stay in the guest.
    pub writable: Vec<PathBuf>,
    /// Longest time from power-on until network and devices are up.
    pub boot_limit: Duration,
    pub limit: Option<Duration>,
    /// Longest time without a message or heartbeat. After it the guest counts as hung.
    pub silence_limit: Duration,
    pub cache: PathBuf,
}

impl Default for VmConfig {
    fn default() -> Self {
        Self {
            memory_mib: 2048,
            processors: 2,
            network: NetworkConfig::default(),
            writable: Vec::new(),
            boot_limit: Duration::from_secs(120),
            limit: None,
            silence_limit: Duration::from_secs(60),
            cache: image::cache_folder(),
        }
    }
}

pub(super) fn power_on(
    config: &VmConfig,
    image: &image::Image,
    job: &VmJob,
) -> Result<(Keeper, std::process::ChildStdout, PathBuf), LabError> {
    let program = std::env::current_exe().map_err(LabError::system("finding this program"))?;
    let shares: Vec<Share> = config
        .writable
        .iter()
        .enumerate()
        .map(|(index, folder)| {
            let folder = fs::canonicalize(folder)
                .map_err(LabError::file("finding the writable folder", folder))?;
            if !folder.is_dir() {
                return Err(LabError::Plan(format!("{} is no folder", folder.display())));
            }
            Ok(Share { tag: format!("share{index}"), folder })
        })
        .collect::<Result<_, LabError>>()?;
    let folder = tempfile::Builder::new()
        .prefix("laxity-vm-")
        .tempdir()
        .map_err(LabError::system("making a folder for the guest's files"))?;
    let control = folder.path().join("control");
    fs::create_dir(&control).map_err(LabError::file("creating", &control))?;
    let guest_job = GuestJob {
        network: config.network.clone(),
        shares: shares.clone(),
        modules: image.modules.clone(),
        release: image.release.clone(),
        job: job.clone(),
    };
    let path = control.join(GUEST_JOB_FILE);
    fs::write(&path, serde_json::to_vec(&guest_job)?).map_err(LabError::file("writing", &path))?;
    let start = control.join("start");
    fs::write(&start, start_script(&program)?)
        .and_then(|()| fs::set_permissions(&start, fs::Permissions::from_mode(0o755)))
        .map_err(LabError::file("writing", &start))?;
    let mut all_shares = vec![Share { tag: "control".into(), folder: control }];
    all_shares.extend(shares);
    let machine = QemuMachine {
        memory_mib: config.memory_mib,
        processors: config.processors,
        console: folder.path().join("console"),
        channel: folder.path().join("channel"),
        shares: all_shares,
    };
    // The keeper removes the folder from here on.
    let folder = folder.keep();
    let charge = Charge {
        program: find_program(QEMU).unwrap_or_else(|| QEMU.into()),
        args: qemu::arguments(image, &machine),
        log: folder.join("qemu.log"),
        folder: folder.clone(),
    };
    let (keeper, stdout) = Keeper::start(&charge)?;
    Ok((keeper, stdout, folder))
}

/// Returns the script for the initramfs, which starts this program as the guest's first process.
fn start_script(program: &Path) -> Result<String, LabError> {
    let program = program
        .to_str()
        .ok_or_else(|| LabError::Plan(format!("{} is no UTF-8", program.display())))?;
    let quoted = program.replace('\'', r"'\''");
    Ok(format!("#!/bin/sh\nexec '{quoted}' {INTERNAL} guest\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_script_survives_quotes() {
        let script = start_script(Path::new("/a b/it's")).expect("UTF-8");
        assert_eq!(script, "#!/bin/sh\nexec '/a b/it'\\''s' lab-internal guest\n");
    }
}
