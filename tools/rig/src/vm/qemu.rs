//! The command line of QEMU, and the meaning of its exit status.
//!
//! QEMU emulates (TCG) instead of using KVM. Most machines have no KVM, and a stock guest hangs
//! under the KVM of some. `-cpu max,-erms` moves 1.7 times the bytes per processor second of `max`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::image::Image;

/// Port of the `isa-debug-exit` device. Writing a byte *n* to it ends QEMU with status `2n + 1`.
pub const EXIT_PORT: u64 = 0xf4;

/// The values that the guest writes to the exit port.
///
/// A guest that panics or powers off ends QEMU with 0, and QEMU ends with 1 on wrong arguments.
/// These values give neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Farewell {
    Finished = 42,
    /// The process that sets up the guest or runs the job ended without a result.
    Lost = 43,
    NoRoot = 44,
}

impl Farewell {
    /// Returns the value for an exit status of QEMU, if the guest chose the status.
    pub fn of_status(status: i32) -> Option<Self> {
        [Self::Finished, Self::Lost, Self::NoRoot]
            .into_iter()
            .find(|farewell| 2 * (*farewell as i32) + 1 == status)
    }
}

/// A host folder that the guest may write to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tag that identifies the folder when the guest mounts it.
    pub tag: String,
    pub folder: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuMachine {
    pub memory_mib: u32,
    pub processors: u32,
    pub console: PathBuf,
    /// Unix socket of the channel. QEMU waits for a connection before it starts the guest.
    pub channel: PathBuf,
    pub shares: Vec<Share>,
}

/// Returns a path quoted for an option of QEMU, where a comma ends a value.
fn quoted(path: &Path) -> OsString {
    let bytes = path.as_os_str().as_bytes();
    let parts: Vec<&[u8]> = bytes.split(|byte| *byte == b',').collect();
    OsString::from_vec(parts.join(b",,".as_slice()))
}

fn joined(parts: &[&dyn AsRef<OsStr>]) -> OsString {
    let mut all = OsString::new();
    for part in parts {
        all.push(part.as_ref());
    }
    all
}

pub fn arguments(image: &Image, machine: &QemuMachine) -> Vec<OsString> {
    let fixed = "-M q35 -accel tcg,thread=multi -cpu max,-erms -nodefaults -no-user-config \
                 -display none -no-reboot -device isa-debug-exit,iobase=0xf4,iosize=0x4 \
                 -device virtio-serial-pci -device virtserialport,chardev=channel,name=laxity";
    let mut args: Vec<OsString> = fixed.split(' ').map(OsString::from).collect();
    let mut option = |name: &str, value: OsString| args.extend([OsString::from(name), value]);
    option("-append", "console=ttyS0 quiet panic=-1 mitigations=off".into());
    option("-smp", machine.processors.to_string().into());
    option("-m", machine.memory_mib.to_string().into());
    option("-kernel", image.kernel.clone().into());
    option("-initrd", image.initrd.clone().into());
    option("-serial", joined(&[&"file:", &machine.console]));
    option(
        "-chardev",
        joined(&[&"socket,id=channel,server=on,wait=on,path=", &quoted(&machine.channel)]),
    );
    // The guest sees the host's files as this process does, including other mounts.
    option(
        "-fsdev",
        "local,id=hostroot,path=/,security_model=none,readonly=on,multidevs=remap".into(),
    );
    option("-device", "virtio-9p-pci,fsdev=hostroot,mount_tag=hostroot".into());
    for share in &machine.shares {
        let tag = &share.tag;
        option(
            "-fsdev",
            joined(&[
                &format!("local,id={tag},security_model=none,multidevs=remap,path="),
                &quoted(&share.folder),
            ]),
        );
        option("-device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}").into());
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled_as_qemu_wants_them() {
        assert_eq!(quoted(Path::new("/t,1/channel")), "/t,,1/channel");
    }

    #[test]
    fn only_what_the_guest_said_on_purpose_is_a_farewell() {
        assert_eq!(Farewell::of_status(85), Some(Farewell::Finished));
        assert_eq!(Farewell::of_status(87), Some(Farewell::Lost));
        assert_eq!(Farewell::of_status(89), Some(Farewell::NoRoot));
        for status in [0, 1, 2, 3, 84, 137] {
            assert_eq!(Farewell::of_status(status), None, "{status}");
        }
    }
}
