//! The rate of a NIC, from the file or from the kernel.

use laxity_quantity::Rate;
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

/// The NIC name that stands for all devices.
pub const ALL_DEVICES: &str = "default";
const AUTO: &str = "auto";
/// What is assumed while the kernel does not know a rate: 100 Gbit/s.
const ASSUMED: u64 = 12_500_000_000;

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RateOrigin {
    File,
    Kernel,
    /// The kernel was not asked yet.
    Open,
    /// The kernel was asked and does not know it.
    Unknown,
}

/// The rate of a NIC: as configured, or as the kernel has it (`"auto"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicRate {
    /// The rate in force.
    pub bytes_per_s: u64,
    pub(super) origin: RateOrigin,
}

impl NicRate {
    /// `"auto"`, before the kernel was asked.
    pub const AUTO: Self = Self { bytes_per_s: ASSUMED, origin: RateOrigin::Open };

    /// Reports whether the configuration or the kernel has the rate, so that it is not assumed.
    #[must_use]
    pub fn is_known(self) -> bool {
        matches!(self.origin, RateOrigin::File | RateOrigin::Kernel)
    }

    /// Reports whether the kernel decides.
    #[must_use]
    pub fn is_auto(self) -> bool {
        self.origin != RateOrigin::File
    }
}

impl From<Rate> for NicRate {
    fn from(rate: Rate) -> Self {
        Self { bytes_per_s: rate.0, origin: RateOrigin::File }
    }
}

impl Serialize for NicRate {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if self.is_auto() { s.serialize_str(AUTO) } else { Rate(self.bytes_per_s).serialize(s) }
    }
}

impl<'de> Deserialize<'de> for NicRate {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let value = toml::Value::deserialize(d)?;
        if value.as_str() == Some(AUTO) {
            return Ok(Self::AUTO);
        }
        let rate = Rate::deserialize(value);
        rate.map(Self::from).map_err(|error| D::Error::custom(error.message()))
    }
}
