//! A table in two forms: Markdown and text for a terminal.

use comfy_table::{CellAlignment, Table, presets};

#[derive(Debug, Default)]
pub(crate) struct Sheet {
    pub(crate) of: String,
    pub(crate) caption: String,
    names: usize,
    heading: Vec<Cell>,
    rows: Vec<Vec<Cell>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// A name, which may contain characters that are special in Markdown.
    Name(String),
    Bound(String),
    Text(String),
    Best(String),
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Cell {
    pub(crate) fn name(name: &str) -> Self {
        Self::Name(name.to_owned())
    }

    fn text(&self) -> &str {
        let (Self::Name(text) | Self::Bound(text) | Self::Text(text) | Self::Best(text)) = self;
        text
    }

    fn markdown(&self) -> String {
        match self {
            Self::Name(name) => plain(name),
            Self::Bound(name) => format!("*{}*", plain(name)),
            Self::Text(text) => text.replace('|', "\\|"),
            Self::Best(text) => format!("**{text}**"),
        }
    }
}

impl Sheet {
    pub(crate) fn new(names: usize, heading: Vec<Cell>) -> Self {
        Self { names, heading, ..Self::default() }
    }

    pub(crate) fn about(self, panel: &str, caption: &str) -> Self {
        Self { of: panel.to_owned(), caption: caption.to_owned(), ..self }
    }

    /// Adds a row, which must be as long as the heading.
    pub(crate) fn add(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.heading.len(), "{row:?}");
        self.rows.push(row);
    }

    /// Returns a title such as `**DBRX**, WHAT:` and the table as Markdown, one line per row.
    pub(crate) fn markdown(&self) -> String {
        let caption = match self.title(|of| format!("**{}**", plain(of))) {
            title if title.is_empty() => title,
            title => format!("{title}:\n\n"),
        };
        let rules = (0..self.heading.len())
            .map(|column| if column < self.names { "---" } else { "---:" })
            .collect::<Vec<_>>();
        let line = |cells: &Vec<Cell>| {
            let cells: Vec<String> = cells.iter().map(Cell::markdown).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rows: String = self.rows.iter().map(line).collect();
        let rule = rules.join("|");
        format!("{caption}{}|{rule}|\n{rows}", line(&self.heading))
    }

    pub(crate) fn terminal(&self) -> String {
        let texts = |cells: &[Cell]| cells.iter().map(|c| c.text().to_owned()).collect::<Vec<_>>();
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(texts(&self.heading));
        for row in &self.rows {
            table.add_row(texts(row));
        }
        for column in table.column_iter_mut().skip(self.names) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        match self.title(str::to_owned) {
            title if title.is_empty() => format!("{table}\n"),
            title => format!("{title}\n{table}\n"),
        }
    }

    fn title(&self, shown: impl Fn(&str) -> String) -> String {
        match (self.of.as_str(), self.caption.as_str()) {
            ("", caption) => caption.to_owned(),
            (of, "") => shown(of),
            (of, caption) => format!("{}, {caption}", shown(of)),
        }
    }
}

fn plain(name: &str) -> String {
    let mut text = String::new();
    for char in name.chars() {
        if matches!(char, '\\' | '|' | '*' | '`' | '<' | '[') {
            text.push('\\');
        }
        text.push(char);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_rule_below_its_heading_and_names_cannot_break_it() {
        let mut table = Sheet::new(1, vec!["who".into(), "%".into()]);
        table.add(vec![Cell::name("a|b*"), Cell::Best("1.0".to_owned())]);
        assert_eq!(table.markdown(), "| who | % |\n|---|---:|\n| a\\|b\\* | **1.0** |\n");
        let table = table.about("DBRX", "in time");
        assert!(table.markdown().starts_with("**DBRX**, in time:\n\n| who"));
        assert!(table.terminal().starts_with("DBRX, in time\n"));
        assert!(table.terminal().contains("a|b*"));
    }
}
