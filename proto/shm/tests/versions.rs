//! Two releases at one socket. The packets are recorded from the last build that demanded equal
//! versions. A change of the wire that such a build would not understand fails here.

use laxity_shm::layout::{Geometry, Mode, VERSION, VERSION_OLDEST};
use laxity_shm::record::{Flow, Hint, Record, Stage};
use laxity_shm::registration::{Hello, Reason, RegistrationError, Release, Reply, Versions};

/// Greeting of `LAXITY_NAME=decode-0`, a program that called `lax_attach`.
const OLD_HELLO: [u8; 48] = *b"LXHI\x02\0\0\0\x44\x40\0\0\x02\0\0\0\
    decode-0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Answer of the same build's daemon.
const OLD_WELCOME: [u8; 32] =
    *b"LXRE\x02\0\0\0\x01\0\0\0\0\0\0\0\0\x70\x10\0\0\0\0\0\x40\0\0\x01\x01\0\0\0";
/// Answer of the same build's daemon to version 3.
const OLD_REFUSAL: [u8; 32] =
    *b"LXRE\x02\0\0\0\x02\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

const SHAPE: Geometry = Geometry { lanes: 64, slots: 256, colour: 1 };

#[test]
fn an_old_client_is_understood_and_gets_the_answer_that_it_understands() {
    let hello = Hello::parse(&OLD_HELLO).expect("an old client");
    assert_eq!((hello.name().as_str(), hello.mode()), ("decode-0", Some(Mode::Enforce)));
    assert_eq!(hello.versions(), Versions { oldest: 2, newest: 2 });
    assert!(hello.release < Release::ours(), "it is older");
    let version = hello.versions().common(Versions::OURS).expect("the last release's version");
    let welcome = Reply::welcome(version, SHAPE);
    assert_eq!(bytemuck::bytes_of(&welcome), OLD_WELCOME);
}

#[test]
fn an_old_daemon_reads_the_same_greeting_and_its_answer_is_understood() {
    let hello = Hello { pid: 0x4044, ..Hello::new("decode-0", Mode::Enforce, false) };
    let packet = bytemuck::bytes_of(&hello);
    let name_end = 16 + "decode-0".len() + 1;
    assert_eq!((packet.len(), &packet[..name_end]), (48, &OLD_HELLO[..name_end]));
    assert_eq!(Reply::parse(&OLD_WELCOME).expect("a welcome"), SHAPE);
    let refused = Reply::parse(&OLD_REFUSAL);
    assert!(matches!(
        refused,
        Err(RegistrationError::Rejected { reason: Reason::Version, version: 2 })
    ));
}

#[test]
fn both_sides_use_the_newest_version_that_both_speak() {
    let speaks = |oldest, newest| Versions { oldest, newest };
    assert_eq!(speaks(2, 3).common(speaks(3, 4)), Some(3));
    assert_eq!(speaks(3, 4).common(speaks(2, 3)), Some(3));
    assert_eq!(speaks(2, 2).common(speaks(2, 5)), Some(2));
    assert_eq!(speaks(2, 3).common(speaks(4, 5)), None);
}

#[test]
fn a_later_client_may_say_more_and_is_refused_only_without_a_common_version() {
    let later = |oldest: u32, newest: u32| {
        let hello = Hello::new("later", Mode::Enforce, false);
        let hello = Hello { version: oldest, newest: newest as u8, flags: 0x80, ..hello };
        let mut packet = bytemuck::bytes_of(&hello).to_vec();
        packet.extend([7; 32]);
        Hello::parse(&packet).map(|hello| hello.versions().common(Versions::OURS))
    };
    let next = VERSION + 1;
    assert_eq!(later(VERSION, next).expect("it speaks ours, too"), Some(VERSION));
    assert!(matches!(later(next, next), Err(RegistrationError::Version(_))));
    let old = VERSION_OLDEST - 1;
    let refused = later(old, old);
    assert!(matches!(refused, Err(RegistrationError::Version(version)) if version == old));
    let mut answer = bytemuck::bytes_of(&Reply::welcome(VERSION, SHAPE)).to_vec();
    answer.extend([7; 32]);
    assert_eq!(Reply::parse(&answer).expect("a later daemon"), SHAPE);
}

#[test]
fn records_are_written_as_in_version_two() {
    let flow = Flow {
        stage: Stage::P2d,
        nic: 1,
        peer: 3,
        bytes: 0x1000,
        batch: 7,
        request: 9,
        deadline_ns: 11,
        layer: 5,
        ..Flow::default()
    };
    let written = |opcode: u64| [0x0300_0005_0001_0003, 0x1000, 7, 9, 11, opcode << 16];
    let recorded = [
        (Record::Submit(flow), written(1)),
        (Record::SubmitOnCredit { flow, observed: false }, written(2)),
        (Record::SubmitOnCredit { flow, observed: true }, written(3)),
        (Record::Completed { tag: 1, bytes: 2 }, [0, 2, 1, 0, 0, 4 << 16]),
        (Record::Cancelled { tag: 1, permitted: 2 }, [0, 2, 1, 0, 0, 5 << 16]),
        (Record::LaneReset, [0, 0, 0, 0, 0, 6 << 16]),
        (
            Record::Hint(Hint::BatchBegin { batch: 1, layers: 2, layer_time_ns: 3 }),
            [2 << 32, 3, 1, 0, 0, 16 << 16],
        ),
        (
            Record::Hint(Hint::RequestJoin { batch: 1, request: 2, deadline_ns: 3, bytes: 4 }),
            [0, 4, 1, 2, 3, 17 << 16],
        ),
        (Record::Hint(Hint::RequestEnd { request: 1 }), [0, 0, 0, 1, 0, 18 << 16]),
        (Record::Hint(Hint::BatchQueued { batch: 1, ahead: 2 }), [0, 2, 1, 0, 0, 19 << 16]),
        (Record::Hint(Hint::LayerBegin { batch: 1, layer: 2 }), [2 << 32, 0, 1, 0, 0, 20 << 16]),
        (Record::Hint(Hint::ComputeEnd { batch: 1 }), [0, 0, 1, 0, 0, 21 << 16]),
        (Record::Hint(Hint::BatchEnd { batch: 1 }), [0, 0, 1, 0, 0, 22 << 16]),
        (
            Record::Hint(Hint::RequestTrace { request: 1, trace: [2, 3], span: 4 }),
            [0, 2, 3, 1, 4, 24 << 16],
        ),
        (
            Record::Peer { peer: 1, address: [2; 16] },
            [1 << 32, 0x0202_0202_0202_0202, 0x0202_0202_0202_0202, 0, 0, 23 << 16],
        ),
    ];
    for (record, words) in recorded {
        assert_eq!(record.encode().0, words, "{record:?}");
    }
}

#[test]
fn a_traceparent_is_read_as_the_w3c_says_and_any_other_is_none() {
    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let expected = Hint::RequestTrace {
        request: 7,
        trace: [0x0af7_6519_16cd_43dd, 0x8448_eb21_1c80_319c],
        span: 0xb7ad_6b71_6920_3331,
    };
    assert_eq!(Hint::of_traceparent(7, VALID), Some(expected));
    let later = format!("cc{}-what-else", &VALID[2..]);
    assert_eq!(Hint::of_traceparent(7, &later), Some(expected), "a later version");
    for wrong in [
        String::new(),
        format!("{VALID}-more"),
        format!("ff{}", &VALID[2..]),
        VALID.to_uppercase(),
        VALID.replace('a', "+"),
        VALID.replace('-', "_"),
        VALID[..VALID.len() - 1].to_owned(),
        format!("00-{:032}-b7ad6b7169203331-01", 0),
        format!("00-0af7651916cd43dd8448eb211c80319c-{:016}-01", 0),
        "ä".repeat(55),
    ] {
        assert_eq!(Hint::of_traceparent(7, &wrong), None, "{wrong}");
    }
}

#[test]
fn flows_that_differ_in_layer_bytes_and_ids_alone_share_credit() {
    let flow = Flow { stage: Stage::Collective, nic: 1, layer: 3, bytes: 9, ..Flow::default() };
    assert_eq!(Flow { layer: 4, bytes: 8, batch: 7, request: 6, ..flow }.key(), flow.key());
    for other in [
        Flow { stage: Stage::P2d, ..flow },
        Flow { nic: 2, ..flow },
        Flow { whole: true, ..flow },
        Flow { peer: 5, ..flow },
    ] {
        assert_ne!(other.key(), flow.key(), "{other:?}");
    }
}
