//! Measures the CPU time of the phases of a run without a network. It applies the load of `laxity
//! cluster load` to [`Cluster`] in virtual time. It serves `perf` and callgrind, and comparisons on
//! a busy machine:
//!
//! ```text
//! cargo run --release -p laxity-trial --example run_cost -- \
//!     [HOSTS] [BATCHES] [EVENTS_PER_S] [RUNS]
//! ```

use laxity_coordinator::cluster::{Cluster, ClusterPolicy, Settings, Taken};
use laxity_policy::{Span, Time};
use laxity_trial::load;
use laxity_wire::v1::{Event, Report, SnapshotPiece, event::Event as Kind};
use nix::time::{ClockId, clock_gettime};

fn cpu_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_or(0, |at| at.tv_sec() as u64 * 1_000_000_000 + at.tv_nsec() as u64)
}

struct Phase {
    name: &'static str,
    spent_ns: Vec<u64>,
}

impl Phase {
    const fn new(name: &'static str) -> Self {
        Self { name, spent_ns: Vec::new() }
    }

    fn time<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let begun = cpu_ns();
        let result = act();
        self.spent_ns.push(cpu_ns() - begun);
        result
    }

    fn print(&mut self) {
        self.spent_ns.sort_unstable();
        let at = |permille: usize| self.spent_ns[(self.spent_ns.len() - 1) * permille / 1000];
        let mean = self.spent_ns.iter().sum::<u64>() as f64 / self.spent_ns.len() as f64;
        println!(
            "{:8} x{:<7} mean {:9.1} us  p50 {:9.1}  p99 {:9.1}  max {:9.1}",
            self.name,
            self.spent_ns.len(),
            mean / 1e3,
            at(500) as f64 / 1e3,
            at(990) as f64 / 1e3,
            at(1000) as f64 / 1e3,
        );
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().ok());
    let mut number = |default: u64| arguments.next().flatten().unwrap_or(default);
    let (hosts, batches, rate, runs) = (number(1024), number(10_000), number(2000), number(500));
    let settings = Settings {
        heartbeat: Span::from_millis(1000),
        host_grace: Span::from_millis(2000),
        order_age_max: Span::from_millis(5000),
        ..Settings::default()
    };
    let policy = ClusterPolicy::default();
    let mut cluster = Cluster::new(Time::ZERO, settings, policy, 1).expect("valid");
    let mut now = Time(1);
    let streams: Vec<_> = (0..hosts as usize)
        .map(|nth| cluster.attend(now, &load::hello(nth)).expect("let in"))
        .collect();
    let mut sequences = vec![0; streams.len()];
    let lifetime_ns = 2_000_000_000 * batches / rate;
    let mut tell =
        |cluster: &mut Cluster, now, nth: usize, snapshot: SnapshotPiece, events: Vec<Kind>| {
            sequences[nth] += 1;
            let report = Report {
                sequence: sequences[nth],
                snapshot: snapshot as i32,
                events: events.into_iter().map(|event| Event { event: Some(event) }).collect(),
            };
            let (id, stream) = streams[nth];
            cluster.report(now, id, stream, report).expect("taken");
        };
    let of = |batch: u64| [(batch % hosts) as usize, ((batch + 1) % hosts) as usize];
    for nth in 0..hosts as usize {
        let events = (1..=batches)
            .filter(|&batch| of(batch).contains(&nth))
            .map(|batch| load::arrival(batch, lifetime_ns, 1000 * batch / batches));
        tell(&mut cluster, now, nth, SnapshotPiece::End, events.collect());
    }
    let (mut report, mut run, mut take) =
        (Phase::new("report"), Phase::new("run"), Phase::new("take"));
    let (mut oldest, mut newest, mut made, mut told, mut changed) = (1, batches, 0_u64, 0_usize, 0);
    let period = Span::from_millis(10);
    for turn in 0..runs {
        now = now + period;
        if turn > 0 {
            for _ in 0..rate / 100 {
                made += 1;
                let (batch, gone) = if made.is_multiple_of(2) {
                    oldest += 1;
                    (oldest - 1, true)
                } else {
                    newest += 1;
                    (newest, false)
                };
                for nth in of(batch) {
                    let events = if gone {
                        load::departure(batch)
                    } else {
                        vec![load::arrival(batch, lifetime_ns, 1000)]
                    };
                    report.time(|| {
                        tell(&mut cluster, now, nth, SnapshotPiece::Unspecified, events);
                    });
                }
            }
        }
        now = now + period;
        if let Some(ran) = run.time(|| cluster.poll(now)) {
            changed += ran.ranks_changed;
        }
        while let Some((id, stream)) = cluster.poll_ready() {
            if let Taken::Frames(frames) = take.time(|| cluster.take(now, id, stream)) {
                told += frames.len();
            }
        }
        if turn == 0 {
            run.spent_ns.clear();
            take.spent_ns.clear();
            (told, changed) = (0, 0);
        }
    }
    for phase in [&mut report, &mut run, &mut take] {
        phase.print();
    }
    let per_run = |count: usize| count as f64 / runs as f64;
    println!("frames a run {:.1}, ranks changed a run {:.1}", per_run(told), per_run(changed));
    let (sum, _) = cluster.counters();
    println!("pruned {} refused {}", sum.pruned, sum.refused_events);
}
