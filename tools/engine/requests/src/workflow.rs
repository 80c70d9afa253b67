//! The types of the workflow tier: which stage of which workflow runs where, with which weights
//! resident.
//!
//! A job is a submitted workflow. Its stages are invocations of models. A stage becomes known only
//! when the stages before it end, because their outputs decide loops and branches (Maestro §III-A).
//! A node has one pool of GPU memory for the weights and the KV of several models. Slower tiers for
//! weights are host memory, disk and a remote store.
//!
//! The policy accounts for the memory of all nodes and makes decisions. The driver carries them out
//! and reports events. The policy assumes that each decision succeeds.
//!
//! The driver reports all events of one instant before it polls for decisions. If a stage ends and
//! its job's next stage is ready, the policy then sees a stage boundary of one job.

use crate::request::numbers;
use crate::{Span, Time};

numbers! {
    /// The id of a submitted workflow. Never used twice.
    JobId(u64);
    /// The id of one invocation of a model. Never used twice.
    StageId(u64);
    /// A model, as an index into the policy's table.
    ModelId(u16);
    /// A node, as an index into the policy's table.
    NodeId(u32);
    /// The location of nodes and sources of jobs, as an index into the table of round-trip times.
    ClusterId(u16);
    /// The workflow that a job is an instance of.
    TemplateId(u16);
    /// The role of an agent, such as planner, coder or critic.
    RoleId(u16);
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A user waits. The sum of the waits of all stages counts.
    #[default]
    Interactive,
    /// The end of the job has a deadline.
    Batch,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkflowJob {
    pub id: JobId,
    pub template: TemplateId,
    pub class: Class,
    pub arrival: Time,
    pub deadline: Time,
    pub source: ClusterId,
}

/// Number of values that represent the meaning of a prompt. They come from a sentence encoder, and
/// the driver reduces them to this number.
pub const SEMANTICS: usize = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stage {
    pub id: StageId,
    pub job: JobId,
    pub model: ModelId,
    pub role: RoleId,
    /// The stage's position in the template, counted from 0.
    pub position: u16,
    /// How often a loop passed this position before.
    pub invocation: u16,
    /// Number of tools that the stage could call.
    pub tools: u16,
    /// Whether the model reasons before it answers.
    pub thinking: bool,
    /// Number of tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Maximum number of tokens that the stage may generate, at least 1.
    pub output_max: u32,
    pub semantics: [f32; SEMANTICS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub output: u32,
    /// Time from start to end. Includes swapped-out time, but no wait before the start.
    pub took: Span,
}

/// A model with costs from microbenchmarks: bytes and ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelSpec {
    pub weights: u64,
    /// GPU bytes that stay while the model sleeps: CUDA graphs, compiled kernels, buffers.
    pub context: u64,
    pub kv_per_token: u64,
    /// Constant part of a prefill.
    pub prefill_base: u64,
    pub prefill_per_token: u64,
    pub decode_per_token: u64,
    /// Time to create the GPU context if it is missing.
    pub context_start: u64,
}

impl ModelSpec {
    /// Returns the run time of a stage under the conditions of the benchmark (Maestro eq. 2).
    pub fn execution(&self, prompt: u32, output: f64) -> Span {
        let prefill = self
            .prefill_per_token
            .saturating_mul(u64::from(prompt))
            .saturating_add(self.prefill_base);
        let decode = self.decode_per_token as f64 * output.max(0.0);
        Span(prefill.saturating_add(decode as u64))
    }

    /// Returns the bytes of KV at the end of a stage (Maestro eq. 3).
    pub fn kv(&self, prompt: u32, output: f64) -> u64 {
        let tokens = f64::from(prompt) + output.max(0.0);
        (self.kv_per_token as f64 * tokens).ceil() as u64
    }
}

/// A node: bytes of memory, and rates in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeSpec {
    pub cluster: ClusterId,
    pub gpu: u64,
    /// Bytes of GPU memory that weights, contexts and KV can't use.
    pub other: u64,
    /// Bytes of host memory for weights and swapped-out KV.
    pub host: u64,
    /// Bytes of disk for weights.
    pub disk: u64,
    /// Transfer rate between host and GPU.
    pub host_rate: u64,
    pub disk_rate: u64,
    /// Transfer rate from the store of all models.
    pub remote_rate: u64,
    pub slots: u32,
}

/// The location of a model's weights on a node, the fastest to start first (Maestro §III-C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Readiness {
    /// Weights and context are on the GPU.
    Running,
    /// Weights are in host memory and the context is on the GPU.
    Sleeping,
    /// Weights are in host memory.
    Host,
    Disk,
    /// Weights are in the remote store only.
    Remote,
}

#[derive(Clone, Debug, PartialEq)]
pub enum WorkflowEvent {
    /// A job was submitted. Its first stages follow.
    Submitted(WorkflowJob),
    /// A stage can run, because all stages before it ended. Its job was submitted before.
    Ready(Stage),
    /// The weights of a [`WorkflowDecision::Activate`] are on the GPU.
    Activated { node: NodeId, model: ModelId },
    /// The weights of a [`WorkflowDecision::Demote`] left the GPU after the time in that decision.
    Slept { node: NodeId, model: ModelId },
    /// A stage generated its last token.
    Finished { stage: StageId, outcome: Outcome },
    /// A running stage waits because it needs more KV than its [`WorkflowDecision::Start`] permits:
    /// this many bytes in total.
    Outgrew { stage: StageId, bytes: u64 },
    /// All stages of a job ended.
    Ended(JobId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkflowDecision {
    /// Move a model to host memory or to disk, or delete it from the node. `takes` is the time
    /// until [`WorkflowEvent::Slept`] reports free memory. It is zero if the memory is free at
    /// once, or if the next [`WorkflowDecision::Activate`] on the node includes the time.
    Demote { node: NodeId, model: ModelId, to: Readiness, takes: Span },
    /// End the move of a [`WorkflowDecision::Demote`] at once and free the GPU memory. A `Demote`
    /// before this decision has the model's new location.
    StopTransition { node: NodeId, model: ModelId },
    /// Load a model's weights onto the GPU. [`WorkflowEvent::Activated`] reports the end. `takes`
    /// is the expected time from now, which includes the time for models that leave first.
    Activate { node: NodeId, model: ModelId, takes: Span },
    /// Start a stage, or resume it after a swap. Its model is running. The stage may use at most
    /// `kv` bytes of KV.
    Start { stage: StageId, node: NodeId, kv: u64 },
    /// Resume a stage that needed more KV than it was permitted, with `kv` bytes.
    Grow { stage: StageId, kv: u64 },
    /// Pause a stage and move its KV to host memory.
    SwapOut(StageId),
    /// Stop a stage and discard its work. The stage is queued again.
    Abort(StageId),
    /// A job lost its slot between two stages. Its next stage is queued.
    Preempted(JobId),
}
