//! The fourth tier: which stage of which workflow runs where, with which weights resident.
//!
//! A job is a workflow that somebody submitted; its stages are invocations of a model, known one
//! after the other, as what comes before them ends (Maestro §III-A: a stage is the unit that is
//! scheduled; the graph ahead is not known, loops and branches are decided by what the stages say).
//! A node has one pool of GPU memory that the weights and the KV of several models share, and below
//! it host memory, disk, and a store elsewhere.
//!
//! The policy keeps the books of all nodes (what is resident, which bytes are promised to whom) and
//! says what to do; the driver does it and reports what was. What the policy decided holds at once
//! in its own books: a driver that can't do what was decided reports [`Event::NodeDown`].
//!
//! All that happens at one instant (a stage ends, the next is ready) is handled before decisions
//! are polled: a slot that a job leaves and wants again is then seen as one thing, the boundary
//! between two stages.

use serde::{Deserialize, Serialize};

use crate::{Span, Time};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($of:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $of);
    };
}

number! {
    /// A submitted workflow. Not used twice.
    JobId(u64)
}
number! {
    /// One invocation of a model. Not used twice.
    StageId(u64)
}
number! {
    /// A model: an index into the policy's table.
    ModelId(u16)
}
number! {
    /// A node: an index into the policy's table.
    NodeId(u32)
}
number! {
    /// Where nodes stand and jobs come from: an index into the table of round-trip times.
    ClusterId(u16)
}
number! {
    /// The workflow that a job is an instance of.
    TemplateId(u16)
}
number! {
    /// What an agent does: planner, coder, critic.
    RoleId(u16)
}

/// What was promised to a job.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Somebody waits: the sum of the waits of its stages counts.
    #[default]
    Interactive,
    /// The end of it has a deadline.
    Batch,
}

/// A job as it is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// The workflow.
    pub template: TemplateId,
    /// What was promised.
    pub class: Class,
    /// When it was submitted.
    #[serde(with = "crate::nanoseconds::time")]
    pub arrival: Time,
    /// When all of it has to be done.
    #[serde(with = "crate::nanoseconds::time")]
    pub deadline: Time,
    /// Where it comes from.
    pub source: ClusterId,
    /// It may not leave the cluster it comes from.
    pub confined: bool,
}

/// Numbers that stand for the meaning of a prompt: those of a sentence encoder, reduced by the
/// driver.
pub const SEMANTICS: usize = 4;

/// A stage as it becomes ready.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its number.
    pub id: StageId,
    /// The job it belongs to.
    pub job: JobId,
    /// The model it invokes.
    pub model: ModelId,
    /// The agent's role.
    pub role: RoleId,
    /// Its place in the template, from 0.
    pub position: u16,
    /// How often this place was passed before: loops.
    pub invocation: u16,
    /// Tools that it could call.
    pub tools: u16,
    /// It reasons before it answers.
    pub thinking: bool,
    /// Tokens of its prompt, 1 at least.
    pub prompt: u32,
    /// Most tokens that it may generate, 1 at least.
    pub output_max: u32,
    /// The meaning of its prompt.
    pub semantics: [f32; SEMANTICS],
}

/// What a stage turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Tokens that it generated.
    pub output: u32,
    /// It called a tool.
    pub tool: bool,
    /// How long it ran, from its start: waiting is not in it, having been swapped out is.
    #[serde(with = "crate::nanoseconds::span")]
    pub took: Span,
}

/// A model, as microbenchmarks have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Bytes of its weights.
    pub weights: u64,
    /// Bytes on the GPU that stay while it sleeps: CUDA graphs, compiled kernels, buffers.
    pub context: u64,
    /// Bytes of KV per token.
    pub kv_per_token: u64,
    /// Prefill: this long whatever the prompt, ns.
    pub prefill_base: u64,
    /// Prefill: and this long for each of its tokens, ns.
    pub prefill_per_token: u64,
    /// Decode: each token, ns.
    pub decode_per_token: u64,
    /// Making the context anew where it is not there, ns.
    pub context_start: u64,
}

impl ModelSpec {
    /// Maestro eq. 2: how long a stage runs that has the GPU as the benchmark had it.
    #[must_use]
    pub fn execution(&self, prompt: u32, output: f64) -> Span {
        let prefill = self
            .prefill_per_token
            .saturating_mul(u64::from(prompt))
            .saturating_add(self.prefill_base);
        let decode = self.decode_per_token as f64 * output.max(0.0);
        Span(prefill.saturating_add(decode as u64))
    }

    /// Maestro eq. 3: bytes of KV at the end of a stage.
    #[must_use]
    pub fn kv(&self, prompt: u32, output: f64) -> u64 {
        let tokens = f64::from(prompt) + output.max(0.0);
        (self.kv_per_token as f64 * tokens).ceil() as u64
    }
}

/// A node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// Where it stands.
    pub cluster: ClusterId,
    /// Bytes of GPU memory.
    pub gpu: u64,
    /// Of those, what neither weights, contexts nor KV may have.
    pub other: u64,
    /// Bytes of host memory for weights and for KV that was swapped out.
    pub host: u64,
    /// Bytes of disk for weights.
    pub disk: u64,
    /// Bytes per second between host and GPU.
    pub host_rate: u64,
    /// Bytes per second from disk.
    pub disk_rate: u64,
    /// Bytes per second from the store of all models.
    pub remote_rate: u64,
    /// Stages that run at once at most.
    pub slots: u32,
}

/// Where a model stands on a node, the readiest first (Maestro §III-C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Readiness {
    /// Weights and context are on the GPU.
    Running,
    /// Weights are in host memory, the context is on the GPU.
    Sleeping,
    /// Weights are in host memory.
    Host,
    /// Weights are on disk.
    Disk,
    /// Weights are elsewhere.
    Remote,
}

/// Something happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A job was submitted. Its first stages follow.
    Submitted(Job),
    /// A stage can run: all that it needs has ended. Its job was submitted before.
    Ready(Stage),
    /// The weights that [`Decision::Activate`] asked for are there.
    Activated {
        /// Where.
        node: NodeId,
        /// Which.
        model: ModelId,
    },
    /// The weights that [`Decision::Demote`] let leave have left: it said how long that takes.
    Slept {
        /// Where.
        node: NodeId,
        /// Which.
        model: ModelId,
    },
    /// A stage has ended.
    Finished {
        /// Which.
        stage: StageId,
        /// What it was.
        outcome: Outcome,
    },
    /// A stage that runs needs more KV than was promised to it, and waits: so many bytes in all.
    Outgrew {
        /// Which.
        stage: StageId,
        /// In all.
        bytes: u64,
    },
    /// All stages of a job have ended.
    Ended(JobId),
    /// Nobody wants it any more: what runs of it stops.
    Cancelled(JobId),
    /// A node is gone, with all that it had on its GPU and in its memory.
    NodeDown(NodeId),
    /// It is back, with what it has on disk.
    NodeUp(NodeId),
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// A model moves down: to host memory, to disk, or is forgotten.
    Demote {
        /// Where.
        node: NodeId,
        /// Which.
        model: ModelId,
        /// To.
        to: Readiness,
        /// How long its memory is not free yet, from now: [`Event::Slept`] says when it is. Zero if
        /// it is at once, or if the time of it is in that of the next [`Decision::Activate`] there.
        #[serde(with = "crate::nanoseconds::span")]
        takes: Span,
    },
    /// A model that [`Decision::Demote`] let leave is dropped where it is, at once: its memory is
    /// free. The `Demote` before this one says where it is now.
    StopTransition {
        /// Where.
        node: NodeId,
        /// Which.
        model: ModelId,
    },
    /// A model's weights go to the GPU; [`Event::Activated`] says when they are there.
    Activate {
        /// Where.
        node: NodeId,
        /// Which.
        model: ModelId,
        /// From.
        from: Readiness,
        /// How long it should take from now, what leaves before it included.
        #[serde(with = "crate::nanoseconds::span")]
        takes: Span,
    },
    /// A stage starts now, or goes on if it was swapped out: its model is running.
    Start {
        /// Which.
        stage: StageId,
        /// Where.
        node: NodeId,
        /// Bytes of KV that it may have.
        kv: u64,
    },
    /// A stage that outgrew what it was promised goes on.
    Grow {
        /// Which.
        stage: StageId,
        /// Bytes of KV that it may have now.
        kv: u64,
    },
    /// A stage stops; its KV goes to host memory.
    SwapOut(StageId),
    /// A stage stops; what it did is lost. It is queued again.
    Abort(StageId),
    /// A job lost its turn between two stages: its next one is queued.
    Preempted(JobId),
    /// No node could ever hold this stage: its job is over.
    Refuse(StageId),
}

/// Decides what runs where.
pub trait Workflow {
    /// How it is called on tables.
    fn name(&self) -> String;
    /// Takes in what happened.
    fn handle(&mut self, now: Time, event: &Event);
    /// The next decision.
    fn poll_decision(&mut self, now: Time) -> Option<Decision>;
    /// When to poll again though nothing happened.
    fn next_deadline(&self) -> Option<Time>;
    /// Stages that are ready and have not started.
    fn waiting(&self) -> usize;
}
