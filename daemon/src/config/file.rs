//! Makes a configuration from a file and the command line, and a file from a configuration.

use std::fmt::Write as _;
use std::path::Path;

use laxity_files::CONFIG_BYTES_MAX;

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
    ///
    /// # Errors
    /// The first file that can't be used, and where it is named.
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
    ///
    /// # Errors
    /// The first assignment that can't be used.
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
        // Assignments to NICs configure them.
        let discovered = before.discovered.filter(|_| config.nic == before.nic);
        Ok(Self { retired: before.retired, discovered, ..config })
    }

    /// Returns a file that gives this configuration when read. Keys without a value are comments
    /// with the value in force.
    pub fn to_toml(&self) -> String {
        let text = match toml::to_string(self) {
            Ok(text) => text,
            Err(error) => return format!("# cannot be shown: {error}\n"),
        };
        let mut shown = String::new();
        let mut table = "";
        let mut nics = self.nic.iter();
        let mut nic = None;
        for line in text.lines() {
            let _ = writeln!(shown, "{line}");
            if line.starts_with('[') {
                table = line;
                if table == "[[nic]]" {
                    nic = nics.next();
                }
            }
            let key = line.split(' ').next().unwrap_or_default();
            match (table, key, nic) {
                ("", "metrics", _) if self.slo_ttft.is_none() => shown.push_str(
                    "# slo_ttft = \"500ms\"  # not set: requests without a deadline have none\n",
                ),
                ("[scheduler]", "spin_us", _) if self.scheduler.cpu.is_none() => {
                    shown.push_str("# cpu = 3  # not set: the scheduler runs on any core\n");
                }
                ("[scheduler]", "clients_max", _)
                    if self.scheduler.clients_per_uid_max.is_none() =>
                {
                    let share = self.scheduler.clients_per_uid();
                    let _ = writeln!(
                        shown,
                        "# clients_per_uid_max = {share}  # not set: half of clients_max"
                    );
                }
                ("[[nic]]", "rate", Some(nic)) => {
                    if nic.chunk.is_none() {
                        let bytes = nic.chunk_bytes();
                        let _ = writeln!(shown, "# chunk = {bytes}  # not set: by the rate");
                    }
                    if nic.window.is_none() {
                        let bytes = nic.window_bytes();
                        let _ = writeln!(shown, "# window = {bytes}  # not set: four chunks");
                    }
                    if nic.peer_window.is_none() {
                        let bytes = self.link(nic).peer_window_bytes;
                        let _ = writeln!(
                            shown,
                            "# peer_window = {bytes}  # not set: window times overcommit"
                        );
                    }
                    if nic.addresses.is_empty() {
                        shown.push_str(
                            "# addresses = [\"10.0.0.7\"]  # not set: what the kernel has for \
                             devices of that name\n",
                        );
                    }
                }
                _ => {}
            }
        }
        shown
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
