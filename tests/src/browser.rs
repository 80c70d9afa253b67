//! A real browser for tests of web pages.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Need, skip};

/// Longest time that Chromium may take for a page.
const BROWSER_MAX: Duration = Duration::from_secs(120);

/// Chromium without a window, a sandbox or a network of its own.
const FLAGS: &str = "--headless --no-sandbox --disable-gpu --disable-quic \
    --no-first-run --disable-background-networking --disable-component-update \
    --disable-sync --disable-dev-shm-usage --hide-scrollbars --virtual-time-budget=5000";

fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path)
        .flat_map(|folder| {
            ["chromium", "chromium-browser", "google-chrome"].map(|it| folder.join(it))
        })
        .find(|file| file.is_file());
    if found.is_none() {
        skip(Need::Machine, "there is no Chromium here; `apt-get install chromium`");
    }
    found
}

/// Runs Chromium until it ends, and returns its standard output. Without Chromium the calling test
/// is skipped.
///
/// # Panics
/// Panics if Chromium takes more than two minutes.
#[must_use]
pub fn browse(arguments: &[String], url: &str) -> Option<String> {
    let program = chromium()?;
    let profile = tempfile::tempdir().expect("a folder");
    let out = profile.path().join("stdout");
    let mut child = Command::new(program)
        .args(FLAGS.split_whitespace())
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(url)
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&out).expect("a file"))
        .stderr(Stdio::null())
        .spawn()
        .expect("Chromium starts");
    let begun = Instant::now();
    loop {
        if child.try_wait().expect("it is ours").is_some() {
            return Some(std::fs::read_to_string(&out).expect("text"));
        }
        if begun.elapsed() > BROWSER_MAX {
            let _ = child.kill();
            let _ = child.wait();
            panic!("Chromium took more than {BROWSER_MAX:?} for {url}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the text of a page's document from the element with this id to the end of its section.
///
/// # Panics
/// Panics if there is no such element.
#[must_use]
pub fn part<'a>(dom: &'a str, id: &str) -> &'a str {
    let from = dom.find(&format!("id=\"{id}\"")).unwrap_or_else(|| panic!("no {id} in {dom}"));
    let rest = &dom[from..];
    &rest[..rest.find("</section>").unwrap_or(rest.len())]
}

/// Checks that a page has no inline code and nothing of other sites, and that its script sets text
/// only.
///
/// # Panics
/// Panics with what it found.
pub fn assert_own_content(page: &str, script: &str) {
    for forbidden in ["<style", "style=", "onclick", "onload", "http:", "https:", "//cdn"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    for forbidden in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
        assert!(!script.contains(forbidden), "{forbidden}");
    }
}
