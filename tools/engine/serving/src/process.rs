//! One whole process: makes the engine and the endpoint from the configuration.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::apart::inbox::{Inbox, Key};
use crate::apart::plugin::Plugin;
use crate::apart::reuse::{self, Call};
use crate::apart::{Net, Words, experts};
use crate::carry::incoming::listen;
use crate::carry::{Carrier, Incoming, Kind, Options, Taker};
use crate::config::{Config, Peers};
use crate::engine::{EngineCommand, Handle, Parts, commands, start};
use crate::error::StartError;
use crate::kv::{Blocks, SharedBlocks, chain};
use crate::model::timed::Timing;
use crate::model::{Model, TimedModel};

/// Default stall timeout, in milliseconds. It is long because the processes of a lab share few
/// cores with their daemons, so a daemon may not run for a while.
const STALL_MS: u64 = 400;

/// Maximum number of bytes of the file that lists the prompts whose KV is present from the start.
const HOLDS_BYTES_MAX: u64 = 64 << 20;

#[cfg(feature = "compute")]
fn computed(config: &Config, holds: &dyn Fn(usize) -> bool) -> Result<Arc<dyn Model>, StartError> {
    use crate::config::Compute;
    use candle_core::Device;
    let device = match config.device {
        Compute::Cpu => Device::Cpu,
        Compute::Cuda => Device::new_cuda(0).map_err(StartError::Gpu)?,
        Compute::Auto => Device::cuda_if_available(0).unwrap_or_else(|error| {
            tracing::warn!("computing on the CPU, since the GPU cannot be used: {error}");
            Device::Cpu
        }),
    };
    tracing::info!("computing on the {}", if device.is_cuda() { "GPU" } else { "CPU" });
    let model = crate::model::computed::Decoder::load(&config.model, holds, &device, config.room())
        .map_err(StartError::Weights)?;
    Ok(Arc::new(model))
}

#[cfg(not(feature = "compute"))]
fn computed(_: &Config, _: &dyn Fn(usize) -> bool) -> Result<Arc<dyn Model>, StartError> {
    Err(StartError::NoCompute)
}

/// Returns the timed model, with the KV that is present from the start.
fn timed(
    config: &Config,
    timing: &Timing,
    holds: &dyn Fn(usize) -> bool,
    blocks: &mut Blocks,
) -> Result<Arc<dyn Model>, StartError> {
    tracing::info!("taking the time of computing instead of computing");
    let model = TimedModel::new(&config.model, timing, holds, config.room());
    if let Some(path) = &timing.holds {
        let wrong = |problem| StartError::Holds { path: path.clone(), problem };
        let text = laxity_files::read_to_string(path, HOLDS_BYTES_MAX);
        let text = text.map_err(|error| wrong(error.to_string()))?;
        let prompts = serde_json::from_str::<Vec<Vec<u32>>>(&text);
        let prompts = prompts.map_err(|error| wrong(error.to_string()))?;
        let size = config.room().block_tokens as usize;
        for tokens in prompts {
            let hashes = chain(&model.identity(), &tokens, size);
            let taken = blocks.take(hashes.len()).ok_or(StartError::HoldsRoom)?;
            model.fill(&tokens[..taken.len() * size], &taken)?;
            for (block, hash) in taken.iter().zip(hashes) {
                blocks.publish(*block, hash);
            }
            blocks.release(&taken);
        }
    }
    Ok(Arc::new(model))
}

/// Reads the weights and starts an engine. If there are peers, the engine also listens for them.
/// Fails if the weights cannot be read, memory is missing or an address is in use.
pub fn engine(config: &Config) -> Result<Handle, StartError> {
    let ranks = config.net_peers().ranks;
    let holds = |expert| ranks.holds(expert);
    let mut blocks = Blocks::new(config.kv.blocks as usize);
    let model = match &config.timing {
        Some(timing) => timed(config, timing, &holds, &mut blocks)?,
        None => computed(config, &holds)?,
    };
    let queue = commands();
    let blocks = SharedBlocks::new(blocks);
    let (reuse, calls) = channel();
    let net = match &config.peers {
        None => None,
        Some(others) => {
            let net = connect(config, others, &*model, &queue.0, &reuse)?;
            let (to, model) = (queue.0.clone(), Arc::clone(&model));
            reuse::serve(calls, Arc::clone(&net), model, blocks.clone(), to)
                .map_err(StartError::thread("KV of others"))?;
            Some(net)
        }
    };
    let parts = Parts {
        model,
        blocks,
        keep_fetched: config.kv.keep_fetched,
        room: config.room(),
        settings: config.schedule.clone(),
        lockstep: config.peers.as_ref().is_some_and(|peers| peers.lockstep),
        reuse: net.as_ref().map(|_| reuse),
        net,
        requests_max: config.limits.requests_max,
    };
    start(parts, queue)
}

/// Listens for other processes and sets up the connections to them.
fn connect(
    config: &Config,
    others: &Peers,
    model: &dyn Model,
    engine: &Handle,
    reuse: &Sender<Call>,
) -> Result<Arc<Net>, StartError> {
    let inbox = Arc::new(Inbox::default());
    let name = config.laxity.name.clone();
    let name =
        name.unwrap_or_else(|| format!("{:?} {}", config.role, others.listen).to_lowercase());
    let options = Options {
        socket: config.laxity.socket.clone(),
        name,
        nic: config.laxity.nic,
        stall: Duration::from_millis(config.laxity.stall_ms.unwrap_or(STALL_MS)),
        words_dscp: config.laxity.words_dscp.unwrap_or(0),
    };
    let own = Arc::new(Own::default());
    let taker = taker(engine.clone(), Arc::clone(&inbox), reuse.clone(), Arc::clone(&own));
    let carrier = Carrier::start(options, others.listen, Taker::clone(&taker))
        .map_err(StartError::thread("transfers"))?;
    // Each part is set only once, so an error is impossible.
    let _ = own.carrier.set(carrier.clone());
    let experts = experts::serve(model.experts(), config.model.hidden, carrier.clone())
        .map_err(StartError::thread("experts"))?;
    if !others.lockstep {
        let _ = own.experts.set(experts);
    }
    listen(others.listen, taker)
        .map_err(|cause| StartError::Listen { address: others.listen, cause })?;
    let peers = config.net_peers();
    let plugin = match &others.nccl_plugin {
        None => None,
        Some(file) => {
            let sends = carrier.clone();
            let tell = move |to, handle| match serde_json::to_string(&Words::Handle { handle }) {
                Ok(line) => sends.say(to, line),
                Err(error) => tracing::error!("a handle that is no JSON: {error}"),
            };
            let ranks = peers.ranks.others().collect();
            let plugin =
                Plugin::start(file, ranks, Arc::clone(&inbox), tell).map_err(StartError::Plugin)?;
            let _ = own.plugin.set(plugin.clone());
            Some(plugin)
        }
    };
    Ok(Arc::new(Net {
        carrier,
        inbox,
        peers,
        patience: config.patience(),
        bytes_per_s: config.laxity.rate_mbit.map(|rate| rate * 125_000.0),
        ask_patience: Duration::from_millis(others.ask_ms),
        reads: others.reads,
        plugin,
        running: Arc::default(),
        waited: Arc::default(),
    }))
}

/// Parts that the readers of connections need, but that are made after the readers.
#[derive(Default)]
struct Own {
    carrier: OnceLock<Carrier>,
    /// The thread of the experts, unless ranks compute in lockstep.
    experts: OnceLock<Sender<crate::carry::Arrival>>,
    plugin: OnceLock<Plugin>,
}

/// Returns the function that hands each arriving parcel to its receiver.
fn taker(engine: Handle, inbox: Arc<Inbox>, reuse: Sender<Call>, own: Arc<Own>) -> Taker {
    Arc::new(move |incoming| match incoming {
        Incoming::Parcel(arrival) => match arrival.head.kind {
            Kind::KvReuse => {
                let key = Key::Reuse(arrival.head.request, arrival.head.layer);
                inbox.put(key, arrival.payload);
            }
            Kind::Combine => {
                let key = Key::Combine(arrival.head.place, arrival.from);
                inbox.put(key, arrival.payload);
            }
            // A failed send means that the engine ended, and the process is about to end.
            Kind::Dispatch => match own.experts.get() {
                Some(experts) => drop(experts.send(arrival)),
                None => {
                    let key = Key::Dispatch(arrival.head.place, arrival.from);
                    inbox.keep(key, arrival.payload);
                }
            },
            Kind::P2d => drop(engine.command(EngineCommand::Kv(arrival))),
        },
        Incoming::Part { flow, bytes } => {
            if let Some(carrier) = own.carrier.get() {
                carrier.arrived(flow, bytes);
            }
        }
        Incoming::Words(from, line) => match serde_json::from_str::<Words>(&line) {
            Ok(
                words @ (Words::Ask(_)
                | Words::Will { .. }
                | Words::Read(_)
                | Words::Layer { .. }
                | Words::Computed { .. }),
            ) => drop(reuse.send(Call::Words(from, words))),
            Ok(Words::Handle { handle }) => {
                // Another rank's handle can arrive before the plugin is loaded here.
                let plugin = own.plugin.wait();
                if let Err(error) = plugin.connect(from, &handle) {
                    tracing::error!(%from, "{error}");
                }
            }
            Ok(words) => drop(engine.command(EngineCommand::Words(from, words))),
            Err(error) => tracing::warn!(%from, "words that make no sense: {error}"),
        },
        Incoming::Lost(peer, why) => {
            inbox.lose(peer);
            let _ = engine.command(EngineCommand::Lost(peer, why));
        }
    })
}
