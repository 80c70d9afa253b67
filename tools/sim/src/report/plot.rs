//! Plots of the page as SVG text: lines with bands.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

use super::palette::{self, GRID, INK, Look, resolve};

/// Ratio of drawn to shown size. Plots are drawn larger, because coordinates are whole numbers.
const SCALE: u32 = 2;
const TEXT: u32 = 15 * SCALE;

/// The result of drawing, with an error in words.
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The horizontal or vertical scale of a plot.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Label of the scale, with its unit.
    pub(super) label: String,
    /// Range that is shown. Both ends are above zero if the scale is logarithmic.
    pub(super) range: (f64, f64),
    /// Whether the scale is logarithmic.
    pub(super) logarithmic: bool,
    /// Factor between a value and the number that is shown, such as 100 for percent.
    pub(super) factor: f64,
}

impl Scale {
    pub(super) fn linear(label: impl Into<String>, range: (f64, f64)) -> Self {
        Self {
            label: label.into(),
            range: if range.1 > range.0 { range } else { (range.0, range.0 + 1.0) },
            logarithmic: false,
            factor: 1.0,
        }
    }

    /// Returns a scale from 0 to 100 %.
    pub(super) fn share(label: impl Into<String>) -> Self {
        Self { factor: 100.0, ..Self::linear(label, (0.0, 1.0)) }
    }

    /// Returns a scale for these values. It is logarithmic if they are above zero and span more
    /// than `ratio`, and else starts at zero.
    pub(super) fn around(label: impl Into<String>, least: f64, most: f64, ratio: f64) -> Self {
        if least > 0.0 && most / least > ratio {
            return Self { logarithmic: true, ..Self::linear(label, (least, most)) };
        }
        Self::linear(label, (0.0, most.max(0.0) * 1.05))
    }

    /// Returns the drawn position of a value.
    fn place(&self, value: f64) -> f64 {
        let value = value.clamp(self.range.0, self.range.1);
        if self.logarithmic { value.log10() } else { value }
    }

    fn ends(&self) -> std::ops::Range<f64> {
        self.place(self.range.0)..self.place(self.range.1)
    }

    /// Returns about `count` round values for tick marks.
    fn ticks(&self, count: usize) -> Vec<f64> {
        let (low, high) = self.range;
        if self.logarithmic {
            let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
            let steps: &[f64] = match (high / low).log10() {
                span if span < 1.6 => &[1.0, 2.0, 3.0, 5.0, 7.0],
                span if span < 3.1 => &[1.0, 2.0, 5.0],
                _ => &[1.0],
            };
            return decades
                .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)))
                .filter(|tick| (low..=high).contains(tick))
                .collect();
        }
        let rough = (high - low) * self.factor / count as f64;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .into_iter()
            .map(|m| m * decade)
            .find(|step| *step >= rough * 0.999)
            .unwrap_or(decade * 10.0)
            / self.factor;
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        (first..=last).map(|tick| tick as f64 * step).collect()
    }

    fn ticked(&self, count: usize) -> Ticked {
        Ticked {
            range: self.ends(),
            ticks: self.ticks(count).into_iter().map(|t| self.place(t)).collect(),
        }
    }

    fn shown(&self, value: f64) -> String {
        let value = value * self.factor;
        // Rounding removes errors, so that ticks have a short form.
        let text = format!("{:.4}", if value.abs() < 1e-9 { 0.0 } else { value });
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PlotLine {
    /// Number of the line's look.
    pub(super) number: usize,
    /// Points from left to right.
    pub(super) points: Vec<(f64, f64)>,
    /// Band around the line as `(x, low, high)`. Empty for none.
    pub(super) band: Vec<(f64, f64, f64)>,
    /// Whether the line's points have marks.
    pub(super) marked: bool,
}

impl PlotLine {
    /// Returns the outline of the band.
    fn outline(&self, x: &Scale, y: &Scale) -> Vec<(f64, f64)> {
        let upper = self.band.iter().map(|&(at, _, high)| (at, high));
        let lower = self.band.iter().rev().map(|&(at, low, _)| (at, low));
        let around = upper.chain(lower);
        around.map(|(a, b)| (x.place(a), y.place(b))).collect()
    }
}

/// Reference lines of a plot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Marks {
    /// Height of a horizontal line.
    pub(super) level: Option<f64>,
    /// Position of a vertical line.
    pub(super) upright: Option<f64>,
}

fn svg(
    size: (u32, u32),
    looks: &[Look],
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Drawn,
) -> String {
    let mut text = String::new();
    let size = (size.0 * SCALE, size.1 * SCALE);
    let drawn = {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        draw(&area).and_then(|()| area.present().map_err(Into::into))
    };
    if let Err(error) = drawn {
        return format!("<svg viewBox=\"0 0 400 20\"><text y=\"15\">no plot: {error}</text></svg>");
    }
    // Replaces the fixed size by a view box, so that the page can scale the plot.
    let fixed = format!("width=\"{}\" height=\"{}\" ", size.0, size.1);
    resolve(&text.replacen(&fixed, "", 1), looks)
}

fn ink(size: u32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size).into_font()).color(&INK)
}

/// Draws bands below, lines and marks above, in the order of their layers.
pub(super) fn lines(
    size: (u32, u32),
    (x, y): (&Scale, &Scale),
    marks: Marks,
    looks: &[Look],
    lines: &[PlotLine],
) -> String {
    let mut order: Vec<&PlotLine> = lines.iter().collect();
    order.sort_by_key(|line| looks[line.number].layer);
    svg(size, looks, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin_top(8 * SCALE)
            .margin_right(16 * SCALE)
            .x_label_area_size(44 * SCALE)
            .y_label_area_size(62 * SCALE)
            .build_cartesian_2d(x.ticked(size.0 as usize / 70), y.ticked(5))?;
        let back = |scale: &Scale, place: f64| {
            scale.shown(if scale.logarithmic { 10f64.powf(place) } else { place })
        };
        chart
            .configure_mesh()
            .x_desc(x.label.as_str())
            .y_desc(y.label.as_str())
            .axis_style(INK.stroke_width(SCALE))
            .bold_line_style(GRID.stroke_width(SCALE))
            .light_line_style(TRANSPARENT)
            .label_style(ink(TEXT))
            .axis_desc_style(ink(TEXT + 2 * SCALE))
            .x_label_formatter(&|place| back(x, *place))
            .y_label_formatter(&|place| back(y, *place))
            .draw()?;
        let (ends_x, ends_y) = (x.ends(), y.ends());
        if let Some(level) = marks.level {
            let height = y.place(level);
            let across = [(ends_x.start, height), (ends_x.end, height)];
            chart.draw_series(LineSeries::new(across, INK.mix(0.45).stroke_width(SCALE)))?;
        }
        if let Some(place) = marks.upright {
            let place = x.place(place);
            let up = [(place, ends_y.start), (place, ends_y.end)];
            chart.draw_series(LineSeries::new(up, INK.mix(0.45).stroke_width(SCALE)))?;
        }
        for line in &order {
            let look = &looks[line.number];
            // Many overlapping bands hide each other, so those in the background are faint.
            let opacity = if look.layer > 1 { 0.2 } else { 0.06 };
            let outline = line.outline(x, y);
            if outline.len() > 2 {
                let colour = palette::colour(line.number).mix(opacity);
                chart.draw_series([Polygon::new(outline, colour.filled())])?;
            }
        }
        for line in &order {
            let colour = palette::colour(line.number);
            let width = looks[line.number].width * SCALE / 10;
            let places = line.points.iter().map(|&(a, b)| (x.place(a), y.place(b)));
            let points: Vec<(f64, f64)> = places.collect();
            if line.marked {
                let dots = points.iter();
                let dots = dots.map(|&at| Circle::new(at, width + SCALE, colour.filled()));
                chart.draw_series(dots)?;
            }
            chart.draw_series(LineSeries::new(points, colour.stroke_width(width)))?;
        }
        Ok(())
    })
}

/// A range with chosen tick marks.
struct Ticked {
    range: std::ops::Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Ticked {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        low + (f64::from(high - low) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_range() {
        let shown = |scale: &Scale, count| -> Vec<String> {
            scale.ticks(count).into_iter().map(|t| scale.shown(t)).collect()
        };
        let share = Scale::share("");
        assert_eq!(shown(&share, 5), ["0", "20", "40", "60", "80", "100"]);
        let rates = Scale::linear("", (0.3, 1.1));
        assert_eq!(shown(&rates, 5), ["0.4", "0.6", "0.8", "1"]);
        let times = Scale::around("", 20.0, 900.0, 10.0);
        assert!(times.logarithmic);
        assert_eq!(shown(&times, 5), ["20", "50", "100", "200", "500"]);
        assert!(!Scale::around("", 0.0, 900.0, 10.0).logarithmic);
        let negative = Scale::linear("", (-100.0, 100.0));
        assert_eq!(shown(&negative, 4), ["-100", "-50", "0", "50", "100"]);
    }

    #[test]
    fn an_empty_plot_is_drawn_all_the_same() {
        let (x, y) = (Scale::linear("", (0.0, 0.0)), Scale::share(""));
        let empty = lines((300, 200), (&x, &y), Marks::default(), &[], &[]);
        assert!(empty.contains("</svg>") && !empty.contains("no plot"));
    }
}
