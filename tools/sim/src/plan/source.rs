//! Finds plans and their parents among files and built-in plans.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use laxity_files::CONFIG_BYTES_MAX;
use toml::de::DeTable;

use super::place::{Places, PlanError, SourceLocation};
use super::reader::Reader;
use super::setting::{Setting, shown};
use super::{Axis, KIND, Plan, Plot, Variant, built_in};
use crate::report::Metric;

struct PlanSource {
    name: String,
    shown: String,
    text: String,
    folder: Option<PathBuf>,
}

impl PlanSource {
    fn find(name: &str) -> Result<Self, PlanError> {
        let is_path = name.contains('/') || name.ends_with(".toml");
        if !is_path && let Some(source) = Self::built_in(name) {
            return Ok(source);
        }
        let path = Path::new(name);
        if !is_path && !path.exists() {
            let known: Vec<&str> = built_in::built_in()
                .iter()
                .filter(|plan| !plan.is_part)
                .map(|plan| plan.name)
                .collect();
            return Err(PlanError::file(
                path,
                format!("neither a file nor a built-in plan; those are {}", known.join(", ")),
            ));
        }
        Self::read(path)
    }

    fn built_in(name: &str) -> Option<Self> {
        let name = name.strip_suffix(".toml").unwrap_or(name);
        built_in::built_in().iter().find(|plan| plan.name == name).map(|plan| Self {
            name: plan.name.to_owned(),
            shown: format!("built-in plan {}", plan.name),
            text: plan.text.to_owned(),
            folder: None,
        })
    }

    fn read(path: &Path) -> Result<Self, PlanError> {
        let text = laxity_files::read_to_string(path, CONFIG_BYTES_MAX)
            .map_err(|error| PlanError::file(path, format!("cannot be read: {error}")))?;
        Ok(Self {
            name: path
                .file_stem()
                .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned()),
            shown: path.display().to_string(),
            text,
            folder: Some(path.parent().unwrap_or(Path::new("")).to_owned()),
        })
    }

    fn parent(&self, name: &str) -> Option<Result<Self, PlanError>> {
        self.folder
            .as_ref()
            .map(|folder| folder.join(name))
            .filter(|path| path.is_file())
            .map(|path| Self::read(&path))
            .or_else(|| Self::built_in(name).map(Ok))
    }
}

#[derive(Default)]
pub(super) struct PlanDraft {
    pub(super) name: Option<String>,
    pub(super) title: Option<String>,
    pub(super) question: Option<String>,
    pub(super) seeds: Option<Vec<u64>>,
    pub(super) base: BTreeMap<String, Setting>,
    pub(super) axes: Option<Vec<Axis>>,
    pub(super) variants: Option<Vec<Variant>>,
    pub(super) reference: Option<(String, SourceLocation)>,
    pub(super) x: Option<(String, SourceLocation)>,
    pub(super) metrics: Option<Vec<&'static Metric>>,
    pub(super) at: Option<(String, SourceLocation)>,
}

impl PlanDraft {
    fn over(mut self, parent: Self) -> Self {
        let mut base = parent.base;
        base.append(&mut self.base);
        Self {
            name: self.name,
            title: self.title.or(parent.title),
            question: self.question.or(parent.question),
            seeds: self.seeds.or(parent.seeds),
            base,
            axes: self.axes.or(parent.axes),
            variants: self.variants.or(parent.variants),
            reference: self.reference.or(parent.reference),
            x: self.x.or(parent.x),
            metrics: self.metrics.or(parent.metrics),
            at: self.at.or(parent.at),
        }
    }

    fn finish(self, name: String, whole: SourceLocation) -> Result<Plan, PlanError> {
        let name = self.name.unwrap_or(name);
        let variants = match self.variants {
            Some(variants) => variants,
            None => vec![Variant {
                name: self
                    .base
                    .get(KIND)
                    .map_or_else(|| "laxity".to_owned(), |setting| shown(&setting.value)),
                settings: Vec::new(),
            }],
        };
        if let Some((wanted, place)) = &self.reference
            && !variants.iter().any(|v| v.name == *wanted)
        {
            let known: Vec<&str> = variants.iter().map(|v| v.name.as_str()).collect();
            return Err(PlanError::new(
                place,
                "reference",
                format!("no variant `{wanted}`; there are {}", known.join(", ")),
            ));
        }
        let axes = self.axes.unwrap_or_default();
        if let Some((wanted, place)) = &self.x {
            let known: Vec<&str> = axes.iter().map(Axis::key).collect();
            let problem = match axes.iter().find(|axis| axis.is(wanted)) {
                None => format!("no axis `{wanted}`; there are {}", known.join(", ")),
                Some(axis) if !axis.is_numeric() => "its values are no numbers".to_owned(),
                Some(_) => String::new(),
            };
            if !problem.is_empty() {
                return Err(PlanError::new(place, "plot.x", problem));
            }
        }
        let plan = Plan {
            title: self.title.unwrap_or_else(|| name.clone()),
            question: self.question.unwrap_or_default(),
            seeds: self.seeds.unwrap_or_else(|| vec![1]),
            base: self.base,
            axes,
            variants,
            plot: Plot {
                x: self.x.map(|(x, _)| x),
                metrics: self.metrics.unwrap_or_else(|| vec![&crate::report::metric::ATTAINMENT]),
                at: self.at.as_ref().map(|(at, _)| at.clone()),
            },
            reference: self.reference.map(|(name, _)| name),
            name,
            place: whole,
        };
        plan.check_axes()?;
        if let (Some((at, place)), Some(x)) = (&self.at, plan.x())
            && !plan.axes[x].values.iter().any(|choice| choice.name == *at)
        {
            let problem = format!("`{at}` is no value of the axis {}", plan.axes[x].key());
            return Err(PlanError::new(place, "plot.at", problem));
        }
        Ok(plan)
    }
}

impl Plan {
    /// Reads a built-in plan, or a file if `name` is a path.
    /// The error has the problem of the plan and its location.
    pub fn load(name: &str) -> Result<Self, PlanError> {
        Self::of(&PlanSource::find(name)?)
    }

    /// Parses a plan. `shown` is its name in messages.
    /// The error has the problem of the plan and its location.
    pub fn parse(name: &str, shown: &str, text: &str) -> Result<Self, PlanError> {
        Self::of(&PlanSource {
            name: name.to_owned(),
            shown: shown.to_owned(),
            text: text.to_owned(),
            folder: None,
        })
    }

    pub fn empty(name: &str, title: &str) -> Self {
        let draft = PlanDraft { title: Some(title.to_owned()), ..PlanDraft::default() };
        draft
            .finish(name.to_owned(), SourceLocation::whole(name))
            .expect("nothing in it can be wrong")
    }

    fn of(source: &PlanSource) -> Result<Self, PlanError> {
        let draft = read(source, &mut Vec::new())?;
        draft.finish(source.name.clone(), SourceLocation::whole(&source.shown))
    }
}

/// Reads a plan and its parents. `chain` has the names of the plans that inherit from it.
fn read(source: &PlanSource, chain: &mut Vec<String>) -> Result<PlanDraft, PlanError> {
    let places = Places::of(&source.shown, &source.text);
    let table = DeTable::parse(&source.text).map_err(|error| {
        let place = error.span().map_or_else(|| places.whole(), |span| places.at(&span));
        PlanError::new(&place, "", error.message())
    })?;
    let (draft, parent) = Reader::of(places).plan(table.get_ref())?;
    let Some((parent, place)) = parent else { return Ok(draft) };
    chain.push(source.shown.clone());
    let parent = source.parent(&parent).unwrap_or_else(|| {
        Err(PlanError::new(
            &place,
            "base_plan",
            format!("`{parent}` is neither a file beside this one nor a built-in plan"),
        ))
    })?;
    if chain.contains(&parent.shown) {
        return Err(PlanError::new(
            &place,
            "base_plan",
            format!("{} inherits from itself", parent.shown),
        ));
    }
    Ok(draft.over(read(&parent, chain)?))
}
