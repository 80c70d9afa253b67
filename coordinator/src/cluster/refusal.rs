//! Why an event of a report is refused, as the daemon is told.

use laxity_wire::v1::RefusalReason;

/// The reason and its text.
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
