//! The capacity of a port that foreign traffic leaves for scheduled traffic.
//!
//! A daemon knows the bytes that it permitted. The NIC counts all bytes that pass the port. The
//! difference is *foreign*: transfers that GPUs start by themselves, storage, other tenants. With
//! `C` the port's counter, `P` the bytes permitted and `Q` those of them that are no longer in
//! flight (both with headers), the own bytes `A` that passed the port obey `Q ≤ A ≤ P`. Each
//! reading attributes as much as it can to ourselves:
//!
//! ```text
//! own = min(ΔC, P − A)      A ← max(A + own, Q − LAG · B)      foreign = ΔC − own
//! ```
//!
//! So bytes in flight, headers, and a counter that is up to [`LAG`] late never look foreign, and an
//! error does not accumulate. Then, with `B` the port's rate in bytes per second:
//!
//! 1. an average with the time constant [`TIME_CONSTANT`] smooths the foreign rate. Foreign bytes
//!    that yield take nothing: the NIC sends them only while nothing of ours waits there. Their
//!    share is a second old, and [`YIELDING_HOLDS`] at most if none come any more;
//! 2. if congestion was signalled (CNP or PFC pause) while own bytes were in flight, the port's
//!    throughput is its capacity. The rest of `B`, at most half, is *lost*. One cut of DCQCN is at
//!    most half, too (Zhu et al., SIGCOMM 2015, §3.1);
//! 3. the largest sum of both within [`HOLD`] counts. So the rate falls at once and rises late: it
//!    changes direction at most twice in [`HOLD`], whatever others send;
//! 4. the rate in force moves only by more than 1/32 of `B`. It leaves `B` above 1/16, and is
//!    exactly `B` again below 1/32;
//! 5. the rate never falls below the assured share of `B`. Foreign traffic that expands into what
//!    others leave, as TCP does, can't take more than the rest.
//!
//! [`RECOVERS_WITHIN`] after the last foreign byte the rate is `B` again. A counter that does not
//! move although own bytes completed says nothing about the port: the rate is then `B`.

use crate::time::{Span, Time};

/// The time between two readings while traffic passes.
pub const READ_EVERY: Span = Span::from_millis(20);
/// The time between two readings while the counters are quiet, see [`Capacity::is_quiet`].
pub const IDLE_EVERY: Span = Span::from_millis(100);
/// The time constant of the average of foreign rates.
pub const TIME_CONSTANT: Span = Span::from_millis(200);
/// How long a peak of foreign traffic counts.
pub const HOLD: Span = Span::from_millis(1_000);
/// Longest time from the last foreign byte until the full rate is in force, if readings come at
/// least every 100 ms: the decay of the average from `B` to `B`/32, and [`HOLD`].
pub const RECOVERS_WITHIN: Span = Span::from_millis(3_000);
/// How long the share of foreign bytes that yield holds while their counter stands still. It is
/// read each second, and drivers may refresh it each second, too.
pub const YIELDING_HOLDS: Span = Span::from_millis(4_000);
/// How late a counter may show own bytes.
pub const LAG: Span = Span::from_millis(100);
/// How long a counter may stand still while own bytes complete.
pub const STALE_AFTER: Span = Span::from_millis(5_000);

/// Number of parts of the rate. Foreign traffic below one part does not lower the rate in force,
/// and a change below one part does not move it.
const STEPS: f64 = 32.0;
/// Payload bytes for each byte of headers: RoCEv2 adds 6.4 % at a path MTU of 1024.
const PAYLOAD_PER_HEADER: u64 = 12;
/// Number of parts of [`HOLD`]. Peaks are forgotten by part.
const PARTS: usize = 4;
const PART: Span = Span(HOLD.0 / PARTS as u64);
/// Shortest time between two readings that count. A reading that comes sooner is skipped, and the
/// next one has its bytes.
const READING_MIN: Span = Span::from_millis(1);
/// Multiple of the rate above which a difference of two counters is a reset, and no traffic. It is
/// large because the configured rate may be too low.
const RATES_LIKELY: f64 = 16.0;
/// Share of a port's rate below which its traffic needs no reading.
const QUIET_SHARE: u64 = 256;
/// Bits at which counters wrap: 32-bit counters of bytes, and of words of 4 bytes.
const WRAPS: [u32; 2] = [32, 34];

/// What is configured for a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRate {
    /// The rate `B`, in bytes per second.
    pub rate: u64,
    /// The assured share of the rate, in thousandths.
    pub assured_permille: u16,
}

/// The counters of a port at one moment. Each counts from an arbitrary start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// When the counters were read.
    pub at: Time,
    /// Bytes that passed the port, with headers. The counter may wrap or start again.
    pub port_bytes: u64,
    /// Bytes that the daemon permitted, with unspent credit.
    pub permitted_bytes: u64,
    /// Permitted bytes that are not completed, with unspent credit.
    pub in_flight_bytes: u64,
    /// Signals of congestion: CNPs and PFC pauses.
    pub signals: u64,
    /// Bytes that passed the port behind all permitted ones, by its strict queues. The counter may
    /// stand still for a second, and then has all of them. 0 if the NIC does not count them.
    pub yielding_bytes: u64,
}

impl Reading {
    /// Returns `Q`, without headers.
    const fn ended_bytes(&self) -> u64 {
        self.permitted_bytes.saturating_sub(self.in_flight_bytes)
    }
}

/// The capacity of a port for scheduled traffic, and the rates that it follows from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// The rate in force, in bytes per second.
    pub rate: u64,
    /// Foreign bytes since the first reading.
    pub foreign_bytes: u64,
    /// The average foreign rate, in bytes per second.
    pub foreign_rate: u64,
    /// The average rate that congestion takes, in bytes per second.
    pub lost_rate: u64,
    /// Signals of congestion since the first reading.
    pub signals: u64,
    /// Whether the counter stands still although own bytes pass the port.
    pub stale: bool,
}

impl Capacity {
    /// Reports whether all of the port's `rate` is in force, nothing is taken from it, and too
    /// little passed since the last reading to need another one.
    #[must_use]
    pub const fn is_quiet(&self, rate: u64, passed_bytes: u64) -> bool {
        let least = rate / QUIET_SHARE;
        let is_full = self.rate == rate && self.foreign_rate < least && self.lost_rate < least;
        is_full && passed_bytes < least / 10
    }
}

/// Returns the window of a port that has `rate` of its `configured` rate and window in force. The
/// window is smaller by as much as the rate. Two chunks always fit, so that one can be sent while
/// the other completes.
#[must_use]
pub fn window_bytes(configured: (u64, u64), chunk_bytes: u64, rate: u64) -> u64 {
    let (most, window) = configured;
    let scaled = u128::from(window) * u128::from(rate) / u128::from(most.max(1));
    (scaled as u64).max(chunk_bytes.saturating_mul(2).min(window))
}

/// The share of foreign bytes that yield to ours, since their counter moved last.
#[derive(Clone, Copy, Debug, Default)]
struct YieldingShare {
    share: f64,
    /// When the counters were these: those that yield, and all foreign ones.
    at: Time,
    yielding_bytes: u64,
    foreign_bytes: u64,
}

impl YieldingShare {
    fn note(&mut self, reading: &Reading, foreign_bytes: u64) {
        let moved = reading.yielding_bytes.saturating_sub(self.yielding_bytes);
        if reading.yielding_bytes == self.yielding_bytes {
            if reading.at.since(self.at) >= YIELDING_HOLDS {
                self.share = 0.0;
            }
            return;
        }
        let foreign = foreign_bytes.saturating_sub(self.foreign_bytes).max(1);
        let share = (moved as f64 / foreign as f64).min(1.0);
        let (at, yielding_bytes) = (reading.at, reading.yielding_bytes);
        *self = Self { share, at, yielding_bytes, foreign_bytes };
    }
}

/// The state of one port.
#[derive(Clone, Debug, Default)]
pub struct Residual {
    last: Option<Reading>,
    /// `A`: own bytes that passed the port, with headers.
    own_bytes: u64,
    /// The bytes that were permitted when the counter moved last.
    permitted_then: u64,
    foreign_rate: f64,
    lost_rate: f64,
    yielding: YieldingShare,
    /// The largest rate that foreign traffic and congestion took in each part of [`HOLD`], the
    /// current part first.
    peaks: [f64; PARTS + 1],
    part_began: Time,
    /// By how much the rate in force is below `B`, in bytes per second.
    lowered: f64,
    capacity: Capacity,
}

/// Returns payload bytes with the most headers that they can have.
const fn with_headers(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / PAYLOAD_PER_HEADER)
}

/// Returns how far a counter moved, at most by `most`, or `None` if it started again.
fn moved(before: u64, now: u64, most: f64) -> Option<u64> {
    let likely = |bytes: &u64| *bytes as f64 <= most;
    if now >= before {
        return Some(now - before).filter(likely);
    }
    let back = before - now;
    WRAPS.into_iter().filter_map(|bits| (1_u64 << bits).checked_sub(back)).find(likely)
}

impl Residual {
    /// Takes a reading and returns the capacity. The first reading is the base of all later
    /// differences.
    pub fn read(&mut self, configured: PortRate, reading: Reading) -> Capacity {
        let Some(last) = self.last else {
            self.restart(reading);
            return self.in_force(configured);
        };
        if reading.at < last.at {
            // The clock went back. The bytes since the last reading belong to no span of time.
            (self.last, self.part_began) = (Some(reading), reading.at);
            return self.in_force(configured);
        }
        let passed = reading.at.since(last.at);
        if reading.port_bytes != last.port_bytes {
            self.permitted_then = reading.permitted_bytes;
        }
        // Bytes that were in flight then may have passed before, and complete later.
        let stands = reading.ended_bytes() > self.permitted_then;
        if stands && passed >= STALE_AFTER {
            self.restart(reading);
            self.capacity.stale = true;
        } else if !stands && passed >= READING_MIN {
            self.advance(configured, last, reading);
        }
        self.in_force(configured)
    }

    /// Begins anew at `reading`, with all capacity.
    fn restart(&mut self, reading: Reading) {
        let Capacity { foreign_bytes, signals, stale, .. } = self.capacity;
        *self = Self {
            last: Some(reading),
            own_bytes: with_headers(reading.ended_bytes()),
            permitted_then: reading.permitted_bytes,
            yielding: YieldingShare {
                share: 0.0,
                at: reading.at,
                yielding_bytes: reading.yielding_bytes,
                foreign_bytes,
            },
            part_began: reading.at,
            capacity: Capacity { foreign_bytes, signals, stale, ..Capacity::default() },
            ..Self::default()
        };
    }

    /// Updates the averages and the peaks from the last reading to this one.
    fn advance(&mut self, configured: PortRate, last: Reading, reading: Reading) {
        self.last = Some(reading);
        let rate = configured.rate as f64;
        let passed = reading.at.since(last.at).0 as f64;
        let seconds = passed * 1e-9;
        let late = (rate * LAG.0 as f64 * 1e-9) as u64;
        let floor = with_headers(reading.ended_bytes()).saturating_sub(late);
        let most = RATES_LIKELY * (rate * seconds + late as f64);
        let Some(port_bytes) = moved(last.port_bytes, reading.port_bytes, most) else {
            self.own_bytes = self.own_bytes.max(floor);
            return;
        };
        self.capacity.stale = false;
        let permitted = with_headers(reading.permitted_bytes);
        let own = port_bytes.min(permitted.saturating_sub(self.own_bytes));
        self.own_bytes = (self.own_bytes + own).max(floor);
        let foreign = port_bytes - own;
        let signals = reading.signals.saturating_sub(last.signals);
        self.capacity.foreign_bytes = self.capacity.foreign_bytes.saturating_add(foreign);
        self.capacity.signals = self.capacity.signals.saturating_add(signals);
        let busy = last.in_flight_bytes.min(reading.in_flight_bytes) > 0;
        let lost = match signals > 0 && busy {
            true => (rate - port_bytes as f64 / seconds).clamp(0.0, rate / 2.0),
            false => 0.0,
        };
        let weight = passed / (passed + TIME_CONSTANT.0 as f64);
        let foreign_rate = (foreign as f64 / seconds).min(rate);
        self.foreign_rate += weight * (foreign_rate - self.foreign_rate);
        self.lost_rate += weight * (lost - self.lost_rate);
        self.yielding.note(&reading, self.capacity.foreign_bytes);
        let taken = self.foreign_rate * (1.0 - self.yielding.share);
        self.note_peak(reading.at, taken + self.lost_rate);
    }

    fn note_peak(&mut self, at: Time, taken: f64) {
        let parts = at.since(self.part_began).0 / PART.0;
        self.part_began = self.part_began + PART.times(parts);
        let over = (parts as usize).min(self.peaks.len());
        self.peaks.rotate_right(over);
        self.peaks[..over].fill(0.0);
        self.peaks[0] = self.peaks[0].max(taken);
    }

    /// Moves the rate in force if the peak differs enough from it.
    fn in_force(&mut self, configured: PortRate) -> Capacity {
        let rate = configured.rate as f64;
        let step = rate / STEPS;
        let peak = self.peaks.iter().copied().fold(0.0, f64::max).min(rate);
        let most = if self.lowered > 0.0 { step } else { 2.0 * step };
        if peak < step {
            self.lowered = 0.0;
        } else if (peak - self.lowered).abs() > most {
            self.lowered = peak;
        }
        let assured = rate * f64::from(configured.assured_permille.min(1000)) / 1000.0;
        self.capacity.rate = match self.lowered > 0.0 {
            true => (rate - self.lowered).max(assured).max(1.0) as u64,
            false => configured.rate,
        };
        self.capacity.foreign_rate = self.foreign_rate as u64;
        self.capacity.lost_rate = self.lost_rate as u64;
        self.capacity
    }
}
