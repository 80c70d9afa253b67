//! The variables by which RDMA libraries choose the class of their traffic, and the values that
//! make all libraries of a job agree with the daemon's levels.
//!
//! The table is `classes.toml`. [`plan`] decides for each of its variables: one that is set stays,
//! and an unset one gets the class of its stage, if [`laxity_shm::marking::decide`] allows that
//! change of the library's own class.

use std::sync::LazyLock;

use laxity_shm::marking::{Marking, Treatments, Verdict, decide};
use laxity_shm::record::Stage;
use serde::{Deserialize, Deserializer, de};

/// ECN bits that no sender may set: they say that a switch saw congestion.
const CONGESTED: u8 = 0b11;
pub(crate) const SERVICE_LEVEL_MAX: u8 = 15;

pub(crate) static VARIABLES: LazyLock<Vec<Variable>> = LazyLock::new(|| {
    let table: Result<VariableTable, _> = toml::from_str(include_str!("classes.toml"));
    table.map(|table| table.variable).unwrap_or_default()
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VariableTable {
    variable: Vec<Variable>,
}

/// A variable of one library. `classes.toml` describes the fields.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Variable {
    pub(crate) library: String,
    pub(crate) name: String,
    pub(crate) sets: Field,
    #[serde(deserialize_with = "stage")]
    pub(crate) stage: Stage,
    pub(crate) default: u8,
    pub(crate) since: String,
    pub(crate) source: String,
    pub(crate) loaded: Vec<String>,
    #[serde(default)]
    order: Vec<String>,
    #[serde(default)]
    alone: bool,
    #[serde(default = "yes")]
    pub(crate) verbs: bool,
    #[serde(default)]
    pub(crate) note: String,
}

/// The field of a packet that a variable sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Field {
    TrafficClass,
    ServiceLevel,
}

const fn yes() -> bool {
    true
}

fn stage<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Stage, D::Error> {
    let name = String::deserialize(deserializer)?;
    let unknown = || de::Error::custom(format!("no stage is called `{name}`"));
    Stage::from_name(&name).ok_or_else(unknown)
}

impl Variable {
    /// Returns the class that a process has, and whether one of its variables sets it. A value that
    /// is no number, such as UCX's `auto`, or is negative, counts as unset.
    pub(crate) fn class_in(&self, value: impl Fn(&str) -> Option<String>) -> (u8, bool) {
        let set = self.set_by(value);
        (set.map_or(self.default, |(_, class)| class), set.is_some())
    }

    /// Returns the variable that sets the class of a process, and the class.
    pub(crate) fn set_by(&self, value: impl Fn(&str) -> Option<String>) -> Option<(&str, u8)> {
        self.order().iter().find_map(|name| Some((name.as_str(), number(&value(name)?)?)))
    }

    /// Returns the variables that count for the library, the first one first.
    fn order(&self) -> &[String] {
        if self.order.is_empty() { std::slice::from_ref(&self.name) } else { &self.order }
    }

    pub(crate) fn reads(&self, name: &str) -> bool {
        self.order().iter().any(|known| known == name)
    }

    /// Reports whether a process has the library. `maps` is the text of its `/proc/PID/maps`.
    pub(crate) fn is_loaded(&self, maps: &str) -> bool {
        self.loaded.iter().any(|beginning| maps.contains(&format!("/{beginning}")))
    }

    /// Reports whether the variable counts on a host with such ports, and does no harm there.
    fn applies(&self, layers: Layers) -> bool {
        let (needed, other) = match self.sets {
            Field::TrafficClass => (layers.roce, layers.infiniband),
            Field::ServiceLevel => (layers.infiniband, layers.roce),
        };
        needed && !(self.alone && other)
    }
}

/// Parses a class as libraries do, by strtol(3) with base 0: `106`, `0x6a` and `0152` are the same.
fn number(text: &str) -> Option<u8> {
    let text = text.trim();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u8::from_str_radix(hex, 16).ok(),
        None if text.starts_with('0') => u8::from_str_radix(text, 8).ok(),
        None => text.parse().ok(),
    }
}

/// The link layers of a host's RDMA ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layers {
    pub(crate) roce: bool,
    pub(crate) infiniband: bool,
}

/// The values to set, and the rule for setting them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) dscp: [u8; Stage::ALL.len()],
    pub(crate) service_level: [Option<u8>; Stage::ALL.len()],
    pub(crate) marking: Option<Marking>,
    pub(crate) treatments: Treatments,
}

impl Rules {
    /// The DSCPs of a daemon without a configuration, by [`Stage::index`].
    pub(crate) const DSCP_DEFAULT: [u8; Stage::ALL.len()] = {
        // Weights and background work have the scavenger's DSCP.
        let mut dscp = [8; Stage::ALL.len()];
        dscp[Stage::Collective.index()] = 34;
        dscp[Stage::KvReuse.index()] = 26;
        dscp[Stage::P2d.index()] = 10;
        dscp
    };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Set(u8),
    Kept(String),
    Left(&'static str),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) variable: &'static Variable,
    pub(crate) outcome: Outcome,
}

/// Decides about each variable that applies to these link layers. `value` returns the present value
/// of a variable.
pub(crate) fn plan(
    layers: Layers,
    rules: &Rules,
    value: impl Fn(&str) -> Option<String>,
) -> Vec<Setting> {
    let applicable = VARIABLES.iter().filter(|variable| variable.applies(layers));
    let settings = applicable.map(|variable| {
        let present = value(&variable.name).filter(|text| !text.is_empty());
        let outcome = present.map_or_else(|| unset(variable, rules), Outcome::Kept);
        Setting { variable, outcome }
    });
    settings.collect()
}

/// Decides about a variable that is not set.
fn unset(variable: &Variable, rules: &Rules) -> Outcome {
    let stage = variable.stage.index();
    if variable.sets == Field::ServiceLevel {
        let named = rules.service_level[stage];
        return named
            .map_or(Outcome::Left("no service level is named for its stage"), Outcome::Set);
    }
    // DeepEP's default 3 is meant as a service level, and must not pass for ECN.
    let ecn = if variable.default & CONGESTED == CONGESTED { 0 } else { variable.default };
    let class = variable.default & !CONGESTED | ecn & CONGESTED;
    match decide(rules.marking, &rules.treatments, class, false, rules.dscp[stage]) {
        Verdict::Change(class) => Outcome::Set(class),
        Verdict::Off => Outcome::Left("the daemon's marking is off"),
        Verdict::Chosen => Outcome::Left("its class was chosen"),
        Verdict::Unlike => Outcome::Left("the NIC treats its class and the stage's differently"),
        Verdict::Unknown => Outcome::Left("it is unknown how the NIC treats the two classes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROCE: Layers = Layers { roce: true, infiniband: false };
    const INFINIBAND: Layers = Layers { roce: false, infiniband: true };

    fn rules() -> Rules {
        Rules {
            dscp: Rules::DSCP_DEFAULT,
            service_level: [None; Stage::ALL.len()],
            marking: Some(Marking::Preserve),
            treatments: Treatments::ALL_ALIKE,
        }
    }

    fn values(layers: Layers, rules: &Rules) -> Vec<(&'static str, u8)> {
        let settings = plan(layers, rules, |_| None).into_iter();
        let set = settings.filter_map(|setting| match setting.outcome {
            Outcome::Set(value) => Some((setting.variable.name.as_str(), value)),
            _ => None,
        });
        set.collect()
    }

    fn of(settings: &[(&'static str, u8)], name: &str) -> Option<u8> {
        settings.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    #[test]
    fn numbers_are_read_as_libraries_read_them() {
        for (text, class) in [("106", 106), (" 0x6A ", 106), ("0152", 106), ("0", 0), ("010", 8)] {
            assert_eq!(number(text), Some(class), "{text}");
        }
        for text in ["", "256", "08", "0x100", "-1", "six"] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn every_row_has_a_source_and_no_variable_has_two_meanings_on_one_layer() {
        assert!(VARIABLES.len() > 15, "classes.toml can be read");
        for variable in VARIABLES.iter() {
            assert!(!variable.source.is_empty(), "{}", variable.name);
            let same =
                |other: &&Variable| other.name == variable.name && other.sets == variable.sets;
            assert_eq!(VARIABLES.iter().filter(same).count(), 1, "{}", variable.name);
            if variable.sets == Field::ServiceLevel {
                assert!(variable.default <= SERVICE_LEVEL_MAX, "{}", variable.name);
            }
        }
    }

    #[test]
    fn on_roce_expert_parallel_libraries_get_one_class_and_it_is_above_that_of_kv() {
        let set = values(ROCE, &rules());
        for name in ["NCCL_IB_TC", "NCCL_GIN_IB_TC", "NVSHMEM_IB_TRAFFIC_CLASS", "UCCL_IB_TC"] {
            assert_eq!(of(&set, name), Some(136), "{name}");
        }
        assert_eq!(of(&set, "EP_OVERRIDE_RDMA_SL"), Some(136), "NCCL takes it for a class");
        assert_eq!(of(&set, "MC_IB_TC"), Some(40));
        assert_eq!(of(&set, "UCX_IB_TRAFFIC_CLASS"), Some(42), "ECN stays as UCX has it");
        assert!(set.iter().all(|(name, _)| !name.ends_with("_SL") || name.starts_with("EP_")));
    }

    #[test]
    fn on_infiniband_only_service_levels_that_were_named_are_set() {
        assert_eq!(values(INFINIBAND, &rules()), []);
        let mut named = rules();
        named.service_level[Stage::Collective.index()] = Some(1);
        let set = values(INFINIBAND, &named);
        for name in ["NCCL_IB_SL", "NVSHMEM_IB_SL", "EP_OVERRIDE_RDMA_SL", "MORI_RDMA_SL"] {
            assert_eq!(of(&set, name), Some(1), "{name}");
        }
        assert_eq!(of(&set, "MC_IB_SL"), None, "its stage has none");
        assert!(set.iter().all(|(name, _)| !name.contains("TRAFFIC_CLASS")));
    }

    #[test]
    fn where_both_kinds_of_ports_are_nothing_is_set_that_one_of_them_misunderstands() {
        let both = Layers { roce: true, infiniband: true };
        let set = values(both, &rules());
        assert_eq!(of(&set, "NCCL_IB_TC"), Some(136));
        for harmful in ["NVSHMEM_IB_TRAFFIC_CLASS", "EP_OVERRIDE_RDMA_SL"] {
            assert_eq!(of(&set, harmful), None, "{harmful}");
        }
        assert_eq!(values(Layers::default(), &rules()), []);
    }

    #[test]
    fn what_is_set_stays_and_an_empty_variable_counts_as_unset() {
        let settings = plan(ROCE, &rules(), |name| match name {
            "NCCL_IB_TC" => Some("106".to_owned()),
            "MC_IB_TC" => Some(String::new()),
            _ => None,
        });
        let of = |name: &str| {
            let found = settings.iter().find(|setting| setting.variable.name == name);
            found.map(|setting| setting.outcome.clone())
        };
        assert_eq!(of("NCCL_IB_TC"), Some(Outcome::Kept("106".to_owned())));
        assert_eq!(of("MC_IB_TC"), Some(Outcome::Set(40)));
    }

    #[test]
    fn a_class_that_would_leave_the_lossless_priority_is_left_unless_levels_are_forced() {
        let stock = core::array::from_fn(|dscp| if dscp >> 3 == 3 { 2 } else { 1 });
        let mut rules = Rules { treatments: Treatments::new(stock), ..rules() };
        let set = values(ROCE, &rules);
        assert_eq!(of(&set, "UCX_IB_TRAFFIC_CLASS"), None, "106 is lossless, 42 is not");
        assert_eq!(of(&set, "NCCL_IB_TC"), Some(136));
        rules.marking = Some(Marking::Levels);
        assert_eq!(of(&values(ROCE, &rules), "UCX_IB_TRAFFIC_CLASS"), Some(42));
        rules.marking = Some(Marking::Off);
        assert_eq!(values(ROCE, &rules), []);
    }

    #[test]
    fn the_class_of_a_process_is_the_first_that_a_variable_of_its_library_says() {
        let row = |library: &str| VARIABLES.iter().find(|row| row.library == library).unwrap();
        let class = |library: &str, set: &[(&str, &str)]| {
            let value = |name: &str| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            row(library).class_in(value)
        };
        assert_eq!(class("UCX", &[("UCX_IB_TRAFFIC_CLASS", "auto")]), (106, false));
        assert_eq!(class("UCX", &[("UCX_IB_TRAFFIC_CLASS", "0x68")]), (104, true));
        assert_eq!(class("Mooncake", &[("MC_IB_TC", "-1")]), (0, false));
        assert_eq!(class("DeepEP V2", &[]), (3, false));
        let both = [("EP_OVERRIDE_RDMA_SL", "4"), ("NCCL_IB_TC", "106")];
        assert_eq!(class("DeepEP V2", &both), (106, true));
        assert_eq!(class("DeepEP V2", &both[..1]), (4, true));
    }
}
