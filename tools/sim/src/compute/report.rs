//! How far off the compute-time model is, and the files of its coefficients.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::coefficients::Coefficients;

/// What fitting gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FitReport {
    /// The coefficients of each GPU.
    pub gpus: Vec<GpuFit>,
    /// The errors of each operator of each profile.
    pub operators: Vec<OperatorReport>,
}

/// The coefficients of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuFit {
    /// The GPU's name.
    pub gpu: String,
    /// Files that they were fitted to.
    pub sources: Vec<String>,
    /// The coefficients.
    pub coefficients: Coefficients,
}

/// The errors of one operator of one profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperatorReport {
    /// The GPU's name.
    pub gpu: String,
    /// The profile's file, without `.csv`.
    pub profile: String,
    /// The operator, as the profile calls it.
    pub operator: String,
    /// On all of the profile, with the coefficients that are written: fitted to this too.
    pub fitted: Errors,
    /// On every fifth size, fitted without those sizes.
    pub sizes_kept_out: Errors,
    /// On the lines with the widest tensor parallelism, fitted without them.
    pub narrowest_kept_out: Option<Errors>,
    /// On all of the profile, fitted to the GPU's other profiles only; none if there are none.
    pub model_kept_out: Option<Errors>,
}

/// Relative errors, (predicted − measured) / measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Times that were compared.
    pub count: usize,
    /// Median of the absolute errors.
    pub median: f64,
    /// 90th percentile of the absolute errors.
    pub p90: f64,
    /// Largest absolute error.
    pub worst: f64,
    /// Mean error; above 0: predicted too slow.
    pub bias: f64,
}

impl Errors {
    /// Of predictions over measurements.
    pub(super) fn of(ratios: impl Iterator<Item = f64>) -> Self {
        let errors: Vec<f64> = ratios.map(|ratio| ratio - 1.0).collect();
        let mut absolute: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        absolute.sort_by(f64::total_cmp);
        let count = errors.len();
        let at = |percent: usize| {
            let index = (count * percent / 100).min(count.saturating_sub(1));
            absolute.get(index).copied().unwrap_or_default()
        };
        Self {
            count,
            median: at(50),
            p90: at(90),
            worst: at(100),
            bias: errors.iter().sum::<f64>() / count.max(1) as f64,
        }
    }
}

impl FitReport {
    /// The files of the coefficients, name and content, to be put into the folder `fits`.
    ///
    /// # Panics
    /// Never: coefficients are numbers.
    #[must_use]
    pub fn files(&self) -> Vec<(String, String)> {
        let file = |fit: &GpuFit| {
            let content = toml::to_string(&fit.coefficients).expect("coefficients are numbers");
            let text = format!(
                "# Coefficients of the compute-time model on {}, made by\n\
                 # `laxity sim fit DIR --write`; not to be edited. What they mean is said in\n\
                 # src/compute/operator.rs. Fitted to {}\n\
                 # of microsoft/vidur (MIT); attention and linear attention to published figures, \
                 see\n\
                 # src/compute/published.rs.\n\n{content}",
                fit.gpu,
                fit.sources.join(",\n# "),
            );
            (format!("{}.toml", fit.gpu), text)
        };
        self.gpus.iter().map(file).collect()
    }

    /// The errors in percent, for people: after what was kept out stands the median.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "profile",
            "operator",
            "n",
            "median",
            "p90",
            "worst",
            "bias",
            "sizes kept out",
            "p90",
            "narrowest kept out",
            "p90",
            "model kept out",
            "p90",
        ]);
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let percent = |share: f64| format!("{:.1}", share * 100.0);
        for row in &self.operators {
            let (fitted, sizes) = (&row.fitted, &row.sizes_kept_out);
            let (narrow, model) = (&row.narrowest_kept_out, &row.model_kept_out);
            let maybe = |errors: &Option<Errors>, of: fn(&Errors) -> f64| {
                errors
                    .as_ref()
                    .map_or_else(|| "–".to_owned(), |errors| percent(of(errors)))
            };
            table.add_row([
                row.profile.clone(),
                row.operator.clone(),
                fitted.count.to_string(),
                percent(fitted.median),
                percent(fitted.p90),
                percent(fitted.worst),
                percent(fitted.bias),
                percent(sizes.median),
                percent(sizes.p90),
                maybe(narrow, |errors| errors.median),
                maybe(narrow, |errors| errors.p90),
                maybe(model, |errors| errors.median),
                maybe(model, |errors| errors.p90),
            ]);
        }
        table.trim_fmt()
    }
}
