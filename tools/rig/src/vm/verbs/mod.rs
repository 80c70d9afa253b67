//! Jobs that run real verbs programs in the guest.

pub mod contention;
