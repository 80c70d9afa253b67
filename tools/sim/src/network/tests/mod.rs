//! Tests of the network: single properties, and comparisons with an oracle.

mod cases;
mod fabric;
mod oracle;
mod scripts;
