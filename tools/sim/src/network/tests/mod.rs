//! Tests of the network: single properties, and comparisons with an oracle.

mod cases;
mod oracle;
mod scripts;
