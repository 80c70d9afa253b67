//! Reads plans: TOML with the place of everything in it, and plans that inherit from others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::Value;
use toml::de::{DeArray, DeTable, DeValue};

use super::place::{Place, Places, PlanError};
use super::setting::{Setting, shown};
use super::{Axis, Choice, Plan, Plot, Variant, built_in, label};
use crate::report::Metric;

/// The text of a plan and where it is from.
struct Source {
    /// Without `.toml`.
    name: String,
    /// As messages call it.
    shown: String,
    text: String,
    /// Where plans that it inherits from lie.
    folder: Option<PathBuf>,
}

impl Source {
    /// A built-in plan's name, or a path.
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
                format!(
                    "neither a file nor a built-in plan; those are {}",
                    known.join(", ")
                ),
            ));
        }
        Self::read(path)
    }

    fn built_in(name: &str) -> Option<Self> {
        let name = name.strip_suffix(".toml").unwrap_or(name);
        built_in::built_in()
            .iter()
            .find(|plan| plan.name == name)
            .map(|plan| Self {
                name: plan.name.to_owned(),
                shown: format!("built-in plan {}", plan.name),
                text: plan.text.to_owned(),
                folder: None,
            })
    }

    fn read(path: &Path) -> Result<Self, PlanError> {
        let text = fs::read_to_string(path)
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

    /// A plan that this one inherits from: a file beside it, else a built-in.
    fn parent(&self, name: &str) -> Option<Result<Self, PlanError>> {
        self.folder
            .as_ref()
            .map(|folder| folder.join(name))
            .filter(|path| path.is_file())
            .map(|path| Self::read(&path))
            .or_else(|| Self::built_in(name).map(Ok))
    }
}

/// What a file says; what it leaves out comes from the plan that it inherits from.
#[derive(Default)]
struct Draft {
    title: Option<String>,
    question: Option<String>,
    seeds: Option<Vec<u64>>,
    base: BTreeMap<String, Setting>,
    axes: Option<Vec<Axis>>,
    variants: Option<Vec<Variant>>,
    reference: Option<(String, Place)>,
    x: Option<(String, Place)>,
    metrics: Option<Vec<&'static Metric>>,
    at: Option<String>,
}

impl Draft {
    fn over(mut self, parent: Self) -> Self {
        let mut base = parent.base;
        base.append(&mut self.base);
        Self {
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

    fn finish(self, name: String, whole: Place) -> Result<Plan, PlanError> {
        let variants = match self.variants {
            Some(variants) => variants,
            None => vec![Variant {
                name: self
                    .base
                    .get("policy.kind")
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
        if let Some((wanted, place)) = &self.x
            && !axes.iter().any(|axis| axis.is(wanted))
        {
            let known: Vec<&str> = axes
                .iter()
                .map(|a| a.field.as_deref().unwrap_or(&a.label))
                .collect();
            return Err(PlanError::new(
                place,
                "plot.x",
                format!("no axis `{wanted}`; there are {}", known.join(", ")),
            ));
        }
        Ok(Plan {
            title: self.title.unwrap_or_else(|| name.clone()),
            question: self.question.unwrap_or_default(),
            seeds: self.seeds.unwrap_or_else(|| vec![1]),
            base: self.base,
            axes,
            variants,
            plot: Plot {
                x: self.x.map(|(x, _)| x),
                metrics: self
                    .metrics
                    .unwrap_or_else(|| vec![&crate::report::metric::ATTAINMENT]),
                at: self.at,
            },
            reference: self.reference.map(|(name, _)| name),
            name,
            place: whole,
        })
    }
}

impl Plan {
    /// Reads a built-in plan, or a file if `name` is a path.
    ///
    /// # Errors
    /// What is wrong with the plan, and where.
    pub fn load(name: &str) -> Result<Self, PlanError> {
        Self::of(&Source::find(name)?)
    }

    /// Reads a plan from a text; `shown` is what messages call it.
    ///
    /// # Errors
    /// What is wrong with the plan, and where.
    pub fn parse(name: &str, shown: &str, text: &str) -> Result<Self, PlanError> {
        Self::of(&Source {
            name: name.to_owned(),
            shown: shown.to_owned(),
            text: text.to_owned(),
            folder: None,
        })
    }

    /// A plan that varies nothing: to add axes to.
    #[must_use]
    pub fn empty(name: &str, title: &str) -> Self {
        let draft = Draft {
            title: Some(title.to_owned()),
            ..Draft::default()
        };
        draft
            .finish(name.to_owned(), Place::whole(name))
            .expect("nothing in it can be wrong")
    }

    fn of(source: &Source) -> Result<Self, PlanError> {
        let draft = read(source, &mut Vec::new())?;
        draft.finish(source.name.clone(), Place::whole(&source.shown))
    }
}

type Node<'t, 'i> = &'t Spanned<DeValue<'i>>;

/// Reads a source and what it inherits from. `chain`: who inherits from it.
fn read(source: &Source, chain: &mut Vec<String>) -> Result<Draft, PlanError> {
    let places = Places::of(&source.shown, &source.text);
    let table = DeTable::parse(&source.text).map_err(|error| {
        let place = error
            .span()
            .map_or_else(|| places.whole(), |span| places.at(&span));
        PlanError::new(&place, "", error.message())
    })?;
    let reader = Reader { places };
    let (draft, parent) = reader.plan(table.get_ref())?;
    let Some((parent, place)) = parent else {
        return Ok(draft);
    };
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

struct Reader<'a> {
    places: Places<'a>,
}

impl Reader<'_> {
    fn place<T>(&self, node: &Spanned<T>) -> Place {
        self.places.at(&node.span())
    }

    fn wrong<T, R>(
        &self,
        node: &Spanned<T>,
        field: &str,
        problem: impl Into<String>,
    ) -> Result<R, PlanError> {
        Err(PlanError::new(&self.place(node), field, problem))
    }

    fn expected<R>(&self, node: Node<'_, '_>, field: &str, what: &str) -> Result<R, PlanError> {
        let found = node.get_ref().type_str();
        self.wrong(node, field, format!("expected {what}, found {found}"))
    }

    fn text(&self, node: Node<'_, '_>, field: &str) -> Result<String, PlanError> {
        match node.get_ref().as_str() {
            Some(text) => Ok(text.to_owned()),
            None => self.expected(node, field, "a string"),
        }
    }

    fn list<'t, 'i>(
        &self,
        node: Node<'t, 'i>,
        field: &str,
        of: &str,
    ) -> Result<&'t DeArray<'i>, PlanError> {
        match node.get_ref().as_array() {
            Some(list) if list.is_empty() => self.wrong(node, field, format!("no {of}")),
            Some(list) => Ok(list),
            None => self.expected(node, field, &format!("a list of {of}")),
        }
    }

    fn table<'t, 'i>(&self, node: Node<'t, 'i>, field: &str) -> Result<&'t DeTable<'i>, PlanError> {
        match node.get_ref().as_table() {
            Some(table) => Ok(table),
            None => self.expected(node, field, "a table"),
        }
    }

    fn whole_number(&self, node: Node<'_, '_>, field: &str) -> Result<u64, PlanError> {
        match value_of(node).as_integer().map(u64::try_from) {
            Some(Ok(number)) => Ok(number),
            _ => self.expected(node, field, "a whole number, 0 or above"),
        }
    }

    /// A plan, and the name of the one that it inherits from.
    fn plan(&self, table: &DeTable<'_>) -> Result<(Draft, Option<(String, Place)>), PlanError> {
        let mut draft = Draft::default();
        let mut parent = None;
        let (mut policies, mut variants) = (Vec::new(), Vec::new());
        for (key, node) in table {
            match key.get_ref().as_ref() {
                "title" => draft.title = Some(self.text(node, "title")?),
                "question" => draft.question = Some(self.text(node, "question")?),
                "base_plan" => {
                    parent = Some((self.text(node, "base_plan")?, self.place(node)));
                }
                "seeds" => draft.seeds = Some(self.seeds(node)?),
                "policies" => policies = self.policies(node)?,
                "reference" => {
                    draft.reference = Some((self.text(node, "reference")?, self.place(node)));
                }
                "base" => {
                    for setting in self.settings(self.table(node, "base")?, &[])? {
                        draft.base.insert(setting.field.clone(), setting);
                    }
                }
                "axis" => draft.axes = Some(self.axes(node)?),
                "variant" => variants = self.variants(node)?,
                "plot" => self.plot(self.table(node, "plot")?, &mut draft)?,
                other => {
                    return self.wrong(
                        key,
                        other,
                        "no such field; a plan has title, question, base_plan, seeds, policies, \
                         reference, base, axis, variant, plot",
                    );
                }
            }
        }
        policies.append(&mut variants);
        for (index, (variant, place)) in policies.iter().enumerate() {
            if policies[..index]
                .iter()
                .any(|(v, _)| v.name == variant.name)
            {
                return Err(PlanError::new(
                    place,
                    "variant",
                    format!("`{}` is there twice", variant.name),
                ));
            }
        }
        if !policies.is_empty() {
            draft.variants = Some(policies.into_iter().map(|(variant, _)| variant).collect());
        }
        Ok((draft, parent))
    }

    fn seeds(&self, node: Node<'_, '_>) -> Result<Vec<u64>, PlanError> {
        let Some(list) = node.get_ref().as_array() else {
            let count = match value_of(node).as_integer() {
                Some(count @ 1..=10_000) => count.unsigned_abs(),
                _ => return self.expected(node, "seeds", "how many (1 to 10000), or a list"),
            };
            return Ok((1..=count).collect());
        };
        if list.is_empty() {
            return self.wrong(node, "seeds", "no seeds");
        }
        let mut seeds = Vec::new();
        for node in list {
            let seed = self.whole_number(node, "seeds")?;
            if seeds.contains(&seed) {
                return self.wrong(node, "seeds", format!("{seed} is there twice"));
            }
            seeds.push(seed);
        }
        Ok(seeds)
    }

    fn policies(&self, node: Node<'_, '_>) -> Result<Vec<(Variant, Place)>, PlanError> {
        let mut found = Vec::new();
        for node in self.list(node, "policies", "policies")? {
            let name = self.text(node, "policies")?;
            let place = self.place(node);
            let setting = Setting {
                field: "policy.kind".to_owned(),
                value: Value::String(name.clone()),
                place: place.clone(),
            };
            setting.check(&place)?;
            found.push((
                Variant {
                    name,
                    settings: vec![setting],
                },
                place,
            ));
        }
        Ok(found)
    }

    fn variants(&self, node: Node<'_, '_>) -> Result<Vec<(Variant, Place)>, PlanError> {
        let mut found = Vec::new();
        for node in self.list(node, "variant", "variants")? {
            let table = self.table(node, "variant")?;
            let name = self.name(node, table, "variant.name")?;
            let settings = self.settings(table, &["name"])?;
            found.push((Variant { name, settings }, self.place(node)));
        }
        Ok(found)
    }

    /// The `name` that a variant or a value of an axis must have.
    fn name(
        &self,
        node: Node<'_, '_>,
        table: &DeTable<'_>,
        field: &str,
    ) -> Result<String, PlanError> {
        match table.get("name") {
            Some(name) => self.text(name, field),
            None => self.wrong(node, field, "missing; every one needs a name"),
        }
    }

    /// The settings of a table: its leaves, whether groups are tables or dotted keys.
    fn settings(&self, table: &DeTable<'_>, besides: &[&str]) -> Result<Vec<Setting>, PlanError> {
        let mut found = Vec::new();
        for (key, node) in table {
            if !besides.contains(&key.get_ref().as_ref()) {
                self.leaves(key.get_ref(), &self.place(key), node, &mut found)?;
            }
        }
        Ok(found)
    }

    fn leaves(
        &self,
        field: &str,
        key: &Place,
        node: Node<'_, '_>,
        found: &mut Vec<Setting>,
    ) -> Result<(), PlanError> {
        if let Some(table) = node.get_ref().as_table() {
            for (inner, node) in table {
                let field = format!("{field}.{}", inner.get_ref());
                self.leaves(&field, &self.place(inner), node, found)?;
            }
            return Ok(());
        }
        let setting = self.setting(field, node);
        setting.check(key)?;
        found.push(setting);
        Ok(())
    }

    fn setting(&self, field: &str, node: Node<'_, '_>) -> Setting {
        Setting {
            field: field.to_owned(),
            value: value_of(node),
            place: self.place(node),
        }
    }

    fn axes(&self, node: Node<'_, '_>) -> Result<Vec<Axis>, PlanError> {
        let mut found: Vec<Axis> = Vec::new();
        for node in self.list(node, "axis", "axes")? {
            let axis = self.axis(node)?;
            let twice = found.iter().any(|other| {
                other.label == axis.label || (axis.field.is_some() && other.field == axis.field)
            });
            if twice {
                return self.wrong(node, "axis", format!("`{}` is there twice", axis.label));
            }
            found.push(axis);
        }
        Ok(found)
    }

    fn axis(&self, node: Node<'_, '_>) -> Result<Axis, PlanError> {
        let table = self.table(node, "axis")?;
        for key in table.keys() {
            if !["field", "values", "names", "label", "settings"].contains(&key.get_ref().as_ref())
            {
                return self.wrong(
                    key,
                    &format!("axis.{}", key.get_ref()),
                    "no such field; an axis has field and values, or settings; and label and names",
                );
            }
        }
        let label = match table.get("label") {
            Some(node) => Some(self.text(node, "axis.label")?),
            None => None,
        };
        let axis = match (
            table.get("field"),
            table.get("values"),
            table.get("settings"),
        ) {
            (Some(field), Some(values), None) => {
                let names = table.get("names");
                self.axis_of_values(field, values, names, label)?
            }
            (None, None, Some(settings)) if table.get("names").is_none() => {
                let Some(label) = label else {
                    return self.wrong(node, "axis.label", "missing; settings need a label");
                };
                self.axis_of_settings(settings, label)?
            }
            _ => {
                return self.wrong(
                    node,
                    "axis",
                    "expected `field` and `values`, or `settings` (whose entries have names)",
                );
            }
        };
        for (index, choice) in axis.values.iter().enumerate() {
            if axis.values[..index].iter().any(|c| c.name == choice.name) {
                return self.wrong(node, "axis", format!("`{}` is there twice", choice.name));
            }
        }
        Ok(axis)
    }

    fn axis_of_values(
        &self,
        field: Node<'_, '_>,
        values: Node<'_, '_>,
        names: Option<Node<'_, '_>>,
        label: Option<String>,
    ) -> Result<Axis, PlanError> {
        let key = self.place(field);
        let field = self.text(field, "axis.field")?;
        let list = self.list(values, "axis.values", "values")?;
        let mut choices = Vec::new();
        for node in list {
            let setting = self.setting(&field, node);
            setting.check(&key)?;
            choices.push(Choice::of(setting));
        }
        if let Some(node) = names {
            let names = self.list(node, "axis.names", "names")?;
            if names.len() != choices.len() {
                return self.wrong(
                    node,
                    "axis.names",
                    format!("{} names for {} values", names.len(), choices.len()),
                );
            }
            for (choice, node) in choices.iter_mut().zip(names) {
                choice.name = self.text(node, "axis.names")?;
            }
        }
        Ok(Axis {
            label: label.unwrap_or_else(|| label::of(&field).to_owned()),
            field: Some(field),
            values: choices,
        })
    }

    fn axis_of_settings(&self, node: Node<'_, '_>, label: String) -> Result<Axis, PlanError> {
        let mut choices = Vec::new();
        for node in self.list(node, "axis.settings", "tables")? {
            let table = self.table(node, "axis.settings")?;
            choices.push(Choice {
                name: self.name(node, table, "axis.settings.name")?,
                number: None,
                settings: self.settings(table, &["name"])?,
            });
        }
        Ok(Axis {
            label,
            field: None,
            values: choices,
        })
    }

    fn plot(&self, table: &DeTable<'_>, draft: &mut Draft) -> Result<(), PlanError> {
        for (key, node) in table {
            match key.get_ref().as_ref() {
                "x" => draft.x = Some((self.text(node, "plot.x")?, self.place(node))),
                "at" => draft.at = Some(shown(&value_of(node))),
                "metrics" => {
                    let mut metrics = Vec::new();
                    for node in self.list(node, "plot.metrics", "metrics")? {
                        let name = self.text(node, "plot.metrics")?;
                        let Some(metric) = Metric::named(&name) else {
                            return self.wrong(
                                node,
                                "plot.metrics",
                                format!(
                                    "no metric `{name}`; there are {}",
                                    Metric::names().join(", ")
                                ),
                            );
                        };
                        metrics.push(metric);
                    }
                    draft.metrics = Some(metrics);
                }
                other => {
                    return self.wrong(
                        key,
                        &format!("plot.{other}"),
                        "no such field; a plot has x, metrics, at",
                    );
                }
            }
        }
        Ok(())
    }
}

impl Choice {
    /// The value of an axis over one field, named as it is written.
    pub(super) fn of(setting: Setting) -> Self {
        Self {
            name: shown(&setting.value),
            number: match setting.value {
                Value::Integer(number) => Some(number as f64),
                Value::Float(number) => Some(number),
                _ => None,
            },
            settings: vec![setting],
        }
    }
}

/// A value without its place. The parser has seen that it is one; only a number beyond its type's
/// range fails, and stays a text, which is no number where one is expected.
fn value_of(node: Node<'_, '_>) -> Value {
    Value::deserialize(node.clone().into_deserializer()).unwrap_or_else(|_| {
        Value::String(match node.get_ref() {
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            other => other.type_str().to_owned(),
        })
    })
}
