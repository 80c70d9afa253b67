//! How the time to the first token divides, from the metrics of vLLM under `laxity.vllm`. It tells
//! a slow network from a slow engine.

use std::array;

use serde::Serialize;

use crate::doctor::finding::Finding;
use crate::scrape;

/// What vLLM exports: sums over requests in seconds and their number, and sums over transfers.
const EXPORTED: [&str; 7] = [
    "laxity:ttft_queue_seconds_sum",
    "laxity:ttft_load_seconds_sum",
    "laxity:ttft_compute_seconds_sum",
    "laxity:ttft_compute_seconds_count",
    "laxity:kv_permit_wait_seconds_sum",
    "laxity:kv_post_seconds_sum",
    "laxity:kv_network_seconds_sum",
];
/// How many of them, from the first on, are always there. Those of transfers are missing before the
/// first transfer.
const ALWAYS: usize = 4;

/// The values of [`EXPORTED`].
pub(super) type Sums = [f64; EXPORTED.len()];

/// Parts of the time to the first token over all requests, each a share of the whole.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Division {
    engines: usize,
    requests: u64,
    mean_ms: f64,
    queue: f64,
    /// Waiting for KV cache from elsewhere: the network's part.
    load: f64,
    compute: f64,
    /// Parts of the transfers' time, each a share of that time.
    permit_wait: f64,
    post: f64,
    network: f64,
}

/// Parses the text that an engine exports. `None` if it has no parts of the TTFT.
fn read(text: &str) -> Option<Sums> {
    let mut sums = Sums::default();
    for (at, name) in EXPORTED.iter().enumerate() {
        let lines = text.lines().filter_map(|line| line.strip_prefix(name));
        let values = lines.filter(|rest| rest.starts_with(['{', ' '])).filter_map(|rest| {
            rest.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok())
        });
        let sum = values.reduce(|a, b| a + b);
        sums[at] = if at < ALWAYS { sum? } else { sum.unwrap_or(0.0) };
    }
    Some(sums)
}

/// Returns the sums over all engines. The error is the finding about an engine that exports none.
pub(super) fn look(engines: &[String]) -> Result<Sums, Finding> {
    let mut all = Sums::default();
    for engine in engines {
        let text = scrape::address(engine).and_then(scrape::metrics).map_err(|why| {
            Finding::warn("ttft", format!("the engine's metrics can't be read: {why}"))
                .action("name the address of vLLM's API server: --engine HOST:PORT")
        })?;
        let sums = read(&text).ok_or_else(|| {
            Finding::warn("ttft", format!("{engine} exports no laxity:ttft_queue_seconds"))
                .because("it is not vLLM under laxity.vllm, its hints are off, or it is unused yet")
                .action("pip install laxity beside vLLM, and leave hints on")
        })?;
        all = array::from_fn(|at| all[at] + sums[at]);
    }
    Ok(all)
}

/// Divides the TTFT of the requests between two readings. `None` if none had its first token.
pub(super) fn divide(before: Sums, after: Sums, engines: usize) -> Option<Division> {
    // An engine that was started again counts from 0.
    let [queue_s, load_s, compute_s, requests, permit_wait_s, post_s, network_s]: Sums =
        array::from_fn(|at| (after[at] - before[at]).max(0.0));
    let whole_s = queue_s + load_s + compute_s;
    if requests < 1.0 || whole_s <= 0.0 {
        return None;
    }
    let transfers_s = (permit_wait_s + post_s + network_s).max(f64::MIN_POSITIVE);
    Some(Division {
        engines,
        requests: requests as u64,
        mean_ms: whole_s / requests * 1e3,
        queue: queue_s / whole_s,
        load: load_s / whole_s,
        compute: compute_s / whole_s,
        permit_wait: permit_wait_s / transfers_s,
        post: post_s / transfers_s,
        network: network_s / transfers_s,
    })
}

impl Division {
    /// Returns the first line of the page.
    pub(super) fn line(&self) -> String {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        format!(
            "the network is {} of TTFT: queue {}, KV cache from elsewhere {} (permits {}, posting \
             {}, network {} of it), computing {}; {} requests, {:.0} ms each on average",
            percent(self.load),
            percent(self.queue),
            percent(self.load),
            percent(self.permit_wait),
            percent(self.post),
            percent(self.network),
            percent(self.compute),
            self.requests,
            self.mean_ms,
        )
    }
}

/// Divides the time to the first token since `before`. The finding says why it can't be divided.
pub(super) fn since(
    before: Result<Sums, Finding>,
    engines: &[String],
    seconds: u64,
) -> Result<Option<Division>, Finding> {
    if engines.is_empty() {
        return Ok(None);
    }
    let (before, after) = (before?, look(engines)?);
    let none = || Finding::info("ttft", format!("no request had its first token in {seconds} s"));
    divide(before, after, engines.len()).map(Some).ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn exported(queue: f64, load: f64, compute: f64, requests: u32) -> String {
        format!(
            "# HELP laxity:ttft_queue_seconds x\n\
             laxity:ttft_queue_seconds_sum{{engine=\"0\"}} {queue}\n\
             laxity:ttft_queue_seconds_bucket{{engine=\"0\",le=\"0.1\"}} 7\n\
             laxity:ttft_load_seconds_sum{{engine=\"0\"}} {load}\n\
             laxity:ttft_compute_seconds_sum{{engine=\"0\"}} {compute}\n\
             laxity:ttft_compute_seconds_count{{engine=\"0\"}} {requests}\n\
             laxity:kv_permit_wait_seconds_sum{{engine=\"0\"}} {}\n\
             laxity:kv_network_seconds_sum{{engine=\"0\"}} {}\n",
            load / 4.0,
            load * 3.0 / 4.0
        )
    }

    /// Answers each request with the next text, and returns its address.
    fn engine(texts: Vec<String>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for text in texts {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 256]).unwrap();
                let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n";
                stream.write_all(format!("{head}{text}").as_bytes()).unwrap();
            }
        });
        format!("http://{address}/metrics")
    }

    #[test]
    fn what_engines_measured_between_two_looks_is_divided() {
        let engines = [
            engine(vec![exported(9.0, 9.0, 9.0, 9), exported(10.0, 12.0, 10.0, 13)]),
            engine(vec![exported(0.0, 0.0, 0.0, 0), exported(1.0, 0.0, 2.0, 4)]),
        ];
        let before = look(&engines).unwrap();
        let after = look(&engines).unwrap();
        let division = divide(before, after, 2).unwrap();
        assert_eq!((division.requests, division.mean_ms), (8, 1000.0));
        assert_eq!((division.queue, division.load, division.compute), (0.25, 0.375, 0.375));
        assert_eq!((division.permit_wait, division.network), (0.25, 0.75));
        assert!(division.line().starts_with("the network is 38 % of TTFT"), "{}", division.line());
        assert_eq!(divide(after, after, 2), None);
    }

    #[test]
    fn an_engine_without_these_metrics_is_named_with_a_next_step() {
        let other = engine(vec!["vllm:num_requests_running 3\n".to_owned()]);
        let finding = look(std::slice::from_ref(&other)).unwrap_err();
        assert!(finding.found.contains(&other) && !finding.action.is_empty(), "{finding:?}");
        let gone = look(&["127.0.0.1:1".to_owned()]).unwrap_err();
        assert!(gone.found.contains("127.0.0.1:1"), "{gone:?}");
        assert!(look(&["nonsense".to_owned()]).is_err());
    }
}
