//! Hints of a process whose daemon is replaced. There is one test, since hints belong to the
//! process.

mod daemon;

use std::sync::atomic::Ordering;
use std::time::Duration;

use daemon::{TestDaemon, eventually};
use laxity_client::hints::{self, Asked, Facts};
use laxity_client::scope::Scope;
use laxity_client::{Direction, Hint, Stage};
use laxity_shm::layout::Geometry;
use laxity_shm::record::Record;

fn heard(daemon: &TestDaemon) -> Vec<Record> {
    let heard = daemon.knobs.heard.lock().expect("heard");
    let is_hint = |record: &&Record| {
        !matches!(record, Record::Cancelled { .. } | Record::LaneReset | Record::Peer { .. })
    };
    heard.iter().filter(is_hint).copied().collect()
}

#[test]
fn a_new_daemon_is_told_what_is_under_way_and_transfers_wait_for_it() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let socket = dir.path().join("laxityd.sock");
    // SAFETY: this is the only test of the program, and no other thread runs yet.
    unsafe {
        std::env::set_var("LAXITY_SOCKET", &socket);
        std::env::set_var("LAXITY_ATTACH_MS", "20000");
        std::env::set_var("LAXITY_STALL_MS", "20000");
    }
    let first = TestDaemon::at(&socket, Geometry::default());
    let due = hints::now() + 60_000_000_000;
    let facts = Facts { deadline_ns: due, bytes: 77, ..Facts::default() };
    let joins = |request| Hint::RequestJoin { batch: 1, request, deadline_ns: 0, bytes: 0 };
    hints::request_begin(4, facts).expect("new");
    hints::request_begin(5, Facts::default()).expect("new");
    let trace = Hint::RequestTrace { request: 4, trace: [1, 2], span: 3 };
    for hint in [
        Hint::BatchBegin { batch: 1, layers: 32, layer_time_ns: 1000 },
        joins(4),
        trace,
        joins(5),
        Hint::RequestEnd { request: 5 },
        Hint::LayerBegin { batch: 1, layer: 7 },
    ] {
        hints::tell(hint).expect("it makes sense");
    }
    let begin = Record::Hint(Hint::BatchBegin { batch: 1, layers: 32, layer_time_ns: 1000 });
    let join =
        Record::Hint(Hint::RequestJoin { batch: 1, request: 4, deadline_ns: due, bytes: 77 });
    eventually("all hints arrive", || heard(&first).len() == 6);
    assert_eq!(heard(&first)[..3], [begin, join, Record::Hint(trace)]);

    // While flows are held, a wait times out, and can be repeated.
    first.set(&first.knobs.hold, true);
    let asked = Asked {
        bytes: 1000,
        said: Scope { request: 4, ..Scope::default() },
        otherwise: Some(Stage::P2d),
        direction: Direction::Egress,
        ..Asked::default()
    };
    let transfer = hints::submit(&asked);
    assert_eq!(transfer.wait(Some(Duration::from_millis(30))), None);
    first.set(&first.knobs.hold, false);
    let permit = transfer.wait(None).expect("without a limit there is one");
    assert_eq!((permit.bytes, permit.bypassed), (1000, false));
    assert_eq!(transfer.complete(1000), Ok(()));
    assert!(transfer.complete(1).is_err());
    assert!(!transfer.cancel(), "nothing of it is left");

    let given_up = hints::submit(&asked);
    assert_eq!(given_up.wait(None).map(|permit| permit.bytes), Some(1000));
    assert!(given_up.cancel() && !given_up.cancel());
    assert_eq!((given_up.permitted(), given_up.is_done()), (1000, true));
    assert_eq!(given_up.complete(1000), Ok(()), "too late to matter");
    assert_eq!(given_up.wait(None).map(|permit| (permit.bytes, permit.last)), Some((0, true)));

    first.kill();
    let second = TestDaemon::at(&socket, Geometry::default());
    eventually("the new daemon is found", || {
        std::thread::sleep(Duration::from_millis(5));
        let queued = Hint::BatchQueued { batch: 2, ahead: 1 };
        hints::tell(queued).expect("both have numbers");
        heard(&second).len() >= 4
    });
    let again = heard(&second);
    let layer = Record::Hint(Hint::LayerBegin { batch: 1, layer: 7 });
    assert_eq!(again[..4], [begin, join, Record::Hint(trace), layer], "{again:?}");
    assert_eq!(second.knobs.garbage.load(Ordering::SeqCst), 0);
    assert!(hints::client().stats().reattaches >= 1);
}
