//! The real plugin over loopback. The tests check the promises of the safe interface with a plugin
//! that moves bytes.
//!
//! Settings come from the environment. Each case therefore runs in its own process, which is this
//! program with the case's name.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use laxity_nccl_host::{
    Attempt, Context, HostError, Plugin, RecvComm, Region, Request, STEP_BYTES, STEPS, SendComm,
    SendQueue, Tested,
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

/// Tests requests in order until all are done.
fn done(requests: Vec<Request>) -> Vec<(Region, usize)> {
    let mut left: VecDeque<Request> = requests.into();
    let mut finished = Vec::new();
    patiently("the transfers", || {
        while let Some(request) = left.pop_front() {
            match request.test().expect("no error") {
                Tested::Done(region, bytes) => finished.push((region, bytes)),
                Tested::Pending(request) => {
                    left.push_front(request);
                    return None;
                }
            }
        }
        Some(())
    });
    finished
}

fn pattern(message: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + at / 251 + message * 7) as u8).collect()
}

#[test]
fn a_message_sent_before_its_receive_arrives_though_only_the_receive_is_tested() {
    let name = "a_message_sent_before_its_receive_arrives_though_only_the_receive_is_tested";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (to, from) = connected(&context);
        // The message is larger than socket buffers.
        let size = 32 << 20;
        let region = to.register(pattern(3, size)).expect("registered");
        let sending = started(region, |region| to.send(region, size, 0));
        let region = from.register(vec![0; size]).expect("registered");
        let receiving = started(region, |region| from.receive(region, size, 0));
        let mut finished = done(vec![receiving, sending]).into_iter();
        let (region, bytes) = finished.next().expect("the receive");
        let arrived = region.into_vec().expect("let go of");
        assert!(bytes == size && arrived == pattern(3, size));
    });
}

#[test]
fn messages_of_all_sizes_arrive_in_order_and_the_memory_comes_back() {
    let name = "messages_of_all_sizes_arrive_in_order_and_the_memory_comes_back";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        assert!(context.devices().expect("devices") > 0);
        let (to, from) = connected(&context);
        let sizes = [0, 1, 63, 4096, 65_535, 65_537, 1 << 20, 5 << 20];
        let (mut sending, mut receiving) = (Vec::new(), Vec::new());
        for (message, &size) in sizes.iter().enumerate() {
            // The buffer has one byte more than the message.
            let region = from.register(vec![0xee; size + 1]).expect("registered");
            receiving.push(started(region, |region| from.receive(region, size + 1, 0)));
            let region = to.register(pattern(message, size)).expect("registered");
            sending.push(started(region, |region| to.send(region, size, 0)));
        }
        // Both ends are in this thread, so neither may wait for the other.
        let mut all: Vec<Option<Request>> =
            sending.into_iter().chain(receiving).map(Some).collect();
        let mut results: Vec<Option<(Region, usize)>> = all.iter().map(|_| None).collect();
        patiently("the transfers", || {
            for (slot, result) in all.iter_mut().zip(&mut results) {
                match slot.take().map(|request| request.test().expect("no error")) {
                    Some(Tested::Done(region, bytes)) => *result = Some((region, bytes)),
                    Some(Tested::Pending(request)) => *slot = Some(request),
                    None => {}
                }
            }
            results.iter().all(Option::is_some).then_some(())
        });
        for (index, (region, bytes)) in results.into_iter().flatten().enumerate() {
            let (message, received) = (index % sizes.len(), index >= sizes.len());
            let size = sizes[message];
            assert_eq!(bytes, size);
            let memory = region.into_vec().expect("deregistered");
            assert_eq!(memory[..size], pattern(message, size), "message {message}");
            if received {
                assert_eq!(memory[size..], [0xee], "nothing beyond the message");
            }
        }
    });
}

#[test]
fn a_window_of_large_messages_goes_through_however_many_there_are() {
    const BYTES: usize = STEP_BYTES;
    const MESSAGES: usize = 200;
    let name = "a_window_of_large_messages_goes_through_however_many_there_are";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (mut listener, handle) = context.listen(0).expect("listens");
        let (mut queue, mut sent) = (SendQueue::default(), (0, 0));
        queue.connect(context.connect(0, handle));
        queue.extend(0..MESSAGES);
        let mut turn = |queue: &mut SendQueue<usize>| {
            let fill = |message: &usize, region: &mut [u8]| {
                region.fill(*message as u8);
                BYTES
            };
            let now = queue.turn(fill).expect("sent");
            sent = (sent.0 + now.messages, sent.1 + now.bytes);
        };
        let from = patiently("a connection", || {
            turn(&mut queue);
            listener.accept().expect("accepts")
        });
        let mut into: Vec<Region> =
            (0..STEPS).map(|_| from.register(vec![0; BYTES]).expect("registered")).collect();
        let (mut receiving, mut posted, mut received) = (VecDeque::new(), 0, 0);
        patiently("all messages", || {
            while posted < MESSAGES
                && let Some(region) = into.pop()
            {
                match from.receive(region, BYTES, 0).expect("posted") {
                    Attempt::Started(request) => receiving.push_back(request),
                    Attempt::NotNow(region) => {
                        into.push(region);
                        break;
                    }
                }
                posted += 1;
            }
            turn(&mut queue);
            while let Some(request) = receiving.pop_front() {
                match Request::test(request).expect("no error") {
                    Tested::Done(region, bytes) => {
                        assert_eq!(bytes, BYTES);
                        assert!(region.iter().all(|&byte| byte == received as u8));
                        received += 1;
                        into.push(region);
                    }
                    Tested::Pending(request) => {
                        receiving.push_front(request);
                        break;
                    }
                }
            }
            (received == MESSAGES && !queue.is_busy()).then_some(())
        });
        assert_eq!(sent, (MESSAGES as u64, (MESSAGES * BYTES) as u64));
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
        let region = to.register(pattern(0, 64 << 20)).expect("registered");
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
        done(vec![started(region, |region| to.send(region, 9, 0))]);
        let (region, bytes) = done(vec![receiving]).pop().expect("one");
        assert_eq!(&region[..bytes], b"afterward");
    });
}

#[test]
fn a_peer_that_closes_is_an_error_with_the_functions_name_and_not_a_hang() {
    let name = "a_peer_that_closes_is_an_error_with_the_functions_name_and_not_a_hang";
    with_interface(name, "=lo", |plugin| {
        let context = plugin.init(1).expect("initialises");
        let (to, from) = connected(&context);
        let region = from.register(vec![0; 100]).expect("registered");
        let mut receiving = Some(started(region, |region| from.receive(region, 100, 0)));
        drop(to);
        let error = patiently("an error", || match receiving.take().expect("pending").test() {
            Ok(Tested::Pending(request)) => {
                receiving = Some(request);
                None
            }
            Ok(Tested::Done(_, bytes)) => panic!("{bytes} bytes of nobody"),
            Err(error) => Some(error),
        });
        assert!(matches!(error, HostError::Call { function: "test", .. }), "{error}");
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
