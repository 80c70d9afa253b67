//! The shown part of a report.

use super::findings::Block;
use super::sheet::Cell;
use super::{Panel, Report};

pub(super) struct View<'a> {
    pub(super) report: &'a Report,
    pub(super) variants: Vec<usize>,
    pub(super) panels: Vec<Panel>,
    at: Option<&'a str>,
}

impl<'a> View<'a> {
    pub(super) fn whole(report: &'a Report) -> Self {
        Self {
            report,
            variants: (0..report.plan.variants.len()).collect(),
            panels: report.panels(),
            at: None,
        }
    }

    pub(super) fn of(block: &'a Block, report: &'a Report) -> Result<Self, String> {
        let variants = report.plan.variants.iter();
        let named: Vec<&str> = variants.map(|v| v.name.as_str()).collect();
        let mut panels = report.panels();
        let names: Vec<&str> = panels.iter().map(|panel| panel.name.as_str()).collect();
        let kept = chosen(&block.panels, &names, "panel")?;
        let mut index = 0;
        panels.retain(|_| {
            index += 1;
            kept.contains(&(index - 1))
        });
        Ok(Self {
            report,
            // In the order of the plan, so that all tables of a plan have the same order.
            variants: chosen(&block.only, &named, "variant")?,
            panels,
            at: block.at.as_deref(),
        })
    }

    pub(super) fn variant(&self, name: &str) -> Option<usize> {
        let variants = &self.report.plan.variants;
        variants.iter().position(|v| v.name == name)
    }

    pub(super) fn name(&self, variant: usize) -> Cell {
        let name = self.report.plan.variants[variant].name.clone();
        if self.report.is_bound(variant) { Cell::Bound(name) } else { Cell::Name(name) }
    }

    pub(super) fn point(&self, panel: &Panel) -> Result<usize, String> {
        let Some(at) = self.at else { return Ok(self.report.telling(panel)) };
        let name = |&point: &usize| self.report.x_name(point);
        let found = panel.points.iter().find(|point| name(point) == at);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = panel.points.iter().map(name).collect();
            format!("no point is at {at}; there are {}", names.join(", "))
        })
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

/// Returns indices of the names that are wanted, or of all if none is. A part of a panel's name
/// stands for the panel, too.
fn chosen(wanted: &[String], names: &[&str], what: &str) -> Result<Vec<usize>, String> {
    let has = |name: &str, part: &str| {
        name == part || what == "panel" && name.split(" · ").any(|own| own == part)
    };
    if let Some(strange) = wanted.iter().find(|part| !names.iter().any(|name| has(name, part))) {
        return Err(format!("no {what} is called {strange}; there are {}", names.join(", ")));
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| has(name, part));
    Ok((0..names.len()).filter(|&index| is_wanted(names[index])).collect())
}
