//! The death of one vLLM in the middle of a run, as [`restart`](crate::vllm::restart) describes it.

use std::time::{Duration, Instant};

use super::{Controller, NONE, Run, RunRecord};
use crate::carriage;
use crate::daemons;
use crate::error::LabError;
use crate::processes::Engines;
use crate::vllm::restart::RestartRecord;

/// Longest time until nothing is left of a dead process. A prefill host keeps KV that nobody
/// fetches for 30 s by default (`kv_lease_duration` of vLLM's NixlConnector).
const LEFT_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The counter of vLLM with the share of its blocks that are in use.
const BLOCKS: &str = "vllm:kv_cache_usage_perc";

impl Controller<'_> {
    pub(super) fn kill_vllm(
        &self,
        run: &Run<'_>,
        engines: &mut Engines,
        host: usize,
    ) -> Result<RestartRecord, LabError> {
        let policy = (run.policy != NONE).then_some(run.policy);
        let config = &self.spec.config;
        let counts = engines.restart_vllm(config, &self.spec.tools, policy, host)?;
        let died = Instant::now();
        Ok(RestartRecord { host, counts, died: Some(died), ..RestartRecord::default() })
    }

    /// Asks requests that failed again when the killed process has another in its place, and waits
    /// until nothing is left of it.
    pub(super) fn ask_again(
        &self,
        run: &Run<'_>,
        engines: &mut Engines,
        record: &mut RunRecord,
    ) -> Result<(), LabError> {
        let Some(restart) = &mut record.restart else { return Ok(()) };
        engines.await_all()?;
        let whole = |id| record.answers.iter().any(|of| of.id == id && of.error.is_none());
        for decode in 0..self.spec.config.decodes {
            let failed = run.asked.iter().filter(|of| of.decode == decode && !whole(of.id));
            let questions = failed.map(|asked| self.question(asked, None)).collect();
            self.one_by_one(decode, questions, engines, |answer| {
                restart.again.push(answer);
                Ok(())
            })
            .map_err(LabError::step("asking again after the death of a process"))?;
        }
        let give_up = Instant::now() + LEFT_WITHIN;
        loop {
            restart.left = self.left(run, engines, restart)?;
            if restart.left.is_empty() || Instant::now() > give_up {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns what is left of a dead process though no request is under way.
    fn left(
        &self,
        run: &Run<'_>,
        engines: &mut Engines,
        restart: &RestartRecord,
    ) -> Result<Vec<String>, LabError> {
        let config = &self.spec.config;
        let mut left = Vec::new();
        for (host, counts) in engines.counts()?.iter().enumerate() {
            let share = counts.get(BLOCKS);
            if share > 0.0 {
                left.push(format!(
                    "{:.1} % of KV blocks of {}",
                    share * 100.0,
                    config.host_name(host)
                ));
            }
        }
        let daemons = (0..config.hosts()).filter(|_| run.daemons.is_some());
        for (host, status) in daemons.filter_map(|h| Some((h, daemons::status(&run.folder, h)?))) {
            for port in &status.ports {
                let bytes = port.in_flight_bytes + port.waiting_bytes + port.held_bytes;
                if bytes > 0 {
                    let name = config.host_name(host);
                    left.push(format!("{bytes} bytes at the {} daemon of {name}", port.direction));
                }
            }
            let age_ms = restart.died.map_or(0, |died| died.elapsed().as_millis() as u64);
            let dead = status.clients.iter().filter(|of| !carriage::is_plugin(&of.name));
            let dead = dead.filter(|of| host == restart.host && of.attached_ms > age_ms);
            left.extend(dead.map(|of| format!("client {} (pid {}) of a daemon", of.name, of.pid)));
        }
        Ok(left)
    }
}
