//! The watch against a scheduler that the test plays, on a host that consists of files.

use std::fs;

use super::*;
use crate::mailbox::{Inbox, mailbox};

const RATE: u64 = 1_000_000_000;
const FOLLOW: ResidualConfig = ResidualConfig { mode: ResidualMode::Follow, assured_permille: 250 };

struct Host {
    root: tempfile::TempDir,
    inbox: Inbox,
    watch: Watch,
    at_ms: u64,
    sent: u64,
    permitted: u64,
}

impl Host {
    fn new(nic: &str) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let (mailbox, inbox) = mailbox().expect("descriptors");
        let watch = Watch::new(root.path().into(), FOLLOW, mailbox);
        let mut host = Self { root, inbox, watch, at_ms: 1, sent: 0, permitted: 0 };
        fs::create_dir_all(host.root.path().join("proc/net")).expect("created");
        host.follow(&[nic]);
        host
    }

    fn follow(&mut self, names: &[&str]) {
        let nic = |name: &&str| {
            let mut nic = crate::config::Config::default().nic.remove(0);
            nic.name = (*name).to_owned();
            nic
        };
        self.watch.follow(&names.iter().map(nic).collect::<Vec<_>>(), vec![46, 8]);
    }

    /// Lets 20 ms pass, in which `bytes` leave. Returns the pause and what the scheduler was told.
    fn step(&mut self, bytes: u64, config: ResidualConfig) -> (Option<Duration>, Told) {
        self.sent += bytes;
        self.at_ms += 20;
        let row = format!("eth0: 0 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n", self.sent);
        fs::write(self.root.path().join("proc/net/dev"), row).expect("written");
        let watched = self.watch.nics.len();
        let (watch, inbox, at) = (&mut self.watch, &self.inbox, Time(self.at_ms * 1_000_000));
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| watch.look(at));
            let mut told = None;
            while !looks.is_finished() {
                for command in inbox.take() {
                    let SchedulerCommand::Residual { residuals, usage } = command else { continue };
                    told = Some(residuals);
                    let permitted_bytes = self.permitted;
                    let port = PortUse { rate: RATE, permitted_bytes, ..PortUse::default() };
                    let ports = 2 * watched;
                    usage.send((config, vec![port; ports])).expect("the watch waits");
                }
                std::thread::yield_now();
            }
            (looks.join().expect("no panic"), told)
        })
    }
}

type Told = Option<Vec<Option<PortResidual>>>;

#[test]
fn the_scheduler_is_told_what_others_leave_and_is_left_alone_while_nothing_passes() {
    let (mut host, config) = (Host::new("eth0"), FOLLOW);
    let (pause, told) = host.step(0, config);
    assert_eq!(pause, Some(READ_EVERY));
    assert!(told.expect("a question").iter().all(Option::is_none));
    let mut left = None;
    for _ in 0..100 {
        left = host.step(RATE / 100, config).1.or(left);
    }
    let [egress, ingress] = left.expect("told")[..] else { panic!("two ports") };
    let (egress, ingress) = (egress.expect("counted"), ingress.expect("counted"));
    assert_eq!((egress.source, ingress.capacity.rate), ("netdev", RATE));
    let share = egress.capacity.rate as f64 / RATE as f64;
    assert!((0.45..0.55).contains(&share), "{egress:?}");
    let mut last = None;
    for _ in 0..300 {
        let (pause, told) = host.step(0, config);
        last = told.or(last);
        if pause == Some(IDLE_EVERY) {
            let last = last.expect("told").remove(0).expect("counted");
            assert_eq!(last.capacity.rate, RATE, "the scheduler knows before the rest");
            assert!(host.step(0, config).1.is_none(), "no question");
            return;
        }
    }
    panic!("no rest after six seconds");
}

#[test]
fn a_nic_that_was_added_is_watched_and_one_with_another_name_counts_anew() {
    let mut host = Host::new("default");
    assert!(host.step(0, FOLLOW).1.is_none(), "there are no counters");
    host.follow(&["eth1", "eth0", "default"]);
    let mut told = None;
    for _ in 0..100 {
        told = host.step(RATE / 100, FOLLOW).1.or(told);
    }
    let counted: Vec<bool> = told.expect("told").iter().map(Option::is_some).collect();
    assert_eq!(counted, [false, false, true, true, false, false]);
    host.follow(&["eth0", "default"]);
    assert!(host.watch.nics[..2].iter().all(|nic| nic.source.is_none()), "other NICs");
}

#[test]
fn bytes_that_were_permitted_to_a_function_are_not_foreign_nor_are_those_before_it_came() {
    let mut host = Host::new("default");
    let count = |host: &Host, device: &str, sent: u64| {
        let folder = host.root.path().join("sys/class/infiniband").join(device);
        let port = folder.join("ports/1/counters");
        fs::create_dir_all(&port).expect("created");
        fs::write(port.join("port_xmit_data"), (sent / 4).to_string()).expect("written");
        fs::write(port.join("port_rcv_data"), "0").expect("written");
        folder
    };
    count(&host, "mlx5_0", 0);
    let mut foreign = 0;
    let mut last = 0;
    for step in 0..200 {
        // The function comes after a second, with a counter that is high already.
        if step >= 50 {
            let function = count(&host, "mlx5_1", (1 << 34) + host.permitted);
            let owner = function.join("device/physfn/infiniband/mlx5_0");
            fs::create_dir_all(owner).expect("created");
        }
        // Once it is found, the function sends permitted bytes, and its owner sends foreign bytes.
        if step >= 110 {
            host.permitted += RATE / 100;
        }
        if step >= 150 {
            foreign += RATE / 100;
            count(&host, "mlx5_0", foreign);
        }
        let Some(told) = host.step(0, FOLLOW).1 else { continue };
        let Some(egress) = told[0] else { continue };
        last = egress.capacity.foreign_bytes;
        assert!(last <= foreign, "{last} of {foreign} in step {step}");
        assert!(!egress.capacity.stale);
    }
    assert!(last > foreign / 2, "{last} of {foreign}");
}

#[test]
fn a_nic_without_counters_or_mode_off_leaves_the_rate_alone() {
    let (mut host, config) = (Host::new("mlx5_9"), FOLLOW);
    let (pause, told) = host.step(RATE, config);
    assert_eq!((pause, told.is_none()), (Some(LOOK_EVERY), true), "there is nothing to say");
    let mut host = Host::new("eth0");
    let off = ResidualConfig { mode: ResidualMode::Off, ..config };
    for _ in 0..50 {
        host.step(RATE / 100, config);
    }
    host.step(RATE / 100, off);
    let (pause, told) = host.step(RATE / 100, off);
    assert_eq!(pause, Some(LOOK_EVERY));
    assert!(told.expect("a question").iter().all(Option::is_none), "nothing is followed");
    drop(host.inbox);
    assert_eq!(host.watch.look(Time(u64::MAX)), None, "the scheduler has ended");
}
