//! Colours of variants and stages. A policy has the same look in every plot of every page.
//!
//! Plots are drawn in placeholder colours, which are then replaced by classes of the page's style
//! sheet. A series can thus have different colours on light and dark backgrounds, be dashed, and be
//! selected by CSS.

use std::fmt::Write as _;

use plotters::style::RGBColor;

use super::Report;

/// Placeholder for the page's text colour.
pub(super) const INK: RGBColor = RGBColor(1, 2, 3);
/// Placeholder for the page's grid colour.
pub(super) const GRID: RGBColor = RGBColor(4, 5, 6);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Colour on a light background.
    light: &'static str,
    /// Colour on a dark background.
    dark: &'static str,
    /// Value of SVG's `stroke-dasharray`. Empty for a solid line.
    dash: &'static str,
    /// Width of the line, in tenths of a pixel.
    pub(super) width: u32,
    /// Drawing order. Higher layers cover lower ones.
    pub(super) layer: u8,
}

const fn look(light: &'static str, dark: &'static str, dash: &'static str) -> Look {
    Look { light, dark, dash, width: 18, layer: 1 }
}

/// Looks of further variants of a policy.
const MORE: [Look; 6] = [
    look("#0f9488", "#2dd4bf", "14 6"),
    look("#0369a1", "#7dd3fc", "5 5"),
    look("#6d5ae0", "#b3a5ff", "18 5 4 5"),
    look("#6b8e12", "#bedb4c", "10 10"),
    look("#a1620f", "#eab676", "3 7"),
    look("#9d3c72", "#e59cc4", "20 10"),
];

const BOUND: Look = Look { light: "#444b55", dark: "#d5dae1", dash: "4 8", width: 22, layer: 0 };

fn of_kind(kind: &str) -> Look {
    match kind {
        "fair" => look("#737b87", "#a3abb8", ""),
        "sjf" => look("#c98a04", "#f0c048", ""),
        "edf" => look("#2a9155", "#5cd08d", ""),
        "edf_low" => look("#2a9155", "#5cd08d", "12 7"),
        "karuna" => look("#8a3ffc", "#b992ff", ""),
        "karuna_wc" => look("#8a3ffc", "#b992ff", "12 7"),
        "two_class" => look("#8d5a3b", "#cf9d7c", ""),
        "two_class_99" => look("#8d5a3b", "#cf9d7c", "12 7"),
        "tent_edf" => look("#d6409f", "#f590cc", "12 7"),
        "tent" => look("#d6409f", "#f590cc", ""),
        "mfs" => Look { width: 28, layer: 2, ..look("#1f6feb", "#6cb0ff", "") },
        _ => Look { width: 36, layer: 3, ..look("#d92d20", "#ff7a6b", "") },
    }
}

/// Returns the look of each variant.
pub(super) fn looks(report: &Report) -> Vec<Look> {
    let mut seen: Vec<&str> = Vec::new();
    let mut more = 0;
    (0..report.plan.variants.len())
        .map(|variant| {
            let kind = report.kind(variant);
            if report.is_bound(variant) {
                BOUND
            } else if seen.contains(&kind) {
                more += 1;
                MORE[(more - 1) % MORE.len()]
            } else {
                seen.push(kind);
                of_kind(kind)
            }
        })
        .collect()
}

/// Returns the placeholder colour of a variant.
pub(super) fn colour(variant: usize) -> RGBColor {
    RGBColor(10, u8::try_from(variant % 250).expect("below 250"), 7)
}

/// Returns the CSS class of a variant's elements outside of plots.
pub(super) fn class(variant: usize) -> String {
    format!("v{variant}")
}

/// Replaces the placeholder colours of an SVG by CSS classes.
pub(super) fn resolve(svg: &str, looks: &[Look]) -> String {
    let mut text = svg.replace(&hex(INK), "currentColor").replace(&hex(GRID), "var(--grid)");
    for (number, look) in looks.iter().enumerate() {
        let stand_in = hex(colour(number));
        let variable = format!("var(--v{number})");
        if !look.dash.is_empty() {
            text = text.replace(
                &format!("stroke=\"{stand_in}\""),
                &format!("stroke=\"{variable}\" stroke-dasharray=\"{}\"", look.dash),
            );
        }
        text = text.replace(&stand_in, &variable);
    }
    text
}

fn hex(RGBColor(r, g, b): RGBColor) -> String {
    format!("#{r:02X}{g:02X}{b:02X}")
}

/// Returns the part of the style sheet that defines the looks and fades other variants while the
/// pointer is on one in a legend.
pub(super) fn style(looks: &[Look]) -> String {
    let (mut light, mut dark, mut rest) = (String::new(), String::new(), String::new());
    for (number, look) in looks.iter().enumerate() {
        let class = class(number);
        write!(light, "--{class}:{};", look.light).expect("a String takes all");
        write!(dark, "--{class}:{};", look.dark).expect("a String takes all");
        let variable = format!("var(--{class})");
        writeln!(
            rest,
            ".legend .{class} svg {{ color: {variable}; }}\n\
             section:has(.legend .{class}:hover) svg \
             :is([stroke^=\"var(--v\"]:not([stroke=\"{variable}\"]), \
             [fill^=\"var(--v\"]:not([fill=\"{variable}\"])) {{ opacity: .05; }}\n\
             section:has(.legend .{class}:hover) svg polygon[fill=\"{variable}\"] {{ opacity: .3; \
             }}"
        )
        .expect("a String takes all");
    }
    format!(
        ":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{rest}"
    )
}

/// Returns a look's symbol for legends: a piece of its line.
pub(super) fn key(look: &Look) -> String {
    format!(
        "<svg viewBox=\"0 0 56 20\" width=\"28\" height=\"10\" aria-hidden=\"true\"><line x1=\"2\" \
         y1=\"10\" \
         x2=\"54\" y2=\"10\" stroke=\"currentColor\" stroke-width=\"{}\"{}/></svg>",
        f64::from(look.width) / 4.5,
        if look.dash.is_empty() {
            String::new()
        } else {
            format!(" stroke-dasharray=\"{}\"", look.dash)
        }
    )
}
