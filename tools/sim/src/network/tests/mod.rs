//! The network against an oracle, and what it promises one by one.

mod cases;
mod fabric;
mod oracle;
mod scripts;
