//! Whole engines: endpoint, disaggregation, experts, daemon.

mod apart;
mod endpoint;
mod load;
mod places;
mod running;
mod timed;
