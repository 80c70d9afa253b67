//! Tests of pages with computed tables, with results of a fake simulation.

mod fake;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use laxity_sim::plan::Plan;
use laxity_sim::report::findings::{Filled, FindingsSection, PageError, Results, blocks, fill};
use laxity_sim::report::table;
use laxity_sim::run::{RunOptions, run};

const PLAN: &str = "
title = 'Two rates'
seeds = 3
policies = ['fair', 'karuna', 'two_class', 'mfs', 'laxity']
[base]
model.name = 'dbrx'
cluster.servers = 16
[[axis]]
field = 'cluster.nic_gbps'
values = [50, 200]
[[axis]]
field = 'workload.rate_per_gpu'
values = [0.4, 0.8, 1.2, 1.6]
[[variant]]
name = 'no contention'
policy.no_contention = true
";

fn results(plan: &Plan) -> Results {
    let options =
        RunOptions { jobs: NonZeroUsize::new(2).expect("two"), out: None, progress: false };
    let report = run(plan, &fake::simulate, &options).expect("it runs");
    let took = Some(report.timing.clone());
    Results { report, took }
}

/// Returns results of `two`, or of built-in plans with few seeds. There are none for `missing`.
fn known(name: &str) -> Result<Results, String> {
    match name {
        "missing" => Err("run it".to_owned()),
        "two" => Ok(results(&Plan::parse("two", "two.toml", PLAN).expect("a plan"))),
        _ => {
            let mut plan = Plan::load(name).map_err(|error| error.to_string())?;
            plan.seeds.truncate(2);
            Ok(results(&plan))
        }
    }
}

fn try_filled(page: &str) -> Result<Filled, PageError> {
    fill(page, &mut known)
}

fn filled(page: &str) -> Filled {
    try_filled(page).expect("a page")
}

fn block(asked: &str) -> String {
    format!("<!-- laxity sim: {asked} -->\n<!-- end -->\n")
}

fn content(asked: &str) -> String {
    let text = filled(&block(asked)).text;
    let text = text.split_once("-->\n").expect("a start").1;
    text.split_once("<!-- end -->").expect("an end").0.to_owned()
}

/// Returns the tables of a text as rows of cells. Fails if one is not a valid GitHub table.
fn tables(text: &str) -> Vec<Vec<Vec<String>>> {
    let (mut tables, mut open, mut before) = (Vec::new(), false, "");
    for line in text.lines() {
        let is_row = line.starts_with('|');
        if is_row && !open {
            assert_eq!(before, "", "a blank line before a table: {text}");
            tables.push(Vec::new());
        }
        assert!(is_row || !open || line.is_empty(), "one after it: {text}");
        open = is_row;
        before = line;
        if is_row {
            let cells = line.trim_matches('|').split('|');
            let cells = cells.map(|cell| cell.trim().to_owned()).collect();
            tables.last_mut().expect("open").push(cells);
        }
    }
    for table in &tables {
        let rows: &Vec<Vec<String>> = table;
        assert!(rows.len() > 2, "{text}");
        assert!(rows[1].iter().all(|c| c.trim_end_matches(':') == "---"));
        assert!(rows.iter().all(|r| r.len() == rows[0].len()), "{text}");
        assert!(rows.iter().flatten().all(|cell| !cell.is_empty()), "{text}");
    }
    tables
}

#[test]
fn only_what_stands_between_markers_is_replaced() {
    let old = format!(
        "# Head\n\nProse ±.\n\n{}Between.\n{}Last line",
        block("two attainment").replace("<!-- end", "old\n<!-- end"),
        block("two speed")
    );
    let new = filled(&old);
    assert_eq!(new.stale.len(), 2);
    assert!(new.text.starts_with("# Head\n\nProse ±.\n\n<!-- laxity sim: two attainment -->\n\n"));
    assert!(new.text.contains(".\n\n<!-- end -->\nBetween.\n<!--"));
    assert!(new.text.ends_with("<!-- end -->\nLast line"));
    assert!(!new.text.contains("old"));
    assert_eq!(filled("no block").text, "no block");
}

#[test]
fn a_page_that_is_filled_is_not_stale_until_a_number_changes() {
    let page = block("two attainment") + &block("two sustained");
    let once = filled(&page);
    let twice = filled(&once.text);
    assert_eq!((twice.stale.len(), &twice.text), (0, &once.text));
    let wrong = once.text.replacen("± 0", "± 9", 1);
    let stale = filled(&wrong).stale;
    assert_eq!(stale.len(), 1);
    assert_eq!(stale[0].line, 1);
    assert_eq!(stale[0].section, FindingsSection::Attainment);
}

#[test]
fn blocks_without_results_stay_as_they_are_and_the_plan_is_asked_for_once() {
    let kept = block("missing attainment").replace("<!-- end", "old\n<!-- end");
    let page = kept.clone() + &block("missing paper") + &block("two ttft");
    let mut asked = Vec::new();
    let new = fill(&page, &mut |plan| {
        asked.push(plan.to_owned());
        known(plan)
    })
    .expect("a page");
    assert_eq!(asked, ["missing", "two"]);
    assert_eq!(new.missing["missing"], "run it");
    assert_eq!(new.missing.len(), 1);
    assert!(new.text.starts_with(&kept));
    assert_eq!(new.stale.len(), 1, "the others are filled");
}

#[test]
fn attainment_is_a_table_for_each_panel_with_the_best_policy_in_bold() {
    let text = content("two attainment");
    let tables = tables(&text);
    assert_eq!(tables.len(), 2);
    assert!(text.contains("**NIC rate 50 Gb/s**, first tokens in time, %:"));
    let table = &tables[1];
    assert_eq!(table[0][1..], ["0.4", "0.8", "1.2", "1.6"]);
    let names: Vec<&str> = table[2..].iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names[4..], ["laxity", "*no contention*"]);
    assert!(table[6][3].starts_with("**") && table[6][3].contains(" ± "), "{text}");
    let overloaded = &tables[0];
    assert!(
        overloaded[2..].iter().all(|row| !row[4].starts_with("**")),
        "all are the same there: {text}"
    );
    assert!(!table[7].iter().any(|cell| cell.starts_with("**")), "a bound is no policy");
}

#[test]
fn plans_without_order_have_a_row_for_each_point() {
    let text = content("choices attainment");
    let tables = tables(&text);
    assert_eq!(tables.len(), 1);
    assert_eq!(tables[0][0][..3], ["in time, %", "sjf", "edf"]);
    assert_eq!(tables[0].len(), 2 + 2 * 16, "each choice in both regimes");
    let single = content("mfs-figure-5 attainment");
    assert!(single.contains("| variant | in time, % |"), "{single}");
}

#[test]
fn sustained_rates_are_set_in_relation_to_two_policies() {
    let text = content("two sustained");
    let tables = tables(&text);
    assert_eq!(tables.len(), 2, "NIC rates 50 and 200 Gb/s");
    assert_eq!(tables[1][0].len(), 1 + 2 * 3);
    let karuna = &tables[1][3];
    assert_eq!((karuna[2].as_str(), karuna[5].as_str()), ("1.00", "1.00"));
    let laxity: f64 = tables[1][6][2].parse().expect("a number");
    assert!(laxity > 1.2, "{text}");
    let without = content("smoke sustained");
    assert!(!without.contains("karuna"), "nor is it there: {without}");
}

/// A page says what no network policy can change before it compares policies.
#[test]
fn capacity_is_shown_at_every_rate_and_warned_of_where_the_bound_is_low() {
    let text = content("two capacity");
    let tables = tables(&text);
    assert_eq!((tables.len(), tables[0].len(), tables[0][0].len()), (2, 2 + 4, 11), "{text}");
    assert!(text.contains("| 1.6 |") && text.contains("under laxity"), "{text}");
    let warnings = |rates: &str| {
        let mut plan = Plan::parse("two", "two.toml", PLAN).expect("a plan");
        plan.vary(&format!("workload.rate_per_gpu={rates}")).expect("rates");
        let text = table::table(&results(&plan).report);
        let warnings = text.lines().filter(|line| line.starts_with("Capacity: "));
        warnings.map(str::to_owned).collect::<Vec<_>>()
    };
    let overloaded = warnings("0.01,9.5");
    assert_eq!(overloaded.len(), 2, "{overloaded:?}");
    assert!(
        overloaded[0].contains("NIC rate 50 Gb/s, at 9.5: no network policy"),
        "{overloaded:?}"
    );
    assert_eq!(warnings("0.01,0.02"), [""; 0]);
}

#[test]
fn details_are_of_the_point_of_a_panel_where_variants_differ_most() {
    for (section, columns) in [("ttft", 5), ("collectives", 4), ("earliness", 4)] {
        let text = content(&format!("two {section}"));
        let tables = tables(&text);
        assert_eq!(tables.len(), 2, "{section}");
        assert_eq!((tables[0].len(), tables[0][0].len()), (2 + 6, columns));
        assert!(text.contains("at request rate 1.2/s per prefill GPU:"), "{text}");
    }
    let one = content("mfs-figure-13 collectives panel=mean");
    assert!(tables(&one).len() < tables(&content("mfs-figure-13 collectives")).len(), "{one}");
}

#[test]
fn differences_and_what_a_paper_says_are_tables_too() {
    let against = content("two against");
    assert_eq!(tables(&against)[0].len(), 2 + 4);
    assert!(against.contains("laxity less the others"));
    assert!(against.contains("(200, ") && !against.contains("one seed"), "{against}");
    let paper = content("mfs-figure-12 paper");
    assert_eq!(tables(&paper)[0].len(), 2 + 3 * 3, "three claims at three rates of NICs");
    assert!(paper.contains("| long agent · 50 Gb/s | 1.15 × |"), "{paper}");
}

#[test]
fn every_block_says_where_its_numbers_are_from() {
    let built_in = content("mfs-figure-5 collectives");
    let said = "Plan mfs-figure-5, seeds 1 to 2, 10 runs: `laxity sim run mfs-figure-5 --seeds 2`.";
    assert!(built_in.ends_with(&format!("\n{said}\n\n")), "{built_in}");
    let changed = fill(&block("smoke speed"), &mut |name| {
        let mut plan = Plan::load(name).expect("built in");
        plan.set("cluster.servers=16").expect("a field");
        Ok(results(&plan))
    });
    let text = changed.expect("a page").text;
    assert!(text.contains("sim run smoke`, with changes to the plan."), "{text}");
}

#[test]
fn what_a_plan_does_not_have_is_a_mistake_of_the_page() {
    let problem = |asked: &str| {
        let page = format!("\n{}", block(asked));
        try_filled(&page).expect_err("a mistake").to_string()
    };
    let panel = problem("two ttft panel=DBRX");
    assert!(panel.contains("line 2: no panel is called DBRX; there are NIC rate"), "{panel}");
    assert!(problem("two paper").contains("no figure"));
    assert!(problem("mfs-figure-13 sustained").contains("does not vary the request rate"));
    assert!(problem("scale-2048 against").contains("nothing to compare"));
}

#[test]
fn the_page_of_this_repository_asks_for_what_its_plans_have() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reproduction-tables.md");
    let page = fs::read_to_string(path).expect("the page");
    let asked = blocks(&page).expect("markers");
    assert!(asked.len() > 10);
    let new = filled(&page);
    assert!(new.missing.is_empty(), "{:?}", new.missing);
    tables(&new.text);
    // The file is kept for manual inspection.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("reproduction-tables.md");
    fs::write(kept, new.text).expect("written");
}

/// Returns what a page quotes of the paper: the rows of those tables, without the columns of what
/// was measured here.
fn quoted(page: &str) -> Vec<Vec<String>> {
    let all = tables(page).into_iter().filter(|table| table[0][0] == "the paper says");
    let quotes = all.flat_map(|table| {
        let here = table[0].iter().position(|cell| cell == "here").expect("a column");
        table.into_iter().map(move |row| row[..here].to_vec())
    });
    quotes.collect()
}

/// The numbers of the page need long runs, but the paper's claims do not. A plan without results
/// has no rows on the page.
#[test]
fn the_page_of_this_repository_quotes_the_paper_as_the_claims_do() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reproduction-tables.md");
    let page = fs::read_to_string(path).expect("the page");
    let quotes = quoted(&page);
    assert!(quotes.len() > 20, "{quotes:?}");
    let claims = quoted(&filled(&page).text);
    let mut later = claims.iter();
    for row in &quotes {
        assert!(later.any(|claim| claim == row), "claims/mfs.toml has no {row:?} there");
    }
}
