//! How values of other crates are written in a file, in modules for `#[serde(with = …)]`: the
//! policy depends on nothing, serde included, so the names of its enums are given here.

pub(super) mod policy_name {
    //! [`PolicyKind`](laxity_policy::PolicyKind) has its names already.
    use laxity_policy::PolicyKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(kind: &PolicyKind, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(kind.name())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PolicyKind, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

/// Enums of the policy by name, in a module for `#[serde(with = …)]`.
macro_rules! names {
    ($module:ident, $type:ident, $($name:literal = $variant:ident),+) => {
        pub(super) mod $module {
            //! The policy depends on nothing, serde included, so its names are given here.
            use laxity_policy::config::$type;
            use serde::{Deserialize, Deserializer, Serializer, de::Error};

            pub(crate) fn serialize<S: Serializer>(value: &$type, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(match value { $($type::$variant => $name),+ })
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                match String::deserialize(d)?.as_str() {
                    $($name => Ok($type::$variant),)+
                    other => Err(D::Error::unknown_variant(other, &[$($name),+])),
                }
            }
        }
    };
}

names!(
    last_stage_name,
    LastStage,
    "below_early" = BelowEarly,
    "within_level" = WithinLevel
);
names!(
    mlu_name,
    MluScope,
    "per_flow" = Flow,
    "per_request" = Request
);
names!(
    granularity_name,
    Granularity,
    "flow" = Flow,
    "coflow" = Coflow
);
names!(
    ties_name,
    Ties,
    "arrival" = Arrival,
    "fair" = Fair,
    "shortest" = Shortest
);

pub(super) mod octal {
    //! File modes, as text in octal: `0o660` would be read back as 432 by a person.
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
