//! Extreme numbers in a plan are either rejected with the field's name or simulated to an end. The
//! simulator must neither panic nor hang.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use laxity_sim::scenario::Scenario;
use laxity_sim::simulate;
use serde::Deserialize;
use toml::{Table, Value};

/// Longest time that a simulation may take. One of this size needs well under a second.
const PATIENCE: Duration = Duration::from_secs(120);

/// One prefill unit and one decode rank, for one second.
const SMALL: &str = "
seed = 1
[cluster]
servers = 2
gpus_per_server = 2
[model]
name = 'llama-3-8b'
tp = 2
ep = 1
[serving]
decode_tp = 2
[workload]
rate_per_gpu = 4.0
seconds = 1.0
";

const FLOATS: [f64; 14] = [
    0.0,
    -1.0,
    f64::MIN_POSITIVE,
    5e-324,
    -5e-324,
    1e-308,
    1e-12,
    1e12,
    1e308,
    -1e308,
    f64::MAX,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];
const WHOLE: [i64; 9] = [0, 1, -1, 7, 1 << 29, 4_294_967_295, 4_294_967_296, i64::MAX, i64::MIN];

fn tree() -> Table {
    let small: Scenario = toml::from_str(SMALL).expect("a scenario");
    Table::try_from(small).expect("a tree")
}

fn outcome(tree: Table, field: &str) -> Result<(), String> {
    let Ok(scenario) = Scenario::deserialize(Value::Table(tree)) else {
        return Ok(()); // It is no number of the field's type.
    };
    if let Err(wrong) = scenario.validate() {
        let named = wrong.field.split('.').count() == 2 && !wrong.problem.is_empty();
        return if named { Ok(()) } else { Err(wrong.to_string()) };
    }
    let (tell, told) = channel();
    let asked = field.to_owned();
    thread::spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(|| simulate(&scenario).map(drop)));
        // Errors that only the simulation detects, such as no arriving request, are allowed.
        let _ = tell.send(ended.map(drop).map_err(|_| format!("{asked}: it panics")));
    });
    told.recv_timeout(PATIENCE)
        .unwrap_or_else(|_| Err(format!("{field}: no end within {PATIENCE:?}")))
}

fn extremes(of: &Value) -> Vec<Value> {
    match of {
        Value::Float(_) => FLOATS.map(Value::Float).to_vec(),
        Value::Integer(_) => WHOLE.map(Value::Integer).to_vec(),
        _ => Vec::new(),
    }
}

#[test]
fn a_number_of_a_plan_is_refused_or_simulated_to_an_end() {
    let tree = tree();
    let mut wrong = Vec::new();
    let mut tried = 0;
    for (group, fields) in &tree {
        let Some(fields) = fields.as_table() else {
            continue; // the seed: any will do
        };
        for (field, value) in fields {
            for extreme in extremes(value) {
                let mut changed = tree.clone();
                let group_of = changed[group].as_table_mut().expect("a group");
                group_of.insert(field.clone(), extreme.clone());
                let name = format!("{group}.{field} = {extreme}");
                tried += 1;
                wrong.extend(outcome(changed, &name).err());
            }
        }
    }
    assert!(tried > 300, "{tried} values of all numbers");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
