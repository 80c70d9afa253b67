//! The plots of the page, as SVG text.
//!
//! Axes and grid are drawn in two placeholder colours, which are replaced by those of the page's
//! light or dark theme. The colours of the series are readable on both.

use plotters::coord::Shift;
use plotters::prelude::*;

const SIZE: (u32, u32) = (620, 320);
const INK: RGBColor = RGBColor(1, 2, 3);
const GRID: RGBColor = RGBColor(4, 5, 6);

/// Colours of the series. They differ on light and dark backgrounds and for most colour-blind
/// readers (after Okabe and Ito).
const COLOURS: [RGBColor; 10] = [
    RGBColor(136, 136, 136),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(0, 114, 178),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(160, 120, 60),
    RGBColor(120, 94, 240),
    RGBColor(100, 180, 60),
];

fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

pub fn css_colour(series: usize) -> String {
    let RGBColor(r, g, b) = colour(series);
    format!("rgb({r},{g},{b})")
}

/// The result of drawing, with the error as text.
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn svg(draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Drawn) -> String {
    let mut text = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area).and_then(|()| area.present().map_err(Into::into))
    };
    if let Err(error) = drawn {
        return format!("<svg viewBox=\"0 0 400 20\"><text y=\"15\">no plot: {error}</text></svg>");
    }
    // A view box instead of a size allows the page to scale the plot.
    let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
    text.replacen(&size, "", 1).replace("#010203", "currentColor").replace("#040506", "var(--grid)")
}

fn ink(size: u32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size).into_font()).color(&INK)
}

/// Returns a plot of lines over a common horizontal axis. The vertical axis runs from 0 to 1.
pub fn shares(
    horizontal: &str,
    vertical: &str,
    range: (f64, f64),
    mark: Option<f64>,
    series: &[Vec<(f64, f64)>],
) -> String {
    let (low, high) = (range.0, if range.1 > range.0 { range.1 } else { range.0 + 1.0 });
    svg(|area| {
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(low..high, 0.0..1.0)?;
        chart
            .configure_mesh()
            .x_desc(horizontal)
            .y_desc(vertical)
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(ink(13))
            .axis_desc_style(ink(14))
            .x_label_formatter(&|value| {
                if high > 10.0 { format!("{value:.0}") } else { format!("{value:.1}") }
            })
            .y_label_formatter(&|share| format!("{:.0} %", share * 100.0))
            .draw()?;
        if let Some(at) = mark.filter(|at| (low..=high).contains(at)) {
            chart.draw_series(LineSeries::new([(at, 0.0), (at, 1.0)], INK.stroke_width(1)))?;
        }
        for (number, points) in series.iter().enumerate() {
            let clipped = points.iter().map(|&(x, y)| (x.clamp(low, high), y.clamp(0.0, 1.0)));
            chart.draw_series(LineSeries::new(clipped, colour(number).stroke_width(2)))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_svg_that_follows_the_theme() {
        let lines =
            shares("ms", "requests", (0.0, 10.0), Some(5.0), &[vec![(0.0, 0.0), (20.0, 1.0)]]);
        assert!(lines.contains("<svg") && lines.contains("</svg>"));
        assert!(lines.contains("currentColor") && !lines.contains("#010203"));
        assert!(!lines.contains("width=\"620\""), "it scales with the page");
        let empty = shares("ms", "requests", (0.0, 0.0), None, &[]);
        assert!(empty.contains("</svg>"), "it is drawn all the same");
    }
}
