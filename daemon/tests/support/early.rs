//! A daemon that has bound its sockets and does not serve yet.

use std::path::Path;

use laxity_daemon::config::Config;
use laxity_daemon::daemon::Daemon;
use laxity_daemon::service::Source;
use laxity_daemon::sockets::PassedSockets;

/// Binds the sockets of a daemon in `folder`: `laxityd.sock` and `control.sock`.
pub(crate) fn bound(folder: &Path) -> Daemon {
    let set = |key: &str, name: &str| format!("{key}={:?}", folder.join(name));
    let sets =
        vec![set("socket", "laxityd.sock"), set("control", "control.sock"), "metrics=".to_owned()];
    let config = Config::load(None, &sets).unwrap();
    let source = Source { file: None, sets };
    Daemon::bind(config, source, Box::new(|_| {}), PassedSockets::take()).unwrap()
}
