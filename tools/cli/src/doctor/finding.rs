//! The output of findings.

use std::fmt::Write as _;

use crate::cluster::tables::clean;
pub(crate) use laxity_wire::finding::{Finding, Severity};

/// Returns all findings as text. The worst come last, where a terminal shows them. Users choose
/// names of processes and values of variables, so characters that control a terminal are escaped.
pub(crate) fn page(findings: &[Finding], coloured: bool) -> String {
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| finding.severity);
    let width = sorted.iter().map(|f| heading(f).chars().count()).max();
    let width = width.unwrap_or(0);
    let mut page = String::new();
    for finding in sorted {
        let (name, colour) = match finding.severity {
            Severity::Ok => ("ok   ", 32),
            Severity::Info => ("info ", 36),
            Severity::Warn => ("warn ", 33),
            Severity::Error => ("ERROR", 31),
        };
        let name = if coloured { format!("\x1b[{colour}m{name}\x1b[0m") } else { name.to_owned() };
        let found = clean(&finding.found);
        // Writing to a `String` does not fail.
        let _ = writeln!(page, "{name}  {:width$}  {found}", heading(finding));
        for (label, text) in [("why:", &finding.why), ("do: ", &finding.action)] {
            if !text.is_empty() {
                let _ = writeln!(page, "       {label} {}", clean(text));
            }
        }
    }
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let _ = write!(
        page,
        "\n{} ok, {} to know, {} warnings, {} errors",
        count(Severity::Ok),
        count(Severity::Info),
        count(Severity::Warn),
        count(Severity::Error)
    );
    page
}

fn heading(finding: &Finding) -> String {
    if finding.subject.is_empty() {
        finding.id.to_owned()
    } else {
        clean(&format!("{} {}", finding.id, finding.subject))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_comes_last_with_its_reason_and_what_to_do() {
        let findings = [
            Finding::error("daemon", "none").because("reason").action("systemctl start"),
            Finding::ok("kernel", "6.1"),
        ];
        let page = page(&findings, false);
        let lines: Vec<&str> = page.lines().collect();
        assert!(lines[0].starts_with("ok") && lines[1].starts_with("ERROR"), "{page}");
        assert_eq!(lines[2], "       why: reason");
        assert_eq!(lines[3], "       do:  systemctl start");
        assert!(page.ends_with("1 ok, 0 to know, 0 warnings, 1 errors"), "{page}");
    }

    #[test]
    fn colours_are_only_there_when_asked_for_and_never_those_of_a_process() {
        let findings = [Finding::ok("x", "evil \x1b[31m name")];
        assert!(!page(&findings, false).contains('\x1b'));
        assert_eq!(page(&findings, true).matches('\x1b').count(), 2);
    }
}
