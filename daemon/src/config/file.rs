//! Makes a configuration from a file and the command line, and a file from a configuration.

use std::fmt::Write as _;
use std::path::Path;

use laxity_files::CONFIG_BYTES_MAX;
use laxity_quantity::{Bytes, Nanos};

use super::Config;
use super::error::{ConfigError, FILE_DEFAULT};

/// Keys of earlier builds that had no useful effect. A file with one is valid, with a warning.
const RETIRED: [&str; 4] =
    ["tuning.last_stage", "tuning.mlu", "tuning.ties", "coordinator.fetch_wait_max"];

impl Config {
    /// Reads `path`, then applies the `key=value` assignments of `sets`. If `path` is `None`, it
    /// reads the default file, or takes the defaults if that is missing. NICs and rates that are
    /// left open are those of this host.
    ///
    /// # Errors
    /// The first error. On a reload, the old configuration stays in force.
    pub fn load(path: Option<&Path>, sets: &[String]) -> Result<Self, ConfigError> {
        let host = Path::new("/");
        let mut config = match path {
            Some(path) => Self::from_file(path)?,
            None if Path::new(FILE_DEFAULT).exists() => Self::from_file(Path::new(FILE_DEFAULT))?,
            None => Self::default(),
        };
        config.discover(host);
        let mut config = config.with_assignments(sets)?;
        config.read_rates(host);
        Ok(config)
    }

    fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = laxity_files::read_to_string(path, CONFIG_BYTES_MAX)
            .map_err(|cause| ConfigError::Read { path: path.to_owned(), cause })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Checks the files that the configuration names. `path` and `sets` are those of
    /// [`load`](Self::load).
    ///
    /// `load` does not check them, because a daemon with a broken certificate still starts.
    pub fn check_files(&self, path: Option<&Path>, sets: &[String]) -> Result<(), ConfigError> {
        let Err(nonsense) = self.check_certificates() else { return Ok(()) };
        let problem = format!("{}: {}", nonsense.key, nonsense.problem);
        let names = |set: &&String| {
            let key = set.split('=').next().unwrap_or_default();
            key.trim() == nonsense.key
        };
        if let Some(assignment) = sets.iter().rfind(names) {
            return Err(ConfigError::Set { assignment: assignment.clone(), problem });
        }
        let path = path.unwrap_or_else(|| Path::new(FILE_DEFAULT));
        let text = laxity_files::read_to_string(path, CONFIG_BYTES_MAX).unwrap_or_default();
        let offset = locate(&text, &nonsense.key);
        Err(at(&text, &path.display().to_string(), problem, offset))
    }

    /// Parses and checks `text`. Errors name `origin`.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let fail = |problem, offset| at(text, origin, problem, offset);
        let (known, retired) = laxity_files::without_retired(text, &RETIRED);
        let mut config: Self = toml::from_str(&known).map_err(|error| {
            fail(error.message().to_owned(), error.span().map_or(0, |span| span.start))
        })?;
        config.retired = retired;
        config.check().map_err(|nonsense| {
            fail(format!("{}: {}", nonsense.key, nonsense.problem), locate(text, &nonsense.key))
        })?;
        Ok(config)
    }

    /// Applies `key=value` assignments. Keys are dotted, and elements of lists are numbers
    /// (`nic.0.rate=25Gbit`).
    pub fn with_assignments(self, sets: &[String]) -> Result<Self, ConfigError> {
        if sets.is_empty() {
            return Ok(self);
        }
        let before = self.clone();
        let mut config = self;
        for assignment in sets {
            let fail =
                |problem: String| ConfigError::Set { assignment: assignment.clone(), problem };
            let (key, text) = assignment
                .split_once('=')
                .ok_or_else(|| fail("write key=value, such as scheduler.spin_us=0".into()))?;
            let value = toml::from_str::<toml::Table>(&format!("v = {text}"))
                .ok()
                .and_then(|mut table| table.remove("v"))
                .unwrap_or_else(|| toml::Value::String(text.trim().to_owned()));
            let mut root =
                toml::Value::try_from(&config).map_err(|error| fail(error.to_string()))?;
            *place(&mut root, key.trim()).ok_or_else(|| {
                fail("no such place; `laxityd --show-config` lists every key".into())
            })? = value;
            config = root.try_into().map_err(|error: toml::de::Error| {
                fail(error.message().lines().next().unwrap_or_default().to_owned())
            })?;
            config.check().map_err(|e| fail(format!("{}: {}", e.key, e.problem)))?;
        }
        // An assignment to a NIC configures the NICs, which then do not follow what the kernel has.
        let discovered = before.discovered.filter(|_| config.nic == before.nic);
        Ok(Self { retired: before.retired, discovered, ..config })
    }

    /// Returns a file that gives this configuration when read. Keys without a value are comments,
    /// with the value in force or an example.
    pub fn to_toml(&self) -> String {
        self.shown().unwrap_or_else(|error| format!("# cannot be shown: {error}\n"))
    }

    fn shown(&self) -> Result<String, toml::ser::Error> {
        let mut full = self.clone();
        full.slo_ttft.get_or_insert(Nanos(500_000_000));
        full.scheduler.cpu.get_or_insert(3);
        full.scheduler.clients_per_uid_max.get_or_insert(self.scheduler.clients_per_uid());
        for nic in &mut full.nic {
            let link = self.link(nic);
            nic.chunk.get_or_insert(Bytes(link.chunk_bytes));
            nic.window.get_or_insert(Bytes(link.window_bytes));
            nic.peer_window.get_or_insert(Bytes(link.peer_window_bytes));
            if nic.addresses.is_empty() {
                nic.addresses = vec![[10, 0, 0, 7].into()];
            }
        }
        let set = toml::to_string(self)?;
        let mut set = set.lines().peekable();
        let mut shown = String::new();
        for line in toml::to_string(&full)?.lines() {
            if set.next_if_eq(&line).is_some() {
                let _ = writeln!(shown, "{line}");
                continue;
            }
            let instead = match line.split(' ').next().unwrap_or_default() {
                "slo_ttft" => "requests without a deadline have none",
                "cpu" => "the scheduler runs on any core",
                "clients_per_uid_max" => "half of clients_max",
                "chunk" => "by the rate",
                "window" => "four chunks",
                "peer_window" => "window times overcommit",
                _ => "what the kernel has for devices of that name",
            };
            let _ = writeln!(shown, "# {line}  # not set: {instead}");
        }
        Ok(shown)
    }
}

/// Returns the error for a problem at an offset of a file.
fn at(text: &str, origin: &str, problem: String, offset: usize) -> ConfigError {
    let line = text[..offset.min(text.len())].matches('\n').count() + 1;
    let mut excerpt = String::new();
    if let Some(written) = text.lines().nth(line - 1) {
        let _ = writeln!(excerpt, "{line:>5} | {written}");
    }
    ConfigError::File { origin: origin.to_owned(), line, problem, excerpt }
}

/// Returns the value at a dotted `key`. A leaf that is missing in its table is created, so that
/// optional keys can be set.
fn place<'v>(root: &'v mut toml::Value, key: &str) -> Option<&'v mut toml::Value> {
    let mut at = root;
    for part in key.split('.') {
        at = match at {
            toml::Value::Table(table) => {
                table.entry(part.to_owned()).or_insert(toml::Value::Boolean(false))
            }
            toml::Value::Array(array) => array.get_mut(part.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(at)
}

/// Returns the offset in `text` of the dotted `key`, or of its deepest part that is there.
fn locate(text: &str, key: &str) -> usize {
    use toml::de::{DeTable, DeValue};
    let Ok(root) = DeTable::parse(text) else { return 0 };
    let mut found = 0;
    let mut at = &DeValue::Table(root.into_inner());
    for part in key.split('.') {
        let next = match at {
            DeValue::Table(table) => table
                .iter()
                .find(|(name, _)| name.get_ref() == part)
                .map(|(name, value)| (name.span().start, value)),
            DeValue::Array(array) => part
                .parse::<usize>()
                .ok()
                .and_then(|index| array.get(index))
                .map(|value| (value.span().start, value)),
            _ => None,
        };
        let Some((offset, value)) = next else { break };
        found = offset;
        at = value.get_ref();
    }
    found
}
