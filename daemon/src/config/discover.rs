//! NICs and rates that the kernel has: `rate = "auto"`, and a configuration that names no NIC.
//!
//! Clients use the index of a NIC as its number, so a NIC keeps its index while the daemon runs,
//! even if the kernel no longer has the NIC.

use std::path::Path;

use laxity_quantity::Rate;

use super::rate::{ALL_DEVICES, NicRate, RateOrigin};
use super::{Config, DiscoveredNics, NICS_MAX, NicConfig};

/// The slowest likely rate of a NIC, in bytes per second: 10 Mbit/s.
const LIKELY_MIN: u64 = 1_250_000;

impl NicConfig {
    /// Returns a warning if no NIC is that slow, or if the rate is only assumed.
    pub(super) fn warn_of_rate(&self, index: usize) -> Option<String> {
        let rate = self.rate.bytes_per_s;
        if self.rate.origin == RateOrigin::Unknown {
            return Some(format!(
                "nic.{index}.rate: the kernel knows no rate for {}; {} is assumed. Write it, such \
                 as \"25Gbit\"",
                self.name,
                Rate(rate).about()
            ));
        }
        (rate < LIKELY_MIN).then(|| {
            format!(
                "nic.{index}.rate: {} is {rate} bytes per second; no NIC is that slow, and all \
                 traffic would wait. Write the unit, such as \"100Gbit\"",
                Rate(rate)
            )
        })
    }
}

impl Config {
    /// Names the NICs of the host below `root`, if the file names none.
    pub(super) fn discover(&mut self, root: &Path) {
        if self.nic == Self::default().nic {
            self.discovered = Some(DiscoveredNics::default());
            self.find_nics(root);
        }
    }

    /// Adds NICs that the kernel has now to those discovered before, and updates which are absent.
    ///
    /// A single NIC has the name `default`, which stands for all devices. Beside several, `default`
    /// is for traffic that names none of them, such as that of programs that name the network
    /// interface of an RDMA device. So the NIC that was alone then gets its own name, at its index.
    pub(crate) fn find_nics(&mut self, root: &Path) {
        let Some(before) = self.discovered.clone() else { return };
        let mut found = laxity_nic::nics(root);
        let has_none = found.is_empty();
        let are_rdma = found.iter().any(|name| laxity_nic::is_rdma(root, name));
        if before.are_rdma && !are_rdma {
            found.clear();
        }
        let mut all_devices = None;
        if self.nic.len() == 1 && found.len() > 1 {
            let is_here = |name: &&String| found.contains(name);
            let first = before.names.iter().find(is_here).or(before.names.first());
            self.nic[0].name.clone_from(first.unwrap_or(&found[0]));
            all_devices = Some(NicConfig::new(ALL_DEVICES));
        }
        let is_alone = self.nic.len() == 1 && found.len() < 2;
        for name in found.iter().filter(|_| !is_alone) {
            let has_room = self.nic.len() + usize::from(all_devices.is_some()) < NICS_MAX;
            if has_room && self.nic.iter().all(|nic| nic.name != *name) {
                self.nic.push(NicConfig::new(name));
            }
        }
        self.nic.extend(all_devices);
        let mut latest = before;
        let folder = |name: &String| Some((name.clone(), laxity_nic::folder_of(root, name)?));
        latest.folders.extend(found.iter().filter_map(folder));
        latest.folders.retain(|name, _| is_alone || self.nic.iter().any(|nic| nic.name == *name));
        if !found.is_empty() {
            (latest.names, latest.are_rdma) = (found, are_rdma);
        }
        let is_gone = |name: &String| {
            let entries = latest.folders.get(name).and_then(|folder| folder.read_dir().ok());
            let has_moved = entries.is_some_and(|mut entries| entries.next().is_none());
            !has_moved && !laxity_nic::exists(root, name)
        };
        for nic in &mut self.nic {
            nic.absent = match nic.name.as_str() {
                ALL_DEVICES => {
                    has_none && !latest.names.is_empty() && latest.names.iter().all(is_gone)
                }
                _ => is_gone(&nic.name),
            };
        }
        self.discovered = Some(latest);
    }

    /// Reads all rates that are `"auto"`. `default` has that of the fastest NIC. A rate that the
    /// kernel no longer knows, as of a port without a cable, stays.
    pub(crate) fn read_rates(&mut self, root: &Path) {
        for nic in self.nic.iter_mut().filter(|nic| nic.rate.is_auto()) {
            let read = match nic.name.as_str() {
                ALL_DEVICES => {
                    laxity_nic::nics(root).iter().filter_map(|n| laxity_nic::rate(root, n)).max()
                }
                name => laxity_nic::rate(root, name),
            };
            match read {
                Some(bytes_per_s) => nic.rate = NicRate { bytes_per_s, origin: RateOrigin::Kernel },
                None if nic.rate.origin == RateOrigin::Open => {
                    nic.rate.origin = RateOrigin::Unknown;
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// Adds an RDMA device with an active port to the host below `root`. Returns its folder.
    fn plug(root: &Path, device: &str, gbit: u32) -> PathBuf {
        let device = root.join("sys/class/infiniband").join(device);
        let port = device.join("ports/1");
        fs::create_dir_all(&port).expect("created");
        fs::write(port.join("state"), "4: ACTIVE").expect("written");
        fs::write(port.join("rate"), format!("{gbit} Gb/sec (4X)")).expect("written");
        device
    }

    fn host(rates: &[(&str, u32)]) -> tempfile::TempDir {
        let host = tempfile::tempdir().expect("a folder");
        for (device, gbit) in rates {
            plug(host.path(), device, *gbit);
        }
        host
    }

    fn on(host: &Path, text: &str) -> Config {
        let mut config = Config::parse(text, "x").unwrap();
        config.discover(host);
        config.read_rates(host);
        config
    }

    fn nics(config: &Config) -> Vec<(&str, u64)> {
        config
            .nic
            .iter()
            .map(|nic| (nic.name.as_str(), nic.rate.bytes_per_s * 8 / 1_000_000_000))
            .collect()
    }

    #[test]
    fn a_configuration_without_nics_has_those_of_the_host_with_their_rates() {
        let two = host(&[("mlx5_0", 400), ("mlx5_1", 200)]);
        let config = on(two.path(), "");
        let default = ("default", 400);
        assert_eq!(nics(&config), [("mlx5_0", 400), ("mlx5_1", 200), default]);
        assert_eq!(config.warnings(), Vec::<String>::new());
        let shown = Config { discovered: None, ..config.clone() };
        assert_eq!(on(two.path(), &config.to_toml()), shown, "shown and read back");
        let one = host(&[("mlx5_0", 200)]);
        assert_eq!(nics(&on(one.path(), "")), [("default", 200)], "it stands for all devices");
        let none = on(host(&[]).path(), "");
        assert_eq!(nics(&none), [("default", 100)]);
        assert!(none.warnings()[0].contains("knows no rate"), "{:?}", none.warnings());
    }

    #[test]
    fn a_named_nic_is_neither_added_to_nor_changed_unless_its_rate_is_auto() {
        let two = host(&[("mlx5_0", 400), ("mlx5_1", 200)]);
        let rate = |rate| format!("[[nic]]\nname = \"mlx5_1\"\nrate = {rate}\n");
        assert_eq!(nics(&on(two.path(), &rate("\"auto\""))), [("mlx5_1", 200)]);
        assert_eq!(nics(&on(two.path(), &rate("\"50Gbit\""))), [("mlx5_1", 50)]);
        let all = "[[nic]]\nname = \"default\"\nrate = \"10Gbit\"\n";
        assert_eq!(nics(&on(two.path(), all)), [("default", 10)]);
        let wrong = Config::parse(&rate("\"car\""), "x").unwrap_err().to_string();
        assert!(wrong.contains("x:3:") && wrong.contains("`car` is not a rate"), "{wrong}");
    }

    #[test]
    fn a_rate_that_changes_is_followed_and_one_that_is_no_longer_known_stays() {
        let host = host(&[("mlx5_0", 100), ("mlx5_1", 100)]);
        let mut config = on(host.path(), "");
        let port = host.path().join("sys/class/infiniband/mlx5_0/ports/1");
        fs::write(port.join("rate"), "25 Gb/sec (1X EDR)").expect("written");
        config.read_rates(host.path());
        assert_eq!(nics(&config)[..2], [("mlx5_0", 25), ("mlx5_1", 100)]);
        fs::write(port.join("state"), "1: DOWN").expect("written");
        config.read_rates(host.path());
        assert_eq!(nics(&config)[0], ("mlx5_0", 25));
    }

    /// Lets the kernel below `root` have these RDMA devices, and looks. Returns the names of the
    /// NICs, those that are absent in parentheses.
    fn look(config: &mut Config, root: &Path, devices: &[&str]) -> String {
        let folder = root.join("sys/class/infiniband");
        let _ = fs::remove_dir_all(&folder);
        for device in devices {
            fs::create_dir_all(folder.join(device).join("ports/1")).expect("created");
        }
        config.find_nics(root);
        let shown = |nic: &NicConfig| match nic.absent {
            true => format!("({})", nic.name),
            false => nic.name.clone(),
        };
        config.nic.iter().map(shown).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn nics_that_come_are_added_and_a_nic_keeps_its_index_when_it_goes() {
        let host = host(&[]);
        let mut config = on(host.path(), "");
        let mut look = |devices: &[&str]| look(&mut config, host.path(), devices);
        assert_eq!(look(&["mlx5_1"]), "default");
        assert_eq!(look(&["mlx5_0", "mlx5_1"]), "mlx5_1 mlx5_0 default");
        assert_eq!(look(&["mlx5_0"]), "(mlx5_1) mlx5_0 default");
        assert_eq!(look(&["mlx5_2"]), "(mlx5_1) (mlx5_0) default mlx5_2");
        assert_eq!(look(&[]), "(mlx5_1) (mlx5_0) (default) (mlx5_2)");
        assert_eq!(look(&["mlx5_1"]), "mlx5_1 (mlx5_0) default (mlx5_2)");
        let many: Vec<String> = (0..2 * NICS_MAX).map(|index| format!("many{index}")).collect();
        look(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(config.nic.len(), NICS_MAX);
    }

    #[test]
    fn functions_of_a_nic_are_no_nics_unless_they_have_their_own() {
        let host = host(&[("mlx5_0", 200)]);
        let function = |function: &str, owner: &str| {
            let device = plug(host.path(), function, 400);
            fs::create_dir_all(device.join("device/physfn/infiniband").join(owner)).unwrap();
        };
        function("mlx5_2", "mlx5_0");
        let mut config = on(host.path(), "");
        assert_eq!(nics(&config), [("default", 200)], "the owner is alone");
        function("mlx5_3", "mlx5_0");
        config.find_nics(host.path());
        assert_eq!(nics(&config), [("default", 200)], "one is hot-plugged");
        let own = "[[nic]]\nname = \"mlx5_0\"\nrate = \"auto\"\n\
                   [[nic]]\nname = \"mlx5_2\"\nrate = \"50Gbit\"\n";
        assert_eq!(nics(&on(host.path(), own)), [("mlx5_0", 200), ("mlx5_2", 50)]);
        fs::create_dir_all(host.path().join("sys/class/infiniband/mlx5_1/ports/1")).unwrap();
        config.find_nics(host.path());
        assert_eq!(nics(&config)[..2], [("mlx5_0", 200), ("mlx5_1", 100)]);
        assert_eq!(config.nic.len(), 3, "with `default`");
        function("mlx5_4", "mlx5_9");
        config.find_nics(host.path());
        assert_eq!(config.nic[3].name, "mlx5_4", "its owner is in another namespace");
    }

    #[test]
    fn a_nic_that_moves_to_the_network_namespace_of_a_pod_is_not_gone() {
        let host = host(&[("mlx5_1", 100)]);
        let folder = host.path().join("sys/devices/pci0/0000:03:00.2/infiniband");
        let device = folder.join("mlx5_0");
        fs::create_dir_all(device.join("ports/1")).expect("created");
        let link = host.path().join("sys/class/infiniband/mlx5_0");
        std::os::unix::fs::symlink(&device, link).expect("linked");
        let mut config = on(host.path(), "");
        fs::remove_dir_all(device).expect("removed");
        assert_eq!(look(&mut config, host.path(), &[]), "mlx5_0 (mlx5_1) default");
        fs::create_dir(folder.join("renamed")).expect("created");
        assert_eq!(look(&mut config, host.path(), &[]), "(mlx5_0) (mlx5_1) (default)");
        fs::remove_dir_all(folder).expect("removed");
        assert_eq!(look(&mut config, host.path(), &[]), "(mlx5_0) (mlx5_1) (default)");
    }

    #[test]
    fn only_discovered_nics_come_and_go() {
        let host = host(&[]);
        let mut named = on(host.path(), "[[nic]]\nname = \"mlx5_0\"\nrate = \"1Gbit\"\n");
        assert_eq!(look(&mut named, host.path(), &["mlx5_1", "mlx5_2"]), "mlx5_0");
        look(&mut named, host.path(), &[]);
        let mut none = on(host.path(), "");
        assert_eq!(look(&mut none, host.path(), &[]), "default", "there never was any");
        assert_eq!(look(&mut none, host.path(), &["rxe0"]), "default");
        assert_eq!(look(&mut none, host.path(), &[]), "(default)");
        for interface in ["eth0", "eth1"] {
            let folder = host.path().join("sys/class/net").join(interface);
            fs::create_dir_all(folder.join("device")).expect("created");
            fs::write(folder.join("operstate"), "up").expect("written");
        }
        assert_eq!(look(&mut none, host.path(), &[]), "default", "RDMA comes back");
        assert_eq!(look(&mut none, host.path(), &["rxe0", "rxe1"]), "rxe0 rxe1 default");
        let mut early = Config::default();
        fs::remove_dir_all(host.path().join("sys/class/infiniband")).expect("removed");
        early.discover(host.path());
        assert_eq!(look(&mut early, host.path(), &["rxe0"]), "eth0 eth1 default rxe0");
        let mut alone = Config::default();
        fs::remove_dir_all(host.path().join("sys/class/infiniband")).expect("removed");
        fs::write(host.path().join("sys/class/net/eth1/operstate"), "down").expect("written");
        alone.discover(host.path());
        let named = look(&mut alone, host.path(), &["rxe0", "rxe1"]);
        assert_eq!(named, "eth0 rxe0 rxe1 default", "the first is the one that was alone");
    }

    #[test]
    fn a_reload_keeps_the_nics_that_were_found() {
        let host = host(&[]);
        let mut running = on(host.path(), "");
        look(&mut running, host.path(), &["b"]);
        look(&mut running, host.path(), &["b", "c"]);
        look(&mut running, host.path(), &["a", "c"]);
        let file = on(host.path(), "mode = \"observe\"");
        assert_eq!(file.needs_restart(&running), Vec::<&str>::new());
        let mut reloaded = file.reloaded_over(&running);
        assert_ne!(reloaded.mode, running.mode);
        assert_eq!((&reloaded.nic, &reloaded.discovered), (&running.nic, &running.discovered));
        assert_eq!(look(&mut reloaded, host.path(), &["a", "b", "d"]), "b (c) default a d");
        let named = on(host.path(), "[[nic]]\nname = \"b\"\nrate = \"1Gbit\"\n");
        assert_eq!(named.needs_restart(&running).len(), 1);
        assert!(named.reloaded_over(&running).discovered.is_some());
        assert!(running.needs_restart(&named).len() == 1, "nor does discovery begin by a reload");
        assert_eq!(running.reloaded_over(&named).discovered, None);
        let mut found = Config::default();
        found.discover(host.path());
        let set = |key: &str| found.clone().with_assignments(&[key.to_owned()]).unwrap();
        assert_eq!(set("mode=\"off\"").discovered, found.discovered);
        assert_eq!(set("nic.0.rate=\"1Gbit\"").discovered, None, "the NICs are configured");
    }
}
