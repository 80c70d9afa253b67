//! What `laxity` and `laxity-lab` share: output, tables, manual pages, and where `liblaxity.so` is.
#![forbid(unsafe_code)]

pub mod library;
pub mod manual;
pub mod output;
pub mod program;
pub mod table;
