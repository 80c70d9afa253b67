//! Network namespaces, in which a link between coordinators, etcd and daemons can fail while the
//! others work.
//!
//! ```text
//! the test's thread and etcd   bridge `etcd`   198.18.0.1 ──── 198.18.0.10+N `etcd`    coordinator N
//!                              bridge `hosts`  198.18.1.1 ──── 198.18.1.10+N `hosts`
//! ```
//! Each coordinator has its own namespace. The test's thread is in one while [`Net`] lives. Only
//! the namespaces' names are visible outside, and they contain the test's process id. So no address
//! collides with one of the machine or of another run.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use laxity_tests::{Need, skip};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NAME: &str = "laxity-served";
const NAMES: &str = "/run/netns";

/// The address at which etcd listens.
pub(crate) const ETCD_HOST: &str = "198.18.0.1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Etcd,
    Hosts,
}

/// The place at which a link fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// At the coordinator, which gets an error at once because it has no route.
    Near,
    /// At the other end, so that nothing comes back and there is no error.
    Far,
}

/// Network namespaces that are removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Net {
    name: String,
    /// The namespace in which the thread was before.
    before: File,
}

impl Net {
    /// Creates namespaces for `count` coordinators. Returns `None`, and skips the test, if that
    /// fails.
    pub(crate) fn lay(count: usize) -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        sweep();
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let net = Self {
            name: format!("{NAME}-{}-{nth}", std::process::id()),
            before: File::open("/proc/thread-self/ns/net").expect("Linux"),
        };
        // A process that had the same id before may have left some.
        net.remove();
        match net.build(count) {
            Ok(()) => Some(net),
            Err(problem) => {
                let needs = "partitions need root and iproute2";
                let why = format!("no network namespaces here ({problem}); {needs}");
                skip(Need::Machine, why);
                None
            }
        }
    }

    fn build(&self, count: usize) -> Result<(), String> {
        let hub = format!("{}-hub", self.name);
        ip(&format!("netns add {hub}"))?;
        ip(&format!("-n {hub} link set lo up"))?;
        for (net, link) in ["etcd", "hosts"].iter().enumerate() {
            ip(&format!("-n {hub} link add {link} type bridge"))?;
            ip(&format!("-n {hub} addr add 198.18.{net}.1/24 dev {link}"))?;
            ip(&format!("-n {hub} link set {link} up"))?;
        }
        for nth in 0..count {
            let own = self.namespace(nth);
            ip(&format!("netns add {own}"))?;
            ip(&format!("-n {own} link set lo up"))?;
            for (net, link) in ["etcd", "hosts"].iter().enumerate() {
                let far = format!("{link}{nth}");
                ip(&format!("-n {hub} link add {far} type veth peer name {link} netns {own}"))?;
                ip(&format!("-n {hub} link set {far} master {link} up"))?;
                let address = format!("198.18.{net}.{}/24", 10 + nth);
                ip(&format!("-n {own} addr add {address} dev {link}"))?;
                ip(&format!("-n {own} link set {link} up"))?;
            }
        }
        let hub = File::open(Path::new(NAMES).join(hub)).map_err(|error| error.to_string())?;
        setns(hub, CloneFlags::CLONE_NEWNET).map_err(|error| format!("setns: {error}"))
    }

    pub(crate) fn namespace(&self, nth: usize) -> String {
        format!("{}-{nth}", self.name)
    }

    /// Returns the address at which coordinator `nth` listens.
    pub(crate) fn address(nth: usize) -> String {
        format!("198.18.1.{}:7471", 10 + nth)
    }

    pub(crate) fn cut(&self, nth: usize, link: Link, cut: Cut) {
        self.set(nth, link, cut, "down");
    }

    pub(crate) fn heal(&self, nth: usize, link: Link, cut: Cut) {
        self.set(nth, link, cut, "up");
    }

    fn set(&self, nth: usize, link: Link, cut: Cut, to: &str) {
        let link = match link {
            Link::Etcd => "etcd",
            Link::Hosts => "hosts",
        };
        let words = match cut {
            Cut::Near => format!("-n {} link set {link} {to}", self.namespace(nth)),
            Cut::Far => format!("-n {}-hub link set {link}{nth} {to}", self.name),
        };
        ip(&words).expect("a link of this test");
    }

    fn remove(&self) {
        for name in names() {
            if name.starts_with(&format!("{}-", self.name)) {
                let _ = ip(&format!("netns del {name}"));
            }
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The call fails without the privilege, but then the thread never changed its namespace.
        let _ = setns(&self.before, CloneFlags::CLONE_NEWNET);
        self.remove();
    }
}

fn ip(words: &str) -> Result<(), String> {
    let ran = Command::new("ip").args(words.split_whitespace()).output();
    let ran = ran.map_err(|error| format!("ip: {error}"))?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr);
    Err(format!("ip {words}: {}", said.trim()))
}

/// Returns all namespaces that runs of these tests made.
fn names() -> Vec<String> {
    let listed = fs::read_dir(NAMES).into_iter().flatten().flatten();
    let names = listed.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("{NAME}-"))).collect()
}

/// Removes the namespaces of runs that were killed.
fn sweep() {
    for name in names() {
        let process = name[NAME.len() + 1..].split('-').next();
        let alive = process.is_none_or(|process| Path::new("/proc").join(process).exists());
        if alive {
            continue;
        }
        let inside = Command::new("ip").args(["netns", "pids", &name]).output();
        let inside = inside.map(|ran| ran.stdout).unwrap_or_default();
        for process in String::from_utf8_lossy(&inside).split_whitespace() {
            if let Ok(process) = process.parse() {
                let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
            }
        }
        let _ = ip(&format!("netns del {name}"));
    }
}
