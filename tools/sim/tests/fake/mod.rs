//! A fake simulation in closed form for tests of plans, runner and reports. Each policy has a knee
//! in its request rate, beyond which attainment drops as in a queue.

use laxity_policy::PolicyKind;
use laxity_sim::outcome::{Distribution, Outcome, StageBytes, Waiting};
use laxity_sim::scenario::{Part, Scenario, Source};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

fn worth(scenario: &Scenario) -> f64 {
    let policy = &scenario.policy;
    if policy.no_contention {
        return 1.75;
    }
    let whole = match policy.kind {
        PolicyKind::Fair => 1.0,
        PolicyKind::Sjf => 1.04,
        PolicyKind::Edf => 1.02,
        PolicyKind::EdfLow => 1.17,
        PolicyKind::Karuna => 1.13,
        PolicyKind::KarunaWc => 1.19,
        PolicyKind::TwoClass => 1.22,
        PolicyKind::TwoClass99 => 1.21,
        PolicyKind::TentEdf => 1.08,
        PolicyKind::Tent => 1.09,
        PolicyKind::Mfs => 1.42,
        PolicyKind::Laxity => 1.5,
    };
    let lost = |part| match part {
        Part::Mlu => 0.06,
        Part::Rli => 0.12,
        Part::Red => 0.09,
        Part::Pruning => 0.02,
    };
    whole - policy.without.iter().copied().map(lost).sum::<f64>()
}

fn knee(scenario: &Scenario) -> f64 {
    let model = match scenario.model.name.as_str() {
        "mixtral-8x22b" => 0.9,
        "grok-2" => 0.8,
        "qwen3-coder-next" => 1.15,
        _ => 1.0,
    };
    let source = match scenario.workload.source {
        Source::Conversation => 0.48,
        Source::LongConversation | Source::LongAgent => 0.35,
        _ => 0.85,
    };
    model * source * (scenario.cluster.nic_gbps / 200.0).powf(0.4)
}

fn noise(scenario: &Scenario, policy: bool) -> ChaCha12Rng {
    let kind = if policy { scenario.policy.kind as u64 + 1 } else { 0 };
    let rate = scenario.workload.rate_per_gpu.to_bits();
    ChaCha12Rng::seed_from_u64(scenario.seed ^ kind << 32 ^ rate.rotate_left(17))
}

/// Returns a random value with mean zero and a deviation of about one.
fn normal(random: &mut ChaCha12Rng) -> f64 {
    (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0
}

/// Returns the outcome of a scenario. Fails if the request rate is 99.
pub(crate) fn simulate(scenario: &Scenario) -> Result<Outcome, String> {
    let rate = scenario.workload.rate_per_gpu;
    if rate == 99.0 {
        return Err("99 requests per second are beyond belief".into());
    }
    assert!(rate < 1000.0, "nobody asks so much");
    let load = rate / (knee(scenario) * worth(scenario));
    // Arrivals are the same for all policies, so most of the randomness is shared.
    let luck =
        normal(&mut noise(scenario, false)) * 0.03 + normal(&mut noise(scenario, true)) * 0.008;
    let attainment = 1.0 / (1.0 + ((load + luck - 1.28) * 9.0).exp());
    let mut random = noise(scenario, true);
    let gpus = f64::from(scenario.cluster.prefill_gpus());
    let requests =
        (rate * gpus * scenario.workload.seconds * (1.0 - scenario.workload.warm_up)) as usize;
    let requests = requests.clamp(20, 4000);
    let objective = 900.0;
    let stretch =
        if scenario.policy.no_contention { 0.0 } else { 1.0 + 0.8 * load / worth(scenario) };
    let (mut ttft, mut early, mut late, mut collective) = (vec![], vec![], vec![], vec![]);
    for _ in 0..requests {
        let in_time = random.random::<f64>() < attainment;
        let time = if in_time {
            let least: f64 = 140.0 + 120.0 * load.min(2.0);
            (least * (0.45 * normal(&mut random)).exp()).min(objective - 1.0)
        } else {
            objective * (1.0 + random.random::<f64>().powi(3) * 6.0 * load)
        };
        if in_time {
            early.push(objective - time);
        } else {
            late.push(time - objective);
        }
        ttft.push(time);
        collective.push(1.9 * stretch * (0.35 * stretch * normal(&mut random)).exp());
    }
    let mean = ttft.iter().sum::<f64>() / requests as f64;
    let compute = 110.0;
    Ok(Outcome {
        requests: requests as u64,
        requests_in_all: (requests as f64 * 1.25) as u64,
        attainment: early.len() as f64 / requests as f64,
        ttft_over_slo: Distribution::of(ttft.iter().map(|t| t / objective).collect()),
        ttft_ms: Distribution::of(ttft),
        collective_stretch: Distribution::of(collective.iter().map(|c| c / 1.9).collect()),
        collective_ms: Distribution::of(collective),
        earliness_ms: Distribution::of(early),
        lateness_ms: Distribution::of(late),
        waiting_ms: Waiting {
            queue: (mean - compute) * 0.4,
            kv_reuse: (mean - compute) * 0.15,
            collective: (mean - compute) * 0.25,
            compute,
            p2d: (mean - compute) * 0.2,
        },
        pruned: (requests as f64 * (1.0 - attainment) * 0.1) as u64,
        bytes: StageBytes {
            kv_reuse: 3_000_000_000,
            collective: 9_000_000_000,
            p2d: 5_000_000_000,
        },
        reused: 0.65,
        fetched: 0.4,
        compute_busy: (0.6 * load).min(0.95),
        port_busy_mean: (0.4 * load).min(0.9),
        port_busy_most: (0.7 * load).min(1.0),
        batch_size: 3.5,
        virtual_s: scenario.workload.seconds + 1.0,
        events: requests as u64 * 1000,
        ..Outcome::default()
    })
}
