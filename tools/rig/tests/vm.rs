//! Real boots of the SoftRoCE lab: two RDMA devices, a router that counts what crosses it, and each
//! way in which a guest can fail to answer.
//!
//! The program has no usual test harness, since the guest runs it as its first process. Without
//! QEMU or the guest's kernel, it skips the tests and says why.

use std::collections::BTreeSet;
use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use laxity_rig::lab;
use laxity_rig::vm::image;
use laxity_rig::vm::{self, Exec, Input, Stream, Vm, VmConfig, VmError, VmJob, VmReport};
use laxity_tests::{Need, skip};
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    if let Some(code) = lab::internal_call() {
        return code;
    }
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            match reason_to_skip() {
                None => test(),
                Some(reason) => skip(Need::Machine, reason),
            }
            Ok(())
        })
    };
    let trials = vec![
        trial("a_pair_crosses_the_router_and_is_counted_by_its_dscp", a_pair_crosses_the_router),
        trial(
            "when_the_time_is_up_the_guest_is_killed_without_a_trace",
            when_the_time_is_up_the_guest_is_killed,
        ),
        trial("a_hang_and_a_panic_are_told_apart", a_hang_and_a_panic_are_told_apart),
    ];
    let mut arguments = Arguments::from_args();
    // A guest takes the whole machine, and one test looks for processes and files that others might
    // leave.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn reason_to_skip() -> Option<String> {
    let config = VmConfig::default();
    let lacks = vm::lacks(&config);
    if !lacks.is_empty() {
        let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
        return Some(lacks.join("; "));
    }
    let prepared = image::prepare(&config.cache, &|text| println!("{text}"));
    prepared.err().map(|error| format!("{error:#}"))
}

fn sh(script: &str) -> VmJob {
    VmJob::Exec(Exec {
        argv: ["sh", "-c", script].map(str::to_owned).into(),
        env: vec![("GREETING".into(), "hello".into())],
        cwd: std::env::current_dir().expect("a folder"),
    })
}

fn run(config: &VmConfig, script: &str) -> (String, Result<VmReport, VmError>) {
    let mut printed = Vec::new();
    let report = vm::run(config, &sh(script), Input::Empty, &mut |stream, bytes| {
        if stream == Stream::Stdout {
            printed.extend_from_slice(bytes);
        }
        Ok(())
    });
    (String::from_utf8_lossy(&printed).into_owned(), report)
}

/// Server on rxe0, client on rxe1, 50 writes of 64 KiB marked with DSCP 46.
const PAIR: &str = "
    pwd; echo $GREETING $LAXITY_LAB
    ibv_devices
    said=$(mktemp)
    ib_write_bw -d $LAXITY_LAB_DEV0 -x $LAXITY_LAB_GID -F -n 50 >$said 2>&1 &
    until grep -qi ':4853 ' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done
    ib_write_bw -d $LAXITY_LAB_DEV1 -x $LAXITY_LAB_GID -F -n 50 --tclass=184 $LAXITY_LAB_ADDR0 || \
    exit 1
    wait
    cat $said >&2
    exit 37";

fn a_pair_crosses_the_router() {
    const BYTES: u64 = 50 * 65536;
    let config = VmConfig { limit: Some(Duration::from_secs(90)), ..VmConfig::default() };
    let (printed, report) = run(&config, PAIR);
    let report = report.unwrap_or_else(|error| panic!("{error}\n{printed}"));
    assert_eq!(report.finished.exit_code, 37, "{printed}");
    let here = std::env::current_dir().expect("a folder");
    let first = format!("{}\nhello 1\n", here.display());
    assert!(printed.starts_with(&first), "{printed}");
    assert!(printed.contains("rxe0") && printed.contains("rxe1"));
    assert!(printed.contains(" 65536 "), "perftest's result: {printed}");
    let towards_server = &report.finished.router.to_host0.offered;
    let marked = towards_server.get(&46).copied().unwrap_or_default();
    assert!(
        (BYTES..BYTES * 6 / 5).contains(&marked.bytes),
        "{BYTES} bytes and headers crossed the router as DSCP 46: {towards_server:?}"
    );
    let back = &report.finished.router.to_host1.offered;
    assert!(
        back.values().map(|passed| passed.bytes).sum::<u64>() < BYTES / 10,
        "only acknowledgements go back: {back:?}"
    );
}

fn folders() -> BTreeSet<String> {
    let entries = fs::read_dir(std::env::temp_dir()).expect("a folder");
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("laxity-vm-")).collect()
}

fn runs(text: &str) -> bool {
    let entries = fs::read_dir("/proc").expect("/proc");
    entries
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .any(|line| String::from_utf8_lossy(&line).contains(text))
}

fn when_the_time_is_up_the_guest_is_killed() {
    let before = folders();
    let config = VmConfig { limit: Some(Duration::from_secs(2)), ..VmConfig::default() };
    let guest = Vm::boot(&config, &sh("sleep 600")).expect("boots");
    let made: Vec<String> = folders().difference(&before).cloned().collect();
    assert!(made.iter().any(|folder| runs(folder)), "{made:?}");
    let began = Instant::now();
    let error = guest.finish(Input::Empty, &mut |_, _| Ok(())).expect_err("the time is up");
    assert!(matches!(error, VmError::TimedOut { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
    for folder in made {
        assert!(!folders().contains(&folder), "{folder} is left");
        assert!(!runs(&folder), "a process of {folder} is left");
    }
}

fn a_hang_and_a_panic_are_told_apart() {
    let config = VmConfig { silence_limit: Duration::from_secs(5), ..VmConfig::default() };
    // The parent is the lab's process, whose heartbeat ends with it.
    let (_, hung) = run(&config, "kill -STOP $PPID; sleep 600");
    assert!(matches!(hung, Err(VmError::Hung { .. })), "{hung:?}");
    let (_, panicked) = run(&config, "echo c >/proc/sysrq-trigger; sleep 600");
    match panicked {
        Err(VmError::Panicked { console }) => assert!(console.contains("sysrq"), "{console}"),
        other => panic!("{other:?}"),
    }
}
