//! What a classifier learns from (H-MAS Appendix C.2): long views of short steady runs, and the
//! structure that did best in each.

use std::sync::{Arc, Mutex, PoisonError};

use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::qos::Long;

use super::bed::{self, Bed, Chooses, Setting, Watched};
use super::traffic::{Mix, Stretch, requests};
use crate::requests::reproduction::{Options, each};

/// Structures that are compared: the paper's "representative subset".
pub(super) const SUBSET: [Kind; 5] = [Kind::Fcfs, Kind::Edf, Kind::Sjf, Kind::TwoLane, Kind::Wfq];

/// Seeds of training: none of them is one of a figure.
const SEED: u64 = 9_000;

/// Goodputs that differ by less, %, are the same.
const TIE: f64 = 0.5;

/// Views, each with the structure that met most objectives in its regime.
pub(super) fn examples(bed: &Bed, options: &Options) -> Arc<Vec<(Long, Kind)>> {
    let (rates, seconds): (&[f64], f64) = if options.quick {
        (&[super::RATE], 25.0)
    } else {
        (
            &[0.7 * super::RATE, 1.1 * super::RATE, 1.6 * super::RATE],
            80.0,
        )
    };
    let mixes = [Mix::Interactive, Mix::Long, Mix::Complex];
    let mut points = Vec::new();
    for mix in mixes {
        for rate in rates {
            for kind in SUBSET {
                points.push((mix, *rate * super::weight(mix), kind));
            }
        }
    }
    let runs = each(&points, options, |(mix, rate, kind)| {
        let asked = requests(&[Stretch::steady(seconds, *rate, *mix)], SEED);
        let watched = Watched::default();
        let setting = Setting::new(Chooses::Watches(*kind, Arc::clone(&watched)));
        let good = bed::run(&setting, bed, &asked, &[], SEED).good;
        (good, watched)
    });
    let regimes: Vec<_> = runs.chunks(SUBSET.len()).collect();
    // Where nobody is late all do alike: then the one that does best elsewhere.
    let overall: Vec<f64> = (0..SUBSET.len())
        .map(|kind| regimes.iter().map(|runs| runs[kind].0).sum())
        .collect();
    let mut examples = Vec::new();
    for runs in regimes {
        let most = runs.iter().map(|run| run.0).fold(0.0, f64::max);
        let mut best = (f64::NEG_INFINITY, Kind::Fcfs);
        for (at, kind) in SUBSET.iter().enumerate() {
            if runs[at].0 > most - TIE && overall[at] > best.0 {
                best = (overall[at], *kind);
            }
        }
        for (_, watched) in runs {
            let views = take(watched);
            examples.extend(views.into_iter().map(|view| (view, best.1)));
        }
    }
    Arc::new(examples)
}

fn take(watched: &Mutex<Vec<Long>>) -> Vec<Long> {
    std::mem::take(&mut watched.lock().unwrap_or_else(PoisonError::into_inner))
}
