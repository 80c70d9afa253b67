//! What the MFS paper says in numbers about the figures that can be simulated.

/// A number that a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    /// Attainment over that of the best of these policies, the most over the request rates.
    Attainment(&'static [&'static str]),
    /// Request rate at 90 % attainment over that of this policy.
    Rate(&'static str),
    /// One less the mean collective completion time over that under this policy.
    CollectiveCut(&'static str),
    /// One less the mean earliness of requests in time over the mean of these policies'.
    EarlinessCut(&'static [&'static str]),
    /// Mean TTFT over that without a network.
    Slowdown,
    /// Collective completion time over that with the ports to itself.
    Stretch,
}

/// A claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// The plan of the figure.
    pub(super) plan: &'static str,
    /// For which panel; empty for all.
    pub(super) panel: &'static str,
    pub(super) says: &'static str,
    pub(super) quantity: Quantity,
    /// From and to.
    pub(super) paper: Option<(f64, f64)>,
}

/// The paper's baselines (§6.3).
const BASELINES: &[&str] = &["fair", "sjf", "edf", "karuna"];

const RATE: &str = "request rate at 90 % over karuna's";
const ATTAINMENT: &str = "attainment over the best baseline's, at most";
const CUT: &str = "shorter collectives than under fair sharing";
const EARLY: &str = "less earliness than under fair, sjf, edf";

const fn claim(
    plan: &'static str,
    panel: &'static str,
    says: &'static str,
    quantity: Quantity,
    low: f64,
    high: f64,
) -> Claim {
    Claim {
        plan,
        panel,
        says,
        quantity,
        paper: Some((low, high)),
    }
}

const BEST: Quantity = Quantity::Attainment(BASELINES);
const KARUNA: Quantity = Quantity::Rate("karuna");
const EARLINESS: Quantity = Quantity::EarlinessCut(&["fair", "sjf", "edf"]);
const COLLECTIVES: Quantity = Quantity::CollectiveCut("fair");

/// In the order of the figures.
pub(super) const CLAIMS: &[Claim] = &[
    // §2.2: “TTFT is prolonged by nearly 50 %”, all-to-all “nearly doubles (1.8×)”.
    claim(
        "mfs-figure-5",
        "",
        "TTFT under fair sharing over that without contention",
        Quantity::Slowdown,
        1.5,
        1.5,
    ),
    claim(
        "mfs-figure-5",
        "",
        "all-to-all time under fair sharing over that without contention",
        Quantity::Stretch,
        1.8,
        1.8,
    ),
    // §6.3 on figure 10.
    claim("mfs-figure-10", "Mixtral 8x22B", ATTAINMENT, BEST, 1.4, 1.8),
    claim("mfs-figure-10", "DBRX", ATTAINMENT, BEST, 2.4, 2.4),
    claim("mfs-figure-10", "Qwen3-Coder", ATTAINMENT, BEST, 1.4, 1.8),
    claim("mfs-figure-10", "Grok-2", ATTAINMENT, BEST, 1.4, 1.8),
    claim("mfs-figure-10", "", RATE, KARUNA, 1.17, 1.46),
    // §6.3 on figure 11.
    claim("mfs-figure-11", "Mixtral 8x22B", ATTAINMENT, BEST, 1.4, 1.7),
    claim("mfs-figure-11", "DBRX", ATTAINMENT, BEST, 2.0, 2.0),
    claim("mfs-figure-11", "Qwen3-Coder", ATTAINMENT, BEST, 2.0, 2.0),
    claim("mfs-figure-11", "Grok-2", ATTAINMENT, BEST, 1.4, 1.7),
    claim("mfs-figure-11", "Mixtral 8x22B", RATE, KARUNA, 1.3, 1.3),
    claim("mfs-figure-11", "DBRX", RATE, KARUNA, 1.4, 1.4),
    claim("mfs-figure-11", "Qwen3-Coder", RATE, KARUNA, 1.3, 1.3),
    claim("mfs-figure-11", "Grok-2", RATE, KARUNA, 1.2, 1.2),
    // §6.3 on figure 12, where Karuna is the baseline that is named.
    claim(
        "mfs-figure-12",
        "long conversation",
        "attainment over karuna's, at most",
        Quantity::Attainment(&["karuna"]),
        1.3,
        1.6,
    ),
    claim(
        "mfs-figure-12",
        "long agent",
        "attainment over karuna's, at most",
        Quantity::Attainment(&["karuna"]),
        1.4,
        1.9,
    ),
    claim("mfs-figure-12", "long agent", RATE, KARUNA, 1.15, 1.15),
    // §6.3 on figure 13.
    claim("mfs-figure-13", "", ATTAINMENT, BEST, 2.2, 2.2),
    claim("mfs-figure-13", "", CUT, COLLECTIVES, 0.52, 0.52),
    claim("mfs-figure-13", "", EARLY, EARLINESS, 0.42, 0.42),
    // §6.3 on figure 14: “a similar trend”.
    Claim {
        plan: "mfs-figure-14",
        panel: "",
        says: CUT,
        quantity: COLLECTIVES,
        paper: None,
    },
    Claim {
        plan: "mfs-figure-14",
        panel: "",
        says: EARLY,
        quantity: EARLINESS,
        paper: None,
    },
];
