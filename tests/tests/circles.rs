//! Checks that the files of a crate depend on each other in one direction only, so that each can be
//! read with those below it.
//!
//! A file depends on another if a path in its code leads into it: `crate::…`, `super::…`, `self::…`
//! or the name of one of its modules. Module declarations and code under `#[cfg(test)]` do not
//! count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::sources::{files, text};

const CRATES: [&str; 3] = ["proto/policy", "daemon", "coordinator"];

/// The path of a module from the root of its crate. The root's path is empty.
type Module = Vec<String>;

/// Returns the files of `krate` by module, without those of tests.
fn modules(krate: &str) -> BTreeMap<Module, String> {
    let source = Path::new(krate).join("src");
    let inside = |path: PathBuf| {
        let parts = path.strip_prefix(&source).ok()?.with_extension("");
        let names = parts.iter().map(|part| part.to_string_lossy().into_owned());
        let module: Module = names.filter(|name| name != "lib").collect();
        let is_test = |name: &String| name == "tests" || name.ends_with("_tests");
        (!module.iter().any(is_test)).then(|| (module, text(&path)))
    };
    files(&["rs"]).into_iter().filter_map(inside).collect()
}

fn file_name(module: &Module) -> String {
    if module.is_empty() { "lib.rs".to_owned() } else { format!("{}.rs", module.join("/")) }
}

pub(crate) fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
}

/// Collects words, `::` and punctuation of a Rust file, without comments and literals.
pub(crate) fn tokens(stream: TokenStream, found: &mut Vec<String>) {
    for tree in stream {
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Parenthesis | Delimiter::None => ("(", ")"),
                };
                found.push(open.to_owned());
                tokens(group.stream(), found);
                found.push(close.to_owned());
            }
            TokenTree::Ident(word) => found.push(word.to_string()),
            TokenTree::Punct(mark) => match found.last_mut() {
                Some(last) if last == ":" && mark.as_char() == ':' => last.push(':'),
                _ => found.push(mark.to_string()),
            },
            TokenTree::Literal(_) => {}
        }
    }
}

pub(crate) fn after_item<'a, 't>(mut tokens: &'a [&'t str]) -> &'a [&'t str] {
    let mut depth = 0_usize;
    while let [token, rest @ ..] = tokens {
        tokens = rest;
        match *token {
            "{" => depth += 1,
            "}" => depth -= 1,
            ";" => {}
            _ => continue,
        }
        if depth == 0 {
            break;
        }
    }
    tokens
}

/// Reads a path, or a tree of paths as in `use`. Returns the tokens after it.
fn paths<'a, 't>(
    mut tokens: &'a [&'t str],
    prefix: &[&'t str],
    found: &mut Vec<Vec<&'t str>>,
) -> &'a [&'t str] {
    let mut path = prefix.to_vec();
    while let [token, rest @ ..] = tokens {
        match *token {
            "{" => {
                tokens = rest;
                while !tokens.starts_with(&["}"]) {
                    tokens = paths(tokens, &path, found);
                    tokens = tokens.strip_prefix(&[","]).unwrap_or(tokens);
                }
                return &tokens[1..];
            }
            word if is_word(word) => path.push(word),
            _ => break,
        }
        tokens = rest;
        match tokens.strip_prefix(&["::"]) {
            Some([next, ..]) if !is_word(next) && *next != "{" => break,
            Some(more) => tokens = more,
            None => break,
        }
    }
    found.push(path);
    // `as name`, `::*` and others may stand between a path of a tree and the next one.
    let end = tokens.iter().position(|t| matches!(*t, "," | "}" | ";"));
    if prefix.is_empty() { tokens } else { &tokens[end.unwrap_or(0)..] }
}

/// Returns the innermost module with its own file into which `path` leads from `here`.
fn resolve(path: &[&str], here: &Module, files: &BTreeMap<Module, String>) -> Option<Module> {
    let inside = |module: &Module, name: &str| {
        let mut inner = module.clone();
        inner.push(name.to_owned());
        files.contains_key(&inner).then_some(inner)
    };
    let mut module = here.clone();
    for (index, name) in path.iter().enumerate() {
        match *name {
            "crate" => module.clear(),
            "self" if index == 0 => {}
            "super" => drop(module.pop()),
            name => match inside(&module, name) {
                Some(inner) => module = inner,
                None if index == 0 => return None,
                None => break,
            },
        }
    }
    while !files.contains_key(&module) {
        module.pop()?;
    }
    Some(module)
}

fn dependencies(module: &Module, files: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut all = Vec::new();
    tokens(files[module].parse().expect("Rust"), &mut all);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let (mut tokens, mut here, mut found) = (&all[..], module.clone(), BTreeSet::new());
    // Whether each open brace belongs to a module.
    let mut open = Vec::new();
    while let [token, rest @ ..] = tokens {
        let mut read = Vec::new();
        tokens = match tokens {
            ["#", "[", "cfg", "(", "test", ")", "]", item @ ..] => after_item(item),
            // A restriction of visibility is not a dependency.
            ["pub", "(", "in", path @ ..] => {
                let end = path.iter().position(|token| *token == ")");
                &path[end.unwrap_or(0)..]
            }
            ["mod", name, "{", inner @ ..] => {
                here.push((*name).to_owned());
                open.push(true);
                inner
            }
            ["use", tree @ ..] => paths(tree, &[], &mut read),
            [word, "::", ..] if is_word(word) => paths(tokens, &[], &mut read),
            _ => {
                match *token {
                    "{" => open.push(false),
                    "}" if open.pop() == Some(true) => drop(here.pop()),
                    _ => {}
                }
                rest
            }
        };
        found.extend(read.iter().filter_map(|path| resolve(path, &here, files)));
    }
    found.remove(module);
    found
}

fn circles(files: &BTreeMap<Module, String>) -> BTreeSet<Vec<String>> {
    let edges: BTreeMap<&Module, BTreeSet<Module>> =
        files.keys().map(|file| (file, dependencies(file, files))).collect();
    let reached = |start: &Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
        while let Some(file) = next.pop() {
            next.extend(edges[file].iter().filter(|to| seen.insert((*to).clone())));
        }
        seen
    };
    let reach: BTreeMap<&Module, BTreeSet<Module>> =
        files.keys().map(|file| (file, reached(file))).collect();
    let circle = |file: &&Module| {
        let back = |to: &&Module| reach[to].contains(*file);
        reach[file].iter().filter(back).map(file_name).collect::<Vec<_>>()
    };
    reach.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
}

#[test]
fn files_of_a_crate_form_no_circles() {
    for folder in CRATES {
        let circles = circles(&modules(folder));
        assert!(
            circles.is_empty(),
            "{folder}: files depend on each other in a circle: {circles:#?}"
        );
    }
}

#[test]
fn paths_are_found_wherever_code_has_them_and_not_in_tests() {
    let text = r##"
        //! `crate::a`
        use super::{b::{self, C}, d as e};
        mod inner { use super::super::f::*; }
        pub(in crate::g) fn go<'a>(h: &'a str) { crate::i::j('"', "crate::k", r#"crate::l"#); }
        #[cfg(test)]
        mod tests { use crate::m; }
        use n::O;
    "##;
    let module = |path: &str| path.split('/').map(str::to_owned).collect::<Module>();
    let mut files: BTreeMap<Module, String> = ["a", "b", "d", "f", "g", "i", "k", "l", "m", "x/n"]
        .map(|path| (module(path), String::new()))
        .into();
    files.insert(Vec::new(), String::new());
    files.insert(module("x"), text.to_owned());
    let found = dependencies(&module("x"), &files);
    assert_eq!(found, ["b", "d", "f", "i", "x/n"].map(module).into());
}
