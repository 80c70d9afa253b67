//! What other threads have of an engine: its queue of commands, and the state that it shows.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::sequence::Submission;
use crate::apart::Words;
use crate::carry::{Arrival, Carrier};
use crate::kv::SharedBlocks;

pub enum EngineCommand {
    Submit(Vec<u32>, Submission),
    Words(SocketAddr, Words),
    Kv(Arrival),
    /// Continue a request after other processes were asked for KV of its beginning.
    Found {
        request: u64,
        /// The process that sends blocks and their number, or `None` if no process has any.
        found: Option<(SocketAddr, usize)>,
    },
    Lost(SocketAddr, String),
    /// End the engine. Open requests are given up.
    Stop,
}

/// The state of an engine for other threads.
#[derive(Default)]
pub struct EngineGauges {
    /// Requests that were accepted and have not ended.
    pub open: AtomicUsize,
    pub ended: AtomicBool,
    pub carrier: OnceLock<Carrier>,
    pub(super) blocks: OnceLock<SharedBlocks>,
}

impl EngineGauges {
    /// Returns the number of blocks in use now. The thread that gives KV to others takes blocks,
    /// too, so a number that the engine's thread stored would be wrong while the engine's thread
    /// sleeps.
    pub fn blocks_used(&self) -> usize {
        self.blocks.get().map_or(0, |blocks| blocks.lock().used())
    }
}

/// A handle of an engine. Clones share the engine, which ends when all are dropped.
#[derive(Clone)]
pub struct Handle {
    commands: Sender<EngineCommand>,
    pub gauges: Arc<EngineGauges>,
}

impl Handle {
    /// Sends a command. Returns false if the engine has ended.
    pub fn command(&self, command: EngineCommand) -> bool {
        if matches!(command, EngineCommand::Submit(..)) {
            // Counting here lets the limit of requests see them before the engine handles them.
            self.gauges.open.fetch_add(1, Ordering::Relaxed);
        }
        self.commands.send(command).is_ok()
    }

    /// Ends the engine and waits at most `patience` until it has ended.
    pub fn stop(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let mut told = self.command(EngineCommand::Stop);
        while told && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
            told = !self.gauges.ended.load(Ordering::Acquire);
        }
    }
}

/// Both ends of the queue of an engine.
pub type EngineCommands = (Handle, Receiver<EngineCommand>);

pub fn commands() -> EngineCommands {
    let (commands, incoming) = channel();
    let gauges = Arc::new(EngineGauges::default());
    (Handle { commands, gauges }, incoming)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::{Parts, start};
    use crate::kv::Blocks;
    use crate::model::TimedModel;

    #[test]
    fn blocks_that_another_thread_released_are_not_in_use_while_the_engine_sleeps() {
        let config: Config = toml::from_str(
            "timing = { layer_us = 1.0, token_us = 1.0, expert_us = 1.0, row_us = 1.0 }\n\
             [model]\nname = \"tiny\"\nlayers = 1\nhidden = 4\nheads = 1\nffn = 4\nvocab = \
             260\ncontext = 64\n",
        )
        .unwrap();
        let blocks = SharedBlocks::new(Blocks::new(config.kv.blocks as usize));
        let timing = config.timing.as_ref().unwrap();
        let parts = Parts {
            model: Arc::new(TimedModel::new(&config.model, timing, &|_| true, config.room())),
            blocks: blocks.clone(),
            keep_fetched: true,
            room: config.room(),
            settings: config.schedule.clone(),
            lockstep: false,
            net: None,
            reuse: None,
            requests_max: 1,
        };
        let engine = start(parts, commands()).unwrap();
        let taken = blocks.lock().take(3).unwrap();
        assert!(engine.command(EngineCommand::Found { request: 1, found: None }));
        let give_up = Instant::now() + Duration::from_secs(30);
        while engine.gauges.blocks_used() != 3 {
            assert!(Instant::now() < give_up, "the engine does not see the blocks");
            std::thread::sleep(Duration::from_millis(1));
        }
        blocks.lock().release(&taken);
        assert_eq!(engine.gauges.blocks_used(), 0);
    }
}
