//! `laxity-engine`: the arguments, the log and the signals. The library does the work.
#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use laxity_engine::config::Config;
use laxity_engine::endpoint::{self, GRACE};
use laxity_engine::engine::Handle;
use laxity_engine::process;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Serves a language model: computes it, and sends KV caches and experts' tokens under Laxity.
///
/// One process can serve prompts and answers (role = "whole"). Or some processes compute
/// prompts (role = "prefill") and others compute answers (role = "decode"). Decode processes
/// accept the requests and receive each layer's KV as soon as it is computed. Processes may
/// fetch KV of a prompt's beginning from each other (peers.reuse) and share the experts of a
/// Mixtral-shaped model (peers.experts). Every such transfer is a flow of the host's laxityd
/// (laxity.socket), or goes out unscheduled without one. The answers are the same either way.
///
/// The endpoint serves OpenAI's /v1/completions, streamed or not. Headers set the objectives:
/// x-llm-d-slo-ttft-ms for the first token, x-llm-d-slo-tpot-ms for the time between tokens (or
/// their older names without llm-d), x-slo-ttlt-ms for the last token of a request that is not
/// interactive. The header x-laxity-importance (paid or free) says which requests are given up
/// first. /health, /metrics and /v1/models are served, too.
///
/// The smallest configuration:
///
///   [model]
///   name = "tiny"
///   layers = 4
///   hidden = 64
///   heads = 4
///   ffn = 128
///   vocab = 260
///   context = 2048
///
/// Weights are drawn from a seed (weights = { seed = 1 }). Text is tokenized by bytes: each byte is
/// a token.
#[derive(Debug, Parser)]
#[command(name = "laxity-engine", version, max_term_width = 100, verbatim_doc_comment)]
struct Arguments {
    /// Path of the configuration
    #[arg(long, value_name = "FILE", env = "LAXITY_ENGINE_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Address of the endpoint (`listen` of the configuration); port 0 means a free port
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// What is logged: a level or a filter
    #[arg(long, value_name = "FILTER", env = "LAXITY_LOG", default_value = "info")]
    log: String,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check the configuration and print a summary of it
    CheckConfig,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laxity-engine: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to standard output")
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let path = arguments
        .config
        .context("which configuration? Give --config FILE (see --help for the smallest one)")?;
    let mut config = Config::load(&path)?;
    if let Some(listen) = arguments.listen {
        config.listen = listen;
    }
    if let Some(Command::CheckConfig) = arguments.command {
        return print(&summary(&config));
    }
    let filter = EnvFilter::try_new(&arguments.log)
        .with_context(|| format!("--log {:?} is no level or filter", arguments.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let metrics = metrics_exporter_prometheus::PrometheusBuilder::new()
        .install_recorder()
        .context("cannot keep metrics")?;
    let engine = process::engine(&config)?;
    let handle = engine.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let config = Arc::new(config);
    let served = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {} (listen)", config.listen))?;
        let here = listener.local_addr().context("no address")?;
        tracing::info!("{:?} of model {} on http://{here}", config.role, config.model.name);
        let mut terminate = signal(SignalKind::terminate()).context("no signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("no signals")?;
        let (stop, mut stopped) = tokio::sync::watch::channel(false);
        let end = async move {
            // An error means that the sender was dropped. The endpoint should end then, too.
            let _ = stopped.changed().await;
        };
        let serving = endpoint::serve(listener, Arc::clone(&config), engine, Some(metrics), end);
        tokio::pin!(serving);
        tokio::select! {
            served = &mut serving => return served.context("the endpoint failed"),
            () = ended(&handle) => anyhow::bail!("the engine has ended; the log says why"),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping; answers that are under way have {GRACE:?}");
        let _ = stop.send(true);
        match tokio::time::timeout(GRACE, serving).await {
            Ok(served) => served.context("the endpoint failed"),
            Err(_) => Ok(()),
        }
    });
    handle.stop(GRACE);
    served
}

/// Waits until the engine's thread has ended. It ends by itself only after an error.
async fn ended(engine: &Handle) {
    while !engine.gauges.ended.load(Ordering::Acquire) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Returns one line that describes a configuration.
fn summary(config: &Config) -> String {
    let model = &config.model;
    let network = 3 * model.hidden * model.ffn;
    let networks = model.moe.map_or(network, |moe| moe.experts * (network + model.hidden));
    let attention = 2 * model.hidden * (model.heads * model.head_dim() + model.kv_width());
    let embeddings = if model.tied_embeddings { 1 } else { 2 } * model.vocab * model.hidden;
    let parameters =
        model.layers * (networks + attention + 2 * model.hidden) + embeddings + model.hidden;
    let kv_tokens = u64::from(config.kv.blocks) * u64::from(config.kv.block_tokens);
    let kv_bytes = kv_tokens * (model.kv_bytes() * model.layers) as u64;
    format!(
        "the configuration is valid: {:?}, {} parameters ({:.1} MiB in f32), KV cache of \
         {kv_tokens} tokens ({:.1} MiB), {} bytes of KV a token and layer, {}\n",
        config.role,
        parameters,
        (parameters * 4) as f64 / f64::from(1 << 20),
        kv_bytes as f64 / f64::from(1 << 20),
        model.kv_bytes(),
        config.schedule.summary(),
    )
}
