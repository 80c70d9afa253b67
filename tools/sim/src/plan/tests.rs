//! Tests of plans and of the errors in invalid ones.

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Result<Plan, PlanError> {
    Plan::parse("p", "p.toml", text)
}

fn mistake(text: &str) -> (usize, usize, String, String) {
    let error = parse(text).and_then(|plan| plan.jobs().map(drop)).expect_err("a mistake");
    assert_eq!(&*error.place.file, "p.toml", "{error}");
    (error.place.line, error.place.column, error.field.clone(), error.to_string())
}

/// Line, column, field, message and plan of each mistake. Semicolons stand for line ends.
const MISTAKES: &str = r"
1:9 | title | expected a string | title = 3
1:1 | titel | a plan has name, title | titel = 'x'
1:11 |  |  | title = 'x
2:1 | servers | `cluster.servers` | [base];servers = 3
2:9 | cluster.server | `cluster` has | [base];cluster.server = 3
2:11 | cluster.servers | expected u32 | [base.cluster];servers = 'x'
2:16 | network.mode | `exact` | [base];network.mode = 'slow'
1:21 | policy.kind | known are | policies = ['fair', 'best']
1:12 | policies | no policies | policies = []
1:9 | seeds | how many | seeds = 0
1:16 | seeds | twice | seeds = [1, 2, 1]
1:10 | seeds | whole number | seeds = [-1]
1:1 | variant.name | missing | [[variant]];policy.kind = 'mfs'
2:1 | variant | twice | policies = ['mfs'];[[variant]];name = 'mfs'
1:13 | reference | no variant `mfs` | reference = 'mfs'
2:1 | plot.y | has x, metrics | [plot];y = 1
2:12 | plot.metrics | there are attainment | [plot];metrics = ['speed']
2:5 | plot.x | no axis `rate` | [plot];x = 'rate'
1:13 | base_plan | neither a file | base_plan = 'nowhere'
2:9 | cluster.nic | `cluster` has | [[axis]];field = 'cluster.nic';values = [1]
3:14 | slo.factor | expected f64 | [[axis]];field = 'slo.factor';values = [1, 'x']
3:10 | axis.values | no values | [[axis]];field = 'slo.factor';values = []
4:7 | axis.names | 1 names for 2 values | [[axis]];field = 'slo.factor';values=[1, 2];names=['one']
1:1 | axis | `1` is there twice | [[axis]];field = 'slo.factor';values = [1, 1]
1:1 | axis | values | [[axis]];field = 'slo.factor'
2:1 | axis.value | field and values, or settings | [[axis]];value = 1
1:1 | axis.label | need a label | [[axis]];settings = [{ name = 'a' }]
3:13 | axis.settings.name | missing | [[axis]];label = 'x';settings = [{ model.tp = 1 }]
3:38 | model.tp | -1 | [[axis]];label = 'x';settings = [{ name = 'a', model.tp = -1 }]
3:11 | policy.kind | `policies` | [[axis]];field = 'policy.kind';values = ['mfs', 'fair']
5:5 | plot.x | no numbers | [[axis]];field = 'model.name';values=['a','b'];[plot];x = 'model.name'
5:6 | plot.at | no value of the axis | [[axis]];field = 'slo.factor';values=[50, 100];[plot];at = 70
4:1 | axis | twice | [[axis]];field='model.tp';values=[1];[[axis]];field='model.tp';values=[1]
";

#[test]
fn a_mistake_is_told_with_its_line_column_and_field() {
    for row in MISTAKES.trim().lines() {
        let cells: Vec<&str> = row.splitn(4, " | ").collect();
        let [place, field, said, text] = cells[..] else {
            panic!("{row}");
        };
        let found = mistake(&text.replace(';', "\n"));
        let place_found = format!("{}:{}", found.0, found.1);
        assert_eq!((place_found.as_str(), found.2.as_str()), (place, field), "{}", found.3);
        assert!(found.3.contains(said), "{}", found.3);
    }
}

#[test]
fn what_makes_no_sense_together_is_told_with_the_point() {
    let text = "
policies = ['fair', 'mfs']
[base]
cluster.servers = 16
[[axis]]
field = 'workload.rate_per_gpu'
values = [0.5]
[[axis]]
label = 'model'
settings = [
  { name = 'small', 'model.tp' = 2, 'model.ep' = 16 },
  { name = 'large', 'model.tp' = 3 },
]";
    let found = mistake(text);
    assert_eq!((found.0, found.1), (12, 34), "{}", found.3);
    assert!(
        found.3.contains("(with workload.rate_per_gpu = 0.5, model = large, variant fair)"),
        "{}",
        found.3
    );
    assert!(found.3.contains("groups of 3 GPUs"), "{}", found.3);
    // The invalid value is a default, so the error is about the whole plan.
    let error = parse("[base]\ncluster.servers = 12").and_then(|p| p.jobs());
    let error = error.expect_err("48 GPUs are no multiple of 32");
    assert_eq!((error.place.line, error.field.as_str()), (0, "model.tp"), "{error}");
    assert!(error.to_string().starts_with("p.toml: "), "{error}");
}

#[test]
fn every_combination_runs_with_every_variant_and_seed_in_order() {
    let plan = parse(
        "
seeds = [7, 3]
policies = ['mfs', 'laxity']
[[axis]]
field = 'cluster.nic_gbps'
values = [50, 200]
[[axis]]
field = 'workload.rate_per_gpu'
values = [0.1, 0.2, 0.3]
names = ['low', 'middle', 'high']
",
    )
    .expect("a plan");
    let jobs = plan.jobs().expect("it makes sense");
    assert_eq!(jobs.len(), 2 * 3 * 2 * 2);
    let seen: Vec<(f64, f64, &str, u64)> = jobs
        .iter()
        .map(|job| {
            let s = &job.scenario;
            (s.cluster.nic_gbps, s.workload.rate_per_gpu, s.policy.kind.name(), s.seed)
        })
        .collect();
    assert_eq!(
        seen[..5],
        [
            (50.0, 0.1, "mfs", 7),
            (50.0, 0.1, "mfs", 3),
            (50.0, 0.1, "laxity", 7),
            (50.0, 0.1, "laxity", 3),
            (50.0, 0.2, "mfs", 7),
        ]
    );
    assert_eq!(seen[12].0, 200.0, "the first axis is the outermost");
    assert_eq!(jobs[23].point, 5);
    let points = plan.points();
    let named: Vec<&str> = plan.at(&points[1]).map(|(_, c)| c.name.as_str()).collect();
    assert_eq!(named, ["50", "middle"]);
    assert_eq!(plan.x(), Some(1), "the rate, although it is not the first");
}

#[test]
fn more_runs_than_fit_into_memory_are_refused_before_they_are_made() {
    let axis = |field: &str| {
        let values: Vec<String> = (1..=30).map(|value| value.to_string()).collect();
        format!("[[axis]]\nfield = \"{field}\"\nvalues = [{}]\n", values.join(", "))
    };
    let fields = ["cluster.servers", "model.tp", "model.ep", "slo.factor", "workload.seconds"];
    let text: String = fields.map(axis).concat();
    // The plan is refused when it is read, and not only when its runs are made.
    let said = parse(&text).expect_err("too many runs").to_string();
    assert!(said.contains("24300000 runs are more than 100000"), "{said}");
    // Seeds may come from the command line.
    let mut plan = parse(&fields.map(axis)[..3].concat()).expect("27000 runs");
    plan.seeds = (1..=4).collect();
    assert!(plan.jobs().is_err());
}

#[test]
fn a_plan_inherits_and_replaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("written");
    };
    write(
        "parent.toml",
        "
title = 'parent'
seeds = 3
policies = ['fair', 'laxity']
[base]
cluster.servers = 16
cluster.nic_gbps = 100
[[axis]]
field = 'workload.rate_per_gpu'
values = [1, 2]
",
    );
    write(
        "child.toml",
        "
title = 'child'
base_plan = 'parent.toml'
[base]
cluster.nic_gbps = 50
[[axis]]
field = 'slo.factor'
values = [2, 3, 4]
",
    );
    let load = |name: &str| Plan::load(&folder.path().join(name).display().to_string());
    let plan = load("child.toml").expect("a plan");
    assert_eq!((plan.name.as_str(), plan.title.as_str()), ("child", "child"));
    assert_eq!(plan.seeds, [1, 2, 3]);
    let jobs = plan.jobs().expect("it makes sense");
    assert_eq!(jobs.len(), 3 * 2 * 3, "its own axis only");
    let cluster = &jobs[0].scenario.cluster;
    assert_eq!((cluster.servers, cluster.nic_gbps), (16, 50.0));
    // Errors in parent plans have the parent's location.
    write("parent.toml", "seeds = 'x'");
    let error = load("child.toml").expect_err("a mistake");
    assert!(error.place.file.ends_with("parent.toml"), "{error}");
    write("parent.toml", "base_plan = 'child.toml'");
    let error = load("child.toml").expect_err("a circle");
    assert!(error.problem.contains("inherits from itself"), "{error}");
    // Built-in plans can be parents of files in any folder.
    write("child.toml", "base_plan = 'smoke'\nseeds = 1");
    assert_eq!(load("child.toml").expect("a plan").seeds, [1]);
}

#[test]
fn names_of_plans_are_explained() {
    let error = Plan::load("smok").expect_err("no such plan").to_string();
    assert!(error.contains("smoke, mfs-figure-5"), "{error}");
    assert!(!error.contains("mfs-common"), "a part is no plan: {error}");
    let error = Plan::load("./nowhere.toml").expect_err("no such file");
    assert!(error.problem.contains("cannot be read"), "{error}");
    let error = Plan::load("/dev/zero").expect_err("it has no end");
    assert!(error.problem.contains("it is a device"), "{error}");
}

fn small() -> Plan {
    parse(
        "
policies = ['fair', 'mfs']
[[axis]]
field = 'workload.rate_per_gpu'
values = [0.1, 0.2]
[[axis]]
label = 'model'
settings = [{ name = 'a', model.tp = 1 }, { name = 'b', model.tp = 2, model.ep = 8 }]
",
    )
    .expect("a plan")
}

#[test]
fn values_that_a_setting_from_outside_makes_equal_run_once() {
    let mut plan = parse(
        "
[[axis]]
label = 'choice'
settings = [
  { name = 'defaults' },
  { name = 'fixed homes', serving.routing = 'static_homes' },
  { name = 'one level less', policy.levels = 7 },
]",
    )
    .expect("a plan");
    plan.set("serving.routing=static_homes").expect("a field");
    let names: Vec<&str> = plan.axes[0].values.iter().map(|choice| choice.name.as_str()).collect();
    assert_eq!(names, ["defaults", "one level less"]);
}

#[test]
fn a_setting_from_outside_holds_everywhere() {
    let mut plan = small();
    plan.set("model.tp=4").expect("a field");
    plan.set("workload.rate_per_gpu = 0.7").expect("a field");
    let jobs = plan.jobs().expect("it makes sense");
    assert_eq!(jobs.len(), 2 * 2, "the axis of rates is gone");
    assert!(jobs.iter().all(|job| job.scenario.model.tp == 4));
    assert!(jobs.iter().all(|job| job.scenario.workload.rate_per_gpu == 0.7));
    plan.set("workload.source=conversation").expect("a word");
    let mut says = |assignment: &str| {
        let error = plan.set(assignment).expect_err("a mistake").to_string();
        assert!(error.starts_with("--set: "), "{error}");
        error
    };
    assert!(says("model.tp").contains("FIELD=VALUE"));
    assert!(says("tp=3").contains("`model.tp`"));
    assert!(says("model.tp=x").contains("expected u32"));
    assert!(says("policy.kind=mfs").contains("--only"));
    assert!(says("seed=3").contains("seeds"));
}

#[test]
fn a_setting_that_makes_no_sense_is_told_as_the_flag() {
    let mut plan = small();
    plan.set("cluster.prefill_share=1").expect("a field");
    let error = plan.jobs().expect_err("no decode").to_string();
    assert!(error.starts_with("--set: cluster.prefill_share: 1 is not between 0 and 1"), "{error}");
}

#[test]
fn axes_and_variants_can_be_given_from_outside() {
    let mut plan = Plan::empty("sweep", "a sweep");
    plan.vary("workload.rate_per_gpu=0.3,0.5").expect("an axis");
    plan.vary("serving.routing=kv_aware,round_robin").expect("words");
    plan.compare(&["mfs".into(), "laxity".into()]).expect("policies");
    assert_eq!(plan.jobs().expect("it makes sense").len(), 2 * 2 * 2);
    plan.vary("workload.rate_per_gpu=0.4").expect("in its place");
    assert_eq!(plan.axes.len(), 2);
    plan.only(&["mfs".into()]).expect("a variant");
    assert_eq!(plan.jobs().expect("it makes sense").len(), 2);
    let error = plan.only(&["fair".into()]).expect_err("not there");
    assert!(error.to_string().contains("there are mfs"), "{error}");
    plan.vary("workload.rate_per_gpu=0.4,0.4").expect_err("twice");
    plan.vary("workload.rate_per_gpu=").expect_err("nothing");
    plan.vary("policy.kind=mfs,fair").expect_err("no axis");
    plan.compare(&["best".into()]).expect_err("no policy");
}

#[test]
fn what_a_plan_compares_with_follows_from_its_variants() {
    let reference = |text: &str| {
        let plan = parse(text).expect("a plan");
        plan.reference().map(|index| plan.variants[index].name.clone())
    };
    assert_eq!(reference("policies = ['fair', 'laxity']").as_deref(), Some("laxity"));
    assert_eq!(reference("policies = ['fair', 'mfs']").as_deref(), Some("mfs"));
    assert_eq!(reference("policies = ['sjf', 'fair']").as_deref(), Some("sjf"));
    assert_eq!(
        reference("reference = 'fair'\npolicies = ['laxity', 'fair']").as_deref(),
        Some("fair")
    );
    assert_eq!(reference("policies = ['fair']"), None);
}

proptest! {
    /// A plan that was written is read as the same plan. An error names a line that exists.
    #[test]
    fn a_plan_that_is_read_can_be_written(
        plan in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..5_usize), 1..4),
    ) {
        let mut text = plan.get(built_in()).text.to_owned();
        for (place, piece) in edits {
            let (at, _) = *place.get(&text.char_indices().collect::<Vec<_>>());
            text.remove(at);
            text.insert_str(at, ["", "0", "\"", "\n", "]"][piece]);
        }
        match parse(&text) {
            Ok(plan) => {
                let shown = plan.to_toml();
                let again = Plan::parse("p", "shown", &shown);
                let again = again.unwrap_or_else(|error| panic!("{error}\n{shown}"));
                prop_assert_eq!(again.to_toml(), shown);
            }
            Err(error) if &*error.place.file == "p.toml" => {
                prop_assert!(error.place.line <= text.matches('\n').count() + 1);
            }
            Err(_) => {}
        }
    }
}
