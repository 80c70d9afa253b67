//! Starting, stopping and changing the role of instances in a [`super::ClusterRun`].

use laxity_requests::Span;
use laxity_requests::dispatch::{DispatchEvent, Role};
use laxity_requests::request::{InstanceId, RequestId};
use laxity_requests::scaling::{self, ScalingDecision};

use super::{ClusterRun, Happens, Startup};

impl ClusterRun<'_> {
    pub(super) fn leave(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id) else { return };
        let Some(then) = instance.leaves else { return };
        let load = instance.replica.load();
        let expected = self.moves.values().any(|m| m.to == Some(id) || m.from == id);
        if load.waiting + load.running > 0 || expected {
            return;
        }
        let Some(instance) = self.instances.remove(&id) else { return };
        let up = self.now.since(instance.up);
        self.outcome.instance_time = self.outcome.instance_time + up;
        if let Some(role) = then {
            // The weights are loaded, so it serves at once.
            let turned = self.add(role);
            self.ready(turned);
        }
    }

    pub(super) fn look(&mut self) {
        let Some(scaler) = &mut self.config.scaler else { return };
        let mut window = std::mem::take(&mut self.window);
        for (id, instance) in &mut self.instances {
            if !instance.ready {
                window.starting += 1;
            } else if instance.leaves.is_none() {
                window.instances.push(scaling::Instance {
                    instance: *id,
                    role: instance.role,
                    load: instance.replica.load(),
                    busy: (instance.busy.0 as f64 / scaler.window.0 as f64).min(1.0),
                });
            }
            instance.busy = Span::ZERO;
        }
        window.waiting = self.config.dispatch.waiting() as u32;
        let waits = self.unplaced.values().filter(|spec| spec.generated == 0);
        let shares = waits.map(|spec| {
            let allowed = spec.first_allowance().0.max(1) as f64;
            self.now.since(spec.arrival).0 as f64 / allowed
        });
        window.wait = shares.fold(0.0, f64::max);
        scaler.decides.handle(self.now, &window);
        let mut decisions = Vec::new();
        while let Some(decision) = scaler.decides.poll_decision(self.now) {
            decisions.push(decision);
        }
        let (again, startup, most) = (self.now + scaler.window, scaler.startup, scaler.most);
        for decision in decisions {
            self.scale(decision, &startup, most);
        }
        // Without further arrivals or iterations no decision is needed.
        if self.events.next().is_some() {
            self.events.push(again, Happens::Looks);
        }
    }

    fn scale(&mut self, decision: ScalingDecision, startup: &Startup, most: u32) {
        match decision {
            ScalingDecision::Start { role, from } => {
                if self.instances.len() as u32 >= most {
                    return;
                }
                let id = self.add(role);
                let loaded = match from.filter(|peer| self.instances.contains_key(peer)) {
                    Some(peer) => self.config.link.transfer(self.now, peer, id, startup.weights),
                    None => self.now + Span::transfer(startup.weights, startup.disk),
                };
                self.events.push(loaded + startup.boot, Happens::Ready(id));
            }
            ScalingDecision::Stop(id) => self.stop(id, None),
            ScalingDecision::Turn { instance, role } => self.stop(instance, Some(role)),
        }
    }

    fn stop(&mut self, id: InstanceId, then: Option<Role>) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if instance.leaves.is_some() {
            return;
        }
        instance.leaves = Some(then);
        // Requests that have begun end here. Those that wait for room are assigned again.
        let waiting: Vec<RequestId> = instance.incoming.drain(..).collect();
        for request in waiting {
            if let Some(moved) = self.moves.get_mut(&request) {
                moved.to = None;
                let (spec, from) = (moved.spec, moved.from);
                self.unplaced.insert(request, spec);
                self.tell(&DispatchEvent::Prefilled { spec, instance: from });
            }
        }
        self.tell(&DispatchEvent::Down { instance: id, lost: Vec::new() });
    }
}
