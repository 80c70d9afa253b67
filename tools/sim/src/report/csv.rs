//! The report as CSV with all metrics and one row per run, for spreadsheets and data frames.

use super::{Report, metric};
use crate::plan::Axis;

pub fn csv(report: &Report) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let axes = report.plan.axes.iter().map(Axis::key);
    let heading: Vec<&str> = axes
        .chain(["variant", "seed"])
        .chain(metric::ALL.iter().map(|metric| metric.key))
        .collect();
    writer.write_record(&heading).expect("memory takes all that is written");
    for run in &report.runs {
        let mut row: Vec<String> = report
            .plan
            .at(&report.points[run.point])
            .map(|(_, choice)| match choice.number {
                Some(number) => number.to_string(),
                None => choice.name.clone(),
            })
            .collect();
        row.push(report.plan.variants[run.variant].name.clone());
        row.push(run.seed.to_string());
        row.extend(metric::ALL.iter().map(|metric| (metric.of)(&run.outcome).to_string()));
        writer.write_record(&row).expect("rows are as long as the heading");
    }
    let bytes = writer.into_inner().expect("memory takes all that is written");
    String::from_utf8(bytes).expect("what was written is text")
}
