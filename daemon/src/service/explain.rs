//! `laxity explain` between the control socket and the scheduler, which looks at its flows in
//! parts.

use laxity_wire::explain::{EXPLAINED_MAX, Explanation, FlowQuery};
use tokio::sync::oneshot;

use super::Service;
use crate::mailbox::{ExplainCommand, FlowPlace, SchedulerCommand, answer};

impl Service {
    pub async fn explain(&self, wanted: FlowQuery) -> Result<Explanation, String> {
        let mut told = Explanation::default();
        let mut next = Some(FlowPlace::default());
        while let Some(from) = next {
            let (reply, part) = oneshot::channel();
            // A command that the scheduler does not take is dropped with its `reply`.
            self.send(SchedulerCommand::Explain(ExplainCommand { wanted, from, reply }));
            let part = answer(part).await?;
            (told.now_ns, next) = (part.told.now_ns, part.next);
            told.count += part.told.count;
            told.flows.extend(part.told.flows);
            told.flows.sort_by_key(|flow| (flow.wait.is_none(), flow.since_ns));
            told.flows.truncate(EXPLAINED_MAX);
        }
        Ok(told)
    }
}
