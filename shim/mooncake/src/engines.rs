//! The engines of a process, and their protocols, which decide who schedules their transfers.
//!
//! This builds on facts about Mooncake 0.3.0 to 0.3.13. An engine uses the protocols for which
//! `installTransport` was called. It may install one itself while it is made: TCP if `MC_FORCE_TCP`
//! is set. Otherwise only with `auto_discover`: NVLink if the environment names it, TCP if there is
//! no RDMA device, else RDMA (or `barex`). An engine with several protocols takes the one that its
//! peer's segment names, which is not visible here. With `MC_USE_TENT` or `MC_USE_TEV1`, TENT moves
//! all bytes, and ignores `installTransport`.

use core::ffi::c_void;
use std::collections::HashMap;
use std::path::Path;

/// Largest number of recorded engines. Transfers of others pass through.
const ENGINES_MAX: usize = 1024;
/// Largest number of recorded buffers of an engine.
const BUFFERS_MAX: usize = 1 << 16;
/// Largest number of recorded segments of an engine.
const SEGMENTS_MAX: usize = 1 << 16;

/// The library that schedules an engine's transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Handling {
    /// This library: each transfer gets permits before Mooncake gets it.
    Gate,
    /// `liblaxity.so`, which sees each work request. It gets hints about the memory.
    Hint,
    /// No library.
    #[default]
    Pass,
}

/// The medium that a protocol uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A NIC, by an interface that no library of Laxity sees.
    Nic,
    Verbs,
    /// The host's memory or a separate fabric: its bytes pass no port of the daemon.
    Inside,
}

/// Returns the medium of a protocol, as `laxity.mooncake` does.
fn path_of(protocol: &str) -> Way {
    match protocol {
        "rdma" => Way::Verbs,
        "nvlink" | "nvlink_intra" | "intra_nvlink" | "mnnvl" | "musa" | "maca" | "hip" | "cxl"
        | "shm" | "nvmeof" | "nvmeof_generic" => Way::Inside,
        _ => Way::Nic,
    }
}

#[derive(Debug, Default)]
struct Engine {
    protocols: Vec<String>,
    /// Whether the TENT runtime chooses the protocols.
    is_tent: bool,
    /// Sizes of registered buffers in bytes, by address.
    buffers: HashMap<usize, usize>,
    /// Peers of segments, as numbers of [`laxity_client::peers`].
    peers: HashMap<i32, u8>,
}

impl Engine {
    fn handling(&self, is_preloaded: bool) -> Handling {
        // TENT chooses a protocol for each piece of a request. The verbs library sees the work
        // requests of its RDMA. A transfer that waits here, too, could wait for itself.
        if self.is_tent {
            return if is_preloaded { Handling::Hint } else { Handling::Pass };
        }
        let mut handling = Handling::Pass;
        for protocol in &self.protocols {
            match path_of(protocol) {
                // A transfer that waits twice can wait for ever: its own bytes fill the window that
                // its work requests wait for. It doesn't wait here if the verbs library may see it.
                Way::Verbs if is_preloaded => return Handling::Hint,
                Way::Verbs | Way::Nic => handling = Handling::Gate,
                Way::Inside => {}
            }
        }
        handling
    }
}

/// The environment's settings that decide about a new engine.
pub(crate) struct EngineEnv {
    pub(crate) force_tcp: bool,
    pub(crate) force_hca: bool,
    pub(crate) barex: bool,
    pub(crate) inside: bool,
    pub(crate) tent: bool,
    pub(crate) has_hca: bool,
}

impl EngineEnv {
    pub(crate) fn here() -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        Self {
            force_tcp: is_set("MC_FORCE_TCP"),
            force_hca: is_set("MC_FORCE_HCA"),
            barex: is_set("USE_BAREX"),
            inside: is_set("MC_INTRANODE_NVLINK") || is_set("MC_FORCE_MNNVL"),
            tent: is_set("MC_USE_TENT") || is_set("MC_USE_TEV1"),
            has_hca: Path::new("/sys/class/infiniband")
                .read_dir()
                .is_ok_and(|mut devices| devices.next().is_some()),
        }
    }

    /// Returns the protocol that an engine installs by itself.
    fn installed(&self, discovers: bool) -> Option<&'static str> {
        if self.force_tcp {
            Some("tcp")
        } else if !discovers {
            None
        } else if self.inside {
            Some("nvlink")
        } else if !self.has_hca && !self.force_hca {
            Some("tcp")
        } else if self.barex {
            Some("barex")
        } else {
            Some("rdma")
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Engines {
    engines: HashMap<usize, Engine>,
}

impl Engines {
    pub(crate) fn made(&mut self, engine: *mut c_void, discovers: bool, around: &EngineEnv) {
        if self.engines.len() >= ENGINES_MAX {
            return;
        }
        let installed = around.installed(discovers).map(str::to_owned);
        let entry = Engine {
            protocols: installed.into_iter().collect(),
            is_tent: around.tent,
            ..Engine::default()
        };
        self.engines.insert(engine as usize, entry);
    }

    pub(crate) fn installed(&mut self, engine: *mut c_void, protocol: &str) {
        if let Some(engine) = self.engines.get_mut(&(engine as usize))
            && !engine.protocols.iter().any(|known| known == protocol)
        {
            engine.protocols.push(protocol.to_owned());
        }
    }

    pub(crate) fn uninstalled(&mut self, engine: *mut c_void, protocol: &str) {
        if let Some(engine) = self.engines.get_mut(&(engine as usize)) {
            engine.protocols.retain(|known| known != protocol);
        }
    }

    pub(crate) fn destroyed(&mut self, engine: *mut c_void) {
        self.engines.remove(&(engine as usize));
    }

    pub(crate) fn handling(&self, engine: *mut c_void, is_preloaded: bool) -> Handling {
        self.engines
            .get(&(engine as usize))
            .map_or(Handling::Pass, |engine| engine.handling(is_preloaded))
    }

    pub(crate) fn registered(&mut self, engine: *mut c_void, address: *mut c_void, length: usize) {
        if let Some(engine) = self.engines.get_mut(&(engine as usize))
            && engine.buffers.len() < BUFFERS_MAX
        {
            engine.buffers.insert(address as usize, length);
        }
    }

    /// Removes a buffer and returns its size.
    pub(crate) fn unregistered(
        &mut self,
        engine: *mut c_void,
        address: *mut c_void,
    ) -> Option<usize> {
        let engine = self.engines.get_mut(&(engine as usize))?;
        engine.buffers.remove(&(address as usize))
    }

    pub(crate) fn opened(&mut self, engine: *mut c_void, segment: i32, peer: u8) {
        if let Some(engine) = self.engines.get_mut(&(engine as usize))
            && engine.peers.len() < SEGMENTS_MAX
        {
            engine.peers.insert(segment, peer);
        }
    }

    /// Returns the peer of a segment, or 0 if unknown.
    pub(crate) fn peer(&self, engine: *mut c_void, segment: i32) -> u8 {
        let engine = self.engines.get(&(engine as usize));
        engine.and_then(|engine| engine.peers.get(&segment)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: EngineEnv = EngineEnv {
        force_tcp: false,
        force_hca: false,
        barex: false,
        inside: false,
        tent: false,
        has_hca: false,
    };
    const ENGINE: *mut c_void = 0x10 as *mut c_void;

    fn handling_of(protocols: &[&str], is_preloaded: bool) -> Handling {
        let mut engines = Engines::default();
        engines.made(ENGINE, false, &NOTHING);
        for protocol in protocols {
            engines.installed(ENGINE, protocol);
        }
        engines.handling(ENGINE, is_preloaded)
    }

    #[test]
    fn what_verbs_carry_waits_there_and_everything_else_on_a_nic_waits_here() {
        assert_eq!(handling_of(&["tcp"], true), Handling::Gate);
        assert_eq!(handling_of(&["tcp"], false), Handling::Gate);
        assert_eq!(handling_of(&["rdma"], true), Handling::Hint);
        assert_eq!(handling_of(&["rdma"], false), Handling::Gate);
        assert_eq!(handling_of(&["efa"], true), Handling::Gate);
        assert_eq!(handling_of(&["nvlink"], true), Handling::Pass);
        assert_eq!(handling_of(&[], true), Handling::Pass);
        assert_eq!(handling_of(&["tcp", "rdma"], true), Handling::Hint, "never twice");
        assert_eq!(handling_of(&["nvlink", "tcp"], true), Handling::Gate);
    }

    #[test]
    fn an_engine_that_installs_for_itself_is_known_by_what_it_finds() {
        let handling = |around: &EngineEnv, discovers| {
            let mut engines = Engines::default();
            engines.made(ENGINE, discovers, around);
            engines.handling(ENGINE, true)
        };
        let with_hca = || EngineEnv { has_hca: true, ..NOTHING };
        assert_eq!(handling(&NOTHING, true), Handling::Gate);
        assert_eq!(handling(&NOTHING, false), Handling::Pass);
        assert_eq!(handling(&with_hca(), true), Handling::Hint);
        let forced = EngineEnv { force_tcp: true, ..with_hca() };
        assert_eq!(handling(&forced, true), Handling::Gate);
        let tent = EngineEnv { tent: true, force_tcp: true, ..NOTHING };
        assert_eq!(handling(&tent, false), Handling::Hint, "TENT installs nothing");
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let mut engines = Engines::default();
        engines.made(ENGINE, false, &NOTHING);
        engines.installed(ENGINE, "tcp");
        engines.opened(ENGINE, 3, 7);
        let buffer = 0x1000 as *mut c_void;
        engines.registered(ENGINE, buffer, 64);
        assert_eq!(engines.peer(ENGINE, 3), 7);
        assert_eq!(engines.unregistered(ENGINE, buffer), Some(64));
        assert_eq!(engines.unregistered(ENGINE, buffer), None);
        engines.uninstalled(ENGINE, "tcp");
        assert_eq!(engines.handling(ENGINE, false), Handling::Pass);
        engines.destroyed(ENGINE);
        assert_eq!(engines.peer(ENGINE, 3), 0);
    }
}
