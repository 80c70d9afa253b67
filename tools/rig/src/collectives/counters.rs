//! What the process of a host counted, and how the controller asks for it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::counts::Counts;
use crate::error::LabError;
use crate::message;

const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Returns the socket of a host's process.
pub fn socket(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("collectives{host}.sock"))
}

/// A line on the socket. The answer is a line, too.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayerAsk {
    /// An engine has computed the attention of a layer. The answer, [`LayerAnswer`], comes when the
    /// rows are back.
    Exchange { layer: u32, tokens: u32 },
    /// The answer is [`Counters`].
    Counters,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LayerAnswer {
    pub(super) waited_ns: u64,
}

/// Counters of a host's process since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub exchanges: u64,
    /// Exchanges that are not over.
    pub open: u64,
    /// Time that layers waited for their rows, in ns.
    pub waited_ns: u64,
    /// Bytes of the messages of this host's exchanges, there and back.
    pub due_bytes: u64,
    pub sent_bytes: u64,
    pub sent_messages: u64,
    pub received_bytes: u64,
    /// Null requests that `isend` answered. A message can have many.
    pub refusals: u64,
}

impl Counters {
    /// Asks the process of a host.
    pub fn ask(folder: &Path, host: usize) -> Result<Self, LabError> {
        let path = socket(folder, host);
        let ask = || -> std::io::Result<String> {
            let mut stream = UnixStream::connect(&path)?;
            stream.set_read_timeout(Some(ANSWER_WITHIN))?;
            stream.set_write_timeout(Some(ANSWER_WITHIN))?;
            stream.write_all(&message::line(&LayerAsk::Counters))?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(line)
        };
        let line = ask().map_err(LabError::file("asking the collectives process at", &path))?;
        serde_json::from_str(&line)
            .map_err(|error| LabError::unreadable("counters of a collectives process", error))
    }

    /// Adds these to the counters of the host, under the names that an engine with the plugin has.
    pub fn add_to(&self, counts: &mut Counts) {
        for (name, value) in [
            ("plugin_bytes_total", self.sent_bytes as f64),
            ("plugin_messages_total", self.sent_messages as f64),
            ("plugin_refusals_total", self.refusals as f64),
            ("exchange_seconds_sum", self.waited_ns as f64 / 1e9),
            ("exchange_seconds_count", self.exchanges as f64),
        ] {
            *counts.of.entry(name.to_owned()).or_default() += value;
        }
    }
}
