//! A real browser for tests of web pages.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Need, skip};

/// Longest time that Chromium may take for a page.
const BROWSER_MAX: Duration = Duration::from_secs(120);

/// Chromium without a window, a sandbox or a network of its own.
const FLAGS: &str = "--headless --no-sandbox --disable-gpu --disable-quic \
    --no-first-run --disable-background-networking --disable-component-update \
    --disable-sync --disable-dev-shm-usage --hide-scrollbars";

/// How long [`copied`] leaves a path without an answer: longer than a page waits.
const SILENCE: Duration = Duration::from_secs(9);

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
#[must_use]
pub fn browse(arguments: &[String], url: &str) -> Option<String> {
    run(&["--virtual-time-budget=5000"], arguments, url)
}

/// Returns the document once the page has loaded, without virtual time: that stands still while an
/// answer is awaited.
#[must_use]
pub fn document_when_loaded(url: &str) -> Option<String> {
    run(&["--dump-dom"], &[], url)
}

fn run(time: &[&str], arguments: &[String], url: &str) -> Option<String> {
    let program = chromium()?;
    let profile = tempfile::tempdir().expect("a folder");
    let out = profile.path().join("stdout");
    let mut child = Command::new(program)
        .args(FLAGS.split_whitespace())
        .args(time)
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

/// Serves a copy of a page, in which `change` may replace what a path holds. A path for which it
/// returns `None` gets no answer, as from a program that hangs, and neither does a path outside the
/// page. Such connections end after [`SILENCE`]. Returns the address of the copy, which stays until
/// the test ends.
///
/// `get` returns head and body of the page's own answer.
pub fn copied(
    get: impl Fn(&str) -> (String, String),
    change: impl Fn(&str, String) -> Option<String>,
) -> SocketAddr {
    let answer = |path: &&str| {
        let (head, body) = get(path);
        let kind = head.lines().find(|line| line.to_ascii_lowercase().starts_with("content-type:"));
        let kind = kind.expect("a content type");
        let body = change(path, body)?;
        let head = format!("HTTP/1.1 200 OK\r\n{kind}\r\nContent-Length: {}", body.len());
        Some(((*path).to_owned(), format!("{head}\r\nConnection: close\r\n\r\n{body}")))
    };
    let paths = ["/", "/page.js", "/kit.js", "/page.css", "/api/state"];
    let answers: HashMap<String, String> = paths.iter().filter_map(answer).collect();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            match line.split(' ').nth(1).and_then(|path| answers.get(path)) {
                Some(answer) => drop((&stream).write_all(answer.as_bytes())),
                None => drop(std::thread::spawn(move || {
                    std::thread::sleep(SILENCE);
                    drop(stream);
                })),
            }
        }
    });
    address
}

/// Returns the text of a page's document from the element with this id to the end of its section.
#[must_use]
pub fn part<'a>(dom: &'a str, id: &str) -> &'a str {
    let from = dom.find(&format!("id=\"{id}\"")).unwrap_or_else(|| panic!("no {id} in {dom}"));
    let rest = &dom[from..];
    &rest[..rest.find("</section>").unwrap_or(rest.len())]
}

/// Checks that a page has no inline code and nothing of other sites, and that its script sets text
/// only.
pub fn assert_own_content(page: &str, script: &str) {
    for forbidden in ["<style", "style=", "onclick", "onload", "http:", "https:", "//cdn"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    for forbidden in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
        assert!(!script.contains(forbidden), "{forbidden}");
    }
}
