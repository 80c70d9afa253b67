//! The controller of the flow policy (`laxity_requests::meta_flow`), a step per window of virtual time: what was in
//! time goes in, and what comes out is put in force at every link at once. In a cluster the coordinator would
//! do both; the delay of telling is left out.

use laxity_policy::Span;
use laxity_requests::meta_flow::{FlowSetting, Guards, MetaFlow, Step, Window};

use super::event::Happening;
use super::world::World;
use crate::outcome::Tuning;
use crate::scenario::Scenario;

/// See the module.
#[derive(Debug)]
pub(super) struct Tuner {
    controller: MetaFlow,
    every: Span,
    window: Window,
    tried: u64,
    taken_back: u64,
}

impl Tuner {
    /// `None` if nothing is tuned.
    pub(super) fn of(scenario: &Scenario) -> Option<Self> {
        let policy = &scenario.policy;
        let in_force = FlowSetting {
            levels: policy.levels,
            scale: policy.threshold_scale,
            base: policy.threshold_base,
        };
        (policy.tune_every_s > 0.0).then(|| Self {
            controller: MetaFlow::new(in_force, Guards::default()),
            every: Span((policy.tune_every_s * 1e9) as u64),
            window: Window::default(),
            tried: 0,
            taken_back: 0,
        })
    }

    /// A request has its first token.
    pub(super) fn served(&mut self, in_time: bool) {
        self.window.requests += 1;
        self.window.in_time += u32::from(in_time);
    }

    pub(super) fn outcome(&self) -> Tuning {
        let FlowSetting {
            levels,
            scale,
            base,
        } = self.controller.in_force();
        Tuning {
            tried: self.tried,
            taken_back: self.taken_back,
            levels,
            threshold_scale: scale,
            threshold_base: base,
        }
    }
}

impl World<'_> {
    pub(super) fn schedule_tuning(&mut self) {
        let Some(tuner) = &self.tuner else { return };
        // After the last arrival nothing is worth a trial.
        if self.arrived < self.requests.len() {
            self.agenda.push(self.now + tuner.every, Happening::Tune);
        }
    }

    pub(super) fn tune(&mut self) {
        let Some(tuner) = &mut self.tuner else { return };
        let setting = match tuner.controller.window(std::mem::take(&mut tuner.window)) {
            Step::Keep => None,
            Step::Try(setting) => {
                tuner.tried += 1;
                Some(setting)
            }
            Step::TakeBack(setting) => {
                tuner.taken_back += 1;
                Some(setting)
            }
        };
        if let Some(setting) = setting {
            let mut scenario = self.scenario.clone();
            scenario.policy.levels = setting.levels;
            scenario.policy.threshold_scale = setting.scale;
            scenario.policy.threshold_base = setting.base;
            self.hosts
                .retune(self.now, &scenario, self.layout.rank_rate);
            for host in 0..2 * self.layout.ranks {
                self.poll(host);
            }
        }
        self.schedule_tuning();
    }
}
