//! Blocks of a page that contain computed tables:
//!
//! ```text
//! <!-- laxity sim: PLAN SECTION [only=NAME,…] [panel=NAME,…] [at=VALUE] -->
//! <!-- end -->
//! ```
//!
//! Each marker is a line of its own. Values with spaces are quoted. Markers inside fenced code are
//! ignored.

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

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Attainment | Self::Sustained | Self::Against => &["only", "panel"],
            Self::Capacity => &["panel"],
            Self::Ttft | Self::Collectives | Self::Earliness => &["only", "panel", "at"],
            Self::Paper | Self::Speed => &[],
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Line number of the first marker, counted from 1.
    pub line: usize,
    pub asked: String,
    pub plan: String,
    pub section: FindingsSection,
    pub only: Vec<String>,
    pub panels: Vec<String>,
    /// Value of the horizontal axis. `None` selects the point where variants differ most.
    pub at: Option<String>,
    pub(super) content: Range<usize>,
}

/// Returns the blocks of a page, from the top.
/// Returns the first marker that is invalid or has no counterpart.
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
    let mut words = words(asked)?.into_iter();
    let (Some(plan), Some(name)) = (words.next(), words.next()) else {
        return Err("a marker names a plan and a section".to_owned());
    };
    let section = FindingsSection::named(&name).ok_or_else(|| {
        let known = FindingsSection::ALL.map(|s| s.0).join(", ");
        format!("no section is called {name}; those are {known}")
    })?;
    let mut block = Block {
        line,
        asked: asked.to_owned(),
        plan,
        section,
        only: Vec::new(),
        panels: Vec::new(),
        at: None,
        content: 0..0,
    };
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("{word} is no OPTION=VALUE"))?;
        if !section.options().contains(&key) {
            return Err(format!("{name} has no option {key}"));
        }
        let list = || value.split(',').map(|name| name.trim().to_owned());
        match key {
            "only" => block.only = list().collect(),
            "panel" => block.panels = list().collect(),
            _ => block.at = Some(value.to_owned()),
        }
    }
    Ok(block)
}

fn words(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for char in text.chars() {
        match char {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            other => word.push(other),
        }
    }
    if quoted {
        return Err("a quote is not closed".to_owned());
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(page: &str) -> String {
        blocks(page).expect_err("a mistake").to_string()
    }

    #[test]
    fn blocks_are_found_with_their_options_but_not_in_code() {
        let page = "# Page\n<!-- laxity sim: smoke collectives only=\"mfs w/o RED,fair\" at=0.5 \
            -->\n\
                    old\n<!-- end -->\n```\n<!-- laxity sim: never -->\n```\n";
        let found = blocks(page).expect("a page");
        assert_eq!(found.len(), 1);
        let block = &found[0];
        assert_eq!((block.line, block.plan.as_str()), (2, "smoke"));
        assert_eq!(block.section, FindingsSection::Collectives);
        assert_eq!(block.only, ["mfs w/o RED", "fair"]);
        assert_eq!(block.at.as_deref(), Some("0.5"));
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
        assert!(problem("<!-- laxity sim: smoke speed at=1 -->").contains("no option at"));
        assert!(problem("<!-- laxity sim: smoke ttft at -->").contains("OPTION=VALUE"));
        assert!(problem("<!-- laxity sim: smoke ttft at=\"1 -->").contains("quote"));
        assert!(problem("<!-- laxity sim: smoke ttft").contains("ends with -->"));
    }
}
