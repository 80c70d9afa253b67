//! The lab, run as a person runs it.
