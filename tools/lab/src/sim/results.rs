//! The destinations of a report: standard output, files, and a folder of results.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use laxity_sim::plan::Plan;
use laxity_sim::report::{Report, csv, json, map, page, table};
use laxity_sim::run::Timing;

use crate::publish::{self, is_stdout};
use laxity_cli::output::{self, OutputError, say};

/// Files that a report is written to.
#[derive(Args, Debug, Default)]
pub(super) struct Destinations {
    /// Write the report as JSON. With `-` it goes to standard output, the table to standard error
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// Write one row for each run as CSV; `-` is standard output
    #[arg(long, value_name = "FILE|-")]
    csv: Option<PathBuf>,
    /// Write the report as one page in Markdown; `-` is standard output
    #[arg(long, value_name = "FILE|-")]
    markdown: Option<PathBuf>,
    /// Write a map as SVG: rows and columns are two axes of the plan, cells are differences to
    /// two_class
    #[arg(long, value_name = "FILE|-")]
    map: Option<PathBuf>,
}

impl Destinations {
    fn all(&self) -> impl Iterator<Item = &Path> {
        [&self.json, &self.csv, &self.markdown, &self.map]
            .into_iter()
            .filter_map(|path| path.as_deref())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.all().filter(|path| is_stdout(path)).count() > 1 {
            bail!("only one of --json, --csv, --markdown and --map can go to standard output");
        }
        publish::check(self.all())
    }

    /// Writes the report to all destinations. Prints its table to standard output, or to standard
    /// error if a report goes to standard output.
    pub(super) fn write(&self, report: &Report) -> Result<()> {
        let table = table::table(report);
        if self.all().any(is_stdout) {
            eprintln!("{table}");
        } else {
            say(&table)?;
        }
        for (what, path) in [
            ("data", &self.json),
            ("rows", &self.csv),
            ("page", &self.markdown),
            ("map", &self.map),
        ] {
            let Some(path) = path else { continue };
            let text = match what {
                "data" => json::json(report),
                "rows" => csv::csv(report),
                "map" => map::map(report)?,
                _ => page::page(report),
            };
            publish::write(path, &text)?;
            if !self.all().any(is_stdout) {
                let shown = path.canonicalize().unwrap_or_else(|_| path.clone());
                say(format!("{what}: {}", shown.display()))?;
            }
        }
        Ok(())
    }
}

const TIMING: &str = "timing.json";

/// A folder of results. The runner writes the journal in it.
#[derive(Debug)]
pub(super) struct Folder<'a>(&'a Path);

impl<'a> Folder<'a> {
    pub(super) fn at(path: &'a Path) -> Self {
        Self(path)
    }

    pub(super) fn page(&self) -> PathBuf {
        self.0.join("page.md")
    }

    /// Writes the plan before it is run, so that the results of an interrupted run can be shown.
    pub(super) fn begin(&self, plan: &Plan) -> Result<()> {
        fs::create_dir_all(self.0).with_context(|| format!("cannot make {}", self.0.display()))?;
        let text = format!(
            "# As it was run, with all that it inherited. Relative paths in it are from where that \
             was.\n{}",
            plan.to_toml()
        );
        Ok(output::replace(&self.0.join("plan.toml"), text.as_bytes())?)
    }

    pub(super) fn has_plan(&self) -> bool {
        self.0.join("plan.toml").is_file()
    }

    pub(super) fn plan(&self) -> Result<Plan> {
        let path = self.0.join("plan.toml");
        if !self.has_plan() {
            bail!("{} holds no results: there is no plan.toml in it", self.0.display());
        }
        Ok(Plan::load(&path.display().to_string())?)
    }

    pub(super) fn finish(&self, report: &Report) -> Result<(), OutputError> {
        let write = |name: &str, text: String| output::replace(&self.0.join(name), text.as_bytes());
        write("report.json", json::json(report))?;
        write("runs.csv", csv::csv(report))?;
        write("page.md", page::page(report))
    }

    /// Writes the time and memory of a run to a file of their own. Does nothing if the run
    /// simulated nothing, so the values of an earlier run stay.
    pub(super) fn note_timing(&self, report: &Report) -> Result<(), OutputError> {
        let path = self.0.join(TIMING);
        if report.timing.simulated == 0 && path.is_file() {
            return Ok(());
        }
        let text = output::json(&report.timing)?;
        output::replace(&path, text.as_bytes())
    }

    /// Returns the time and memory of the last run, or `None` if it was interrupted.
    pub(super) fn timing(&self) -> Result<Option<Timing>> {
        let path = self.0.join(TIMING);
        if !path.is_file() {
            return Ok(None);
        }
        let read = || format!("cannot read {}", path.display());
        let text = fs::read(&path).with_context(read)?;
        serde_json::from_slice(&text).map(Some).with_context(read)
    }
}
