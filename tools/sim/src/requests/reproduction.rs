//! A paper's claims with the results here, formatted for terminals, pages and programs.

use std::fmt::Write as _;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::report::sheet::{Cell, Sheet};
use crate::run::in_parallel;
use crate::run::progress::Progress;

#[derive(Clone, Debug)]
pub struct Options {
    /// Seeds of each point. Results are shown as mean ± half width over the seeds.
    pub seeds: Vec<u64>,
    /// Whether to run fewer and shorter points, for tests and a first look. Such results are no
    /// findings.
    pub quick: bool,
    pub jobs: NonZero<usize>,
    /// Folder of recorded traces (`LAXITY_DATA`). Without it, workloads are generated.
    pub data: Option<std::path::PathBuf>,
    pub progress: bool,
}

#[cfg(test)]
impl Options {
    pub(crate) fn quick(seed: u64) -> Self {
        Self {
            seeds: vec![seed],
            quick: true,
            jobs: NonZero::new(2).expect("two"),
            data: None,
            progress: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    pub says: String,
    /// Result that the paper reports.
    pub paper: String,
    pub here: String,
    pub regime: String,
    pub baseline: String,
    pub holds: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Section {
    pub title: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    pub notes: String,
}

impl Section {
    fn sheet(&self) -> Sheet {
        let cells = |texts: &[String]| texts.iter().cloned().map(Cell::Text).collect();
        let mut sheet = Sheet::new(1, cells(&self.head));
        for row in &self.rows {
            sheet.add(cells(row));
        }
        sheet
    }
}

/// All results for a paper.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reproduction {
    pub title: String,
    pub sections: Vec<Section>,
    pub claims: Vec<Claim>,
    pub quick: bool,
}

impl Reproduction {
    #[cfg(test)]
    pub(crate) fn assert_whole(&self) {
        for section in &self.sections {
            assert!(!section.rows.is_empty(), "{}", section.title);
            for row in &section.rows {
                assert_eq!(row.len(), section.head.len(), "{}: {row:?}", section.title);
            }
        }
    }

    fn claims_section(&self) -> Section {
        let row = |claim: &Claim| {
            let holds = if claim.holds { "yes" } else { "no" }.to_owned();
            let Claim { says, paper, here, regime, baseline, .. } = claim.clone();
            vec![says, paper, here, holds, baseline, regime]
        };
        Section {
            title: "Claims".to_owned(),
            head: ["claim", "paper", "here", "holds", "fair baseline", "regime"]
                .map(str::to_owned)
                .to_vec(),
            rows: self.claims.iter().map(row).collect(),
            notes: String::new(),
        }
    }

    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.title);
        if self.quick {
            text += "A quick run: its figures are no findings.\n";
        }
        for section in &self.sections {
            let _ = write!(text, "\n{}\n{}", section.title, section.sheet().terminal());
            if !section.notes.is_empty() {
                text += &section.notes;
                text.push('\n');
            }
        }
        text + &self.claims_list()
    }

    /// Formats the claims as a list, because a table of sentences would be too wide.
    fn claims_list(&self) -> String {
        let hold = self.claims.iter().filter(|claim| claim.holds).count();
        let mut text = format!("\nClaims: {hold} of {} hold\n", self.claims.len());
        for claim in &self.claims {
            let holds = if claim.holds { "yes" } else { "no " };
            let _ = writeln!(text, "\n{holds}  {}", claim.says);
            let parts = [
                ("regime", &claim.regime),
                ("paper", &claim.paper),
                ("here", &claim.here),
                ("baseline", &claim.baseline),
            ];
            for (name, part) in parts.iter().filter(|(_, part)| !part.is_empty()) {
                let _ = writeln!(text, "     {name:<9} {part}");
            }
        }
        text
    }

    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for section in self.sections.iter().chain([&self.claims_section()]) {
            let _ = write!(text, "### {}\n\n{}\n", section.title, section.sheet().markdown());
            if !section.notes.is_empty() {
                let _ = write!(text, "{}\n\n", section.notes);
            }
        }
        text
    }
}

/// Calls `work` for every point, several in parallel, and returns the results in the order of
/// points.
pub fn each<P: Sync, R: Send>(
    points: &[P],
    options: &Options,
    work: impl Fn(&P) -> R + Sync,
) -> Vec<R> {
    let bar = Progress::new(points.len(), 0, options.progress);
    let results = Mutex::new(Vec::new());
    in_parallel(options.jobs, points, |at, point| {
        let result = work(point);
        results.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
        bar.step();
    });
    bar.finish();
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Formats the mean and half the range of values: `12.3 ± 0.4`.
pub fn spread(values: &[f64]) -> String {
    if values.is_empty() {
        return "–".to_owned();
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let digits = if mean.abs() < 10.0 { 2 } else { 1 };
    if values.len() == 1 {
        return format!("{mean:.digits$}");
    }
    format!("{mean:.digits$} ± {:.digits$}", (most - least) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_their_points_however_many_work() {
        let options = Options { jobs: NonZero::new(3).expect("three"), ..Options::quick(1) };
        let points: Vec<u64> = (0..50).collect();
        let squares = each(&points, &options, |point| point * point);
        assert!(squares.iter().zip(&points).all(|(square, point)| *square == point * point));
    }

    #[test]
    fn claims_are_sentences_below_each_other_and_a_table_on_a_page() {
        let claim = |holds, says: &str| Claim {
            says: says.to_owned(),
            paper: "2 times".to_owned(),
            here: "1.3 times".to_owned(),
            regime: "overload".to_owned(),
            baseline: String::new(),
            holds,
        };
        let found = Reproduction {
            title: "Paper".to_owned(),
            sections: Vec::new(),
            claims: vec![claim(true, "it is faster"), claim(false, "it is cheaper")],
            quick: true,
        };
        let shown = found.table();
        assert!(shown.contains("Claims: 1 of 2 hold"), "{shown}");
        assert!(shown.contains("\nno   it is cheaper\n     regime    overload\n"), "{shown}");
        assert!(!shown.contains("baseline"), "{shown}");
        assert!(found.markdown().contains("| it is faster | 2 times |"));
    }

    #[test]
    fn a_spread_is_shown_with_its_half_width() {
        assert_eq!(spread(&[10.0, 12.0, 14.0]), "12.0 ± 2.0");
        assert_eq!(spread(&[1.5]), "1.50");
        assert_eq!(spread(&[]), "–");
    }
}
