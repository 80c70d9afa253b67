//! Checks the documentation: links, paths and cited sections exist, every page is in the book, and
//! programs accept the examples for them.
//!
//! The second word of a fenced block names the program that reads it, as in `toml laxityd`
//! ([`READERS`]). In blocks of `sh`, subcommands and flags of Laxity's programs have to exist.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{Said, binary, words};
use crate::sources::{files, none, root, text};

/// Second words of `toml` blocks, each with the program that reads `FILE` and its arguments.
const READERS: [(&str, &str, &str); 7] = [
    ("laxityd", "laxityd", "--check-config --config FILE"),
    ("coordinator", "laxity-coordinator", "--check --config FILE"),
    ("profile", "laxity", "profiles FILE"),
    ("plan", "laxity", "sim run --show-plan FILE"),
    ("model", "laxity", "sim models FILE"),
    ("gpu", "laxity", GPU),
    ("engine", "laxity-engine", "check-config --config FILE"),
];

/// Arguments that simulate a small cluster for a second.
const GPU: &str = "sim sweep --policies=fair --seeds=1 --axis=workload.rate_per_gpu=0.1 \
                   --set=cluster.servers=4 --set=model.name=mixtral-8x7b --set=model.ep=8 \
                   --set=workload.seconds=1 --set=cluster.gpu=FILE";

struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

struct Block {
    place: String,
    info: Vec<String>,
    text: String,
}

fn pages() -> Vec<Page> {
    let page = |path: PathBuf| Page { text: text(&path), path };
    files(&["md"]).into_iter().map(page).collect()
}

fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((number + 1, line))
    })
}

/// Returns all fenced blocks in a language, which is their first word.
fn blocks(language: &str) -> Vec<Block> {
    let mut all: Vec<_> = pages().iter().flat_map(blocks_of).collect();
    all.retain(|block| block.info.first().is_some_and(|first| first == language));
    all
}

fn blocks_of(page: &Page) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut open = false;
    for (number, line) in page.text.lines().enumerate() {
        let Some(info) = line.trim_start().strip_prefix("```") else {
            if let Some(block) = found.last_mut().filter(|_| open) {
                block.text.push_str(line);
                block.text.push('\n');
            }
            continue;
        };
        open = !open;
        if open {
            found.push(Block {
                place: format!("{}:{}", page.name(), number + 1),
                info: info.split_whitespace().map(str::to_owned).collect(),
                text: String::new(),
            });
        }
    }
    found
}

fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

fn link_targets(line: &str) -> Vec<String> {
    let line = without_code(line);
    let mut found: Vec<String> = line
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', ' ']).next())
        .map(str::to_owned)
        .collect();
    if let Some((label, target)) = line.split_once("]: ")
        && label.starts_with('[')
    {
        found.push(target.trim().to_owned());
    }
    found
}

fn anchor(heading: &str) -> String {
    // Of a link in a heading, only the text counts.
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text.push_str(before);
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let is_dropped = |c: char| !(c.is_alphanumeric() || c == '-' || c == '_');
    text.trim().to_lowercase().replace(' ', "-").replace(is_dropped, "")
}

fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor = anchor(heading);
        let repeats = seen.entry(anchor.clone()).or_insert(0);
        found.insert(match *repeats {
            0 => anchor,
            n => format!("{anchor}-{n}"),
        });
        *repeats += 1;
    }
    found
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let pages = pages();
    let real = |path: &Path| root().join(path).canonicalize();
    let headings: BTreeMap<PathBuf, BTreeSet<String>> =
        pages.iter().map(|page| (real(&page.path).expect("a page"), anchors(&page.text))).collect();
    let mut wrong = Vec::new();
    for page in &pages {
        let folder = page.path.parent().expect("a folder");
        for (number, line) in prose(&page.text) {
            for target in link_targets(line) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
                let path = if file.is_empty() { page.path.clone() } else { folder.join(file) };
                let has_anchor = |path: PathBuf| {
                    anchor.is_empty() || headings.get(&path).is_some_and(|it| it.contains(anchor))
                };
                if !real(&path).is_ok_and(has_anchor) {
                    wrong.push(format!("{}:{number}: {target}", page.name()));
                }
            }
        }
    }
    none("links that lead nowhere", &wrong);
}

fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((inside, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    inside.split(',').flat_map(|choice| alternatives(&format!("{before}{choice}{after}"))).collect()
}

#[test]
fn every_path_of_the_repository_that_a_page_names_exists() {
    let folders = fs::read_dir(root()).expect("a readable root").flatten();
    let tops: BTreeSet<String> = folders
        .filter(|entry| entry.path().is_dir() && entry.file_name() != "target")
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    let mut wrong = Vec::new();
    for page in pages() {
        if page.name() == "CHANGELOG.md" {
            continue;
        }
        for (number, line) in prose(&page.text) {
            for span in line.split('`').skip(1).step_by(2) {
                let Some((top, _)) = span.split_once('/') else { continue };
                // A capital letter stands for a placeholder, as in `baseline/NAME.rs`.
                let path_like = span
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-{},".contains(c));
                if !tops.contains(top) || !path_like {
                    continue;
                }
                for path in alternatives(span) {
                    if !root().join(&path).exists() {
                        wrong.push(format!("{}:{number}: {path}", page.name()));
                    }
                }
            }
        }
    }
    none("paths that do not exist", &wrong);
}

#[test]
fn every_section_of_the_architecture_that_a_file_cites_exists() {
    let page = text("docs/architecture.md");
    let sections: BTreeSet<&str> = prose(&page)
        .filter_map(|(_, line)| line.strip_prefix("##"))
        .filter_map(|heading| heading.trim_start_matches('#').split_whitespace().next())
        .map(|number| number.trim_end_matches('.'))
        .collect();
    let mut wrong = Vec::new();
    for file in files(&["rs", "c", "h", "py", "sh", "toml", "md"]) {
        for cited in text(&file).split("architecture §").skip(1) {
            let number: String =
                cited.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
            let number = number.trim_end_matches('.');
            if !number.is_empty() && !sections.contains(number) {
                wrong.push(format!("{}: architecture §{number}", file.display()));
            }
        }
    }
    none("sections that do not exist", &wrong);
}

#[test]
fn every_page_of_the_documentation_is_in_the_book() {
    let summary = text("docs/SUMMARY.md");
    let listed: BTreeSet<String> = summary.lines().flat_map(link_targets).collect();
    let missing: Vec<String> = pages()
        .iter()
        .filter_map(|page| page.path.strip_prefix("docs").ok())
        .map(|path| path.display().to_string())
        .filter(|path| path != "SUMMARY.md" && !listed.contains(path))
        .collect();
    none("not in docs/SUMMARY.md", &missing);
}

#[test]
fn pages_fit_a_terminal_and_the_readme_a_few_screens() {
    let mut wide = Vec::new();
    for page in pages() {
        for (number, line) in page.text.lines().enumerate() {
            let table = line.trim_start().starts_with('|');
            let definition = line.starts_with('[') && line.contains("]: ");
            let comment = line.starts_with("<!--");
            if !table && !definition && !comment && line.chars().count() > 120 {
                wide.push(format!("{}:{}", page.name(), number + 1));
            }
        }
        if page.name() == "README.md" {
            assert!(page.text.lines().count() <= 120, "README.md: 120 lines at most");
        }
    }
    none("lines of more than 120 columns", &wide);
}

/// Creates certificates for the hosts of the examples in `folder`, with the names that `laxity
/// certs` gives them.
fn certificates(folder: &Path) {
    let mut laxity = Command::new(binary("laxity"));
    let roles = "--coordinator coord1.example --daemon prefill-3 --viewer alice --operator bob";
    laxity.arg("certs").args(words(roles)).arg("--out");
    Said::of(laxity.arg(folder)).good();
}

#[test]
fn examples_of_configuration_are_accepted_by_the_program_that_reads_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let certs = folder.path().join("certs");
    certificates(&certs);
    let file = folder.path().join("example.toml");
    let mut wrong = Vec::new();
    for block in blocks("toml") {
        let reader = block.info.get(1).map_or("", String::as_str);
        // Tests of `mooncake-adapter` read these.
        if reader == "objectives" {
            continue;
        }
        let Some((_, program, arguments)) = READERS.iter().find(|(name, ..)| *name == reader)
        else {
            wrong.push(format!("{}: write ```toml READER, see READERS", block.place));
            continue;
        };
        let here = format!("{}/", certs.display());
        fs::write(&file, block.text.replace("/etc/laxity/", &here)).expect("example written");
        let arguments = arguments.replace("FILE", &file.display().to_string());
        let output = Said::of(Command::new(binary(program)).args(words(&arguments)));
        if !output.status.success() {
            wrong.push(format!("{}: {}", block.place, output.all()));
        }
    }
    none("examples that are refused", &wrong);
}

/// A command of a shell line: the program, the words before the first flag, and the flags.
struct Call<'l> {
    program: &'l str,
    words: Vec<&'l str>,
    flags: Vec<&'l str>,
}

/// Returns the commands of `line`, without comments, variables, `sudo` and what follows ` -- `.
fn calls(line: &str) -> Vec<Call<'_>> {
    let line = line.split(" #").next().unwrap_or_default();
    line.split(['|', ';', '&'])
        .filter_map(|part| {
            let mut words = part
                .split_whitespace()
                .skip_while(|word| word.contains('=') || *word == "sudo" || *word == "$")
                .take_while(|word| *word != "--");
            let program = words.next()?;
            let rest: Vec<&str> = words.collect();
            let flags = rest.iter().filter(|word| word.starts_with("--") && word.len() > 2);
            Some(Call {
                program: program.rsplit('/').next().unwrap_or(program),
                flags: flags.filter_map(|word| word.split('=').next()).collect(),
                words: rest.into_iter().take_while(|word| !word.starts_with('-')).collect(),
            })
        })
        .collect()
}

#[derive(Default)]
struct Helps(HashMap<String, Option<String>>);

impl Helps {
    fn of(&mut self, program: &str, words: &[&str]) -> Option<&str> {
        self.0
            .entry(format!("{program} {}", words.join(" ")))
            .or_insert_with(|| {
                let mut command = Command::new(binary(program));
                let output = Said::of(command.args(words).arg("--help"));
                output.status.success().then(|| output.all())
            })
            .as_deref()
    }

    fn lists(&mut self, program: &str, words: &[&str], word: &str) -> bool {
        self.of(program, words).is_some_and(|help| {
            help.lines()
                .any(|line| line.starts_with("  ") && line.split_whitespace().next() == Some(word))
        })
    }
}

#[test]
fn commands_in_the_documentation_exist_with_their_flags() {
    let makefile = text("Makefile");
    let mut helps = Helps::default();
    let mut wrong = Vec::new();
    for block in blocks("sh") {
        let joined = block.text.replace("\\\n", " ");
        for call in joined.lines().flat_map(calls) {
            let program = call.program;
            if program == "make" {
                for target in &call.words {
                    let known =
                        makefile.lines().any(|line| line.starts_with(&format!("{target}:")));
                    if !known && !target.contains('=') {
                        wrong.push(format!("{}: make {target}", block.place));
                    }
                }
                continue;
            }
            if !["laxity", "laxityd", "laxity-coordinator", "laxity-engine"].contains(&program) {
                continue;
            }
            // Words are subcommands as long as `--help` lists them. The others are arguments.
            let mut depth = 0;
            while let Some(word) = call.words.get(depth) {
                if !helps.lists(program, &call.words[..depth], word) {
                    break;
                }
                depth += 1;
            }
            if program == "laxity" && depth == 0 && !call.words.is_empty() {
                wrong.push(format!("{}: laxity {}", block.place, call.words[0]));
                continue;
            }
            let help = helps.of(program, &call.words[..depth]).unwrap_or_default();
            for flag in &call.flags {
                let known = help
                    .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
                    .any(|word| word == *flag);
                if !known {
                    wrong.push(format!("{}: {program} … {flag}", block.place));
                }
            }
        }
    }
    none("not in --help", &wrong);
}
