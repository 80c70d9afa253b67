//! Fuzzes what an inference engine says by C or Python: hints, facts about memory, trace contexts
//! and the settings of its environment.
//!
//! The first byte selects the kind of input. Hints go into the table of a process, as from
//! `laxity.h` and the Python package, and then through records into a daemon's state. Both are
//! compared with a simple model. A refused hint must change nothing. A new daemon that gets the
//! table has to know the deadlines that the engine gave.

mod memory;

use std::collections::BTreeMap;

use laxity_client::hints::{
    BATCHES_MAX, Facts, HintError, HintTable, REQUESTS_MAX, TENANT_MAX, number, number_of,
};
use laxity_client::{Hint, Mode};
use laxity_daemon::config::Config;
use laxity_daemon::driver::hints::Hints;
use laxity_daemon::driver::ports::{self, DriverPort};
use laxity_job::{Environment, Job, PROFILE_ENV, Profile};
use laxity_policy::{BatchId, DomainId, Layer, RequestId, Span, Time};
use laxity_quantity::Nanos;
use laxity_shm::record::Record;

use crate::Input;
use crate::input::put_packet;

const STEPS_MAX: usize = 256;
const PID: u32 = 7;
const DOMAIN: DomainId = DomainId(0);

/// A daemon's state of hints, and the facts that it has to contain.
struct HintedDaemon {
    hints: Hints,
    ports: Vec<DriverPort>,
    /// Deadlines by request, with the request's batch.
    deadlines: BTreeMap<u64, (u64, Time)>,
    computes: Option<(u64, u16)>,
    traces: BTreeMap<u64, ([u64; 2], u64)>,
}

impl HintedDaemon {
    fn new(now: Time) -> Self {
        let mut config = Config::default();
        // Small limits are reached by short inputs.
        config.scheduler.batches_per_domain_max = 6;
        config.scheduler.requests_per_domain_max = 12;
        config.tuning.drop_budget = 2;
        let mut ports = Vec::new();
        ports::configure(&mut ports, now, &config).expect("valid");
        let hints = Hints::new(now, &config).expect("valid");
        let (deadlines, traces) = (BTreeMap::new(), BTreeMap::new());
        Self { hints, ports, deadlines, computes: None, traces }
    }

    fn take(&mut self, now: Time, hint: Hint) {
        let record = Record::Hint(hint);
        assert_eq!(Record::decode(&record.encode()), Ok(record), "a hint fits into a record");
        self.hints.take(now, DOMAIN, PID, &hint, &mut self.ports);
        match hint {
            Hint::RequestJoin { batch, request, deadline_ns, .. } => {
                let known = self.deadlines.get(&request).map(|(_, deadline)| *deadline);
                let own = (deadline_ns != 0).then_some(Time(deadline_ns));
                let deadline = own.or(known).filter(|deadline| *deadline != Time::NEVER);
                self.deadlines.extend(deadline.map(|deadline| (request, (batch, deadline))));
            }
            Hint::RequestEnd { request } => {
                self.deadlines.remove(&request);
                self.traces.remove(&request);
            }
            Hint::RequestTrace { request, trace, span } => {
                self.traces.insert(request, (trace, span));
            }
            Hint::LayerBegin { batch, layer } => self.computes = Some((batch, layer)),
            Hint::BatchEnd { batch } => {
                self.deadlines.retain(|_, (of, _)| *of != batch);
                self.computes = self.computes.filter(|(of, _)| *of != batch);
            }
            Hint::ComputeEnd { batch } => {
                self.computes = self.computes.filter(|(of, _)| *of != batch);
            }
            Hint::BatchBegin { .. } | Hint::BatchQueued { .. } => {}
        }
        self.check(now, hint.ids());
    }

    fn check(&mut self, now: Time, ids: [u64; 2]) {
        for id in ids {
            let expected = self.deadlines.get(&id).map_or(Time::NEVER, |(_, deadline)| *deadline);
            assert_eq!(self.hints.of(DOMAIN).deadline(now, 0, id), expected, "request {id}");
            assert_eq!(self.hints.of(DOMAIN).deadline(now, 5, id), Time(5), "its own comes first");
            let trace = self.traces.get(&id).copied();
            assert_eq!(self.hints.trace_of(DOMAIN, RequestId(id)), trace);
        }
        let computes = self.computes.map(|(batch, layer)| (BatchId(batch), Layer(layer)));
        assert_eq!(self.hints.of(DOMAIN).computed_by(PID), computes);
    }

    fn decide(&mut self, now: Time) {
        // After each run of admission there is a pause, which depends on the time of the run.
        for _ in 0..4 {
            if self.hints.due() > now {
                break;
            }
            self.hints.decide(now, &mut self.ports, || now);
        }
        for port in &mut self.ports {
            assert_eq!((port.link.waiting_flows(), port.link.in_flight_bytes()), (0, 0));
        }
    }
}

/// Returns an id that recurs, or any.
fn id(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        small @ 0..=0xf7 => u64::from(small % 24),
        _ => input.word(),
    }
}

/// Returns an instant: none, near, or any.
fn instant(now: Time, input: &mut Input<'_>) -> u64 {
    match input.byte() {
        0 => 0,
        near @ 1..=0xf7 => now.0 + u64::from(near) * 1_000_000 - 20_000_000,
        _ => input.word(),
    }
}

fn hint(now: Time, kind: u8, input: &mut Input<'_>) -> Hint {
    let (first, second) = (id(input), id(input));
    match kind {
        0 => Hint::BatchBegin { batch: first, layers: input.short(), layer_time_ns: second },
        1 => Hint::RequestJoin {
            batch: first,
            request: second,
            deadline_ns: instant(now, input),
            bytes: input.word(),
        },
        2 => Hint::RequestEnd { request: first },
        3 => Hint::RequestTrace { request: first, trace: [second, input.word()], span: second },
        4 => Hint::BatchQueued { batch: first, ahead: second },
        5 => Hint::LayerBegin { batch: first, layer: u16::from(input.byte()) },
        6 => Hint::ComputeEnd { batch: first },
        _ => Hint::BatchEnd { batch: first },
    }
}

fn check_refusal(error: HintError, request: u64) {
    let text = error.to_string();
    match error {
        HintError::NoId => assert!(text.contains('0')),
        HintError::DeadlinePassed { request: of, late_ns } => {
            assert!(of == request && text.contains(&late_ns.to_string()));
        }
        HintError::RequestEnded { request: id } | HintError::NoLayers { batch: id } => {
            assert!(text.contains(&id.to_string()));
        }
        HintError::UnknownLayer { batch, layer, layers } => {
            assert!(layer >= layers && text.contains(&batch.to_string()));
        }
    }
}

/// What a table knows about an id.
fn known(table: &HintTable, id: u64) -> impl PartialEq + use<> {
    (table.sizes(), table.facts(id).cloned(), table.batch_of(id), table.layers(id))
}

fn give(
    table: &mut HintTable,
    daemon: &mut HintedDaemon,
    now: Time,
    ids: [u64; 2],
    how: impl FnOnce(&mut HintTable, &mut dyn FnMut(Hint)) -> Result<(), HintError>,
) {
    let before = ids.map(|id| known(table, id));
    let mut said = Vec::new();
    match how(table, &mut |hint| said.push(hint)) {
        Ok(()) => {
            for hint in said {
                assert!(!hint.ids().contains(&0), "0 is no id");
                daemon.take(now, hint);
            }
        }
        Err(error) => {
            check_refusal(error, ids[0]);
            assert!(said.is_empty(), "{said:?} was said, and refused: {error}");
            assert!(before == ids.map(|id| known(table, id)), "{error}");
        }
    }
    let (requests, batches) = table.sizes();
    assert!(requests <= REQUESTS_MAX && batches <= BATCHES_MAX);
}

/// Gives all that is remembered to a new daemon.
fn restart(table: &HintTable, now: Time) -> HintedDaemon {
    let mut daemon = HintedDaemon::new(now);
    // Another process must accept the same hints, and remember them.
    let mut other = HintTable::new();
    let (mut requests, mut batches) = (Vec::new(), Vec::new());
    table.retell(&mut |hint| {
        daemon.take(now, hint);
        other.tell(hint, &mut |_| {}).unwrap_or_else(|error| panic!("{hint:?}: {error}"));
        match hint {
            Hint::RequestJoin { request, .. } => requests.push(request),
            Hint::BatchBegin { batch, .. } => batches.push(batch),
            _ => {}
        }
    });
    for request in requests {
        let facts = table.facts(request).expect("it has not ended");
        // The batch of another request with this deadline may be the only one that is known.
        let expected = daemon.deadlines.get(&request).map_or(0, |(_, deadline)| deadline.0);
        let never = facts.deadline_ns == Time::NEVER.0;
        assert_eq!(expected, if never { 0 } else { facts.deadline_ns }, "request {request}");
    }
    assert_eq!(table.sizes().1, batches.len());
    assert!(batches.iter().all(|batch| other.layers(*batch) == table.layers(*batch)));
    daemon
}

fn engine(mut input: Input<'_>) {
    let mut now = Time(1 << 40);
    let (mut table, mut daemon) = (HintTable::new(), HintedDaemon::new(now));
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.byte() % 12 {
            kind @ 0..=7 => {
                let hint = hint(now, kind, &mut input);
                let how = |table: &mut HintTable, say: &mut dyn FnMut(Hint)| table.tell(hint, say);
                give(&mut table, &mut daemon, now, hint.ids(), how);
            }
            8 | 9 => {
                let request = id(&mut input);
                let deadline_ns = instant(now, &mut input);
                let tenant = String::from_utf8_lossy(input.packet()).into();
                let (bytes, priority) = (input.word(), i32::from(input.byte()));
                let facts = Facts { deadline_ns, bytes, priority, tenant };
                give(&mut table, &mut daemon, now, [request; 2], |table, say| {
                    table.request_begin(now.0, request, facts, say)
                });
                let kept = table.facts(request).map_or(0, |facts| facts.tenant.len());
                assert!(kept <= TENANT_MAX);
            }
            10 => now = now + Span::from_millis(1 + u64::from(input.byte())),
            _ => daemon = restart(&table, now),
        }
        daemon.decide(now);
    }
    restart(&table, now).decide(now);
}

fn trace_context(header: &str) {
    let Some(hint) = Hint::of_traceparent(3, header) else { return };
    let Hint::RequestTrace { request: 3, trace: [high, low], span } = hint else {
        panic!("{hint:?} is of another request");
    };
    assert!((high, low) != (0, 0) && span != 0, "zero means none");
    let again = format!("00-{high:016x}{low:016x}-{span:016x}-01");
    assert!(header.contains(&again[3..52]), "{header} has other ids than {again}");
    assert_eq!(Hint::of_traceparent(3, &again), Some(hint));
}

fn ids(text: &str) {
    assert!(number(text) != 0 && number(text) == number_of(text.as_bytes()));
}

/// Reads the settings of a process: one `NAME=VALUE` for each line.
fn settings(text: &str) {
    let set = |wanted: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once('='));
        let value = pairs.rfind(|(name, _)| *name == wanted).map(|(_, value)| value);
        // A path would make the result depend on the machine.
        let value = value.filter(|value| wanted != PROFILE_ENV || !value.contains('/'));
        value.map(str::to_owned)
    };
    let job = Job::read(Environment::new(&set));
    for problem in job.problems() {
        assert!(problem.contains("; going on with "), "{problem}");
    }
    let given = |name| set(name).filter(|value| !value.is_empty());
    let mode = given("LAXITY_MODE").map(|name| Mode::from_name(&name).unwrap_or(Mode::Off));
    let of_profile = job.profile.mode.unwrap_or_default();
    assert_eq!(job.mode, mode.unwrap_or_default().min(of_profile), "the lower one");
    if let Some(objective) = given("LAXITY_SLO_TTFT") {
        let wanted = objective.parse::<Nanos>().map_or(0, |nanos| nanos.0);
        assert_eq!(job.objective_ns(), wanted);
    }
    let name = given(PROFILE_ENV).unwrap_or_else(|| "default".into());
    match job.problems().iter().any(|problem| problem.contains("profile")) {
        true => assert_eq!(job.profile, Profile::default()),
        false => assert_eq!(job.profile.name, name),
    }
    let wrong = ["LAXITY_STALL_MS", "LAXITY_ATTACH_MS"]
        .map(|name| given(name).is_some_and(|value| value.trim().parse::<u64>().is_err()));
    assert_eq!(wrong[0], job.stall_timeout.is_none() && given("LAXITY_STALL_MS").is_some());
    assert_eq!(wrong[1], job.attach_timeout.is_none() && given("LAXITY_ATTACH_MS").is_some());
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = input.byte() % 8;
    let mut text = || String::from_utf8_lossy(input.take(usize::MAX));
    match kind {
        0 => trace_context(&text()),
        1 => ids(&text()),
        2 => settings(&text()),
        3 | 4 => memory::run(input),
        _ => engine(input),
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let with = |kind: u8, rest: &[u8]| [&[kind], rest].concat();
    let begin = |request: u8, due: u8| {
        let mut step = vec![8, request, due];
        put_packet(&mut step, b"gold");
        step.extend([1, 0, 0, 0, 0, 0, 0, 0, 2]);
        step
    };
    let batch = |batch: u8, layers: u8| vec![0, batch, 9, layers, 0];
    let join = |batch: u8, request: u8| vec![1, batch, request, 0, 0, 0, 1, 0, 0, 0, 0, 0];
    let life = [
        begin(7, 90),
        begin(8, 40),
        batch(1, 4),
        batch(2, 4),
        join(1, 7),
        join(2, 8),
        vec![3, 7, 5, 1, 2, 3, 4, 5, 6, 7, 8],
        vec![4, 2, 1],
        vec![10, 5],
        vec![5, 1, 0, 0],
        vec![5, 1, 0, 3],
        vec![11],
        vec![6, 1, 0],
        vec![2, 7, 0],
        vec![7, 1, 0],
    ];
    let many: Vec<u8> =
        (1..20).flat_map(|id| [batch(id, 9), begin(id, 80), join(id, id)].concat()).collect();
    let mut seeds = vec![
        with(0, b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        with(0, b" 01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"),
        with(1, "request-7 é".as_bytes()),
        with(2, b"LAXITY_MODE=observe\nLAXITY_SLO_TTFT=500ms\nLAXITY_STALL_MS=7\n"),
        with(2, b"LAXITY_PROFILE=nccl\nLAXITY_ATTACH_MS=20\nLAXITY_MODE=fast\n"),
        with(5, &life.concat()),
        with(5, &many),
    ];
    seeds.extend(memory::seeds().iter().map(|seed| with(3, seed)));
    seeds
}
