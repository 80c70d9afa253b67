//! The shown part of a report.

use std::ops::Range;

use super::sheet::Cell;
use super::{Panel, Report};

pub(super) struct View<'a> {
    pub(super) report: &'a Report,
    pub(super) panels: Vec<Panel>,
}

impl<'a> View<'a> {
    pub(super) fn whole(report: &'a Report) -> Self {
        Self { report, panels: report.panels() }
    }

    /// Returns the panel with this name, or those with this part of a name.
    pub(super) fn of_panel(wanted: &str, report: &'a Report) -> Result<Self, String> {
        let mut panels = report.panels();
        let names = panels.iter().map(|panel| panel.name.as_str()).collect::<Vec<_>>().join(", ");
        panels.retain(|panel| panel.name.split(" · ").any(|part| part == wanted));
        if panels.is_empty() {
            return Err(format!("no panel is called {wanted}; there are {names}"));
        }
        Ok(Self { report, panels })
    }

    pub(super) fn variants(&self) -> Range<usize> {
        0..self.report.plan.variants.len()
    }

    pub(super) fn variant(&self, name: &str) -> Option<usize> {
        let variants = &self.report.plan.variants;
        variants.iter().position(|v| v.name == name)
    }

    pub(super) fn name(&self, variant: usize) -> Cell {
        let name = self.report.plan.variants[variant].name.clone();
        if self.report.is_bound(variant) { Cell::Bound(name) } else { Cell::Name(name) }
    }

    /// Returns a text such as `at request rate 0.2/s`, or an empty one without horizontal axis.
    pub(super) fn at(&self, point: usize) -> String {
        let Some(axis) = self.report.plan.x() else { return String::new() };
        let (label, value) = (&self.report.plan.axes[axis].label, self.report.x_name(point));
        match label.split_once(", ") {
            Some((label, unit)) => match unit.strip_prefix("1/") {
                Some(per) => format!("at {label} {value}/{per}"),
                None => format!("at {label} {value} {unit}"),
            },
            None => format!("at {label} {value}"),
        }
    }
}
