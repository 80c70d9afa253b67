//! Reasons why an event is refused or a stream is ended.

use laxity_wire::v1::{Goodbye, GoodbyeReason, RefusalReason};

pub(super) type Refused = (RefusalReason, String);

pub(super) fn unknown(what: &str, id: u64) -> Refused {
    let detail = format!("{what} {id} is not known; announce it first");
    (RefusalReason::Unknown, detail)
}

pub(super) fn not_yours(detail: impl Into<String>) -> Refused {
    (RefusalReason::NotYours, detail.into())
}

pub(super) fn over_limit(detail: impl Into<String>) -> Refused {
    (RefusalReason::Limit, detail.into())
}

pub(super) fn invalid(detail: impl Into<String>) -> Refused {
    (RefusalReason::Invalid, detail.into())
}

pub(crate) fn goodbye(reason: GoodbyeReason, detail: impl Into<String>) -> Goodbye {
    Goodbye {
        reason: reason as i32,
        detail: detail.into(),
        retry_after_ns: 1_000_000_000,
        leader: String::new(),
    }
}
