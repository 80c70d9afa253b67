//! Tests of which hints are taken, refused and sent again.

use super::*;

fn due(deadline_ns: u64) -> Facts {
    Facts { deadline_ns, ..Facts::default() }
}

fn begin(batch: u64, layers: u16, layer_time_ns: u64) -> Hint {
    Hint::BatchBegin { batch, layers, layer_time_ns }
}

fn layer(batch: u64, layer: u16) -> Hint {
    Hint::LayerBegin { batch, layer }
}

fn said(how: impl FnOnce(&mut dyn FnMut(Hint))) -> Vec<Hint> {
    let mut all = Vec::new();
    how(&mut |hint| all.push(hint));
    all
}

#[test]
fn a_request_ends_once() {
    let mut table = HintTable::new();
    let mut none = |hint| assert_eq!(hint, Hint::RequestEnd { request: 7 });
    table.request_begin(1, 7, due(100), &mut none).expect("new");
    assert_eq!(table.facts(7), Some(&due(100)));
    table.tell(Hint::RequestEnd { request: 7 }, &mut none).expect("it has begun");
    let twice = table.tell(Hint::RequestEnd { request: 7 }, &mut |_| panic!("nothing is said"));
    assert_eq!(twice, Err(HintError::RequestEnded { request: 7 }));
    assert_eq!(table.facts(7), None);
    let joins = table.tell(join(1, 7, &Facts::default()), &mut |_| panic!("nothing is said"));
    assert_eq!(joins, Err(HintError::RequestEnded { request: 7 }));
    table.request_begin(1, 7, due(9), &mut none).expect("its id may be used again");
    assert_eq!(table.counts.requests_begun_twice, 0);
}

#[test]
fn a_request_that_nobody_began_may_end_but_not_twice() {
    let mut table = HintTable::new();
    let hints = said(|say| {
        table.tell(Hint::RequestEnd { request: 3 }, say).expect("another process's");
    });
    assert_eq!(hints, [Hint::RequestEnd { request: 3 }]);
    assert_eq!(table.counts.requests_unknown, 1);
    assert!(table.tell(Hint::RequestEnd { request: 3 }, &mut |_| {}).is_err());
}

#[test]
fn a_deadline_that_has_passed_is_refused_and_says_by_how_much() {
    let mut table = HintTable::new();
    let passed = table.request_begin(50, 7, due(20), &mut |_| {});
    assert_eq!(passed, Err(HintError::DeadlinePassed { request: 7, late_ns: 30 }));
    assert_eq!((table.facts(7), table.counts.deadlines_passed), (None, 1));
}

#[test]
fn a_layer_is_checked_against_its_batch_and_against_no_other() {
    let mut table = HintTable::new();
    let mut ignore = |_| {};
    table.tell(begin(1, 32, 5), &mut ignore).expect("new");
    table.tell(layer(1, 31), &mut ignore).expect("the last");
    assert_eq!(
        table.tell(layer(1, 32), &mut ignore),
        Err(HintError::UnknownLayer { batch: 1, layer: 32, layers: 32 })
    );
    let other = said(|say| table.tell(layer(2, 99), say).expect("another process's"));
    assert_eq!(other, [layer(2, 99)]);
    table.tell(layer(1, 4), &mut ignore).expect("it is there");
    assert_eq!((table.counts.batches_unknown, table.counts.layers_backwards), (1, 1));
    assert_eq!(table.tell(begin(3, 0, 0), &mut ignore), Err(HintError::NoLayers { batch: 3 }));
    assert_eq!(table.tell(layer(0, 0), &mut ignore), Err(HintError::NoId), "0 is no id");
}

#[test]
fn an_engine_that_ends_nothing_has_its_oldest_ended() {
    let mut table = HintTable::with(3, 2);
    let mut all = Vec::new();
    for request in 1..=5 {
        table.request_begin(0, request, Facts::default(), &mut |hint| all.push(hint)).expect("new");
    }
    let ended = [1, 2].map(|request| Hint::RequestEnd { request });
    assert_eq!((&all[..], table.counts.requests_evicted), (&ended[..], 2));
    let hints = said(|say| {
        for batch in 1..=3 {
            table.tell(begin(batch, 1, 0), say).expect("new");
        }
    });
    assert!(hints.contains(&Hint::BatchEnd { batch: 1 }));
    assert_eq!(table.sizes(), (3, 2));
}

#[test]
fn a_new_daemon_is_told_what_the_old_one_knew() {
    let mut table = HintTable::new();
    let mut ignore = |_| {};
    for request in 1..=3 {
        table.request_begin(0, request, due(100 + request), &mut ignore).expect("new");
    }
    table.tell(begin(8, 4, 6), &mut ignore).expect("new");
    table.tell(begin(9, 4, 6), &mut ignore).expect("new");
    table.tell(join(8, 1, &Facts::default()), &mut ignore).expect("both are there");
    table.tell(join(8, 2, &Facts::default()), &mut ignore).expect("both are there");
    table.tell(Hint::BatchQueued { batch: 9, ahead: 8 }, &mut ignore).expect("both");
    table.tell(layer(8, 2), &mut ignore).expect("it has that");
    table.tell(Hint::RequestEnd { request: 2 }, &mut ignore).expect("it is there");
    assert_eq!(
        said(|say| table.retell(say)),
        [
            begin(8, 4, 6),
            begin(9, 4, 6),
            Hint::RequestJoin { batch: 8, request: 1, deadline_ns: 101, bytes: 0 },
            layer(8, 2),
            Hint::BatchQueued { batch: 9, ahead: 8 },
        ]
    );
}

#[test]
fn a_tenant_with_a_long_name_is_cut_between_letters() {
    let mut table = HintTable::new();
    let facts = Facts { tenant: "ü".repeat(50).into(), ..Facts::default() };
    table.request_begin(0, 1, facts, &mut |_| {}).expect("new");
    let kept = table.facts(1).expect("it is there").tenant.clone();
    assert_eq!(&*kept, "ü".repeat(32));
}
