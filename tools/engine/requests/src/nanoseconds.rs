//! Serde functions that write [`Time`] and [`Span`] as nanoseconds. They are here because
//! `laxity-policy` doesn't depend on serde.

pub(crate) mod time {
    //! Functions for `#[serde(with)]` on fields of type [`Time`].
    use laxity_policy::Time;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(time: &Time, to: S) -> Result<S::Ok, S::Error> {
        time.0.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Time, D::Error> {
        u64::deserialize(from).map(Time)
    }
}

pub(crate) mod span {
    //! Functions for `#[serde(with)]` on fields of type [`Span`].
    use laxity_policy::Span;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(span: &Span, to: S) -> Result<S::Ok, S::Error> {
        span.0.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Span, D::Error> {
        u64::deserialize(from).map(Span)
    }
}
