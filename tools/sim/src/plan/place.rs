//! Locations in a plan, and errors at a location.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    pub file: Arc<str>,
    /// Line number, counted from 1. 0 if there are no lines.
    pub line: usize,
    /// Column in characters, counted from 1.
    pub column: usize,
    text: Arc<str>,
}

impl SourceLocation {
    pub fn whole(file: &str) -> Self {
        Self { file: file.into(), line: 0, column: 0, text: "".into() }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Places<'a> {
    file: Arc<str>,
    text: &'a str,
}

impl<'a> Places<'a> {
    pub(super) fn of(file: &str, text: &'a str) -> Self {
        Self { file: file.into(), text }
    }

    pub(super) fn whole(&self) -> SourceLocation {
        SourceLocation { file: Arc::clone(&self.file), line: 0, column: 0, text: "".into() }
    }

    pub(super) fn at(&self, span: &Range<usize>) -> SourceLocation {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        SourceLocation {
            file: Arc::clone(&self.file),
            line: before.matches('\n').count() + 1,
            column: before[start..].chars().count() + 1,
            text: self.text[start..].lines().next().unwrap_or("").into(),
        }
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}", self.file),
            line => write!(f, "{}:{line}:{}", self.file, self.column),
        }
    }
}

/// An error in a plan, with its location and field. Show it to the author of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    pub place: SourceLocation,
    /// Name of the field, such as `workload.rate_per_gpu`. Empty for errors about the whole file.
    pub field: String,
    pub problem: String,
    /// Axis values and variant with which the error occurs. Empty if it always does.
    pub point: String,
}

impl PlanError {
    pub(super) fn new(place: &SourceLocation, field: &str, problem: impl Into<String>) -> Self {
        Self {
            place: place.clone(),
            field: field.to_owned(),
            problem: problem.into(),
            point: String::new(),
        }
    }

    pub(super) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::new(&SourceLocation::whole(&path.display().to_string()), "", problem)
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.problem)?;
        if !self.point.is_empty() {
            write!(f, " (with {})", self.point)?;
        }
        if !self.place.text.is_empty() {
            let margin = self.place.line.to_string();
            // Tabs are kept, so that the mark is below the marked text.
            let indent: String = self
                .place
                .text
                .chars()
                .take(self.place.column - 1)
                .map(|c| if c == '\t' { '\t' } else { ' ' })
                .collect();
            write!(
                f,
                "\n  {margin} | {}\n  {:width$} | {indent}^",
                self.place.text,
                "",
                width = margin.len()
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for PlanError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_counts_lines_and_characters_and_shows_the_line() {
        let text = "a = 1\nβ = \"é\" # x\nc = 2\n";
        let start = text.find("# x").expect("it is there");
        let place = Places::of("f.toml", text).at(&(start..start + 1));
        assert_eq!((place.line, place.column), (2, 9));
        let shown = PlanError::new(&place, "β", "is odd").to_string();
        assert_eq!(shown, "f.toml:2:9: β: is odd\n  2 | β = \"é\" # x\n    |         ^");
    }

    #[test]
    fn a_flag_has_no_line() {
        let error = PlanError::new(&SourceLocation::whole("--set"), "model.tp", "3 is odd");
        assert_eq!(error.to_string(), "--set: model.tp: 3 is odd");
    }
}
