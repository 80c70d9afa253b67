//! Code that `laxity` and `laxity-lab` share: output, tables, manual pages, and the search for
//! `liblaxity.so`.
#![forbid(unsafe_code)]

pub mod library;
pub mod manual;
pub mod output;
pub mod program;
pub mod table;
