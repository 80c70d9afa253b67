//! What a report says, in numbers: means over seeds, sustained rates, and how the reference stands
//! to the other variants.

use serde::Serialize;

use super::metric::ATTAINMENT;
use super::paired::{Verdict, difference};
use super::sustained::{ASKED, Sustained};
use super::{Estimate, Panel, Report};

/// The rate that a variant serves with 90 % in time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// Index of the variant.
    #[serde(skip)]
    pub variant: usize,
    /// The rate; `None` if nothing was run.
    pub rate: Option<Sustained>,
    /// It over that of the reference, where both lie between the plan's rates.
    pub over_reference: Option<f64>,
}

/// How the reference stands to one other variant at a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Index of the point.
    #[serde(skip)]
    pub point: usize,
    /// Index of the other variant.
    #[serde(skip)]
    pub other: usize,
    /// Attainment of the reference less that of the other, over the seeds that both have.
    pub difference: Estimate,
    /// What follows from it.
    pub standing: Verdict,
}

/// How the reference stands to one other variant over all points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Points at which it is better.
    pub above: usize,
    /// Points without a difference.
    pub level: usize,
    /// Points at which it is worse.
    pub below: usize,
    /// Points with one seed.
    pub unknown: usize,
    /// The difference that is worst for the reference, and the point.
    pub worst: Option<(Estimate, usize)>,
    /// The one that is best for it.
    pub best: Option<(Estimate, usize)>,
}

impl Report {
    /// Rates at 90 % attainment of a panel's variants; empty if the horizontal axis is not the
    /// request rate.
    #[must_use]
    pub fn sustained(&self, panel: &Panel) -> Vec<Rate> {
        self.sustained_with(ASKED, panel)
    }

    /// The same with another attainment than 90 %.
    #[must_use]
    pub fn sustained_with(&self, asked: f64, panel: &Panel) -> Vec<Rate> {
        if self.plan.rate_axis().is_none() {
            return Vec::new();
        }
        let rates: Vec<Option<Sustained>> = (0..self.plan.variants.len())
            .map(|variant| Sustained::with(asked, &self.curves(panel, variant)))
            .collect();
        let reference = self
            .plan
            .reference()
            .and_then(|reference| rates[reference].as_ref()?.rate());
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

    /// For each seed, attainment over the horizontal axis.
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

    /// The reference against every other variant at every point. Empty without a reference.
    #[must_use]
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

    /// The comparisons with one variant, counted.
    #[must_use]
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

    /// The values of the axes at a point in a few words: `DBRX, 0.7`.
    #[must_use]
    pub fn point_name(&self, point: usize) -> String {
        let names: Vec<&str> = self
            .plan
            .at(&self.points[point])
            .map(|(_, choice)| choice.name.as_str())
            .collect();
        names.join(", ")
    }

    /// The result in sentences, for those who read no further.
    #[must_use]
    pub fn findings(&self) -> Vec<String> {
        let mut found = Vec::new();
        let Some(reference) = self.plan.reference() else {
            return found;
        };
        let name = |variant: usize| self.plan.variants[variant].name.as_str();
        let comparisons = self.comparisons();
        let count = |standing| {
            comparisons
                .iter()
                .filter(|c| c.standing == standing)
                .count()
        };
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
            let policies = rates
                .iter()
                .filter(|r| r.variant != reference && !self.is_bound(r.variant));
            let best = policies
                .filter_map(|r| Some((r.variant, r.rate?.rate()?)))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let own = rates
                .get(reference)
                .and_then(|r| r.rate.as_ref())
                .and_then(Sustained::rate);
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
