//! Blocks of a page that contain computed tables:
//!
//! ```text
//! <!-- laxity sim: PLAN SECTION [panel=NAME] -->
//! <!-- end -->
//! ```
//!
//! Each marker is a line of its own. Markers inside fenced code are ignored.

use std::ops::Range;

use super::PageError;

const START: &str = "<!-- laxity sim:";
const CLOSE: &str = "-->";
const END: &str = "<!-- end -->";
const FENCE: &str = "```";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingsSection {
    Attainment,
    /// Request rates with 90 % and with 50 % attainment.
    Sustained,
    Ttft,
    Collectives,
    Earliness,
    Capacity,
    Against,
    /// A paper's numbers beside those of the report.
    Paper,
    Speed,
}

impl FindingsSection {
    const ALL: [(&'static str, Self); 9] = [
        ("attainment", Self::Attainment),
        ("sustained", Self::Sustained),
        ("ttft", Self::Ttft),
        ("collectives", Self::Collectives),
        ("earliness", Self::Earliness),
        ("capacity", Self::Capacity),
        ("against", Self::Against),
        ("paper", Self::Paper),
        ("speed", Self::Speed),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|s| s.0 == name).map(|s| s.1)
    }

    fn has_panels(self) -> bool {
        !matches!(self, Self::Paper | Self::Speed)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Line number of the first marker, counted from 1.
    pub line: usize,
    pub asked: String,
    pub plan: String,
    pub section: FindingsSection,
    /// Name of the shown panel, or a part of it. `None` selects all.
    pub panel: Option<String>,
    pub(super) content: Range<usize>,
}

/// Returns the blocks of a page, from the top.
/// Fails at the first marker that is invalid or has no counterpart.
pub fn blocks(page: &str) -> Result<Vec<Block>, PageError> {
    let mut found: Vec<Block> = Vec::new();
    let (mut open, mut fenced, mut at) = (None::<Block>, false, 0);
    for (index, whole) in page.split_inclusive('\n').enumerate() {
        let (line, text, start) = (index + 1, whole.trim(), at);
        at += whole.len();
        if text.starts_with(FENCE) {
            fenced = !fenced;
        } else if fenced {
        } else if let Some(asked) = text.strip_prefix(START) {
            if let Some(block) = open {
                return Err(block.unended());
            }
            let asked = asked.strip_suffix(CLOSE).ok_or_else(|| {
                PageError::new(line, format!("a marker ends with {CLOSE} on its line"))
            })?;
            let mut block =
                parse(asked.trim(), line).map_err(|problem| PageError::new(line, problem))?;
            block.content = at..at;
            open = Some(block);
        } else if text == END {
            let mut block = open.take().ok_or_else(|| {
                PageError::new(line, format!("nothing is open that {END} could end"))
            })?;
            block.content.end = start;
            found.push(block);
        }
    }
    match open {
        Some(block) => Err(block.unended()),
        None => Ok(found),
    }
}

impl Block {
    fn unended(&self) -> PageError {
        PageError::new(self.line, format!("no {END} follows this block"))
    }
}

fn parse(asked: &str, line: usize) -> Result<Block, String> {
    let mut words = asked.split_whitespace();
    let (Some(plan), Some(name)) = (words.next(), words.next()) else {
        return Err("a marker names a plan and a section".to_owned());
    };
    let section = FindingsSection::named(name).ok_or_else(|| {
        let known = FindingsSection::ALL.map(|s| s.0).join(", ");
        format!("no section is called {name}; those are {known}")
    })?;
    let mut block = Block {
        line,
        asked: asked.to_owned(),
        plan: plan.to_owned(),
        section,
        panel: None,
        content: 0..0,
    };
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("{word} is no OPTION=VALUE"))?;
        if key != "panel" || !section.has_panels() {
            return Err(format!("{name} has no option {key}"));
        }
        block.panel = Some(value.to_owned());
    }
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(page: &str) -> String {
        blocks(page).expect_err("a mistake").to_string()
    }

    #[test]
    fn blocks_are_found_with_their_options_but_not_in_code() {
        let page = "# Page\n<!-- laxity sim: smoke collectives panel=mean -->\nold\n\
                    <!-- end -->\n```\n<!-- laxity sim: never -->\n```\n";
        let found = blocks(page).expect("a page");
        assert_eq!(found.len(), 1);
        let block = &found[0];
        assert_eq!((block.line, block.plan.as_str()), (2, "smoke"));
        assert_eq!(block.section, FindingsSection::Collectives);
        assert_eq!(block.panel.as_deref(), Some("mean"));
        assert_eq!(&page[block.content.clone()], "old\n");
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let start = "<!-- laxity sim: smoke attainment -->\n";
        assert!(problem(start).contains("line 1: no <!-- end --> follows"));
        assert!(problem(&[start, start].concat()).contains("line 1: no <!-- end -->"));
        assert!(problem("\n<!-- end -->").contains("line 2: nothing is open"));
        assert!(problem("<!-- laxity sim: smoke -->").contains("a plan and a section"));
        assert!(problem("<!-- laxity sim: smoke magic -->").contains("those are attainment, "));
        assert!(problem("<!-- laxity sim: smoke ttft at=1 -->").contains("no option at"));
        assert!(problem("<!-- laxity sim: smoke speed panel=x -->").contains("no option panel"));
        assert!(problem("<!-- laxity sim: smoke ttft panel -->").contains("OPTION=VALUE"));
        assert!(problem("<!-- laxity sim: smoke ttft").contains("ends with -->"));
    }
}
