//! The policies as their users see them, in virtual time and against oracles.

mod admission;
mod admission_naive;
mod admission_oracle;
mod backlog_rate;
mod baseline_oracle;
mod baselines;
mod capacity;
mod caps;
mod domains;
mod explain;
mod held_up;
mod link;
mod order_oracle;
mod paper_examples;
mod peers;
mod properties;
mod random_events;
mod red;
mod residual;
mod scavenger;
mod starvation;
mod urgency;
mod virtual_time;
mod whole_transfers;
