//! Draws the screen of `laxity top`: the daemon's state, the views, the rows, and the keys.

use clap::ValueEnum as _;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

use super::Top;
use super::flows::{self, FlowList};
use super::rows::{self, View};
use crate::host::overview::summary;

/// Maximum number of lines of the daemon's state. `laxity status` has the others.
const STATE_LINES_MAX: usize = 4;
const GAP: u16 = 2;

pub(super) fn draw(frame: &mut Frame<'_>, top: &Top) {
    let mut state = summary(&top.now);
    state.truncate(STATE_LINES_MAX);
    if let Some(problem) = &top.problem {
        state.insert(0, format!("NO ANSWER, values are old: {problem}"));
    }
    let heights = [
        Constraint::Length(state.len() as u16),
        Constraint::Length(2),
        Constraint::Min(1),
        Constraint::Length(2),
    ];
    let [above, views, middle, below] = Layout::vertical(heights).areas(frame.area());
    frame.render_widget(Paragraph::new(Text::from(state.join("\n"))), above);
    frame.render_widget(Paragraph::new(views_line(top)), views);
    match (&top.flows, &top.detail) {
        (Some(list), _) => flow_list(frame, top, list, middle),
        (None, Some(key)) => {
            let lines = rows::details(top.view, &top.now, key);
            let line = |(name, value): (String, String)| Line::from(format!("{name:<12} {value}"));
            let text: Vec<Line<'_>> = lines.into_iter().map(line).collect();
            frame.render_widget(Paragraph::new(text), middle);
        }
        (None, None) => table(frame, top, middle),
    }
    frame.render_widget(Paragraph::new(keys(top)), below);
}

fn views_line(top: &Top) -> Text<'static> {
    let mut spans = Vec::new();
    for (at, view) in View::value_variants().iter().enumerate() {
        let name = match *view == top.view {
            true => format!("[{} {}]", at + 1, view.name()),
            false => format!(" {} {} ", at + 1, view.name()),
        };
        spans.push(Span::raw(name));
    }
    let interval =
        if top.paused { "paused".to_owned() } else { format!("every {} s", top.interval_s) };
    spans.push(Span::raw(format!("  {interval}")));
    if !top.filter.is_empty() || top.typing {
        let cursor = if top.typing { "_" } else { "" };
        spans.push(Span::raw(format!("  /{}{cursor}", top.filter)));
    }
    Text::from(vec![Line::from(""), Line::from(spans)])
}

/// Returns the reason of the selected row, which its column may not have room for, and the keys.
fn keys(top: &Top) -> Text<'static> {
    let keys = match () {
        () if top.typing => "type to filter   Enter keep   Esc clear",
        () if top.flows.as_ref().is_some_and(|list| list.is_open) => "Esc back   p pause   q quit",
        () if top.flows.is_some() => "↑↓ select   Enter whole screen   Esc back   p pause   q quit",
        () if top.detail.is_some() => "Esc back   p pause   q quit",
        () => "Tab view  ↑↓ select  Enter open  d details  s sort  r reverse  / filter  q quit",
    };
    let why = top.selected_row().and_then(|mut line| line.cells.pop()).map(|cell| cell.text);
    let is_shown = top.flows.is_none() && top.detail.is_none() && top.view != View::Stages;
    let why = why.filter(|why| is_shown && !why.is_empty()).map(|why| format!("why: {why}"));
    let keys = Line::from(keys).style(Style::new().add_modifier(Modifier::DIM));
    Text::from(vec![Line::from(why.unwrap_or_default()), keys])
}

/// Draws the flows of a job or a client, and below them the explanation of the selected one.
fn flow_list(frame: &mut Frame<'_>, top: &Top, list: &FlowList, area: Rect) {
    let rows = list.rows(&top.now);
    let text: Vec<Line<'_>> = list.explanation(&top.now).into_iter().map(Line::from).collect();
    let text = Paragraph::new(text).wrap(Wrap { trim: true });
    // The explanation needs up to twelve lines of a small screen.
    let lines = match list.is_open || rows.is_empty() {
        true => 0,
        false => (rows.len() as u16 + 1).min((area.height / 3).max(3)),
    };
    let heights = [Constraint::Length(1), Constraint::Length(lines), Constraint::Min(1)];
    let [title, above, below] = Layout::vertical(heights).areas(area);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(list.title(&top.now)).style(bold), title);
    frame.render_widget(text, below);
    let width = |at: usize| {
        let texts = rows.iter().map(|row| row[at].chars().count());
        texts.chain([flows::HEADER[at].chars().count()]).max().unwrap_or(0) as u16
    };
    let last = flows::HEADER.len() - 1;
    let widths = (0..=last).map(|at| match at == last {
        true => Constraint::Fill(1),
        false => Constraint::Length(width(at)),
    });
    let table = Table::new(rows.iter().map(|row| Row::new(row.clone())), widths)
        .header(Row::new(flows::HEADER).style(bold))
        .column_spacing(GAP)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .highlight_symbol("> ");
    let mut state = TableState::new().with_selected(list.selected);
    frame.render_stateful_widget(table, above, &mut state);
}

fn table(frame: &mut Frame<'_>, top: &Top, area: Rect) {
    let rows = top.rows();
    let header: Vec<String> = (top.view.header().iter().enumerate())
        .map(|(at, name)| match (at == top.sort, top.ascending) {
            (false, _) => (*name).to_owned(),
            (true, true) => format!("{name}↑"),
            (true, false) => format!("{name}↓"),
        })
        .collect();
    if rows.is_empty() {
        let why = match top.filter.is_empty() {
            true => "No process is attached. `laxity doctor` says why.",
            false => "No row has this text. Esc clears the filter.",
        };
        return frame.render_widget(Paragraph::new(why), area);
    }
    let last = header.len() - 1;
    let width = |at: usize| {
        let cells = rows.iter().map(|line| line.cells[at].text.chars().count());
        cells.chain([header[at].chars().count()]).max().unwrap_or(0) as u16
    };
    let widths = (0..=last).map(|at| match at {
        // The name gives way if the screen is narrow, and the last column takes what is left.
        0 => Constraint::Max(width(0).min(area.width / 3)),
        _ if at == last => Constraint::Fill(1),
        _ => Constraint::Length(width(at)),
    });
    let is_number = |at: usize| at > 0 && (at != last || top.view == View::Stages);
    let cell = |(at, text): (usize, String)| {
        let line = Line::from(text);
        Cell::from(if is_number(at) && at != last { line.right_aligned() } else { line })
    };
    let body = rows.iter().map(|line| {
        let texts = line.cells.iter().map(|cell| cell.text.clone());
        Row::new(texts.enumerate().map(cell))
    });
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let table = Table::new(body, widths)
        .header(Row::new(header.into_iter().enumerate().map(cell)).style(bold))
        .column_spacing(GAP)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .highlight_symbol("> ");
    let selected = top.selected.min(rows.len() - 1);
    let mut state = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut state);
}
