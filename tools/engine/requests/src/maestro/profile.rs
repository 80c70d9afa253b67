//! Rolling profiles of workflows: how long a job continues after a stage (Maestro §III-D, eq. 8).
//!
//! `T_future(J, k)` is the median, over recent jobs, of the execution time after stages in the same
//! state: template, position, role and invocation.
//! The paper leaves these points open:
//!
//! * Execution times are those of eq. 2 with actual lengths, because they are added to such times.
//! * The future is the sum of the execution times of stages that became ready after this one ended.
//!   It includes all branches, but no waits, because the scheduler causes waits.
//! * A state with fewer than five records uses a coarser one: first without role and invocation,
//!   then the whole template. A new template has a future of 0, so its jobs go first and its
//!   profile fills.

use std::collections::HashMap;

use crate::Span;
use crate::window::Window;
use crate::workflow::{JobId, Stage, StageId, TemplateId, WorkflowJob};

/// Number of records of a state that are kept.
const WINDOW: usize = 64;
/// Least records of a state. With fewer, a coarser state is used.
const ENOUGH: usize = 5;
const LOOPS: u16 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ProfileKey {
    Fine { template: TemplateId, position: u16, role: u16, invocation: u16 },
    Place(TemplateId, u16),
    Template(TemplateId),
}

impl ProfileKey {
    /// Returns the states of a stage from fine to coarse.
    fn of(job: &WorkflowJob, stage: &Stage) -> [Self; 3] {
        [
            Self::Fine {
                template: job.template,
                position: stage.position,
                role: stage.role.0,
                invocation: stage.invocation.min(LOOPS),
            },
            Self::Place(job.template, stage.position),
            Self::Template(job.template),
        ]
    }
}

#[derive(Clone, Debug)]
struct Passed {
    stage: StageId,
    states: [ProfileKey; 3],
    ready: u32,
    ended: Option<(u32, u64)>,
}

#[derive(Clone, Debug, Default)]
pub struct Profiles {
    records: HashMap<ProfileKey, Window<u64>>,
    jobs: HashMap<JobId, (u32, Vec<Passed>)>,
}

impl Profiles {
    /// Returns the expected time after a stage in such a state, by eq. 8.
    pub fn future(&self, job: &WorkflowJob, stage: &Stage) -> Span {
        ProfileKey::of(job, stage)
            .iter()
            .filter_map(|state| self.records.get(state))
            .map(Window::sorted)
            .find(|records| records.len() >= ENOUGH)
            .map_or(Span::ZERO, |records| Span(records[(records.len() - 1) / 2]))
    }

    pub fn ready(&mut self, job: &WorkflowJob, stage: &Stage) {
        let (clock, passed) = self.jobs.entry(job.id).or_default();
        *clock += 1;
        passed.push(Passed {
            stage: stage.id,
            states: ProfileKey::of(job, stage),
            ready: *clock,
            ended: None,
        });
    }

    pub fn finished(&mut self, stage: &Stage, took: Span) {
        if let Some((clock, passed)) = self.jobs.get_mut(&stage.job) {
            *clock += 1;
            if let Some(passed) = passed.iter_mut().find(|passed| passed.stage == stage.id) {
                passed.ended = Some((*clock, took.0));
            }
        }
    }

    /// Adds the futures of a completed job's stages to the records.
    pub fn ended(&mut self, job: JobId) {
        let Some((_, passed)) = self.jobs.remove(&job) else { return };
        for one in &passed {
            let Some((end, _)) = one.ended else { continue };
            let future = passed
                .iter()
                .filter(|other| other.ready > end)
                .filter_map(|other| other.ended.map(|(_, took)| took))
                .fold(0u64, u64::saturating_add);
            for state in one.states {
                self.records.entry(state).or_default().push(future, WINDOW);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workflow::Class;

    fn job(id: u64) -> WorkflowJob {
        WorkflowJob {
            id: JobId(id),
            template: TemplateId(1),
            class: Class::Batch,
            ..WorkflowJob::default()
        }
    }

    fn stage(job: u64, position: u16) -> Stage {
        let id = StageId(job * 10 + u64::from(position));
        Stage { id, job: JobId(job), position, prompt: 1, output_max: 1, ..Stage::default() }
    }

    fn run(profiles: &mut Profiles, id: u64, took: &[u64]) {
        for (position, took) in took.iter().enumerate() {
            let stage = stage(id, position as u16);
            profiles.ready(&job(id), &stage);
            profiles.finished(&stage, Span(*took));
        }
        profiles.ended(JobId(id));
    }

    #[test]
    fn the_future_of_a_stage_is_the_median_of_what_followed_it() {
        let mut profiles = Profiles::default();
        for (id, last) in [10, 20, 30, 40, 1000].into_iter().enumerate() {
            run(&mut profiles, id as u64, &[7, 5, last]);
        }
        assert_eq!(profiles.future(&job(9), &stage(9, 0)), Span(35));
        assert_eq!(profiles.future(&job(9), &stage(9, 1)), Span(30));
        assert_eq!(profiles.future(&job(9), &stage(9, 2)), Span(0));
    }

    #[test]
    fn branches_that_run_beside_a_stage_are_not_its_future() {
        let mut profiles = Profiles::default();
        for id in 0..5 {
            let (a, b, join) = (stage(id, 0), stage(id, 1), stage(id, 2));
            profiles.ready(&job(id), &a);
            profiles.ready(&job(id), &b);
            profiles.finished(&a, Span(100));
            profiles.finished(&b, Span(200));
            profiles.ready(&job(id), &join);
            profiles.finished(&join, Span(3));
            profiles.ended(JobId(id));
        }
        assert_eq!(profiles.future(&job(9), &stage(9, 0)), Span(3));
    }

    #[test]
    fn an_unknown_template_has_no_future_and_old_records_leave() {
        let mut profiles = Profiles::default();
        assert_eq!(profiles.future(&job(9), &stage(9, 0)), Span::ZERO);
        for id in 0..200 {
            run(&mut profiles, id, &[1, if id < 100 { 50 } else { 70 }]);
        }
        assert_eq!(profiles.future(&job(999), &stage(999, 0)), Span(70));
    }
}
