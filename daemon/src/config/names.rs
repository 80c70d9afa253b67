//! Names in files for values of other crates, for `#[serde(with = …)]`. The policy crate has no
//! dependencies, so it has no serde names itself.

use laxity_policy::config::Granularity;
use laxity_shm::layout::Mode;
use laxity_shm::marking::Marking;
use serde::{Deserialize, Serialize};

pub(super) mod policy_name {
    //! The names of [`PolicyKind`](laxity_policy::PolicyKind) come from its own methods.
    use laxity_policy::PolicyKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(kind: &PolicyKind, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(kind.name())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PolicyKind, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Granularity", rename_all = "snake_case")]
pub(super) enum GranularityName {
    Flow,
    Coflow,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Marking", rename_all = "snake_case")]
pub(super) enum MarkingName {
    Preserve,
    Levels,
    Off,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Mode", rename_all = "snake_case")]
pub(super) enum ModeName {
    Off,
    Observe,
    Enforce,
}

pub(super) mod octal {
    //! File modes as octal text, because TOML would show `0o660` as 432.
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(mode: &u32, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{mode:04o}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
        let text = String::deserialize(d)?;
        u32::from_str_radix(&text, 8)
            .map_err(|_| D::Error::custom(format!("`{text}` is not a file mode; write \"0660\"")))
    }
}
