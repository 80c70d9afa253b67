//! What the daemon knows about a flow, in sentences: for `laxity explain`, `laxity top` and the
//! host's page.
//!
//! An [`Explanation`] says what the scheduler knows about a flow. Whose flow it is, and which port
//! it crosses, comes from the daemon's [`Status`].

use laxity_quantity::{Bytes, Nanos};
use serde::Serialize;

use crate::explain::{ExplainedFlow, Explanation, FlowWait};
use crate::trace::SubmitOutcome;
use crate::{ClientStatus, PortStatus, Status};

/// A flow, its process, and all that is known about it.
#[derive(Debug, Serialize)]
pub struct FlowReport<'a> {
    /// What the scheduler knows about the flow.
    #[serde(flatten)]
    pub flow: &'a ExplainedFlow,
    /// The process, if it is still a client.
    pub process: Option<&'a ClientStatus>,
    /// Sentences from the flow's owner to the next step.
    pub text: Vec<String>,
}

/// The flows of an [`Explanation`].
#[derive(Debug, Serialize)]
pub struct FlowReports<'a> {
    /// The time of the answer, in nanoseconds of CLOCK_MONOTONIC.
    pub now_ns: u64,
    /// Number of flows that match the query.
    pub count: u64,
    /// The flows of the [`Explanation`], in its order.
    pub flows: Vec<FlowReport<'a>>,
}

impl<'a> FlowReports<'a> {
    /// Puts an explanation into words. The status is of about the same time.
    pub fn of(told: &'a Explanation, status: &'a Status) -> Self {
        let report = |flow: &'a ExplainedFlow| {
            let process = status.clients.iter().find(|client| client.id == flow.client);
            FlowReport { flow, process, text: sentences(status, process, told.now_ns, flow) }
        };
        let flows = told.flows.iter().map(report).collect();
        Self { now_ns: told.now_ns, count: told.count, flows }
    }
}

/// Returns the name of a level as people read it: `P1` is the highest, 255 the scavenger, 0 none.
pub fn level(number: u8) -> String {
    match number {
        0 => "none".to_owned(),
        255 => "scavenger".to_owned(),
        number => format!("P{number}"),
    }
}

/// Returns "1 flow", "2 flows" and so on.
pub fn flows(count: u64) -> String {
    format!("{count} {}", if count == 1 { "flow" } else { "flows" })
}

fn span(ns: u64) -> String {
    Nanos(ns).about()
}

/// Returns all that is known about a flow, in sentences from its owner to the next step.
pub fn sentences(
    status: &Status,
    client: Option<&ClientStatus>,
    now_ns: u64,
    told: &ExplainedFlow,
) -> Vec<String> {
    let flow = &told.flow;
    let direction = if flow.ingress { "ingress" } else { "egress" };
    let is_port = |port: &&PortStatus| port.nic == flow.nic && port.direction == direction;
    let port = status.ports.iter().find(is_port);
    let nic = port.map_or("?", |port| &port.name);
    let mut what = format!("{} of {} on {nic} {direction}", Bytes(flow.bytes).about(), flow.stage);
    for (name, id) in [("request", flow.request), ("batch", flow.batch)] {
        if id != 0 {
            what.push_str(&format!(", {name} {id}"));
        }
    }
    if flow.batch != 0 {
        what.push_str(&format!(", layer {}", flow.layer));
    }
    if !told.trace_id.is_empty() {
        what.push_str(&format!(", trace {}", told.trace_id));
    }
    let gone = || format!("process {}, which has left", flow.pid);
    let whose = client.map_or_else(gone, |client| {
        let pod = client.pod.as_ref().map_or_else(String::new, |pod| format!(", {pod}"));
        let distrusted = ". Its owner is distrusted, so later flows go out unscheduled";
        let (name, id) = (&client.name, client.id);
        format!(
            "`{name}` (client {id}, process {}, user {}{pod}){}",
            client.pid,
            client.uid,
            if client.distrusted { distrusted } else { "" }
        )
    });
    let mut text = vec![
        format!("{what}."),
        format!("It belongs to {whose}."),
        format!(
            "{} are permitted and {} have completed. The last change was {} ago.",
            Bytes(flow.permitted).about(),
            Bytes(told.completed_bytes).about(),
            span(now_ns.saturating_sub(told.since_ns)),
        ),
    ];
    if flow.deadline_ns != 0 {
        text.push(deadline(now_ns, flow.deadline_ns, told.wait.as_ref()));
    }
    let Some(wait) = &told.wait else {
        text.push(match flow.standing {
            SubmitOutcome::Observed => "It was sent without a permit, in mode observe.".into(),
            _ => format!(
                "It has all permits, at {}, and does not wait for Laxity. The application, the NIC \
                 or the network has it: `laxity verify` compares permits with the NIC's counters.",
                level(flow.level)
            ),
        });
        return text;
    };
    text.push(waits(told, wait));
    text.push(leveled(status, now_ns, told, wait));
    if status.cluster.as_ref().is_some_and(|cluster| cluster.order == "cluster") {
        text.push(format!(
            "The coordinator's order is in force; `laxity cluster explain {}` explains it.",
            if flow.batch == 0 { "BATCH".into() } else { flow.batch.to_string() }
        ));
    }
    let rate = port.map_or(0, |port| port.rate_in_force_bytes_per_s);
    let owed = client.map_or(0, |client| client.owed_bytes);
    text.push(format!("Next step: {}.", next_step(now_ns, told, wait, rate, owed)));
    text
}

fn deadline(now_ns: u64, deadline_ns: u64, wait: Option<&FlowWait>) -> String {
    let due = match deadline_ns.checked_sub(now_ns) {
        Some(left) => format!("It is due in {}", span(left)),
        None => format!("It was due {} ago", span(now_ns - deadline_ns)),
    };
    match wait.map_or(0, |wait| wait.begin_by_ns) {
        0 => format!("{due}."),
        begin if begin < now_ns => {
            format!("{due}; its work had to begin {} ago.", span(now_ns - begin))
        }
        begin => format!("{due}; its laxity is {}.", span(begin - now_ns)),
    }
}

fn waits(told: &ExplainedFlow, wait: &FlowWait) -> String {
    let flow = &told.flow;
    let why = match wait.obstacle.as_str() {
        "held" => "It waits because its client owes completions, so its flows are held".into(),
        "order" => {
            let (ahead, count) = (Bytes(wait.ahead_bytes).about(), flows(flow.ahead));
            format!("It waits behind {count} ({ahead})")
        }
        "peer" => "It is next, but its peer has all that may be in flight to it".into(),
        "window" if flow.in_flight_bytes > flow.window_bytes => {
            "It is next, but waits for the port's pace: more than the window is in flight".into()
        }
        "window" => "It is next, but the window is full".into(),
        "turn" => "It waits because other users of the port have their turn".into(),
        _ => "Nothing is in its way now".to_owned(),
    };
    let (in_flight, window) = (Bytes(flow.in_flight_bytes), Bytes(flow.window_bytes));
    let to_it = if wait.obstacle == "peer" { " to it" } else { "" };
    format!("{why}. {} of a window of {} are in flight{to_it}.", in_flight.about(), window.about())
}

fn leveled(status: &Status, now_ns: u64, told: &ExplainedFlow, wait: &FlowWait) -> String {
    let why = match wait.rule.as_str() {
        "collective" => "the level of all collectives",
        "rli" => "by its layer: how soon its batch needs it (RLI)",
        "late" => "because flows of its stage were held up, and have a higher level for a while",
        "laxity" => "by its laxity: the time that is left beyond its work",
        "mlu" => "by the part of the port that it needs until its deadline (MLU)",
        "piece" => "because it goes in one piece, which exceeds the window",
        "undated" => "because no request waits for flows of this stage",
        "pruned" => "because its request is pruned",
        "lost" => "because its request cannot make its deadline any more",
        _ => "by the policy's own order",
    };
    let mut text = format!("Policy {} gives it {}, {why}.", status.policy, level(wait.level));
    if told.flow.level != 0 && told.flow.level != wait.level {
        let wire = level(told.flow.level);
        text.push_str(&format!(" On the wire it keeps {wire}, the level of its first permit."));
    }
    if wait.moved_ns != 0 {
        let ago = span(now_ns.saturating_sub(wait.moved_ns));
        text.push_str(&format!(" Until {ago} ago it had {}.", level(wait.moved_from)));
    }
    if wait.starved {
        text.push_str(" It has waited for over a second, so it gets turns whatever its level.");
    }
    text
}

/// Returns what the operator can do.
fn next_step(now_ns: u64, told: &ExplainedFlow, wait: &FlowWait, rate: u64, owed: u64) -> String {
    let flow = &told.flow;
    match (wait.obstacle.as_str(), wait.rule.as_str()) {
        ("held", _) => format!(
            "find out why process {} completes nothing (stopped, or polls late); it owes {}",
            flow.pid,
            Bytes(owed).about()
        ),
        (_, "pruned") => "the host cannot serve all requests in time; move load away, or lower \
                          `tuning.drop_budget` to prune fewer requests"
            .into(),
        (_, "lost") => "it is late in any case; move load away, or give later deadlines".into(),
        (_, "undated") => "none; such flows use what others leave of the port".into(),
        ("peer", _) => "none if the peer's port is busy; if `laxity status` there shows that it \
                        is not, run `laxity doctor` there"
            .into(),
        ("turn", _) => "see in `laxity top` which clients use the port".into(),
        _ => {
            let left = wait.ahead_bytes.saturating_add(flow.bytes.saturating_sub(flow.permitted));
            let ns = u128::from(left) * 1_000_000_000 / u128::from(rate.max(1));
            let ns = u64::try_from(ns).unwrap_or(u64::MAX);
            let is_late = flow.deadline_ns != 0 && now_ns.saturating_add(ns) > flow.deadline_ns;
            let late = if is_late { ", after its deadline; move load away" } else { "" };
            format!(
                "at the port's rate its last byte leaves in {}{late}; if it does not, run `laxity \
                 doctor`, and `laxity bypass on` to send all traffic unscheduled",
                span(ns)
            )
        }
    }
}

#[cfg(test)]
mod tests;
