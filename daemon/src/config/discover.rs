//! NICs and rates that the kernel has: `rate = "auto"`, and a configuration that names no NIC.

use std::path::Path;

use laxity_quantity::Rate;

use super::rate::{ALL_DEVICES, NicRate, RateOrigin};
use super::{Config, NICS_MAX, NicConfig};

/// The slowest likely rate of a NIC, in bytes per second: 10 Mbit/s.
const LIKELY_MIN: u64 = 1_250_000;

impl NicConfig {
    /// Returns a warning if nothing runs at this rate, or nobody knows it.
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
    /// Names the NICs of the host below `root`, if the file names none. A single NIC keeps the name
    /// `default`, which stands for all devices. Beside several, `default` is for traffic that names
    /// none of them, such as that of programs that name the network interface of an RDMA device.
    pub(super) fn discover(&mut self, root: &Path) {
        let [own] = self.nic.as_slice() else { return };
        let found = laxity_nic::nics(root);
        if *own != Self::default().nic[0] || found.len() < 2 {
            return;
        }
        let own = own.clone();
        let named = |name| NicConfig { name, ..own.clone() };
        self.nic = found.into_iter().take(NICS_MAX - 1).map(named).collect();
        self.nic.push(own);
    }

    /// Reads all rates that are `"auto"`. `default` has that of the fastest NIC. A rate that the
    /// kernel no longer knows, as of a port without a cable, stays. Returns whether one changed.
    pub(crate) fn read_rates(&mut self, root: &Path) -> bool {
        let before = self.nic.clone();
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
        self.nic != before
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn host(rates: &[(&str, u32)]) -> tempfile::TempDir {
        let host = tempfile::tempdir().expect("a folder");
        for (device, gbit) in rates {
            let port = host.path().join("sys/class/infiniband").join(device).join("ports/1");
            fs::create_dir_all(&port).expect("created");
            fs::write(port.join("state"), "4: ACTIVE").expect("written");
            fs::write(port.join("rate"), format!("{gbit} Gb/sec (4X)")).expect("written");
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
        assert_eq!(on(two.path(), &config.to_toml()), config, "shown and read back");
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
        assert!(!config.read_rates(host.path()));
        let port = host.path().join("sys/class/infiniband/mlx5_0/ports/1");
        fs::write(port.join("rate"), "25 Gb/sec (1X EDR)").expect("written");
        assert!(config.read_rates(host.path()));
        assert_eq!(nics(&config)[..2], [("mlx5_0", 25), ("mlx5_1", 100)]);
        fs::write(port.join("state"), "1: DOWN").expect("written");
        assert!(!config.read_rates(host.path()));
        assert_eq!(nics(&config)[0], ("mlx5_0", 25));
    }
}
