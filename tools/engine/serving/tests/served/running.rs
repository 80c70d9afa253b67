//! Processes of the real program, with configurations and ports of their own, and a client that
//! speaks to them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time after which a test calls a wait a hang. It is long because the machine may also be building
/// something.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until the condition holds. Panics after [`PATIENCE`].
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "still not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a port that nothing listens on now. It is below the range from which the kernel takes
/// ports of outgoing connections.
pub(crate) fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let spread = (std::process::id() % 900) as u16 * 16;
        let port = 16_000 + (spread + NEXT.fetch_add(1, Ordering::Relaxed)) % 16_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub(crate) fn address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port()))
}

pub(crate) fn model(moe: bool) -> String {
    let experts = if moe { "moe = { experts = 4, per_token = 2 }" } else { "" };
    format!(
        "[model]\nname = \"tiny\"\nlayers = 3\nhidden = 48\nheads = 4\nkv_heads = 2\nhead_dim = \
         16\nffn = 80\nvocab = 260\ncontext = 1024\n{experts}\nweights = {{ seed = 7 }}\n"
    )
}

/// Returns a configuration with its [`model`].
pub(crate) fn with_model(moe: bool, config: &str) -> String {
    format!("{config}\n{}", model(moe))
}

/// A running engine; killed when dropped.
pub(crate) struct Running {
    child: Child,
    pub(crate) http: SocketAddr,
    log: PathBuf,
}

impl Running {
    /// Starts an engine with this configuration (without `listen`).
    pub(crate) fn start(folder: &Path, name: &str, config: &str) -> Self {
        // The engine chooses its port. A port that was free a moment ago may have another test's
        // engine by now, which would answer in place of this one.
        let file = folder.join(format!("{name}.toml"));
        fs::write(&file, format!("listen = \"127.0.0.1:0\"\n{config}")).expect("written");
        let log = folder.join(format!("{name}.log"));
        let output = fs::File::create(&log).expect("log");
        let child = Command::new(env!("CARGO_BIN_EXE_laxity-engine"))
            .arg("--config")
            .arg(&file)
            .env("RAYON_NUM_THREADS", "2")
            .env_remove("LAXITY_LOG")
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("log"))
            .stderr(output)
            .spawn()
            .expect("it starts");
        let mut running = Self { child, http: SocketAddr::from(([127, 0, 0, 1], 0)), log };
        let start = Instant::now();
        while !running.is_there() {
            let ended = running.child.try_wait().expect("wait");
            assert!(
                ended.is_none() && start.elapsed() < PATIENCE,
                "it does not answer ({ended:?}): {}",
                running.log_text()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    fn is_there(&mut self) -> bool {
        let text = self.log_text();
        let address = text
            .split_once("on http://")
            .and_then(|(_, after)| after.lines().next()?.trim().parse().ok());
        let Some(address) = address else { return false };
        self.http = address;
        self.try_get("/health").is_some()
    }

    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn try_get(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(self.http).ok()?;
        // An engine that no longer answers must not block the caller.
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
        let answer = Answer::read(stream)?;
        Some((answer.status, answer.body))
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.try_get(path).unwrap_or_else(|| panic!("no answer: {}", self.log_text()))
    }

    pub(crate) fn health(&self) -> Value {
        serde_json::from_str(&self.get("/health").1).expect("JSON")
    }

    pub(crate) fn is_idle(&self) -> bool {
        let health = self.health();
        health["requests"] == 0 && health["kv_blocks_used"] == 0
    }

    /// Returns the sum of the metrics whose name and labels begin with `name`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").1;
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.split_whitespace().last()?.parse::<f64>().ok()).sum()
    }

    /// Returns health, metrics and log of the engine, for the message of a failed test.
    pub(crate) fn explain(&self) -> String {
        let get = |path| match self.try_get(path) {
            Some((status, body)) => format!("{status} {body}"),
            None => "no answer".to_owned(),
        };
        let metrics = get("/metrics");
        let metrics: Vec<&str> = metrics
            .lines()
            .filter(|line| line.starts_with("laxity_engine_") && !line.contains("_bucket"))
            .collect();
        // Signal 0 only checks whether the process exists.
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let alive = nix::sys::signal::kill(pid, None).is_ok();
        format!(
            "== {}, {}, process {pid} {} ==\n{}\n{}\n{}\n",
            self.log.display(),
            self.http,
            if alive { "runs" } else { "has ended" },
            get("/health"),
            metrics.join("\n"),
            self.log_text()
        )
    }

    /// Sends a body and does not wait for the answer.
    pub(crate) fn begin(&self, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.http).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: \
             {length}\r\n{headers}\r\n{body}"
        )
        .expect("written");
        stream
    }

    pub(crate) fn post(&self, path: &str, headers: &str, body: &str) -> Answer {
        Answer::read(self.begin(path, headers, body))
            .unwrap_or_else(|| panic!("no answer: {}", self.log_text()))
    }

    /// Returns the text of a greedy answer to a prompt of tokens.
    pub(crate) fn complete(&self, prompt: &[u32], tokens: u32) -> String {
        let body = serde_json::json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true});
        let answer = self.post("/v1/completions", "", &body.to_string());
        assert_eq!(answer.status, 200, "{}\n{}", answer.body, self.log_text());
        let json = answer.json();
        assert_eq!(json["usage"]["completion_tokens"], tokens);
        json["choices"][0]["text"].as_str().expect("text").to_owned()
    }

    /// Returns the texts of the answers to prompts that are sent at the same time.
    pub(crate) fn complete_all(&self, prompts: &[Vec<u32>], tokens: u32) -> Vec<String> {
        std::thread::scope(|scope| {
            let prompts = prompts.iter();
            let answers: Vec<_> =
                prompts.map(|prompt| scope.spawn(move || self.complete(prompt, tokens))).collect();
            answers.into_iter().map(|answer| answer.join().expect("an answer")).collect()
        })
    }

    /// Returns the engine's resident memory, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.child.id());
        let text = fs::read_to_string(path).expect("it runs");
        let pages: u64 =
            text.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("pages");
        pages * 4096
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn terminate(mut self) -> bool {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("signal");
        let mut ended = None;
        eventually("the engine ends", || {
            ended = self.child.try_wait().expect("wait");
            ended.is_some()
        });
        ended.is_some_and(|status| status.success())
    }
}

/// Returns the answers of one process to one prompt after another.
pub(crate) fn alone(folder: &Path, config: &str, prompts: &[Vec<u32>], tokens: u32) -> Vec<String> {
    let engine = Running::start(folder, "alone", config);
    prompts.iter().map(|prompt| engine.complete(prompt, tokens)).collect()
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    /// Reads an answer of HTTP/1.0, which ends with its connection.
    pub(crate) fn read(mut stream: TcpStream) -> Option<Self> {
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split_whitespace().nth(1)?.parse().ok()?;
        Some(Self { status, body: body.to_owned() })
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn error(&self) -> (String, String) {
        let error = &self.json()["error"];
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (text("code"), text("message"))
    }

    pub(crate) fn events(&self) -> Vec<String> {
        let lines = self.body.split("\n\n").filter(|line| !line.is_empty());
        lines.map(|line| line.strip_prefix("data: ").expect("an event").to_owned()).collect()
    }
}

/// Returns a prompt of `length` tokens. Prompts with different numbers differ from the first token.
pub(crate) fn prompt(number: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|at| (at * 37 + at / 7 + number * 101 + 11) % 256).collect()
}
