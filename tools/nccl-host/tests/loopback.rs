//! The real plugin over loopback. The tests check the promises of the safe interface with a plugin
//! that moves bytes. `tests/nccl` tests the plugin itself.
//!
//! Settings come from the environment. Each case therefore runs in its own process, which is this
//! program with the case's name.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use laxity_nccl_host::{
    Attempt, Context, HostError, Plugin, ReceiveQueue, RecvComm, Region, Request, STEP_BYTES,
    STEPS, SendComm, SendCounts, SendQueue, Tested,
};

const ROLE: &str = "LAXITY_NCCL_HOST_ROLE";

/// Time after which a wait counts as a hang. It is long, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

fn plugin() -> PathBuf {
    if let Some(path) = std::env::var_os("LAXITY_NCCL_PLUGIN") {
        return path.into();
    }
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("target/<profile>/deps");
    [deps.join("../libnccl_net_laxity.so"), deps.join("libnccl_net_laxity.so")]
        .into_iter()
        .find(|path| path.exists())
        .expect("libnccl_net_laxity.so is not built: `cargo build -p laxity-nccl` (make test does)")
}

/// Runs `case` with the plugin on `interface`, in a child that runs the test `name`.
fn with_interface(name: &str, interface: &str, case: impl FnOnce(Plugin)) {
    if std::env::var_os(ROLE).is_some() {
        case(Plugin::load(&plugin()).expect("the plugin loads"));
        return;
    }
    let output = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", name, "--nocapture"])
        .env(ROLE, name)
        .env("NCCL_SOCKET_IFNAME", interface)
        .env("LAXITY_NET", "tcp")
        .env("LAXITY_MODE", "off")
        .output()
        .expect("this program runs");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("1 passed"), "the case did not run: {said}");
}

fn patiently<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn connected(context: &Context) -> (SendComm, RecvComm) {
    let (mut listener, handle) = context.listen(0).expect("listens");
    let mut connecting = context.connect(0, handle);
    let (mut to, mut from) = (None, None);
    patiently("a connection", || {
        if to.is_none() {
            to = connecting.poll().expect("connects");
        }
        if from.is_none() {
            from = listener.accept().expect("accepts");
        }
        (to.is_some() && from.is_some()).then_some(())
    });
    to.zip(from).expect("both ends")
}

/// Repeats a call until the plugin starts the transfer.
fn started(region: Region, mut ask: impl FnMut(Region) -> Result<Attempt, HostError>) -> Request {
    let mut region = Some(region);
    patiently("a request", || match ask(region.take().expect("given back")).expect("taken") {
        Attempt::Started(request) => Some(request),
        Attempt::NotNow(back) => {
            region = Some(back);
            None
        }
    })
}

/// Tests a request until it is done.
fn done(request: Request) -> (Region, usize) {
    let mut left = Some(request);
    patiently("the transfer", || match left.take().expect("pending").test().expect("no error") {
        Tested::Done(region, bytes) => Some((region, bytes)),
        Tested::Pending(request) => {
            left = Some(request);
            None
        }
    })
}

#[test]
fn a_window_of_large_messages_goes_through_however_many_there_are() {
    const BYTES: usize = STEP_BYTES;
    const MESSAGES: usize = 200;
    let name = "a_window_of_large_messages_goes_through_however_many_there_are";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (listener, handle) = context.listen(0).expect("listens");
        let (mut receiving, mut received) = (ReceiveQueue::new(listener), 0);
        let (mut sending, mut sent) = (SendQueue::default(), SendCounts::default());
        sending.connect(context.connect(0, handle));
        sending.extend(0..MESSAGES);
        patiently("all messages", || {
            let fill = |message: &usize, region: &mut [u8]| {
                region.fill(*message as u8);
                BYTES
            };
            let now = sending.turn(fill).expect("sent");
            sent.messages += now.messages;
            sent.bytes += now.bytes;
            sent.done += now.done;
            receiving.accept().expect("accepts");
            let check = |message: &mut [u8]| {
                assert_eq!(message.len(), BYTES);
                assert!(message.iter().all(|&byte| byte == received as u8));
            };
            received += receiving.next(STEPS, check).expect("received").iter().len();
            (received == MESSAGES && !sending.is_busy()).then_some(())
        });
        let messages = MESSAGES as u64;
        assert_eq!((sent.messages, sent.done), (messages, messages));
        assert_eq!(sent.bytes, messages * BYTES as u64);
    });
}

#[test]
fn requests_that_are_given_up_leave_the_plugin_and_the_memory_in_order() {
    let name = "requests_that_are_given_up_leave_the_plugin_and_the_memory_in_order";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (to, from) = connected(&context);
        let region = from.register(vec![0; 1 << 20]).expect("registered");
        let receiving = started(region, |region| from.receive(region, 1 << 20, 0));
        let region = to.register(vec![7; 64 << 20]).expect("registered");
        let sending = started(region, |region| to.send(region, 64 << 20, 0));
        // The message is larger than the connection takes, and nobody tests. Both requests are in
        // progress when they are dropped.
        drop((receiving, sending));
        drop((to, from));
        // The plugin still works.
        let (to, from) = connected(&context);
        let region = from.register(vec![0; 9]).expect("registered");
        let receiving = started(region, |region| from.receive(region, 9, 0));
        let region = to.register(b"afterward".to_vec()).expect("registered");
        done(started(region, |region| to.send(region, 9, 0)));
        let (region, bytes) = done(receiving);
        assert_eq!(&region[..bytes], b"afterward");
    });
}

#[test]
fn memory_of_another_connection_or_too_little_of_it_is_refused() {
    let name = "memory_of_another_connection_or_too_little_of_it_is_refused";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (to, from) = connected(&context);
        let foreign = from.register(vec![0; 10]).expect("registered");
        let error = to.send(foreign, 10, 0).expect_err("refused");
        assert!(matches!(error, HostError::Misuse(_)), "{error}");
        let short = to.register(vec![0; 10]).expect("registered");
        let error = to.send(short, 11, 0).expect_err("refused");
        assert!(matches!(error, HostError::Misuse(_)), "{error}");
    });
}

#[test]
fn a_plugin_that_finds_no_interface_says_which_it_looked_for() {
    let name = "a_plugin_that_finds_no_interface_says_which_it_looked_for";
    with_interface(name, "=nonsense0", |plugin| {
        // A plugin may refuse, as this one does, or report no devices.
        let error = plugin.init(1).map(|_| ()).expect_err("no such interface");
        let text = error.to_string();
        assert!(text.starts_with("the plugin's init failed with"), "{text}");
        assert!(text.contains("nonsense0"), "{text}");
    });
}
