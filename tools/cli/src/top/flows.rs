//! The flows of a job or a client in `laxity top`: what waits, and the explanation of one of them.
//!
//! The daemon explains the flows of one process at a time, so a job's flows are asked for by
//! process.

use laxity_cli::table::bytes;
use laxity_wire::explain::{EXPLAINED_MAX, ExplainedFlow, Explanation, FlowQuery};
use laxity_wire::sentences::sentences;
use laxity_wire::{ClientStatus, PortStatus, Status};

/// Maximum number of processes that are asked for in one refresh: those with the most waiting
/// flows.
const PROCESSES_MAX: usize = 8;

pub(super) const HEADER: [&str; 6] =
    ["pid", "stage", "port", "to permit", "unchanged", "waits for"];

/// Whose flows are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FlowsOwner {
    /// All clients of this name.
    Job(String),
    /// The client with this id and name.
    Client(u64, String),
}

impl FlowsOwner {
    fn owns(&self, client: &ClientStatus) -> bool {
        match self {
            Self::Job(name) => client.name == *name,
            Self::Client(id, _) => client.id == *id,
        }
    }
}

#[derive(Debug)]
pub(super) struct FlowList {
    pub(super) owner: FlowsOwner,
    /// Whether the explanation has the whole screen.
    pub(super) is_open: bool,
    pub(super) selected: usize,
    answer: Explanation,
    /// Processes that were not asked for.
    unasked: usize,
}

impl FlowList {
    pub(super) fn new(owner: FlowsOwner) -> Self {
        let answer = Explanation::default();
        Self { owner, is_open: false, selected: 0, answer, unasked: 0 }
    }

    /// Returns what to ask the daemon for, after its status.
    pub(super) fn queries(&mut self, now: &Status) -> Vec<FlowQuery> {
        let mut clients: Vec<&ClientStatus> =
            now.clients.iter().filter(|it| self.owner.owns(it) && it.flows > 0).collect();
        clients.sort_by_key(|client| std::cmp::Reverse((client.waiting_flows, client.flows)));
        self.unasked = clients.len().saturating_sub(PROCESSES_MAX);
        let query = |it: &&ClientStatus| FlowQuery { pid: Some(it.pid), ..FlowQuery::default() };
        clients.iter().take(PROCESSES_MAX).map(query).collect()
    }

    /// Takes the answers to the queries. The selected flow stays selected while it is there.
    pub(super) fn take(&mut self, now: &Status, answers: Vec<Explanation>) {
        let selected = self.flows().get(self.selected).map(|flow| flow.flow.flow);
        let mut all = Explanation::default();
        for answer in answers {
            all.now_ns = all.now_ns.max(answer.now_ns);
            all.count += answer.count;
            all.flows.extend(answer.flows);
        }
        // A process may have several clients.
        all.flows.retain(|flow| {
            now.clients.iter().any(|it| it.id == flow.client && self.owner.owns(it))
        });
        all.flows.sort_by_key(|flow| (flow.wait.is_none(), flow.since_ns, flow.flow.flow));
        all.flows.truncate(EXPLAINED_MAX);
        let place = |id| all.flows.iter().position(|flow| flow.flow.flow == id);
        match selected.map(place) {
            Some(Some(place)) => self.selected = place,
            // An explanation that has the whole screen must not become another flow's.
            Some(None) => self.is_open = false,
            None => {}
        }
        self.selected = self.selected.min(all.flows.len().saturating_sub(1));
        self.answer = all;
    }

    pub(super) fn flows(&self) -> &[ExplainedFlow] {
        &self.answer.flows
    }

    /// Moves the selection by one row, unless an explanation has the whole screen.
    pub(super) fn step(&mut self, is_down: bool) {
        let last = self.flows().len().saturating_sub(1);
        if !self.is_open {
            let to = if is_down { self.selected + 1 } else { self.selected.saturating_sub(1) };
            self.selected = to.min(last);
        }
    }

    /// Says whose flows these are, and how many there are.
    pub(super) fn title(&self, now: &Status) -> String {
        let name = match &self.owner {
            FlowsOwner::Job(name) => format!("job {name}"),
            FlowsOwner::Client(id, name) => format!("client {name} ({id})"),
        };
        let own = || now.clients.iter().filter(|client| self.owner.owns(client));
        if own().next().is_none() {
            return format!("{name} has left; Esc goes back");
        }
        let waiting: u64 = own().map(|client| client.waiting_flows).sum();
        let flows: u64 = own().map(|client| client.flows).sum();
        let shown = self.flows().len();
        let mut title = format!("{name}: {waiting} of {flows} flows wait");
        if (shown as u64) < flows {
            title.push_str(&format!(", the longest-waiting {shown} are shown"));
        }
        if self.unasked > 0 {
            title.push_str(&format!(" ({} processes left out)", self.unasked));
        }
        title
    }

    /// Returns the texts of the rows, by [`HEADER`].
    pub(super) fn rows(&self, now: &Status) -> Vec<[String; 6]> {
        let row = |told: &ExplainedFlow| {
            let flow = &told.flow;
            let direction = if flow.ingress { "ingress" } else { "egress" };
            let is_port = |it: &&PortStatus| it.nic == flow.nic && it.direction == direction;
            let nic = now.ports.iter().find(is_port).map_or("?", |port| &port.name);
            let unchanged_ns = self.answer.now_ns.saturating_sub(told.since_ns);
            [
                flow.pid.to_string(),
                flow.stage.clone(),
                format!("{nic} {direction}"),
                bytes(flow.bytes.saturating_sub(flow.permitted)),
                laxity_quantity::Nanos(unchanged_ns).about(),
                obstacle(told),
            ]
        };
        self.flows().iter().map(row).collect()
    }

    /// Returns the sentences about the selected flow.
    pub(super) fn explanation(&self, now: &Status) -> Vec<String> {
        let Some(told) = self.flows().get(self.selected) else {
            return vec!["Nothing is under way here now. Esc goes back.".to_owned()];
        };
        let client = now.clients.iter().find(|client| client.id == told.client);
        let mut text = sentences(now, client, self.answer.now_ns, told);
        text[0].insert_str(0, &format!("Flow {}: ", told.flow.flow));
        text
    }
}

/// Says in a few words what a flow waits for.
fn obstacle(told: &ExplainedFlow) -> String {
    let Some(wait) = &told.wait else { return "its completion".to_owned() };
    match wait.obstacle.as_str() {
        "held" => "its client's completions".to_owned(),
        "order" => format!("{} ahead of it", bytes(wait.ahead_bytes)),
        "peer" => "its peer".to_owned(),
        "window" => "room in the window".to_owned(),
        "turn" => "its user's turn".to_owned(),
        _ => "nothing".to_owned(),
    }
}
