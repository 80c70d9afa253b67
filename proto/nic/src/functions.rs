//! The counters of a NIC, with those of the functions that share its port.
//!
//! A virtual function or a subfunction counts its own traffic only, and its owner's counters lack
//! that traffic. So the bytes of a NIC are the sum over both. A function may appear and go at any
//! time. It counts from its first reading on, and what it has counted stays, so that the sum makes
//! no jump.

use std::path::{Path, PathBuf};

use crate::counters::{CounterSource, NicCounts, NicDriver, device_of, source_alone, source_of};
use crate::ports::{INTERFACES, RdmaPort, is_called, names, owner, rdma_ports, text};

/// The `type` of a network interface over InfiniBand. Its bytes are RDMA, which its device counts.
const IPOIB: &str = "32";

struct FunctionCounter {
    name: String,
    source: Box<dyn CounterSource>,
    last: NicCounts,
}

/// The counters of a NIC. Each reading may cost a system call or a firmware command per device.
pub struct NicCounters {
    root: PathBuf,
    nic: String,
    owner: Box<dyn CounterSource>,
    functions: Vec<FunctionCounter>,
    /// What functions have counted since they were found.
    passed: NicCounts,
}

/// Returns the counters of a NIC that is named by its RDMA device or its network interface. The
/// name `default` means the host's only NIC, if there is exactly one ([`crate::nics`]). `root`
/// stands for `/`.
pub fn counters_of(root: &Path, nic: &str, driver: NicDriver) -> Option<NicCounters> {
    let owner = source_of(root, nic, driver)?;
    let (root, nic) = (root.to_owned(), nic.to_owned());
    Some(NicCounters { root, nic, owner, functions: Vec::new(), passed: NicCounts::default() })
}

impl NicCounters {
    /// Returns the name of the owner's source in reports.
    pub fn name(&self) -> &'static str {
        self.owner.name()
    }

    /// Looks which functions share the port now, other than those that are among `nics` themselves.
    pub fn look(&mut self, nics: &[String]) {
        let found = shared_by(&self.root, &self.nic, nics);
        self.functions.retain(|function| found.contains(&function.name));
        for name in found {
            if self.functions.iter().any(|function| function.name == name) {
                continue;
            }
            if let Some(mut source) = source_alone(&self.root, &name)
                && let Some(last) = source.read(&[])
            {
                self.functions.push(FunctionCounter { name, source, last });
            }
        }
    }

    /// Reads the counters, or returns `None` if those of the owner can't be read now. `ours` are
    /// the DSCPs of the traffic to which bytes yield ([`NicCounts::yielding_bytes`]).
    pub fn read(&mut self, ours: &[u8]) -> Option<NicCounts> {
        let owner = self.owner.read(ours)?;
        let passed = &mut self.passed;
        self.functions.retain_mut(|function| {
            let Some(now) = function.source.read(&[]) else { return false };
            // A counter that started again moved by an unknown amount.
            let moved = now.with(function.last, u64::saturating_sub);
            *passed = passed.with(moved, u64::wrapping_add);
            function.last = now;
            true
        });
        Some(owner.with(self.passed, u64::wrapping_add))
    }
}

/// Returns the functions that share the port of a NIC and are no NICs: RDMA devices, and network
/// interfaces.
fn shared_by(root: &Path, nic: &str, nics: &[String]) -> Vec<String> {
    let ports = rdma_ports(root);
    let nic = device_of(root, nic);
    let is_shared = |name: &str, owner: Option<String>| {
        owner.is_some_and(|owner| is_called(&ports, &owner, &nic))
            && !nics.iter().any(|own| is_called(&ports, name, own))
    };
    let interfaces = root.join(INTERFACES);
    let is_counted = |name: &String| {
        let folder = interfaces.join(name);
        folder.join("device").exists() && text(&folder.join("type")).as_deref() != Some(IPOIB)
    };
    let is_port = |port: &&RdmaPort| is_shared(&port.device, port.owner.clone());
    let mut found: Vec<String> =
        ports.iter().filter(is_port).map(|port| port.device.clone()).collect();
    found.dedup();
    let beside = names(&interfaces).into_iter().filter(is_counted);
    found.extend(beside.filter(|name| is_shared(name, owner(root, name))));
    found
}
