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
    #[serde(skip)]
    pub variant: usize,
    /// The rate, or `None` if nothing was run.
    pub rate: Option<Sustained>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    #[serde(skip)]
    pub point: usize,
    #[serde(skip)]
    pub other: usize,
    /// Attainment of the reference minus that of the other variant, over common seeds.
    pub difference: Estimate,
    pub standing: Verdict,
}

/// Comparisons of the reference with another variant, counted over all points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    pub above: usize,
    /// Points without a significant difference.
    pub level: usize,
    pub below: usize,
    pub unknown: usize,
    pub worst: Option<(Estimate, usize)>,
    pub best: Option<(Estimate, usize)>,
}

impl Report {
    /// Returns the rates with 90 % attainment of a panel's variants. Empty if the horizontal axis
    /// is not the request rate.
    pub fn sustained(&self, panel: &Panel) -> Vec<Rate> {
        self.sustained_with(ASKED, panel)
    }

    pub fn sustained_with(&self, asked: f64, panel: &Panel) -> Vec<Rate> {
        if self.plan.rate_axis().is_none() {
            return Vec::new();
        }
        let rate = |variant| Sustained::with(asked, &self.curves(panel, variant));
        (0..self.plan.variants.len()).map(|variant| Rate { variant, rate: rate(variant) }).collect()
    }

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
        let Some(reference) = self.plan.reference() else { return Vec::new() };
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
}
