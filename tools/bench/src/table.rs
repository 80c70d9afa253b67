//! The report: a table for people and a JSON document for programs.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde_json::{Value, json};

use crate::figure::{Figure, Gate, Limit, Outcome, Quantile, Side, Unit, Verdict};
use crate::machine::{Cores, Machine};

pub(crate) fn render(figures: &[Figure]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "figure", "p50", "p99", "p99.9", "mean", "min–max of p50", "× P", "gate", "verdict",
    ]);
    let mut notes: Vec<String> = Vec::new();
    for figure in figures {
        let mut title = figure.row.title.clone();
        let note = match &figure.outcome {
            Outcome::Measured(_) => figure.row.note.clone(),
            Outcome::Skipped(why) => Some(format!("skipped: {why}")),
            Outcome::Failed(why) => Some(format!("failed: {why}")),
        };
        if let Some(note) = note {
            let number = notes.iter().position(|known| *known == note).unwrap_or_else(|| {
                notes.push(note);
                notes.len() - 1
            });
            let _ = write!(title, " [{}]", number + 1);
        }
        let mut cells = vec![Cell::new(title)];
        let numbers = numbers(figure).into_iter();
        cells.extend(numbers.map(|text| Cell::new(text).set_alignment(CellAlignment::Right)));
        let gates = figure.row.gates.iter();
        let gates: Vec<_> = gates.map(|gate| show_gate(gate, figure.row.unit)).collect();
        cells.push(Cell::new(gates.join("\n")));
        cells.push(Cell::new(show_verdict(figure.verdict())));
        table.add_row(cells);
    }
    let mut text = table.to_string();
    for (number, note) in notes.iter().enumerate() {
        let _ = write!(text, "\n[{}] {note}", number + 1);
    }
    text
}

fn numbers(figure: &Figure) -> Vec<String> {
    let dash = || "–".to_owned();
    let Outcome::Measured(summary) = &figure.outcome else { return vec![dash(); 6] };
    let show = |value: f64| show(value, figure.row.unit);
    let optional = |value: Option<f64>| value.map_or_else(dash, show);
    vec![
        show(summary.p50),
        optional(summary.p99),
        optional(summary.p999),
        optional(summary.mean),
        format!("{} … {}", show(summary.spread.0), show(summary.spread.1)),
        summary.of_p.map_or_else(dash, |ratios| format!("{:.2}", ratios.p50)),
    ]
}

fn show(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Nanoseconds if value < 100.0 => format!("{value:.1} ns"),
        Unit::Nanoseconds if value < 10_000.0 => format!("{value:.0} ns"),
        Unit::Nanoseconds if value < 1e6 => format!("{:.1} µs", value / 1e3),
        Unit::Nanoseconds => format!("{:.2} ms", value / 1e6),
        Unit::PerSecond => format!("{:.2} M/s", value / 1e6),
        Unit::Instructions => format!("{value:.1} instr"),
        Unit::PercentOfCore => format!("{value:.3} %"),
    }
}

fn show_gate(gate: &Gate, unit: Unit) -> String {
    let side = match gate.side {
        Side::AtMost => "≤",
        Side::AtLeast => "≥",
    };
    let quantile = match gate.quantile {
        Quantile::P50 => "",
        Quantile::P99 => "p99 ",
        Quantile::P999 => "p99.9 ",
    };
    let limit = match gate.limit {
        Limit::TimesP(ratio) => format!("{ratio:.2} P"),
        Limit::Value(value) => show(value, unit),
    };
    format!("{quantile}{side} {limit}")
}

fn show_verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::None => "",
        Verdict::Ok => "ok",
        Verdict::Missed => "MISSED",
        Verdict::Skipped => "skipped",
        Verdict::Failed => "FAILED",
    }
}

/// Returns the report as JSON. Values are in nanoseconds, events per second, instructions or
/// percent of a core. `unit` names which.
pub(crate) fn json(
    machine: &Machine,
    cores: &Cores,
    figures: &[Figure],
) -> serde_json::Result<Value> {
    let rows = figures.iter().map(|figure| {
        let mut row = serde_json::to_value(figure)?;
        row["verdict"] = serde_json::to_value(figure.verdict())?;
        Ok(row)
    });
    let rows = rows.collect::<serde_json::Result<Vec<Value>>>()?;
    Ok(json!({ "machine": machine, "cores": cores, "figures": rows }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Row;
    use crate::sample::Summary;

    #[test]
    fn a_row_shows_its_numbers_its_gate_and_why_another_was_skipped() {
        let gate = Gate::at_most(Quantile::P50, Limit::Value(15.0));
        let row = Row::latency("submit", "submit").gates([gate]);
        let figure = |outcome| Figure { row: row.clone(), outcome };
        let text = render(&[
            figure(Outcome::Measured(Summary::of_numbers(vec![12.0, 13.0, 14.0]))),
            figure(Outcome::Skipped("no valgrind".into())),
        ]);
        for part in ["13.0 ns", "12.0 ns … 14.0 ns", "≤ 15.0 ns", "ok", "[1] skipped: no valgrind"]
        {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
