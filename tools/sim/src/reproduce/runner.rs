//! Evaluates the claims of papers, which are TOML files in `claims/`.
//!
//! A file has one `[[claim]]` for each claim. `here` and `baseline` are texts in which `{…}` is an
//! expression. `holds` is an expression that is true or false:
//!
//! ```toml
//! [[claim]]
//! each = ["1.4", "2"]            # optional: one claim for each of these, as the variable `each`
//! let = ['fcfs = of(each, "fcfs", "ttft p95")']    # optional: names for expressions, in order
//! says = "SJF lowers TTFT p95"
//! paper = "2.92 times without it"
//! here = '{fixed(mean(fcfs), 1)} s with FCFS'
//! regime = "heavy mix, calibration {each}"
//! baseline = '{spread(of(each, "sjf", "ttft p95"))} s with SJF'
//! holds = 'below(of(each, "sjf", "ttft p95"), fcfs)'
//! ```
//!
//! Expressions are those of the crate `evalexpr`, with the additional functions below. [`Figures`]
//! adds the functions of a paper. A list has one value for each seed.
//!
//! | function | result |
//! |---|---|
//! | `mean(list)`, `least(list)`, `most(list)` | a number |
//! | `ratio(list, list)` | a list: the one over the other, seed by seed |
//! | `below(list, list)` | whether all of the one are below all of the other |
//! | `spread(list)` | a text: mean ± half the range |
//! | `fixed(number, decimals)`, `signed(number, decimals)` | a text |

use evalexpr::{Context, EvalexprError, EvalexprResult, Value};
use serde::Deserialize;

use crate::requests::reproduction::{Claim, spread};

pub trait Figures {
    /// Returns the value of a function, or `None` if there is no such function, row or column.
    fn call(&self, function: &str, arguments: &[Value]) -> Option<Value>;
}

/// A claim that cannot be evaluated. The file of claims must be corrected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the claim “{says}”: {problem}")]
pub struct ClaimError {
    pub says: String,
    pub problem: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClaimText {
    #[serde(default)]
    each: Vec<String>,
    #[serde(default)]
    r#let: Vec<String>,
    says: String,
    paper: String,
    here: String,
    regime: String,
    baseline: String,
    holds: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClaimsFile {
    claim: Vec<ClaimText>,
}

/// Evaluates the claims of a file.
/// Fails at the first claim that cannot be evaluated.
pub fn run(file: &str, figures: &dyn Figures) -> Result<Vec<Claim>, ClaimError> {
    let file: ClaimsFile = toml::from_str(file)
        .map_err(|error| ClaimError { says: String::new(), problem: error.to_string() })?;
    let mut found = Vec::new();
    for claim in &file.claim {
        let places = match claim.each.as_slice() {
            [] => &[String::new()],
            each => each,
        };
        for place in places {
            let evaluated = evaluate(claim, place, figures);
            found.push(evaluated.map_err(|problem| ClaimError {
                says: claim.says.clone(),
                problem: problem.to_string(),
            })?);
        }
    }
    Ok(found)
}

fn evaluate(text: &ClaimText, place: &str, figures: &dyn Figures) -> EvalexprResult<Claim> {
    let mut scope = Scope::new(figures);
    scope.set("each", Value::from(place));
    for named in &text.r#let {
        let (name, expression) = named
            .split_once('=')
            .ok_or_else(|| EvalexprError::CustomMessage(format!("{named} is no NAME = VALUE")))?;
        let value = scope.value(expression)?;
        scope.set(name.trim(), value);
    }
    Ok(Claim {
        says: scope.fill(&text.says)?,
        paper: text.paper.clone(),
        here: scope.fill(&text.here)?,
        regime: scope.fill(&text.regime)?,
        baseline: scope.fill(&text.baseline)?,
        holds: scope.value(&text.holds)?.as_boolean()?,
    })
}

pub struct Scope<'a> {
    figures: &'a dyn Figures,
    variables: Vec<(String, Value)>,
}

impl<'a> Scope<'a> {
    pub const fn new(figures: &'a dyn Figures) -> Self {
        Self { figures, variables: Vec::new() }
    }

    pub fn set(&mut self, name: &str, value: Value) {
        self.variables.push((name.to_owned(), value));
    }

    /// Returns the value of an expression.
    /// Fails if the expression is invalid or contains unknown names.
    pub fn value(&self, expression: &str) -> EvalexprResult<Value> {
        evalexpr::eval_with_context(expression, self)
    }

    fn fill(&self, text: &str) -> EvalexprResult<String> {
        let mut parts = text.split('{');
        let mut filled = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (expression, after) = part
                .split_once('}')
                .ok_or_else(|| EvalexprError::CustomMessage(format!("no }} in {text}")))?;
            match self.value(expression)? {
                Value::String(text) => filled += &text,
                other => filled += &other.to_string(),
            }
            filled += after;
        }
        Ok(filled)
    }
}

impl Context for Scope<'_> {
    fn get_value(&self, identifier: &str) -> Option<&Value> {
        let found = self.variables.iter().rev().find(|v| v.0 == identifier);
        found.map(|(_, value)| value)
    }

    fn call_function(&self, function: &str, argument: &Value) -> EvalexprResult<Value> {
        let arguments = match argument {
            Value::Tuple(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        let pair = |at: usize| {
            let lacks = || EvalexprError::CustomMessage(format!("{function} lacks an argument"));
            arguments.get(at).ok_or_else(lacks)
        };
        let fold = |by: fn(f64, f64) -> f64| Ok(numbers(argument)?.into_iter().fold(f64::NAN, by));
        Ok(match function {
            "mean" => {
                let list = numbers(argument)?;
                Value::Float(list.iter().sum::<f64>() / list.len().max(1) as f64)
            }
            "least" => Value::Float(fold(f64::min)?),
            "most" => Value::Float(fold(f64::max)?),
            "ratio" | "below" => {
                let (one, other) = (numbers(pair(0)?)?, numbers(pair(1)?)?);
                match function {
                    "ratio" => list(one.iter().zip(other).map(|(one, other)| one / other)),
                    _ => Value::from(one.iter().all(|one| other.iter().all(|other| one < other))),
                }
            }
            "spread" => Value::from(spread(&numbers(argument)?)),
            "fixed" | "signed" => {
                let (number, decimals) = (pair(0)?.as_number()?, pair(1)?.as_int()?);
                let decimals = usize::try_from(decimals).unwrap_or(0);
                Value::from(match function {
                    "fixed" => format!("{number:.decimals$}"),
                    _ => format!("{number:+.decimals$}"),
                })
            }
            _ => self.figures.call(function, arguments).ok_or_else(|| {
                EvalexprError::CustomMessage(format!("nothing is known of {function}{argument}"))
            })?,
        })
    }

    fn are_builtin_functions_disabled(&self) -> bool {
        false
    }

    fn set_builtin_functions_disabled(&mut self, disabled: bool) -> EvalexprResult<()> {
        match disabled {
            true => Err(EvalexprError::BuiltinFunctionsCannotBeDisabled),
            false => Ok(()),
        }
    }
}

pub fn list(values: impl IntoIterator<Item = f64>) -> Value {
    Value::Tuple(values.into_iter().map(Value::Float).collect())
}

pub(crate) fn numbers(value: &Value) -> EvalexprResult<Vec<f64>> {
    match value {
        Value::Tuple(values) => values.iter().map(Value::as_number).collect(),
        one => Ok(vec![one.as_number()?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Waits;

    impl Figures for Waits {
        fn call(&self, function: &str, arguments: &[Value]) -> Option<Value> {
            match (function, arguments) {
                ("wait", [Value::String(policy)]) if policy == "fair" => Some(list([4.0, 6.0])),
                ("wait", [Value::String(policy)]) if policy == "laxity" => Some(list([2.0, 3.0])),
                _ => None,
            }
        }
    }

    const CLAIM: &str = r#"
        [[claim]]
        each = ["fair"]
        let = ['shorter = ratio(wait(each), wait("laxity"))']
        says = "less waiting"
        paper = "3 times"
        here = '{fixed(mean(shorter), 2)}×, {spread(wait("laxity"))} s, {signed(1, 1)}'
        regime = "under {each}"
        baseline = "–"
        holds = 'below(wait("laxity"), wait(each)) && mean(shorter) > 1.5 && most(shorter) <= 2'
    "#;

    #[test]
    fn a_claim_is_evaluated_with_what_runs_gave() {
        let found = run(CLAIM, &Waits).expect("a claim");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].here, "2.00×, 2.50 ± 0.50 s, +1.0");
        assert_eq!(found[0].regime, "under fair");
        assert!(found[0].holds);
    }

    #[test]
    fn what_nothing_is_known_of_is_an_error_that_names_the_claim() {
        let error = run(&CLAIM.replace("\"fair\"", "\"edf\""), &Waits).expect_err("no row");
        assert_eq!(error.says, "less waiting");
        assert!(error.problem.contains("edf"), "{error}");
    }
}
