//! The report of a soak, as a table for people and as a page.

use crate::faults::report::{PATHS, grid, kinds, markdown_table, mib, paths};
use crate::faults::soak::{Growth, SoakReport};

const GROWTH: [&str; 6] = ["of", "first third", "middle", "last third", "maximum", "bound"];

fn growth(report: &SoakReport) -> Vec<Vec<String>> {
    let row = |growth: &Growth| {
        let numbers = [growth.first, growth.middle, growth.last, growth.max];
        let mut row = vec![growth.what.clone()];
        row.extend(numbers.map(|number| number.to_string()));
        row.push(format!("+{}", growth.bound));
        row
    };
    report.growth.iter().map(row).collect()
}

fn counters(report: &SoakReport) -> Vec<Vec<String>> {
    let it = &report.counters;
    [
        ("attachments", it.attachments.to_string()),
        ("flows", it.flows.to_string()),
        ("MiB submitted", mib(it.submitted_bytes)),
        ("MiB permitted", mib(it.permitted_bytes)),
        ("MiB bypassed", mib(it.bypassed_bytes)),
        ("MiB withdrawn", mib(it.withdrawn_bytes)),
        ("MiB completed", mib(it.completed_bytes)),
    ]
    .map(|(name, value)| vec![name.to_owned(), value])
    .to_vec()
}

fn found(report: &SoakReport) -> String {
    match report.violations.as_slice() {
        [] => "Nothing was wrong.".to_owned(),
        all => all.iter().map(|violation| format!("* {violation}\n")).collect(),
    }
}

fn minutes(report: &SoakReport) -> String {
    match report.seconds {
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.1} min", seconds / 60.0),
    }
}

pub fn soak_table(report: &SoakReport) -> String {
    format!(
        "{}\n{}\n{}\n{} of soak with seed {}: {} transfers, {} MiB checked, {:.1} MiB/s through \
         laxityd, longest wait {} ms, {} samples, {} violations\n{}",
        grid(&PATHS, paths(&report.by_path).into_iter()),
        grid(&["change", "times"], kinds(&report.changes).into_iter()),
        grid(&GROWTH, growth(report).into_iter()),
        minutes(report),
        report.seed,
        report.transfers,
        mib(report.bytes_checked),
        report.counters.completed_bytes as f64 / f64::from(1 << 20) / report.seconds.max(0.001),
        report.longest_stall_ms,
        report.samples,
        report.violations.len(),
        found(report).trim_end()
    )
}

pub fn soak_page(report: &SoakReport) -> String {
    format!(
        "# A soak\n\nThis page is the output of\n\n```sh\nlaxity lab faults --soak {} --seed {} \
         --report docs/results/soak.md\n```\n\n[faults.md](../faults.md#soak) says what is done \
         and checked. One daemon and its workers ran for **{}**. {}\ntransfers completed, and {} \
         MiB were compared. The counters of {} workers agreed with the bytes that\ncame. The \
         longest wait for a permit was {} ms. **{} violations.**\n\n{}\n\n## Growth\n\nMedians \
         of {} samples, by thirds after the first fifth.\n\n{}\n## The daemon's counters\n\n{}\n\
         ## Changes\n\n{}\n## Paths\n\n{}",
        minutes(report).replace(' ', ""),
        report.seed,
        minutes(report),
        report.transfers,
        mib(report.bytes_checked),
        report.workers_counted,
        report.longest_stall_ms,
        report.violations.len(),
        found(report).trim_end(),
        report.samples,
        markdown_table(&GROWTH, &growth(report)),
        markdown_table(&["counter", "value"], &counters(report)),
        markdown_table(&["change", "times"], &kinds(&report.changes)),
        markdown_table(&PATHS, &paths(&report.by_path)),
    )
}
