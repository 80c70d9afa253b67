//! Summaries of a report: means over seeds, sustained rates, and comparisons of the reference with
//! other variants.

use serde::Serialize;

use super::metric::ATTAINMENT;
use super::paired::{Verdict, difference};
use super::sustained::{ASKED, Sustained};
use super::{Estimate, Panel, Report};

/// The rate at which a variant has 90 % attainment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// Index of the variant.
    #[serde(skip)]
    pub variant: usize,
    /// The rate, or `None` if nothing was run.
    pub rate: Option<Sustained>,
    /// The rate divided by that of the reference, if both lie between the plan's rates.
    pub over_reference: Option<f64>,
}

/// A comparison of the reference with another variant at one point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Index of the point.
    #[serde(skip)]
    pub point: usize,
    /// Index of the other variant.
    #[serde(skip)]
    pub other: usize,
    /// Attainment of the reference minus that of the other variant, over common seeds.
    pub difference: Estimate,
    /// Verdict that follows from the difference.
    pub standing: Verdict,
}

/// Comparisons of the reference with another variant, counted over all points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Points at which the reference is better.
    pub above: usize,
    /// Points without a significant difference.
    pub level: usize,
    /// Points at which the reference is worse.
    pub below: usize,
    /// Points with a single seed.
    pub unknown: usize,
    /// Worst difference for the reference, and its point.
    pub worst: Option<(Estimate, usize)>,
    /// Best difference for the reference, and its point.
    pub best: Option<(Estimate, usize)>,
}

impl Report {
    /// Returns the rates with 90 % attainment of a panel's variants. Empty if the horizontal axis
    /// is not the request rate.
    pub fn sustained(&self, panel: &Panel) -> Vec<Rate> {
        self.sustained_with(ASKED, panel)
    }

    /// Returns the rates with an attainment of `asked` of a panel's variants.
    pub fn sustained_with(&self, asked: f64, panel: &Panel) -> Vec<Rate> {
        if self.plan.rate_axis().is_none() {
            return Vec::new();
        }
        let rates: Vec<Option<Sustained>> = (0..self.plan.variants.len())
            .map(|variant| Sustained::with(asked, &self.curves(panel, variant)))
            .collect();
        let reference =
            self.plan.reference().and_then(|reference| rates[reference].as_ref()?.rate());
        rates
            .into_iter()
            .enumerate()
            .map(|(variant, rate)| Rate {
                variant,
                over_reference: rate
                    .as_ref()
                    .and_then(Sustained::rate)
                    .zip(reference)
                    .map(|(own, reference)| own / reference),
                rate,
            })
            .collect()
    }

    /// Returns attainment over the horizontal axis, for each seed.
    fn curves(&self, panel: &Panel, variant: usize) -> Vec<Vec<(f64, f64)>> {
        self.plan
            .seeds
            .iter()
            .map(|&seed| {
                panel
                    .points
                    .iter()
                    .filter_map(|&point| {
                        let mut runs = self.runs_of(point, variant);
                        let run = runs.find(|run| run.seed == seed)?;
                        Some((self.x_of(point), run.outcome.attainment))
                    })
                    .collect()
            })
            .collect()
    }

    /// Compares the reference with every other variant at every point. Empty without a reference.
    pub fn comparisons(&self) -> Vec<Comparison> {
        let Some(reference) = self.plan.reference() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for point in 0..self.points.len() {
            let ours = self.values(point, reference, &ATTAINMENT);
            for other in 0..self.plan.variants.len() {
                if other == reference || self.is_bound(other) {
                    continue;
                }
                let theirs = self.values(point, other, &ATTAINMENT);
                if let Some(difference) = difference(&ours, &theirs) {
                    found.push(Comparison {
                        point,
                        other,
                        standing: Verdict::of(&difference),
                        difference,
                    });
                }
            }
        }
        found
    }

    /// Counts the comparisons with one variant.
    pub fn tally(&self, comparisons: &[Comparison], other: usize) -> Tally {
        let mut tally = Tally::default();
        for c in comparisons.iter().filter(|c| c.other == other) {
            match c.standing {
                Verdict::Above => tally.above += 1,
                Verdict::Level => tally.level += 1,
                Verdict::Below => tally.below += 1,
                Verdict::Unknown => tally.unknown += 1,
            }
            let entry = Some((c.difference, c.point));
            if tally.worst.is_none_or(|(d, _)| c.difference.mean < d.mean) {
                tally.worst = entry;
            }
            if tally.best.is_none_or(|(d, _)| c.difference.mean > d.mean) {
                tally.best = entry;
            }
        }
        tally
    }

    /// Returns the values of the axes at a point in a few words: `DBRX, 0.7`.
    pub fn point_name(&self, point: usize) -> String {
        let names: Vec<&str> =
            self.plan.at(&self.points[point]).map(|(_, choice)| choice.name.as_str()).collect();
        names.join(", ")
    }

    /// Returns the main results in sentences.
    pub fn findings(&self) -> Vec<String> {
        let mut found = super::capacity::warnings(self);
        let Some(reference) = self.plan.reference() else {
            return found;
        };
        let name = |variant: usize| self.plan.variants[variant].name.as_str();
        let comparisons = self.comparisons();
        let count = |standing| comparisons.iter().filter(|c| c.standing == standing).count();
        if !comparisons.is_empty() && count(Verdict::Unknown) == 0 {
            let mut text = format!(
                "Against the others, {} is better in {} of {} comparisons, level within noise in \
                 {}, and \
                 worse in {}",
                name(reference),
                count(Verdict::Above),
                comparisons.len(),
                count(Verdict::Level),
                count(Verdict::Below)
            );
            let worst = comparisons
                .iter()
                .filter(|c| c.standing == Verdict::Below)
                .min_by(|a, b| a.difference.mean.total_cmp(&b.difference.mean));
            if let Some(worst) = worst {
                text += &format!(
                    ", at worst by {:.1} points of attainment against {}",
                    -worst.difference.mean * 100.0,
                    name(worst.other)
                );
                if self.points.len() > 1 {
                    text += &format!(" ({})", self.point_name(worst.point));
                }
            }
            text.push('.');
            found.push(text);
        }
        for panel in self.panels() {
            let rates = self.sustained(&panel);
            let policies =
                rates.iter().filter(|r| r.variant != reference && !self.is_bound(r.variant));
            let best = policies
                .filter_map(|r| Some((r.variant, r.rate?.rate()?)))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let own = rates.get(reference).and_then(|r| r.rate.as_ref()).and_then(Sustained::rate);
            if let (Some((other, theirs)), Some(own)) = (best, own) {
                let place = match panel.name.as_str() {
                    "" => String::new(),
                    name => format!("{name}: "),
                };
                found.push(format!(
                    "{place}with {:.0} % in time {} serves {own:.3} requests/s per prefill GPU, \
                     {:.2} × the next best, {} ({theirs:.3}).",
                    ASKED * 100.0,
                    name(reference),
                    own / theirs,
                    name(other)
                ));
            }
        }
        found
    }
}
