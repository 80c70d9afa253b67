//! The other process of a measured pair: this program again, in a hidden role, pinned to its core.
//! The shared medium is its standard input.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::signal::Signal;

use crate::error::{BenchError, Result};
use crate::machine::pin_thread;

/// A process that is killed on drop.
pub(crate) struct Running(pub(crate) Child);

/// Starts the peer of a role on a core.
pub(crate) fn spawn(role: &str, core: usize, medium: OwnedFd) -> Result<Running> {
    let program = std::env::current_exe().map_err(BenchError::system("find this program"))?;
    let child = Command::new(program)
        .args(["peer", "--core", &core.to_string(), role])
        .stdin(Stdio::from(medium))
        .spawn()
        .map_err(BenchError::system(format!("start the {role} peer")))?;
    Ok(Running(child))
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may be gone already, so errors are ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pins the peer to its core and makes it die with its parent. Every peer calls this first.
pub(crate) fn settle(core: usize) -> Result<()> {
    let parent = nix::unistd::getppid();
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(BenchError::system("ask to die with the parent"))?;
    // The parent may have died before the request took effect. Then another process is the parent.
    if nix::unistd::getppid() != parent {
        return Err(BenchError::Failed("the parent is gone".to_owned()));
    }
    pin_thread(core)
}

pub(crate) fn medium() -> Result<OwnedFd> {
    std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(BenchError::system("take over standard input"))
}

/// A page that the pair shares. Words are 128 bytes apart, so that no prefetcher couples them.
pub(crate) struct SharedPage {
    base: NonNull<core::ffi::c_void>,
}

const PAGE_BYTES: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
const LINE_BYTES: usize = 128;
/// Index of the word that the peer sets once it is ready.
const READY_LINE: usize = 31;

impl SharedPage {
    /// Creates a page. Returns it with the descriptor for the peer.
    pub(crate) fn create() -> Result<(Self, OwnedFd)> {
        let memory = memfd_create(c"laxity-bench", MFdFlags::MFD_CLOEXEC)
            .map_err(BenchError::system("memfd_create"))?;
        nix::unistd::ftruncate(&memory, PAGE_BYTES.get() as i64)
            .map_err(BenchError::system("size the page"))?;
        Ok((Self::map(&memory)?, memory))
    }

    pub(crate) fn map(memory: &impl AsFd) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe {
            mmap(
                None,
                PAGE_BYTES,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE,
                memory,
                0,
            )
        }
        .map_err(BenchError::system("map the shared page"))?;
        Ok(Self { base })
    }

    /// Returns the word of `line`, 0 to 31.
    pub(crate) fn word(&self, line: usize) -> &AtomicU64 {
        assert!(line < PAGE_BYTES.get() / LINE_BYTES);
        // SAFETY: `base` maps PAGE_BYTES until `self` is dropped, the offset is in range and a
        // multiple of 128, and both processes touch the page through atomics only.
        unsafe { self.base.byte_add(line * LINE_BYTES).cast::<AtomicU64>().as_ref() }
    }

    pub(crate) fn announce(&self) {
        self.word(READY_LINE).store(1, Ordering::Release);
    }

    pub(crate) fn await_peer(&self) -> Result<()> {
        let begin = Instant::now();
        while self.word(READY_LINE).load(Ordering::Acquire) == 0 {
            if begin.elapsed() > Duration::from_secs(10) {
                let why = "the peer did not get ready within 10 s";
                return Err(BenchError::Failed(why.to_owned()));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and no reference outlives `self`.
        let unmapped = unsafe { munmap(self.base, PAGE_BYTES.get()) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_a_page_show_the_same_words() {
        let (ours, memory) = SharedPage::create().expect("a page");
        let theirs = SharedPage::map(&memory).expect("a second mapping");
        theirs.word(3).store(7, Ordering::Release);
        theirs.announce();
        assert_eq!(ours.word(3).load(Ordering::Acquire), 7);
        ours.await_peer().expect("announced");
    }
}
