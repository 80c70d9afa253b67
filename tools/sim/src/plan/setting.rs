//! A setting: one field of a scenario with its value. Base, axes, variants and `--set` consist of
//! settings.
//!
//! Each setting is checked separately when it is read, so that errors have its location. The check
//! deserialises a scenario with only that field set.

use std::sync::LazyLock;

use serde::Deserialize;
use toml::{Table, Value};

use super::place::{PlanError, SourceLocation};
use crate::scenario::{Grants, RequestOrder, ResidualChoice, Scenario};

#[derive(Clone, Debug)]
pub struct Setting {
    /// Name with its group, such as `workload.rate_per_gpu`.
    pub field: String,
    pub value: Value,
    pub place: SourceLocation,
}

static EVERY_FIELD: LazyLock<Table> = LazyLock::new(|| {
    let mut scenario = Scenario::default();
    scenario.workload.file = Some("file".into());
    scenario.serving.requests = RequestOrder::Edf;
    scenario.model.kv_bytes_per_value = 1.0;
    let network = &mut scenario.network;
    (network.ungoverned_share, network.ungoverned_period_ms) = (0.1, 1.0);
    network.peer_window_bytes = network.chunk_bytes;
    network.residual_mode = ResidualChoice::Follow;
    network.residual_assured_permille = 500;
    scenario.policy.grants = Grants::Shortest;
    Table::try_from(scenario).expect("a scenario is a TOML table")
});

pub(super) static DEFAULTS: LazyLock<Table> =
    LazyLock::new(|| Table::try_from(Scenario::default()).expect("a scenario is a TOML table"));

impl Setting {
    /// Checks that the field exists and that the value has its type.
    /// The location of an error is `key` if the field's name is wrong.
    pub(super) fn check(&self, key: &SourceLocation) -> Result<(), PlanError> {
        self.check_name(key)?;
        let mut tree = DEFAULTS.clone();
        self.apply(&mut tree);
        scenario_of(tree)
            .map(drop)
            .map_err(|problem| PlanError::new(&self.place, &self.field, problem))
    }

    fn check_name(&self, key: &SourceLocation) -> Result<(), PlanError> {
        let (group, name) = match self.field.split_once('.') {
            Some((group, name)) => (group, Some(name)),
            None => (self.field.as_str(), None),
        };
        let problem = match (EVERY_FIELD.get(group).and_then(Value::as_table), name) {
            _ if self.field == "seed" => "seeds are said by `seeds`, not as a setting".to_owned(),
            (Some(inner), Some(name)) if inner.contains_key(name) => return Ok(()),
            (Some(inner), None) => format!("is a group, not a field; it has {}", names(inner)),
            (Some(inner), _) => unknown(&self.field, inner, group),
            (None, _) => unknown(&self.field, &EVERY_FIELD, ""),
        };
        Err(PlanError::new(key, &self.field, problem))
    }

    /// Applies the setting to a scenario's tree. The name must have been checked.
    pub(super) fn apply(&self, tree: &mut Table) {
        let known = self.field.split_once('.');
        let group = known.and_then(|(group, name)| Some((tree.get_mut(group)?, name)));
        let Some((Value::Table(group), name)) = group else {
            unreachable!("the name has been checked");
        };
        group.insert(name.to_owned(), self.value.clone());
    }
}

pub(super) fn scenario_of(tree: Table) -> Result<Scenario, String> {
    Scenario::deserialize(Value::Table(tree)).map_err(|error| error.message().to_owned())
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name with its group, such as `workload.rate_per_gpu`.
    pub name: String,
    /// Default value. Empty if the field is omitted by default.
    pub default: String,
    pub words: Vec<String>,
}

pub fn fields() -> Vec<Field> {
    let mut found = Vec::new();
    for (group, inner) in EVERY_FIELD.iter() {
        let Some(inner) = inner.as_table() else { continue };
        for (name, value) in inner {
            let default = DEFAULTS.get(group).and_then(|group| group.get(name));
            let name = format!("{group}.{name}");
            let words = words(&name, value);
            found.push(Field {
                // The default of an omitted enumeration is its first word.
                default: default.map_or_else(|| words.first().cloned().unwrap_or_default(), shown),
                name,
                words,
            });
        }
    }
    found
}

/// Returns the allowed words of a field from the error about an unknown word. They are in backticks
/// or after `known are`.
fn words(field: &str, value: &Value) -> Vec<String> {
    let wrong = match value {
        Value::String(_) => Value::from("?"),
        Value::Array(_) => Value::from(vec!["?"]),
        _ => return Vec::new(),
    };
    let mut tree = DEFAULTS.clone();
    let setting =
        Setting { field: field.to_owned(), value: wrong, place: SourceLocation::whole("") };
    setting.apply(&mut tree);
    let Err(problem) = scenario_of(tree) else { return Vec::new() };
    if let Some((_, known)) = problem.split_once("known are ") {
        return known.split(", ").map(str::to_owned).collect();
    }
    let quoted = problem.split('`').skip(1).step_by(2);
    quoted.filter(|word| *word != "?").map(str::to_owned).collect()
}

fn names(group: &Table) -> String {
    let names: Vec<&str> =
        group.keys().map(String::as_str).filter(|&name| name != "seed").collect();
    names.join(", ")
}

/// Returns a message with the fields that exist instead of an unknown one.
fn unknown(field: &str, group: &Table, group_name: &str) -> String {
    let last = field.rsplit('.').next().unwrap_or(field);
    for (name, inner) in EVERY_FIELD.iter() {
        if inner.as_table().is_some_and(|t| t.contains_key(last)) {
            return format!("no such field; did you mean `{name}.{last}`?");
        }
    }
    match group_name {
        "" => format!("no such field; the groups are {}", names(group)),
        name => format!("no such field; `{name}` has {}", names(group)),
    }
}

/// Formats a value for names and messages. Strings have no quotes.
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let inner: Vec<String> = values.iter().map(shown).collect();
            format!("[{}]", inner.join(", "))
        }
        Value::Float(number) => number.to_string(),
        other => other.to_string(),
    }
}

pub(super) fn typed(text: &str) -> Value {
    text.trim().parse::<Value>().unwrap_or_else(|_| Value::String(text.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(field: &str, value: impl Into<Value>) -> Result<(), String> {
        let place = SourceLocation::whole("t");
        Setting { field: field.to_owned(), value: value.into(), place: place.clone() }
            .check(&place)
            .map_err(|error| error.problem)
    }

    #[test]
    fn a_field_must_exist_and_its_value_be_of_its_type() {
        check("workload.rate_per_gpu", 1).expect("an integer is a number");
        check("workload.file", "trace.jsonl").expect("a field without a default");
        check("policy.without", vec!["red"]).expect("a list");
        check("serving.requests", "edf").expect("a field that is left out by default");
        let problem = check("serving.requests", "lifo").expect_err("no such order");
        assert!(problem.contains("`edf_relegate`"), "{problem}");
        let problem = check("cluster", 1).expect_err("a group");
        assert!(problem.contains("is a group"), "{problem}");
        let problem = check("policy.levels", 300).expect_err("out of range");
        assert!(problem.contains("300"), "{problem}");
        check("seed", 3).expect_err("seeds are not set");
        check("cluster.servers.more", 3).expect_err("not a group");
    }

    #[test]
    fn fields_are_listed_with_their_defaults_and_their_words() {
        let all = fields();
        let of = |name: &str| {
            let field = all.iter().find(|field| field.name == name);
            field.unwrap_or_else(|| panic!("{name} is not listed"))
        };
        let requests = of("serving.requests");
        assert_eq!(requests.default, "fcfs");
        assert_eq!(requests.words, ["fcfs", "edf", "srpf", "edf_relegate", "qoserve"]);
        for word in &requests.words {
            check("serving.requests", word.clone()).expect("a word that is listed is taken");
        }
        let kinds = laxity_policy::PolicyKind::ALL.map(|kind| kind.name().to_owned());
        let mut listed = of("policy.kind").words.clone();
        listed.sort();
        let mut kinds = kinds.to_vec();
        kinds.sort();
        assert_eq!(listed, kinds);
        assert_eq!(of("workload.rate_per_gpu").words, Vec::<String>::new());
        assert!(of("policy.without").words.contains(&"red".to_owned()));
        assert!(of("workload.file").words.is_empty());
    }

    #[test]
    fn a_typed_value_is_toml_or_a_word() {
        assert_eq!(typed("0.5"), Value::Float(0.5));
        assert_eq!(typed("[1, 2]"), Value::from(vec![1, 2]));
        assert_eq!(typed(" mfs "), Value::from("mfs"));
        assert_eq!(typed("\"a b\""), Value::from("a b"));
        assert_eq!(typed("true"), Value::from(true));
    }
}
