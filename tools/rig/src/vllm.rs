//! vLLM as the engine of the lab: one `vllm serve` in each host's namespace, and a front door at
//! each decode host.
//!
//! vLLM, its connector and its transport are the released ones. They compute a small random model
//! on the CPU, which [`MAKE_MODEL`] writes. The front door ([`FRONT_DOOR`]) does what a
//! disaggregating router does. It listens where the other engines have their endpoint, so the lab's
//! clients ask it in the same way.
//!
//! ```text
//! client ─HTTP─▶ front door ─HTTP─▶ prefill host's vLLM
//!                     └──────HTTP─▶ decode host's vLLM ◀═KV, over the shaped ports═ prefill
//! ```
//!
//! HTTP and the connector's handshakes use the management network, as [`fabric::management_script`]
//! makes it. Only KV crosses the shaped ports.
//!
//! With `store = true` each prefill host also keeps the KV that it computes in its part of
//! Mooncake's store, and reads what another prefill host has computed. The master of the store
//! knows where blocks are. It is on the management network.
//!
//! With `collectives = true` each layer of a prefill host waits for an exchange with the other
//! prefill hosts, which [`collectives`] describes. [`SITE_CUSTOMIZE`] makes the worker wait.
//!
//! How much Laxity takes part depends on the policy. Under `none` vLLM runs without it. Under
//! `NAME_no_hints` transfers wait for permits, and the connector gives no hints. Under other names
//! it gives all hints.

mod config;
pub mod restart;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::child::{self, Guarded};
use crate::client::ENDPOINT;
use crate::collectives;
use crate::config::LabConfig;
use crate::daemons::daemon_socket;
use crate::error::LabError;
use crate::fabric;
use crate::processes::Process;
use crate::sandbox;

pub use config::{Connector, VllmConfig};

const MAKE_MODEL: &str = include_str!("vllm/make_model.py");
const FRONT_DOOR: &str = include_str!("vllm/front_door.py");
const SITE_CUSTOMIZE: &str = include_str!("vllm/sitecustomize.py");
pub const PYTHON_VARIABLE: &str = "LAXITY_VLLM_PYTHON";
const NO_HINTS: &str = "_no_hints";
const BEHIND_PORT: u16 = 8001;
const SIDE_CHANNEL_PORT: u16 = 5600;
const BOOTSTRAP_PORT: u16 = 8998;
const MASTER_PORT: u16 = 50_051;
/// Port in the name of a host's part of the store. Nothing listens there.
const PART_PORT: u16 = 17_000;
/// Host whose namespace has the store's master.
const MASTER_HOST: usize = 0;
/// Tokens of a block. Only whole blocks are reused, and vLLM's block of 128 tokens on a processor
/// is longer than many of the lab's prefixes.
const STORE_BLOCK_TOKENS: u32 = 32;
const PART_BYTES: u64 = 512 << 20;
const STORE_BUFFER_BYTES: u64 = 64 << 20;

pub fn daemon_policy(policy: &str) -> (&str, bool) {
    policy.strip_suffix(NO_HINTS).map_or((policy, true), |policy| (policy, false))
}

/// Returns the Python that has vLLM: the configured one, the one in the environment, or that of the
/// checkout that this program was built in.
pub fn find_python(config: &LabConfig) -> Result<PathBuf, String> {
    let configured = config.vllm.as_ref().and_then(|vllm| vllm.python.clone());
    let named = configured.or_else(|| std::env::var_os(PYTHON_VARIABLE).map(PathBuf::from));
    // No links are resolved: Python finds its packages by the path that it was started with.
    let found = named.map(std::path::absolute).or_else(|| Some(Ok(beside_this_program()?)));
    match found {
        Some(Ok(path)) if path.is_file() => Ok(path),
        Some(Ok(path)) => Err(format!("{} is not there; run `make setup-vllm`", path.display())),
        Some(Err(error)) => Err(error.to_string()),
        None => Err(format!(
            "run `make setup-vllm` (6 GB), and name its bin/python in {PYTHON_VARIABLE}"
        )),
    }
}

/// Returns `target/vllm/bin/python` if this program lies in `target/PROFILE`, or one folder below.
fn beside_this_program() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folders = program.ancestors().skip(2).take(2);
    folders.map(|target| target.join("vllm/bin/python")).find(|python| python.is_file())
}

/// What the processes of a run have in common.
pub(crate) struct Vllm<'a> {
    config: &'a LabConfig,
    own: VllmConfig,
    folder: &'a Path,
    python: &'a Path,
    policy: Option<&'a str>,
}

impl<'a> Vllm<'a> {
    /// Prepares a run. `policy` is `None` if there is no daemon.
    pub(crate) fn new(
        config: &'a LabConfig,
        folder: &'a Path,
        python: &'a Path,
        policy: Option<&'a str>,
    ) -> Self {
        let own = config.vllm.clone().unwrap_or_default();
        Self { config, own, folder, python, policy }
    }

    /// Writes the model, once for all runs of a lab, and the files of its programs.
    pub(crate) fn prepare(&self) -> Result<(), LabError> {
        let door = self.folder.join("front_door.py");
        fs::write(&door, FRONT_DOOR).map_err(LabError::file("writing", &door))?;
        let site = self.site();
        fs::create_dir_all(&site).map_err(LabError::file("making", &site))?;
        let customize = site.join("sitecustomize.py");
        fs::write(&customize, SITE_CUSTOMIZE).map_err(LabError::file("writing", &customize))?;
        let store = self.store_file();
        fs::write(&store, self.store().to_string()).map_err(LabError::file("writing", &store))?;
        let model = model_folder();
        if model.join("tokenizer_config.json").exists() {
            return Ok(());
        }
        let shape = json!({
            "layers": self.own.layers, "hidden": self.own.hidden, "heads": self.own.heads,
            "kv_heads": self.own.kv_heads, "head_dim": self.own.head_dim, "ffn": self.own.ffn,
            "vocab": self.own.vocab, "seed": self.own.weights_seed, "context": self.context(),
        });
        let mut command = Command::new(self.python);
        command.args(["-c", MAKE_MODEL]).arg(&model).arg(shape.to_string());
        child::output(self.python.display(), &mut command, "")
            .map_err(LabError::step("making the model"))?;
        Ok(())
    }

    fn context(&self) -> u32 {
        self.config.tokens_max + self.own.output_tokens
    }

    /// Starts vLLM at a host, the front door if it is a decode host, and the store's master at one
    /// host.
    pub(crate) fn start(&self, host: usize, processes: &mut Vec<Process>) -> Result<(), LabError> {
        if self.own.store && host == MASTER_HOST {
            processes.push(self.spawn(host, "master.log".to_owned(), self.master())?);
        }
        processes.push(self.start_engine(host)?);
        if !self.prefills(host) {
            processes.push(self.spawn(host, format!("door{host}.log"), self.door())?);
        }
        Ok(())
    }

    pub(crate) fn start_engine(&self, host: usize) -> Result<Process, LabError> {
        self.spawn(host, format!("engine{host}.log"), self.engine(host))
    }

    fn spawn(
        &self,
        host: usize,
        log: String,
        arguments: Vec<OsString>,
    ) -> Result<Process, LabError> {
        let mut command = sandbox::internal("in");
        command
            .arg(fabric::namespace(host))
            .arg(self.python)
            .args(arguments)
            .envs(self.environment(host));
        let guarded = Guarded::start_group("vLLM", &mut command, &self.folder.join(log))?;
        Ok(Process { host, guarded })
    }

    /// Returns the folder of vLLM's caches, which its first start fills. It lies in Python's
    /// environment, because later starts are much faster with it.
    fn cache(&self) -> PathBuf {
        let environment = self.python.ancestors().nth(2).unwrap_or(self.folder);
        environment.join("cache")
    }

    /// Returns the folder of the module that Python loads at its start.
    fn site(&self) -> PathBuf {
        self.folder.join("site")
    }

    /// Returns Python's path: the folder of that module, and then what the caller has.
    fn python_path(&self) -> OsString {
        let own = std::env::var_os("PYTHONPATH").unwrap_or_default();
        // Python takes an empty path for the current folder.
        let own = std::env::split_paths(&own).filter(|folder| !folder.as_os_str().is_empty());
        let folders = std::iter::once(self.site()).chain(own);
        std::env::join_paths(folders).unwrap_or_else(|_| self.site().into())
    }

    fn prefills(&self, host: usize) -> bool {
        host < self.config.prefills()
    }

    fn engine(&self, host: usize) -> Vec<OsString> {
        let prefills = self.prefills(host);
        let port = if prefills { ENDPOINT.port() } else { BEHIND_PORT };
        // The command `vllm` needs a package of that name, and the package for CPUs has another
        // name.
        let module = ["-m", "vllm.entrypoints.openai.api_server", "--model"];
        let mut arguments: Vec<OsString> = module.map(OsString::from).into();
        arguments.push(model_folder().into());
        let mut add = |argument: &str, value: String| {
            arguments.push(argument.into());
            arguments.push(value.into());
        };
        add("--host", "0.0.0.0".to_owned());
        add("--port", port.to_string());
        add("--served-model-name", "lab".to_owned());
        // Sums of 32 bits: with 16 bits a batch may round another token to be the likeliest.
        add("--dtype", "float32".to_owned());
        add("--max-model-len", self.context().to_string());
        add("--max-num-batched-tokens", self.own.step_tokens.to_string());
        add("--max-num-seqs", self.own.step_requests.to_string());
        add("--distributed-executor-backend", "uni".to_owned());
        add("--kv-transfer-config", self.transfer(host).to_string());
        if self.own.store {
            add("--block-size", STORE_BLOCK_TOKENS.to_string());
        }
        if self.policy.is_some_and(|policy| daemon_policy(policy).1) {
            add("--middleware", "laxity.asgi.ObjectiveMiddleware".to_owned());
        }
        arguments.push("--enforce-eager".into());
        if !prefills {
            // Every request then reads all of its prompt's KV, and computes none of it again.
            arguments.push("--no-enable-prefix-caching".into());
        }
        arguments.extend(self.own.arguments.iter().map(OsString::from));
        arguments
    }

    /// Returns the configuration of a host's KV connectors.
    fn transfer(&self, host: usize) -> serde_json::Value {
        let prefills = self.prefills(host);
        let (name, role, extra) = match (self.own.connector, prefills) {
            (Connector::Nixl, _) => ("NixlConnector", "kv_both", json!({})),
            (Connector::Mooncake, prefills) => {
                let role = if prefills { "kv_producer" } else { "kv_consumer" };
                ("MooncakeConnector", role, json!({ "mooncake_protocol": "tcp" }))
            }
        };
        let p2d = self.connector(name, role, extra);
        if !self.own.store || !prefills {
            return p2d;
        }
        // The number is part of a socket's name. Hosts have the same name and folder.
        let own = json!({ "lookup_rpc_port": host });
        let store = self.connector("MooncakeStoreConnector", "kv_both", own);
        self.connector("MultiConnector", role, json!({ "connectors": [p2d, store] }))
    }

    /// Returns the configuration of a connector. It names nothing of Laxity but the missing hints:
    /// the package is a plugin of vLLM.
    fn connector(&self, name: &str, role: &str, mut extra: serde_json::Value) -> serde_json::Value {
        if self.policy.is_some_and(|policy| !daemon_policy(policy).1) {
            extra["laxity"] = json!({ "hints": false });
        }
        json!({
            "kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        })
    }

    fn master(&self) -> Vec<OsString> {
        let program = self.python.with_file_name("mooncake_master").into();
        let port = format!("--rpc_port={MASTER_PORT}").into();
        vec![program, port, "--enable_metric_reporting=false".into()]
    }

    fn store_file(&self) -> PathBuf {
        self.folder.join("store.json")
    }

    /// Returns what vLLM's connector to the store reads from its file.
    fn store(&self) -> serde_json::Value {
        json!({
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address":
                format!("{}:{MASTER_PORT}", fabric::management_address(MASTER_HOST)),
            "protocol": "tcp",
            "global_segment_size": PART_BYTES,
            "local_buffer_size": STORE_BUFFER_BYTES,
        })
    }

    fn door(&self) -> Vec<OsString> {
        let urls = |port: u16| {
            let prefill = 0..self.config.units * self.config.ranks;
            prefill.map(move |host| {
                let address = fabric::management_address(host);
                OsString::from(format!("http://{address}:{port}"))
            })
        };
        let mut arguments = vec![self.folder.join("front_door.py").into()];
        arguments.extend(["--listen".to_owned(), ENDPOINT.to_string()].map(OsString::from));
        arguments.extend(["--decode".into(), format!("http://127.0.0.1:{BEHIND_PORT}").into()]);
        arguments.push("--prefill".into());
        arguments.extend(urls(ENDPOINT.port()));
        if self.own.connector == Connector::Mooncake {
            arguments.push("--bootstrap".into());
            arguments.extend(urls(BOOTSTRAP_PORT));
        }
        arguments
    }

    /// Returns the environment of a host's processes. Data use the shaped port, and all else the
    /// management network.
    fn environment(&self, host: usize) -> Vec<(&'static str, OsString)> {
        let management = fabric::management_address(host).to_string();
        let port = fabric::HOST_PORT;
        let part = format!("{}:{PART_PORT}", fabric::address(host));
        let mut environment: Vec<(&'static str, OsString)> = vec![
            ("OMP_NUM_THREADS", "1".into()),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind".into()),
            ("VLLM_CPU_KVCACHE_SPACE", "1".into()),
            ("VLLM_NO_USAGE_STATS", "1".into()),
            ("VLLM_CACHE_ROOT", self.cache().into()),
            ("VLLM_RPC_BASE_PATH", self.folder.into()),
            ("VLLM_HOST_IP", fabric::address(host).to_string().into()),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", management.into()),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", SIDE_CHANNEL_PORT.to_string().into()),
            ("VLLM_MOONCAKE_BOOTSTRAP_PORT", BOOTSTRAP_PORT.to_string().into()),
            ("MOONCAKE_CONFIG_PATH", self.store_file().into()),
            // A host keeps what it computes, so reads of the store are all that crosses its ports.
            ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", part.clone().into()),
            ("MOONCAKE_PREFERRED_SEGMENT", part.into()),
            ("PYTHONPATH", self.python_path()),
            ("GLOO_SOCKET_IFNAME", "lo".into()),
            ("UCX_TLS", "tcp,self".into()),
            ("UCX_NET_DEVICES", port.into()),
            ("HF_HUB_OFFLINE", "1".into()),
            ("HF_HOME", self.folder.join("huggingface").into()),
        ];
        if self.own.collectives && self.prefills(host) {
            let socket = collectives::socket(self.folder, host);
            environment.push((collectives::SOCKET_VARIABLE, socket.into()));
        }
        match self.policy {
            None => environment.push(("LAXITY_VLLM", "off".into())),
            Some(_) => environment.extend([
                ("LAXITY_SOCKET", daemon_socket(self.folder, host).into()),
                ("LAXITY_NAME", self.config.host_name(host).into()),
                ("LAXITY_STALL_MS", self.own.stall_ms.to_string().into()),
                ("LAXITY_ATTACH_MS", "5000".into()),
            ]),
        }
        environment
    }
}

fn model_folder() -> PathBuf {
    Path::new(sandbox::FOLDER).join("model")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_host(
        config: &LabConfig,
        policy: Option<&str>,
        host: usize,
    ) -> (String, Vec<(&'static str, OsString)>) {
        let vllm = Vllm::new(config, Path::new("/run/lab/1"), Path::new("/e/bin/python"), policy);
        let words = vllm.engine(host);
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        (words.join(" "), vllm.environment(host))
    }

    fn value(environment: &[(&str, OsString)], wanted: &str) -> Option<String> {
        let found = environment.iter().find(|(name, _)| *name == wanted);
        found.map(|(_, value)| value.to_string_lossy().into_owned())
    }

    #[test]
    fn the_policy_says_how_much_laxity_takes_part() {
        let config = LabConfig::vllm();
        let (none, environment) = of_host(&config, None, 0);
        assert!(!none.contains("laxity"), "{none}");
        assert_eq!(value(&environment, "LAXITY_VLLM").as_deref(), Some("off"));
        assert_eq!(value(&environment, "LAXITY_SOCKET"), None);
        let (silent, environment) = of_host(&config, Some("laxity_no_hints"), 0);
        assert!(silent.contains(r#""laxity":{"hints":false}"#), "{silent}");
        assert!(!silent.contains("--middleware"), "{silent}");
        let socket = value(&environment, "LAXITY_SOCKET");
        assert_eq!(socket.as_deref(), Some("/run/lab/1/laxityd0.sock"));
        assert_eq!(value(&environment, "LAXITY_VLLM"), None);
        let (hinted, _) = of_host(&config, Some("laxity"), 0);
        assert!(hinted.contains("--middleware laxity.asgi.ObjectiveMiddleware"), "{hinted}");
        assert!(!hinted.contains("hints"), "{hinted}");
        assert_eq!(daemon_policy("laxity_no_hints"), ("laxity", false));
        assert_eq!(daemon_policy("two_class"), ("two_class", true));
    }

    #[test]
    fn decode_is_behind_its_front_door_and_only_kv_crosses_the_shaped_ports() {
        let config = LabConfig::vllm();
        let (prefill, environment) = of_host(&config, Some("laxity"), 1);
        assert!(prefill.contains("--port 8000") && !prefill.contains("prefix"), "{prefill}");
        let decode = of_host(&config, Some("laxity"), 2).0;
        assert!(decode.contains("--port 8001 ") && decode.contains("--no-enable-prefix-caching"));
        let side = value(&environment, "VLLM_NIXL_SIDE_CHANNEL_HOST");
        assert_eq!(side.as_deref(), Some("10.78.0.2"));
        assert_eq!(value(&environment, "UCX_NET_DEVICES").as_deref(), Some(fabric::HOST_PORT));
        let vllm = Vllm::new(&config, Path::new("/run/lab/1"), Path::new("/e/bin/python"), None);
        let door = vllm.door();
        let urls = ["http://10.78.0.1:8000", "http://10.78.0.2:8000"].map(OsString::from);
        assert!(door.ends_with(&urls), "{door:?}");
    }

    #[test]
    fn with_mooncake_prefill_hosts_write_and_the_front_door_knows_where_their_names_are() {
        let mut config = LabConfig::vllm();
        config.vllm.as_mut().unwrap().connector = Connector::Mooncake;
        let prefill = of_host(&config, None, 0).0;
        assert!(prefill.contains(r#""kv_connector":"MooncakeConnector""#), "{prefill}");
        assert!(prefill.contains(r#""kv_role":"kv_producer""#), "{prefill}");
        assert!(of_host(&config, None, 2).0.contains(r#""kv_role":"kv_consumer""#));
        let vllm = Vllm::new(&config, Path::new("/run/lab/1"), Path::new("/e/bin/python"), None);
        let urls = ["http://10.78.0.1:8998", "http://10.78.0.2:8998"].map(OsString::from);
        assert!(vllm.door().ends_with(&urls));
    }

    #[test]
    fn only_prefill_hosts_wait_for_collectives_and_only_if_they_are_wanted() {
        let mut config = LabConfig::vllm();
        let socket = |config: &LabConfig, host| {
            let (_, environment) = of_host(config, None, host);
            value(&environment, collectives::SOCKET_VARIABLE)
        };
        assert_eq!(socket(&config, 1), None);
        config.vllm.as_mut().unwrap().collectives = true;
        assert_eq!(socket(&config, 1).as_deref(), Some("/run/lab/1/collectives1.sock"));
        assert_eq!(socket(&config, 2), None, "a decode host");
    }

    #[test]
    fn with_a_store_prefill_hosts_keep_their_kv_and_read_that_of_others() {
        let mut config = LabConfig::vllm();
        assert!(!of_host(&config, None, 0).0.contains("Store"));
        config.vllm.as_mut().unwrap().store = true;
        let (prefill, environment) = of_host(&config, Some("laxity_no_hints"), 1);
        for part in ["MultiConnector", "NixlConnector", "MooncakeStoreConnector"] {
            assert!(prefill.contains(&format!(r#""kv_connector":"{part}""#)), "{prefill}");
        }
        assert!(prefill.contains(r#""lookup_rpc_port":1"#), "{prefill}");
        assert_eq!(prefill.matches(r#""laxity":{"hints":false}"#).count(), 3, "{prefill}");
        let decode = of_host(&config, None, 2).0;
        assert!(!decode.contains("Store"), "decode hosts have no part: {decode}");
        assert!([prefill, decode].iter().all(|words| words.contains("--block-size 32")));
        for variable in ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "MOONCAKE_PREFERRED_SEGMENT"] {
            assert_eq!(value(&environment, variable).as_deref(), Some("10.77.0.2:17000"));
        }
        let path = value(&environment, "MOONCAKE_CONFIG_PATH");
        assert_eq!(path.as_deref(), Some("/run/lab/1/store.json"));
        let vllm = Vllm::new(&config, Path::new("/run/lab/1"), Path::new("/e/bin/python"), None);
        assert_eq!(vllm.store()["master_server_address"], "10.78.0.1:50051");
        assert_eq!(vllm.master()[0], "/e/bin/mooncake_master");
    }
}
