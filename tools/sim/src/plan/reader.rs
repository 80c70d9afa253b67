//! Parses the TOML of a plan and keeps the location of every value.

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::Value;
use toml::de::{DeArray, DeTable, DeValue};

use super::place::{Places, PlanError, SourceLocation};
use super::setting::{Setting, shown};
use super::source::PlanDraft;
use super::{Axis, Choice, KIND, Variant, label};
use crate::report::Metric;

type Node<'t, 'i> = &'t Spanned<DeValue<'i>>;

pub(super) struct Reader<'a> {
    places: Places<'a>,
}

impl<'a> Reader<'a> {
    pub(super) fn of(places: Places<'a>) -> Self {
        Self { places }
    }

    fn place<T>(&self, node: &Spanned<T>) -> SourceLocation {
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

    pub(super) fn plan(
        &self,
        table: &DeTable<'_>,
    ) -> Result<(PlanDraft, Option<(String, SourceLocation)>), PlanError> {
        let mut draft = PlanDraft::default();
        let mut parent = None;
        let (mut policies, mut variants) = (Vec::new(), Vec::new());
        for (key, node) in table {
            match key.get_ref().as_ref() {
                "name" => draft.name = Some(self.text(node, "name")?),
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
                        "no such field; a plan has name, title, question, base_plan, seeds, \
                         policies, \
                         reference, base, axis, variant, plot",
                    );
                }
            }
        }
        policies.append(&mut variants);
        for (index, (variant, place)) in policies.iter().enumerate() {
            if policies[..index].iter().any(|(v, _)| v.name == variant.name) {
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

    fn policies(&self, node: Node<'_, '_>) -> Result<Vec<(Variant, SourceLocation)>, PlanError> {
        let mut found = Vec::new();
        for node in self.list(node, "policies", "policies")? {
            let name = self.text(node, "policies")?;
            let place = self.place(node);
            let setting = Setting {
                field: KIND.to_owned(),
                value: Value::String(name.clone()),
                place: place.clone(),
            };
            setting.check(&place)?;
            found.push((Variant { name, settings: vec![setting] }, place));
        }
        Ok(found)
    }

    fn variants(&self, node: Node<'_, '_>) -> Result<Vec<(Variant, SourceLocation)>, PlanError> {
        let mut found = Vec::new();
        for node in self.list(node, "variant", "variants")? {
            let table = self.table(node, "variant")?;
            let name = self.name(node, table, "variant.name")?;
            let settings = self.settings(table, &["name"])?;
            found.push((Variant { name, settings }, self.place(node)));
        }
        Ok(found)
    }

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

    /// Returns the leaves of a table as settings. Groups may be tables or dotted keys.
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
        key: &SourceLocation,
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
        Setting { field: field.to_owned(), value: value_of(node), place: self.place(node) }
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
        let label = table.get("label").map(|node| self.text(node, "axis.label")).transpose()?;
        let axis = match (table.get("field"), table.get("values"), table.get("settings")) {
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
        Ok(Axis { label, field: None, values: choices })
    }

    fn plot(&self, table: &DeTable<'_>, draft: &mut PlanDraft) -> Result<(), PlanError> {
        for (key, node) in table {
            match key.get_ref().as_ref() {
                "x" => draft.x = Some((self.text(node, "plot.x")?, self.place(node))),
                "at" => draft.at = Some((shown(&value_of(node)), self.place(node))),
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

/// Converts a value without its location. Only a number outside of its type's range fails. It stays
/// a text, which is then rejected as a number.
fn value_of(node: Node<'_, '_>) -> Value {
    Value::deserialize(node.clone().into_deserializer()).unwrap_or_else(|_| {
        Value::String(match node.get_ref() {
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            other => other.type_str().to_owned(),
        })
    })
}
