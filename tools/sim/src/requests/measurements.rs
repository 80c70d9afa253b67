//! Results of runs by place, row and column. Tables and claims use them.

use std::collections::BTreeMap;

use evalexpr::Value;

use super::reproduction::{Options, Section, each, spread};
use crate::reproduce::runner::{Figures, list, numbers};

pub(crate) type Columns = Vec<(&'static str, f64)>;

/// Results of runs by place, row and column, with a value for each seed. Claims access them with
/// `of(PLACE, ROW, COLUMN)`.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    values: BTreeMap<(String, String, &'static str), Vec<f64>>,
    rows: Vec<(String, String)>,
}

impl Measurements {
    pub(crate) fn add(&mut self, place: &str, row: &str, runs: &[Columns]) {
        self.rows.push((place.to_owned(), row.to_owned()));
        for (column, value) in runs.iter().flatten() {
            let key = (place.to_owned(), row.to_owned(), *column);
            self.values.entry(key).or_default().push(*value);
        }
    }

    /// Runs every row in every place for each seed, and adds the results.
    pub(crate) fn measure<P: Sync, R: Sync>(
        &mut self,
        places: &[(String, P)],
        rows: &[(String, R)],
        options: &Options,
        of: impl Fn(&P, &R, u64) -> Columns + Sync,
    ) {
        let mut points = Vec::new();
        for place in places {
            for row in rows {
                points.extend(options.seeds.iter().map(|seed| (place, row, *seed)));
            }
        }
        let ran = each(&points, options, |(place, row, seed)| of(&place.1, &row.1, *seed));
        let seeds = options.seeds.len();
        for (point, runs) in points.chunks(seeds).zip(ran.chunks(seeds)) {
            let (place, row, _) = point[0];
            self.add(&place.0, &row.0, runs);
        }
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.values.extend(other.values);
        self.rows.extend(other.rows);
    }

    fn find(&self, place: &str, row: &str, column: &str) -> Option<&[f64]> {
        let mut found =
            self.values.iter().filter(|((p, r, c), _)| p == place && r == row && *c == column);
        found.next().map(|(_, values)| values.as_slice())
    }

    pub(crate) fn of(&self, place: &str, row: &str, column: &str) -> &[f64] {
        self.find(place, row, column).unwrap_or(&[])
    }

    fn in_place(&self, place: &str) -> impl Iterator<Item = &str> {
        let rows = self.rows.iter().filter(move |(other, _)| other == place);
        rows.map(|(_, row)| row.as_str())
    }

    /// Returns a table with the columns of several places side by side. A name precedes each
    /// column.
    pub(crate) fn table(
        &self,
        title: &str,
        places: &[(&str, &str)],
        columns: &[&str],
        notes: &str,
    ) -> Section {
        let mut head = vec!["setting".to_owned()];
        for (_, name) in places {
            head.extend(columns.iter().map(|column| format!("{name} {column}").trim().to_owned()));
        }
        let row = |row: &str| {
            let cells = places.iter().flat_map(|(place, _)| {
                columns.iter().map(|column| spread(self.of(place, row, column)))
            });
            std::iter::once(row.to_owned()).chain(cells).collect()
        };
        Section {
            title: title.to_owned(),
            head,
            rows: self.in_place(places[0].0).map(row).collect(),
            notes: notes.to_owned(),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl Figures for Measurements {
    /// Evaluates a claim's function. `of(PLACE, ROW, COLUMN)` is a value for each seed.
    ///
    /// `means(PLACES, ROW, COLUMN)` are the means in all places whose names start with `PLACES`.
    ///
    /// `difference(LIST, LIST)` is taken by seed. `past(LIST, OTHER)` are the values with an
    /// `OTHER` below 90.
    ///
    /// `interval(REQUESTS, PERCENT)` is half of the 95 % confidence interval of a share of
    /// `PERCENT` among `REQUESTS` requests.
    ///
    /// `best(PLACE, COLUMN, START, "most")` is the row with the most (or least) in the column,
    /// among rows whose names start with `START` and have no `+`.
    fn call(&self, function: &str, arguments: &[Value]) -> Option<Value> {
        let text = |at: usize| arguments.get(at)?.as_string().ok();
        let numbers = |at: usize| numbers(arguments.get(at)?).ok();
        match function {
            "of" => {
                let values = self.find(&text(0)?, &text(1)?, &text(2)?)?;
                Some(list(values.iter().copied()))
            }
            "means" => {
                let (places, row, column) = (text(0)?, text(1)?, text(2)?);
                let rows = self.rows.iter();
                let rows =
                    rows.filter(|(place, other)| place.starts_with(&places) && *other == row);
                Some(list(rows.map(|(place, row)| mean(self.of(place, row, &column)))))
            }
            "interval" => {
                let requests: f64 = numbers(0)?.iter().sum();
                let part = arguments.get(1)?.as_number().ok()? / 100.0;
                let half = 196.0 * (part * (1.0 - part) / requests.max(1.0)).sqrt();
                Some(Value::Float(half))
            }
            "difference" | "past" => {
                let pairs = numbers(0)?.into_iter().zip(numbers(1)?);
                Some(if function == "past" {
                    list(pairs.filter(|(_, by)| *by < 90.0).map(|(value, _)| value))
                } else {
                    list(pairs.map(|(one, other)| one - other))
                })
            }
            "best" => {
                let (place, column, start) = (text(0)?, text(1)?, text(2)?);
                let mean = |row: &str| mean(self.of(&place, row, &column));
                let rows = self.in_place(&place);
                let rows = rows.filter(|row| row.starts_with(&start) && !row.contains('+'));
                let by = |a: &&str, b: &&str| mean(a).total_cmp(&mean(b));
                let best = if text(3)? == "most" { rows.max_by(by) } else { rows.min_by(by) };
                best.map(Value::from)
            }
            _ => None,
        }
    }
}
