//! Watches which DSCPs the host's NICs treat alike, for clients that mark their traffic
//! ([`laxity_shm::marking`]). The same thread looks for changes of NICs.
//!
//! A driver may take long to answer, so a thread of its own asks. It asks again every
//! [`READ_EVERY`], because tools such as `mlnx_qos` often set PFC after the daemon's start.

use std::io;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use laxity_nic::RdmaPort;
use laxity_shm::marking::Treatments;
use tracing::info;

use crate::config::{ALL_DEVICES, ConfigInForce, NicConfig};
use crate::mailbox::{Mailbox, SchedulerCommand};

const READ_EVERY: Duration = Duration::from_secs(5);

/// Starts a watch, which sends each reading that differs from the one before. The first is sent
/// before the return, so that the scheduler knows it before its first client. The watch ends when
/// the returned end of a channel is dropped. Before each later reading it calls `follow_nics`.
pub(crate) fn watch(
    config: ConfigInForce,
    mailbox: Mailbox,
    follow_nics: impl Fn() + Send + 'static,
) -> io::Result<mpsc::Sender<()>> {
    let (alive, ended) = mpsc::channel();
    let mut last = Treatments::UNKNOWN;
    let mut read = move || {
        let read = of_host(Path::new("/"), &config.load().nic);
        if read == last {
            return true;
        }
        info!(known = read != Treatments::UNKNOWN, "read what the NICs do with each DSCP");
        last = read;
        mailbox.send(SchedulerCommand::Treatments(Box::new(read)))
    };
    read();
    std::thread::Builder::new().name("nics".into()).spawn(move || {
        while ended.recv_timeout(READ_EVERY) == Err(RecvTimeoutError::Timeout) {
            follow_nics();
            if !read() {
                return;
            }
        }
    })?;
    Ok(alive)
}

/// Returns how many levels have a DSCP that the NICs treat unlike that of the highest level, as far
/// as this is known. Packets of some levels can then be lost, and of others not, or only some slow
/// down under congestion.
pub(crate) fn unlike_levels(treatments: &Treatments, dscp: &[u8]) -> usize {
    let is_unlike = |other: &&u8| treatments.alike(dscp[0], **other) == Some(false);
    dscp.iter().filter(is_unlike).count()
}

fn of_host(root: &Path, nics: &[NicConfig]) -> Treatments {
    let is_ours = |port: &RdmaPort| {
        nics.iter().any(|nic| {
            nic.name == ALL_DEVICES
                || nic.name == port.device
                || Some(&nic.name) == port.interface.as_ref()
        })
    };
    laxity_nic::treatments(root, is_ours, &laxity_nic::query)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_ports_of_configured_nics_count() {
        let host = tempfile::tempdir().expect("a folder");
        let port = host.path().join("sys/class/infiniband/mlx5_0/ports/1");
        fs::create_dir_all(&port).expect("created");
        fs::write(port.join("link_layer"), "Ethernet").expect("written");
        let mut nic = crate::config::Config::default().nic.remove(0);
        let of = |nic: &NicConfig| of_host(host.path(), std::slice::from_ref(nic));
        assert_eq!(of(&nic), Treatments::UNKNOWN, "`default` stands for all, and this one is mute");
        nic.name = "mlx5_0".into();
        assert_eq!(of(&nic), Treatments::UNKNOWN);
        nic.name = "mlx5_1".into();
        assert_eq!(of(&nic), Treatments::ALL_ALIKE);
    }

    #[test]
    fn levels_that_the_nics_treat_unlike_the_highest_are_counted() {
        let dscp = [46, 34, 26, 26, 10];
        assert_eq!(unlike_levels(&Treatments::UNKNOWN, &dscp), 0);
        assert_eq!(unlike_levels(&Treatments::ALL_ALIKE, &dscp), 0);
        let mut lossless_26 = [1; Treatments::COUNT];
        lossless_26[26] = 2;
        assert_eq!(unlike_levels(&Treatments::new(lossless_26), &dscp), 2);
    }
}
