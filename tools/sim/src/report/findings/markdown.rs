//! Tables of GitHub's Markdown.

/// A table. All rows are as long as its heading.
#[derive(Debug)]
pub(super) struct Table {
    /// How many columns on the left hold names; the others hold numbers and are set right.
    names: usize,
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(names: usize, heading: Vec<String>) -> Self {
        Self {
            names,
            heading,
            rows: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, row: Vec<String>) {
        debug_assert_eq!(row.len(), self.heading.len(), "{row:?}");
        self.rows.push(row);
    }

    /// One line for each row, each ended.
    pub(super) fn text(&self) -> String {
        let rules = (0..self.heading.len()).map(|column| {
            if column < self.names {
                "---".to_owned()
            } else {
                "---:".to_owned()
            }
        });
        let rule = format!("|{}|\n", rules.collect::<Vec<_>>().join("|"));
        let line = |cells: &Vec<String>| format!("| {} |\n", cells.join(" | "));
        let rows: String = self.rows.iter().map(line).collect();
        line(&self.heading) + &rule + &rows
    }
}

/// A name as text that means nothing to Markdown.
pub(super) fn plain(name: &str) -> String {
    let mut text = String::new();
    for char in name.chars() {
        if matches!(char, '\\' | '|' | '*' | '`' | '<' | '[') {
            text.push('\\');
        }
        text.push(char);
    }
    text
}

/// In bold.
pub(super) fn bold(text: &str) -> String {
    format!("**{text}**")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_rule_below_its_heading_and_names_cannot_break_it() {
        let mut table = Table::new(1, vec!["who".to_owned(), "%".to_owned()]);
        table.add(vec![plain("a|b*"), "1.0".to_owned()]);
        assert_eq!(
            table.text(),
            "| who | % |\n|---|---:|\n| a\\|b\\* | 1.0 |\n"
        );
    }
}
