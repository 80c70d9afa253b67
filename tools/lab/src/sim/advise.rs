//! `laxity sim advise`: whether scheduling helps on a cluster, in plain words.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use laxity_sim::advise::{self, Advice, Advised};
use laxity_sim::model::Model;
use laxity_sim::plan::Plan;
use laxity_sim::report::Estimate;
use laxity_sim::run::Simulate;

use super::args::Execution;
use laxity_cli::output::{self, say};

pub(super) const HELP: &str = "\
Simulates the cluster for a short time under static classes (two_class), weighted classes
(two_class_99), mfs, laxity, and without contention. It says how full the NICs are, which stage
contends, how many requests are in time, and whether scheduling is worth it. Differences are taken
seed by seed, with their 95 % interval.

Without --rate the question is asked where it matters: at the highest rate at which computing alone
serves 95 % as many requests in time as at a low rate. Without --tp and --ep a prefill unit has 32
GPUs if the model has experts, else 4 or 8. --set changes any field (`laxity sim fields` lists
them).

Exit status: 0 if there is an answer, 1 if not.

Examples:
  laxity sim advise --model dbrx --nic 50
  laxity sim advise --model llama-3-70b --nic 100 --workload long_conversation --rate 0.2
  laxity sim advise --model mixtral-8x22b --nic 200 --trace conversation.jsonl --ungoverned 30
  laxity sim advise --model my-model.toml --nic 400 --tp 1 --ep 32 --gpu h100 --json";

/// GPUs of a server, as the simulator's default has it.
const SERVER: u32 = 8;

#[derive(Args)]
pub(crate) struct AdviseArgs {
    /// Name of a model (`laxity sim models` lists them), or path of a TOML file
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// Rate of one GPU's NIC, in Gb/s
    #[arg(long, value_name = "GBPS")]
    nic: f64,
    /// Trace to take prompts and their reuse from
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    /// Format of the trace: mooncake, qwen, azure or burstgpt [default: mooncake, or azure for
    /// .csv]
    #[arg(long, value_name = "FORMAT", requires = "trace")]
    format: Option<String>,
    /// Made-up requests: conversation, agent, long_conversation or long_agent
    #[arg(long, value_name = "KIND", default_value = "agent")]
    workload: String,
    /// Requests per second and prefill GPU [default: the most that computing alone can serve]
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,
    /// GPU, by name or file
    #[arg(long, value_name = "GPU", default_value = "a100")]
    gpu: String,
    /// GPUs of a tensor-parallel group
    #[arg(long, value_name = "N")]
    tp: Option<u32>,
    /// Ranks of expert parallelism
    #[arg(long, value_name = "N")]
    ep: Option<u32>,
    /// Servers of 8 GPUs, half of them for prefill [default: enough for two prefill units]
    #[arg(long, value_name = "N")]
    servers: Option<u32>,
    /// Share of the NICs that other traffic takes, in per cent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
    ungoverned: f64,
    /// Seconds that are simulated
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    seconds: f64,
    /// Number of seeds
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..=1000)
    )]
    seeds: u64,
    /// Set any other field of the scenario
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    execution: Execution,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unit {
    tp: u32,
    ep: u32,
}

impl Unit {
    /// Returns a usual unit for a model: 32 GPUs with experts, else 4 or 8.
    fn of(model: &Model, tp: Option<u32>, ep: Option<u32>) -> Self {
        const SMALL: u64 = 20_000_000_000;
        let most = 1_u32 << model.experts.max(1).ilog2();
        let ep = ep.unwrap_or(if model.has_experts() { most.min(16) } else { 1 });
        let usual = match (model.has_experts(), model.parameters()) {
            (true, _) => (32 / ep.max(1)).clamp(1, SERVER),
            (false, ..=SMALL) => 4,
            (false, _) => SERVER,
        };
        Self { tp: tp.unwrap_or(usual), ep }
    }

    fn gpus(self) -> u32 {
        self.tp.saturating_mul(self.ep)
    }

    fn servers(self) -> u32 {
        self.gpus().saturating_mul(2).div_ceil(SERVER).saturating_mul(2)
    }
}

impl AdviseArgs {
    fn plan(&self, model: &Model) -> Result<Plan> {
        let unit = Unit::of(model, self.tp, self.ep);
        if unit.tp == 0 || unit.ep == 0 {
            bail!("--tp and --ep must be at least 1");
        }
        let mut plan = Plan::empty("advise", "Advise");
        plan.seeds = (1..=self.seeds).collect();
        let mut set = |field: &str, value: &dyn std::fmt::Display| -> Result<()> {
            Ok(plan.set(&format!("{field}={value}"))?)
        };
        set("model.name", &self.model)?;
        set("model.tp", &unit.tp)?;
        set("model.ep", &unit.ep)?;
        set("serving.decode_tp", &unit.tp)?;
        // A unit computes about 8192 tokens at a time, however many ranks share them.
        set("serving.token_budget", &(8192 / unit.ep).max(256))?;
        set("cluster.servers", &self.servers.unwrap_or(unit.servers()))?;
        set("cluster.gpu", &self.gpu)?;
        set("cluster.nic_gbps", &self.nic)?;
        set("slo.kind", &"mean")?;
        set("workload.seconds", &self.seconds)?;
        set("network.ungoverned_share", &(self.ungoverned / 100.0))?;
        match &self.trace {
            Some(trace) => {
                let csv = trace.extension().is_some_and(|end| end == "csv");
                let usual = if csv { "azure" } else { "mooncake" };
                set("workload.source", &self.format.as_deref().unwrap_or(usual))?;
                set("workload.file", &trace.display())?;
            }
            None => set("workload.source", &self.workload)?,
        }
        for assignment in &self.set {
            plan.set(assignment)?;
        }
        Ok(plan)
    }
}

pub(super) fn run(args: &AdviseArgs, simulate: &Simulate<'_>) -> Result<()> {
    let model = Model::named(&args.model)?;
    let plan = args.plan(&model)?;
    if args.execution.show_plan {
        return Ok(say(plan.to_toml())?);
    }
    let jobs = plan.jobs()?;
    let Some(first) = jobs.first() else {
        bail!("give at least one seed");
    };
    laxity_sim::check(jobs.iter().map(|job| &job.scenario))?;
    let advice = advise::advise(&plan, args.rate, simulate, &args.execution.options(None))?;
    if args.json {
        return Ok(say(output::json(&advice)?)?);
    }
    let scenario = &first.scenario;
    let cache: u64 = (0..model.layers).map(|layer| model.kv_bytes_per_token(layer)).sum();
    let cluster = format!(
        "Cluster   {} prefill GPUs in units of {} ({}, tp {}, ep {}), NICs of {} Gb/s, {:.0} KB of \
         KV cache a token\n",
        scenario.cluster.prefill_gpus(),
        scenario.model.gpus(),
        model.name,
        scenario.model.tp,
        scenario.model.ep,
        scenario.cluster.nic_gbps,
        cache as f64 / 1e3,
    );
    Ok(say(cluster + &words(&advice, args.rate.is_none()))?)
}

fn points(estimate: &Estimate) -> String {
    let half = estimate.half_width.map_or(String::new(), |h| format!(" ± {:.1}", 100.0 * h));
    format!("{:.1}{half}", 100.0 * estimate.mean)
}

fn words(advice: &Advice, chosen: bool) -> String {
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let mut text = format!("Requests  {} per second and prefill GPU", advice.rate_per_gpu);
    if chosen {
        text += ", about the most that computing alone can serve";
    }
    let [reuse, collective, p2d] = advice.bytes.map(percent);
    let (mean, most) = advice.nics_busy;
    text += &format!(
        "\nNICs      {} in use on average, the busiest {}; of the bytes {collective} are \
         collectives, {reuse} KV reuse, {p2d} P2D\nUnits     compute {} of the time\n",
        percent(mean),
        percent(most),
        percent(advice.compute_busy),
    );
    let (stage, added) = advice.added_ms.most();
    let ttft = format!("{added:.1} ms of a mean TTFT of {:.1} ms", advice.ttft_ms);
    text += &match advice.contends {
        Some(_) => format!("Contends  {stage}: {ttft}, beyond an idle network\n"),
        None => format!("Contends  no stage: at most {ttft} ({stage})\n"),
    };
    text += "\nrequests in time, %         TTFT p99, ms\n";
    for served in &advice.served {
        let attainment = points(&served.attainment);
        let p99 = served.ttft_p99_ms.mean;
        text += &format!("  {:<14}{attainment:<14}{p99:.0}\n", served.policy);
    }
    let (gain, room) = (points(&advice.gain), points(&advice.room));
    text += &format!(
        "\nlaxity less two_class: {gain} points. No contention less two_class: {room}.\n\n\
         Verdict   {}\n",
        verdict(advice.advised)
    );
    text.trim_end().to_owned()
}

fn verdict(advised: Advised) -> &'static str {
    match advised {
        Advised::NothingToGain => {
            "Static classes are enough. They serve what a network without contention would serve, \
             to a point."
        }
        Advised::Schedule => {
            "Scheduling helps: laxity serves more requests in time than static classes, beyond \
             noise."
        }
        Advised::KeepClasses => {
            "Keep static classes. laxity serves fewer requests in time here, beyond noise."
        }
        Advised::StaticIsEnough => {
            "Static classes are enough. The network costs some requests, but laxity does not save \
             a point of them beyond noise."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_unit_fits_every_built_in_model() {
        for model in Model::built_in() {
            let unit = Unit::of(&model, None, None);
            assert!(unit.ep <= model.experts.max(1), "{}: {unit:?}", model.name);
            assert!(unit.gpus().is_multiple_of(SERVER) || SERVER.is_multiple_of(unit.gpus()));
        }
        let dbrx = Model::named("dbrx").expect("built in");
        assert_eq!(Unit::of(&dbrx, None, None), Unit { tp: 2, ep: 16 });
        assert_eq!(Unit::of(&dbrx, Some(4), Some(2)), Unit { tp: 4, ep: 2 });
        assert_eq!(Unit { tp: 2, ep: 16 }.servers(), 16);
    }
}
