//! The scaler (§6, Algorithm 3). Every `τ` it adds an instance above one threshold of load or
//! removes one below another.
//!
//! The paper leaves `f(Utils, T_wait, R_in, R_process)` open. Here it is the largest of three
//! shares of what is permitted ("if any of these metrics exceed an upper threshold"):
//!
//! * The mean utilization of instances. The utilization of one is the largest of its KV occupancy,
//!   `E_d / TPOT`, and `E_p / TTFT` of the prompts that wait there. The share of busy time isn't
//!   used, because one decoding request makes it 1.
//! * The longest wait, as a share of its TTFT.
//! * `R_in / R_process` times the mean utilization: the utilization if the ratio lasts. The ratio
//!   alone is 1 at any steady load.
//!
//! An instance is removed after `k` windows in a row below the lower threshold ("for a sustained
//! period"), and only if the others would stay below the upper one. Starting instances count as
//! present. In disaggregated pools each role is judged alone. If one role is overloaded and another
//! has a spare instance, that instance changes its role.
//!
//! Weights come from the least used running instance (fast scaling).

use std::collections::VecDeque;

use super::latency::Linear;
use crate::Time;
use crate::dispatch::Role;
use crate::request::InstanceId;
use crate::scaling::{Instance, Scaling, ScalingDecision, ScalingWindow};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerOptions {
    /// Load above which instances are added (`ε_o`).
    pub upper: f64,
    /// Load below which instances are removed (`ε_i`).
    pub lower: f64,
    /// Number of windows in a row below `lower` before an instance is removed (`k`).
    pub patience: u32,
    /// Time between decisions, ns (`τ`).
    pub interval: u64,
    pub least: u32,
    pub most: u32,
    /// The costs of a prefill and of a decode step.
    pub model: Linear,
    /// Shortest objective for the time to the first token, ns.
    pub ttft: u64,
    /// Shortest objective for the time per token, ns.
    pub tpot: u64,
}

impl ScalerOptions {
    /// Returns the paper's options: one second between decisions (§9.3). The paper has no values
    /// for thresholds.
    pub const fn new(model: Linear, ttft: u64, tpot: u64, most: u32) -> Self {
        Self {
            upper: 0.8,
            lower: 0.3,
            patience: 5,
            interval: 1_000_000_000,
            least: 1,
            most,
            model,
            ttft,
            tpot,
        }
    }
}

pub struct Scaler {
    options: ScalerOptions,
    decided: Option<Time>,
    /// Number of windows in a row below the lower threshold, by role.
    calm: [u32; 3],
    arrived: u64,
    finished: u64,
    decisions: VecDeque<ScalingDecision>,
}

const ROLES: [Role; 3] = [Role::Whole, Role::Prefill, Role::Decode];

impl Scaler {
    pub const fn new(options: ScalerOptions) -> Self {
        Self {
            options,
            decided: None,
            calm: [0; 3],
            arrived: 0,
            finished: 0,
            decisions: VecDeque::new(),
        }
    }

    /// Returns the utilization of an instance, as a share of what is permitted.
    fn utilization(&self, instance: &Instance) -> f64 {
        let (load, model) = (&instance.load, &self.options.model);
        let blocks = f64::from(load.blocks.max(1));
        let occupancy = 1.0 - f64::from(load.blocks_free.min(load.blocks.max(1))) / blocks;
        let occupancy = if load.blocks == 0 { 0.0 } else { occupancy };
        let step = model.decode_ns(f64::from(load.decoding), load.decode_context as f64);
        let prompts = f64::from(load.waiting + load.running.saturating_sub(load.decoding)).max(1.0);
        let tokens = load.prefill_tokens as f64;
        let prefill = model.prefill_ns(tokens, tokens * tokens / prompts);
        occupancy.max(step / self.options.tpot as f64).max(prefill / self.options.ttft as f64)
    }

    /// Returns the load of a role (`LoadMetric`) and the utilization of each of its instances.
    fn load(&self, role: Role, window: &ScalingWindow) -> Option<(f64, Vec<(InstanceId, f64)>)> {
        let some: Vec<(InstanceId, f64)> = window
            .instances
            .iter()
            .filter(|one| one.role == role)
            .map(|one| (one.instance, self.utilization(one)))
            .collect();
        if some.is_empty() {
            return None;
        }
        let mean = some.iter().map(|one| one.1).sum::<f64>() / some.len() as f64;
        let growth =
            if self.finished == 0 { 1.0 } else { self.arrived as f64 / self.finished as f64 };
        // A request without an instance waits for one that computes prompts.
        let wait = if role == Role::Decode { 0.0 } else { window.wait };
        Some((mean.max(mean * growth).max(wait), some))
    }

    fn start(&mut self, role: Role, window: &ScalingWindow) {
        let least = window
            .instances
            .iter()
            .min_by(|x, y| self.utilization(x).total_cmp(&self.utilization(y)));
        let from = least.map(|source| source.instance);
        self.decisions.push_back(ScalingDecision::Start { role, from });
    }
}

fn least(some: &[(InstanceId, f64)]) -> Option<InstanceId> {
    let least = some.iter().min_by(|x, y| x.1.total_cmp(&y.1));
    least.map(|one| one.0)
}

impl Scaling for Scaler {
    fn handle(&mut self, now: Time, window: &ScalingWindow) {
        self.arrived += u64::from(window.arrived);
        self.finished += u64::from(window.finished);
        let due = self.decided.is_none_or(|before| now.since(before).0 >= self.options.interval);
        if !due {
            return;
        }
        self.decided = Some(now);
        let loads: Vec<_> = ROLES.map(|role| self.load(role, window)).into();
        let (arrived, finished) = (self.arrived, self.finished);
        (self.arrived, self.finished) = (0, 0);
        let all = window.instances.len() as u32 + window.starting;
        let options = self.options;
        for (at, role) in ROLES.into_iter().enumerate() {
            let Some((load, some)) = &loads[at] else { continue };
            let count = some.len() as f64;
            // The expected load after all starts. The window has no roles of starting instances, so
            // all count for each role.
            let soon = load * count / (count + f64::from(window.starting));
            if soon > options.upper {
                self.calm[at] = 0;
                // A role can spare an instance if its load is below the lower threshold and would
                // stay below the upper one.
                let spare = ROLES.into_iter().enumerate().find_map(|(other, _)| {
                    let (load, some) = loads[other].as_ref().filter(|_| other != at)?;
                    let without = load * some.len() as f64 / (some.len() as f64 - 1.0);
                    let may = some.len() as u32 > options.least
                        && *load < options.lower
                        && without < options.upper;
                    least(some).filter(|_| may)
                });
                if let Some(instance) = spare.filter(|_| role != Role::Whole) {
                    self.decisions.push_back(ScalingDecision::Turn { instance, role });
                    // Only one change in a window, because it changes the other role's load, too.
                    return;
                }
                if all < options.most {
                    self.start(role, window);
                    return;
                }
            } else if *load < options.lower {
                self.calm[at] += 1;
                let without = load * count / (count - 1.0);
                if self.calm[at] >= options.patience
                    && some.len() as u32 > options.least
                    && window.starting == 0
                    && without < options.upper
                    && arrived <= finished.max(1) * 2
                    && let Some(instance) = least(some)
                {
                    self.calm[at] = 0;
                    self.decisions.push_back(ScalingDecision::Stop(instance));
                }
            } else {
                self.calm[at] = 0;
            }
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<ScalingDecision> {
        self.decisions.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iteration::Load;

    const MODEL: Linear = Linear { prefill: [8e6, 60_000.0, 0.0], decode: [7e6, 12.0, 20_000.0] };
    const SECOND: u64 = 1_000_000_000;

    fn scaler(most: u32) -> Scaler {
        Scaler::new(ScalerOptions::new(MODEL, 700_000_000, 50_000_000, most))
    }

    fn instance(at: u32, role: Role, prefill_tokens: u64, decoding: u32) -> Instance {
        let load = Load {
            prefill_tokens,
            decoding,
            running: decoding,
            waiting: u32::from(prefill_tokens > 0),
            decode_context: u64::from(decoding) * 500,
            blocks: 1_000,
            blocks_free: 900,
            ..Load::default()
        };
        let instance = InstanceId(at);
        Instance { instance, role, load, busy: 1.0 }
    }

    fn run(
        scaler: &mut Scaler,
        second: u64,
        instances: &[Instance],
        starting: u32,
    ) -> Vec<ScalingDecision> {
        let window = ScalingWindow {
            instances: instances.to_vec(),
            starting,
            arrived: 10,
            finished: 10,
            ..ScalingWindow::default()
        };
        let now = Time(second * SECOND);
        scaler.handle(now, &window);
        std::iter::from_fn(|| scaler.poll_decision(now)).collect()
    }

    #[test]
    fn above_the_upper_threshold_one_is_added_with_weights_of_the_least_used() {
        let full = [instance(0, Role::Whole, 20_000, 40), instance(1, Role::Whole, 9_000, 40)];
        let start = ScalingDecision::Start { role: Role::Whole, from: Some(InstanceId(1)) };
        assert_eq!(run(&mut scaler(3), 0, &full, 0), [start]);
        // No instance starts at the limit, or while one starts that will suffice.
        assert_eq!(run(&mut scaler(2), 0, &full, 0), []);
        let half = [instance(0, Role::Whole, 10_000, 4)];
        assert_eq!(run(&mut scaler(3), 0, &half, 1), []);
    }

    #[test]
    fn one_is_taken_away_only_after_a_while() {
        let calm = [instance(0, Role::Whole, 0, 3), instance(1, Role::Whole, 0, 1)];
        let mut scaler = scaler(4);
        for second in 0..4 {
            assert_eq!(run(&mut scaler, second, &calm, 0), []);
        }
        let stop = ScalingDecision::Stop(InstanceId(1));
        assert_eq!(run(&mut scaler, 4, &calm, 0), [stop]);
        // The last instance never stops.
        for second in 5..20 {
            assert_eq!(run(&mut scaler, second, &calm[..1], 0), []);
        }
    }

    #[test]
    fn nothing_is_decided_twice_in_an_interval() {
        let full = [instance(0, Role::Whole, 20_000, 40)];
        let mut scaler = scaler(8);
        assert_eq!(run(&mut scaler, 1, &full, 0).len(), 1);
        let window = ScalingWindow { instances: full.to_vec(), ..ScalingWindow::default() };
        scaler.handle(Time(SECOND + 1), &window);
        assert_eq!(scaler.poll_decision(Time(SECOND + 1)), None);
    }

    #[test]
    fn an_instance_changes_its_role_where_one_role_lacks_and_the_other_can_spare() {
        let pools = [
            instance(0, Role::Prefill, 20_000, 0),
            instance(1, Role::Decode, 0, 3),
            instance(2, Role::Decode, 0, 1),
        ];
        let turn = ScalingDecision::Turn { instance: InstanceId(2), role: Role::Prefill };
        assert_eq!(run(&mut scaler(8), 0, &pools, 0), [turn]);
        // The only decode instance can't change its role, so a new instance starts.
        let start = ScalingDecision::Start { role: Role::Prefill, from: Some(InstanceId(1)) };
        assert_eq!(run(&mut scaler(8), 0, &pools[..2], 0), [start]);
    }

    #[test]
    fn a_long_wait_is_load_though_instances_are_empty() {
        let window = ScalingWindow {
            instances: vec![instance(0, Role::Whole, 0, 1)],
            wait: 0.9,
            ..ScalingWindow::default()
        };
        let mut scaler = scaler(2);
        scaler.handle(Time::ZERO, &window);
        assert!(matches!(scaler.poll_decision(Time::ZERO), Some(ScalingDecision::Start { .. })));
    }
}
