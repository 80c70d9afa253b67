//! A unit of two ranks and one decode host, played without a network: every flow that a rank
//! wants to send arrives after a fixed time.

use std::collections::BTreeMap;

use super::*;

const HOP_NS: u64 = 1_000_000;

#[derive(Debug)]
enum Due {
    Compute(usize),
    Flow(NewFlow, usize),
    Post(usize, Message),
}

struct Play {
    ranks: Vec<Rank>,
    setting: Rc<Setting>,
    due: BTreeMap<(u64, u64), Due>,
    count: u64,
    flows: Vec<(u64, usize, NewFlow)>,
    hints: Vec<(usize, Progress)>,
    /// What was read, and from where.
    reads: Vec<(usize, NewFlow)>,
}

fn request(id: u64, new_tokens: u32, reused: u32, holder: usize) -> PlannedRequest {
    PlannedRequest {
        id,
        arrival_ns: 0,
        new_tokens,
        reused,
        unit: 0,
        holder,
        decode: 0,
        ideal_ns: 1_000_000_000,
        slo_ns: 3_000_000_000,
    }
}

impl Play {
    fn new(plan: Vec<PlannedRequest>) -> Self {
        Self::with(plan, false)
    }

    fn with(plan: Vec<PlannedRequest>, reads: bool) -> Self {
        Self::of(
            plan,
            LabConfig {
                reads,
                ..LabConfig::default()
            },
        )
    }

    fn of(plan: Vec<PlannedRequest>, config: LabConfig) -> Self {
        let config = LabConfig {
            units: 2,
            ranks: 2,
            decodes: 1,
            ..config
        };
        let scaling = config.scaling();
        let setting = Rc::new(Setting {
            config,
            scaling,
            plan,
            begin_ns: 0,
        });
        let ranks = (0..4)
            .map(|host| Rank::new(Rc::clone(&setting), host / 2, host % 2))
            .collect();
        Self {
            ranks,
            setting,
            due: BTreeMap::new(),
            count: 0,
            flows: vec![],
            hints: vec![],
            reads: vec![],
        }
    }

    fn at(&mut self, ns: u64, due: Due) {
        self.count += 1;
        self.due.insert((ns, self.count), due);
    }

    fn collect(&mut self, now: u64) {
        for host in 0..self.ranks.len() {
            for effect in self.ranks[host].take_effects() {
                match effect {
                    Effect::Send(flow) => {
                        self.flows.push((now, host, flow));
                        self.at(now + HOP_NS, Due::Flow(flow, host));
                    }
                    Effect::Read { from, flow } => {
                        self.reads.push((from, flow));
                        self.at(now + HOP_NS, Due::Flow(flow, from));
                    }
                    Effect::Post(to, message) => self.at(now + 1, Due::Post(to, message)),
                    Effect::Hint(hint) => self.hints.push((host, hint)),
                    Effect::ComputeUntil(ns) => self.at(ns, Due::Compute(host)),
                }
            }
        }
    }

    fn run(&mut self) -> u64 {
        let mut now = 0;
        self.collect(now);
        while let Some(((ns, _), due)) = self.due.pop_first() {
            now = ns;
            match due {
                Due::Compute(host) => self.ranks[host].computed(now),
                Due::Post(to, message) => self.ranks[to].message(now, &message),
                Due::Flow(flow, from) => {
                    let head = Head {
                        flow: 0,
                        offset: 0,
                        total: flow.bytes,
                        len: 0,
                        kind: flow.kind,
                        layer: flow.layer,
                        batch: flow.batch,
                        request: flow.request,
                        from: from as u16,
                    };
                    if flow.to < self.ranks.len() {
                        self.ranks[flow.to].received(now, &head);
                    }
                }
            }
            self.collect(now);
        }
        now
    }

    fn count(&self, kind: Kind) -> usize {
        self.flows
            .iter()
            .filter(|(_, _, flow)| flow.kind == kind)
            .count()
    }
}

#[test]
fn every_layer_exchanges_twice_and_hands_over_its_kv() {
    let mut play = Play::new(vec![request(1, 1000, 0, 0)]);
    play.ranks[0].request_arrived(0, 1);
    play.run();
    let layers = usize::from(play.setting.scaling.layers);
    assert_eq!(play.count(Kind::Dispatch), 2 * layers);
    assert_eq!(play.count(Kind::Combine), 2 * layers);
    assert_eq!(play.count(Kind::P2d), 2 * layers);
    assert_eq!(play.count(Kind::KvReuse), 0);
    let (collectives, records) = play.ranks[1].take_records();
    assert_eq!(collectives.len(), 2 * layers);
    assert!(
        collectives
            .iter()
            .all(|&ns| (HOP_NS - 1..=HOP_NS + 1).contains(&ns))
    );
    assert_eq!(records[0].requests, [1]);
    let compute = play.setting.scaling.compute_ns(1000);
    let expected = layers as u64 * (compute + 2 * HOP_NS);
    let took = records[0].computed_ns - records[0].begun_ns;
    assert!(
        took.abs_diff(expected) < 1000,
        "{took} instead of {expected}"
    );
}

#[test]
fn where_blocks_are_read_the_reader_submits_them_and_the_holder_hears_of_nothing() {
    let mut play = Play::with(vec![request(1, 100, 500, 1)], true);
    play.ranks[0].request_arrived(0, 1);
    play.run();
    let layers = play.setting.scaling.layers;
    assert_eq!(play.count(Kind::KvReuse), 0, "nothing is sent unasked");
    let read = |host: usize| {
        let ours = play.reads.iter().filter(move |(_, flow)| flow.to == host);
        ours.map(|&(from, flow)| (from, flow.layer))
            .collect::<Vec<_>>()
    };
    // From the same rank of the other unit, lowest layer first.
    assert_eq!(
        read(0),
        (0..layers).map(|layer| (2, layer)).collect::<Vec<_>>()
    );
    assert_eq!(
        read(1),
        (0..layers).map(|layer| (3, layer)).collect::<Vec<_>>()
    );
    assert!(play.hints.iter().all(|&(host, _)| host < 2));
    let (_, records) = play.ranks[0].take_records();
    assert!(records[0].kv_stall_ns >= HOP_NS);
}

#[test]
fn reused_kv_is_asked_for_at_once_lowest_layer_first_and_awaited() {
    let mut play = Play::new(vec![request(1, 100, 500, 1)]);
    play.ranks[0].request_arrived(0, 1);
    play.run();
    let layers = play.setting.scaling.layers;
    let fetches: Vec<_> = play
        .flows
        .iter()
        .filter(|(_, host, f)| f.kind == Kind::KvReuse && *host == 2)
        .collect();
    assert_eq!(
        fetches.iter().map(|(_, _, f)| f.layer).collect::<Vec<_>>(),
        Vec::from_iter(0..layers)
    );
    assert!(fetches.iter().all(|(_, _, f)| f.to == 0 && f.request == 1));
    let (_, records) = play.ranks[0].take_records();
    assert!(
        records[0].kv_stall_ns >= HOP_NS,
        "the first layer waited for its KV"
    );
    let holder_saw_layers = play
        .hints
        .iter()
        .filter(|(host, hint)| *host == 2 && matches!(hint, Progress::LayerBegin { .. }))
        .count();
    assert_eq!(
        holder_saw_layers,
        usize::from(layers),
        "progress reaches the holder's daemon"
    );
}

#[test]
fn requests_that_arrive_meanwhile_form_one_batch_within_the_budget() {
    // 2048 tokens is the budget: the second and third fit together, the fourth does not.
    let sizes = [1000, 1000, 1000, 500];
    let plan = sizes
        .iter()
        .zip(1..)
        .map(|(&size, id)| request(id, size, 0, 0))
        .collect();
    let mut play = Play::new(plan);
    for id in 1..=4 {
        play.ranks[0].request_arrived(0, id);
    }
    play.run();
    let (_, records) = play.ranks[0].take_records();
    let batches: Vec<_> = records.iter().map(|r| r.requests.clone()).collect();
    assert_eq!(batches, [vec![1], vec![2, 3], vec![4]]);
    assert!(
        records
            .windows(2)
            .all(|w| w[1].begun_ns >= w[0].computed_ns),
        "one at a time"
    );
    let queued = play
        .hints
        .iter()
        .any(|(_, hint)| matches!(hint, Progress::BatchQueued { .. }));
    assert!(queued, "the scheduler hears which batch waits behind which");
}

#[test]
fn a_batch_is_forgotten_when_its_requests_have_their_first_token() {
    let mut play = Play::new(vec![request(1, 100, 50, 1), request(2, 100, 0, 0)]);
    play.ranks[0].request_arrived(0, 1);
    play.ranks[0].request_arrived(0, 2);
    let now = play.run();
    for id in [1, 2] {
        for rank in 0..2 {
            play.ranks[rank].message(now, &Message::Finished { request: id });
        }
    }
    play.collect(now);
    play.run();
    assert!(play.ranks[0].batches.is_empty() && play.ranks[1].batches.is_empty());
    let ends = |host: usize| {
        let end = |hint: &Progress| matches!(hint, Progress::BatchEnd { .. });
        play.hints
            .iter()
            .filter(|(at, hint)| *at == host && end(hint))
            .count()
    };
    assert_eq!(
        (ends(0), ends(1), ends(2)),
        (2, 2, 1),
        "at the holder only what it served"
    );
}

#[test]
fn what_is_announced_for_a_request_is_what_is_sent_in_its_name() {
    let mut play = Play::new(vec![request(1, 700, 300, 1), request(2, 100, 50, 1)]);
    play.ranks[0].request_arrived(0, 1);
    play.ranks[0].request_arrived(0, 2);
    play.run();
    let sum = |flows: &mut dyn Iterator<Item = u64>| flows.sum::<u64>();
    for host in 0..4 {
        for id in [1, 2] {
            let announced = sum(&mut play.hints.iter().filter_map(|(at, hint)| match hint {
                Progress::RequestJoin { request, bytes, .. } if *at == host && *request == id => {
                    Some(*bytes)
                }
                _ => None,
            }));
            let sent = sum(&mut play
                .flows
                .iter()
                .filter(|(_, at, flow)| *at == host && flow.request == id)
                .map(|(_, _, flow)| flow.bytes));
            assert_eq!(announced, sent, "request {id} at host {host}");
        }
    }
    assert!(
        play.flows
            .iter()
            .any(|(_, at, flow)| *at >= 2 && flow.request == 1),
        "none was served"
    );
}

#[test]
fn a_holder_knows_the_batch_ahead_of_the_one_that_it_serves() {
    // The second request fetches from another unit while the first, which fetches nothing, runs.
    let mut play = Play::new(vec![request(1, 2000, 0, 0), request(2, 500, 300, 1)]);
    play.ranks[0].request_arrived(0, 1);
    play.ranks[0].request_arrived(0, 2);
    play.run();
    let holder = play
        .hints
        .iter()
        .find_map(|(at, hint)| {
            matches!(hint, Progress::BatchQueued { .. })
                .then_some(*at)
                .filter(|at| *at >= 2)
        })
        .expect("a holder hears what the batch waits for");
    let at_holder: Vec<_> = play
        .hints
        .iter()
        .filter(|(at, _)| *at == holder)
        .map(|(_, hint)| *hint)
        .collect();
    let ahead = at_holder.iter().find_map(|hint| match hint {
        Progress::BatchQueued { ahead, .. } => Some(*ahead),
        _ => None,
    });
    let ahead = ahead.expect("queued");
    let position = |wanted: &dyn Fn(&Progress) -> bool| at_holder.iter().position(wanted);
    let begun = position(&|h| matches!(h, Progress::BatchBegin { batch, .. } if *batch == ahead));
    let queued = position(&|h| matches!(h, Progress::BatchQueued { .. }));
    assert!(begun.is_some() && begun < queued, "{at_holder:?}");
    let layers = at_holder
        .iter()
        .filter(|h| matches!(h, Progress::LayerBegin { batch, .. } if *batch == ahead))
        .count();
    assert!(layers > 1, "its progress is followed: {at_holder:?}");
}

#[test]
fn with_a_plugin_the_layer_that_began_last_is_always_one_of_the_hosts_own_batch() {
    for (collectives, own_last) in [
        (Collectives::NcclPlugin, true),
        (Collectives::Sockets, false),
    ] {
        let config = LabConfig {
            collectives,
            ..LabConfig::default()
        };
        let mut play = Play::of(vec![request(1, 500, 0, 0)], config);
        play.ranks[0].request_arrived(0, 1);
        play.ranks[0].take_effects();
        let elsewhere = Progress::LayerBegin { batch: 7, layer: 3 };
        play.ranks[0].message(5, &Message::Progress(elsewhere));
        let hints: Vec<Progress> = play.ranks[0]
            .take_effects()
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Hint(hint) => Some(hint),
                _ => None,
            })
            .collect();
        assert_eq!(hints[0], elsewhere);
        let own = |hint: &Progress| matches!(hint, Progress::LayerBegin { batch, layer: 0 } if *batch != 7);
        assert_eq!(hints[1..].iter().any(own), own_last, "{hints:?}");
    }
}

#[test]
fn an_unknown_request_or_batch_is_ignored() {
    let mut play = Play::new(vec![request(1, 100, 0, 0)]);
    play.ranks[0].message(
        0,
        &Message::Join {
            batch: 1,
            request: 99,
            behind: 0,
        },
    );
    play.ranks[0].message(0, &Message::Finished { request: 99 });
    play.ranks[0].request_arrived(0, 99);
    assert!(play.ranks[0].take_effects().is_empty());
}
