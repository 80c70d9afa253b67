//! The inputs of a simulation: `laxity sim models` and `laxity sim workload`.

use anyhow::Result;
use clap::Args;
use laxity_sim::model::Model;
use laxity_sim::scenario::Scenario;
use laxity_sim::workload::{self, Summary};

use super::args::Changes;
use laxity_cli::output::{self, say};
use laxity_cli::table;
use laxity_sim::plan::Plan;

#[derive(Args)]
pub(crate) struct ModelsArgs {
    /// Name of a model, or path of a TOML file [default: list the built-in models]
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct WorkloadArgs {
    /// Plan whose workloads are shown [default: the default of every field]
    #[arg(value_name = "PLAN")]
    plan: Option<String>,
    #[command(flatten)]
    changes: Changes,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn json(value: &impl serde::Serialize) -> Result<()> {
    Ok(say(output::json(value)?)?)
}

pub(super) fn models(args: &ModelsArgs) -> Result<()> {
    let models = match &args.model {
        Some(name) => vec![Model::named(name)?],
        None => Model::built_in(),
    };
    if args.json {
        return json(&models);
    }
    let header = [
        "model", "layers", "hidden", "KV heads", "experts", "top k", "parameters", "active",
        "KV bytes/token",
    ];
    let mut rows = table::table(&header);
    for model in models {
        let billions = |n: u64| format!("{:.1} G", n as f64 / 1e9);
        let cache: u64 = (0..model.layers).map(|layer| model.kv_bytes_per_token(layer)).sum();
        rows.add_row([
            model.name.clone(),
            model.layers.to_string(),
            model.hidden.to_string(),
            model.kv_heads.to_string(),
            model.experts.to_string(),
            model.top_k.to_string(),
            billions(model.parameters()),
            billions(model.active_parameters()),
            cache.to_string(),
        ]);
    }
    Ok(say(rows)?)
}

pub(super) fn workload(args: &WorkloadArgs) -> Result<()> {
    let mut plan = match &args.plan {
        Some(name) => Plan::load(name)?,
        None => Plan::empty("workload", "Workload"),
    };
    args.changes.apply(&mut plan)?;
    let mut seen: Vec<(Scenario, Summary)> = Vec::new();
    for job in plan.jobs()? {
        let scenario = Scenario {
            cluster: job.scenario.cluster.clone(),
            workload: job.scenario.workload.clone(),
            seed: job.scenario.seed,
            ..Scenario::default()
        };
        if seen.iter().any(|(other, _)| *other == scenario) {
            continue;
        }
        let rate = scenario.workload.rate_per_gpu * f64::from(scenario.cluster.prefill_gpus());
        let requests = workload::load(&scenario.workload, rate, scenario.seed)?;
        seen.push((scenario, Summary::of(&requests)));
    }
    if args.json {
        let all: Vec<_> = seen
            .iter()
            .map(|(scenario, summary)| {
                serde_json::json!({
                    "workload": scenario.workload, "seed": scenario.seed, "summary": summary,
                })
            })
            .collect();
        return json(&all);
    }
    let header = [
        "source", "seed", "requests", "rate/s", "gaps cv", "prompt mean", "p50", "p99", "longest",
        "answer", "reuse", "by request",
    ];
    let mut rows = table::table(&header);
    for (scenario, summary) in &seen {
        rows.add_row([
            scenario.workload.source.to_string(),
            scenario.seed.to_string(),
            summary.requests.to_string(),
            format!("{:.2}", summary.rate),
            format!("{:.2}", summary.gap_variation),
            format!("{:.0}", summary.prompt_mean),
            summary.prompt_p50.to_string(),
            summary.prompt_p99.to_string(),
            summary.prompt_longest.to_string(),
            format!("{:.0}", summary.output_mean),
            format!("{:.1} %", 100.0 * summary.reuse),
            format!("{:.1} %", 100.0 * summary.reuse_per_request),
        ]);
    }
    Ok(say(rows)?)
}
