//! Checks that a type name stands for one type, so that a search for the name finds one definition.

use std::collections::BTreeMap;

use crate::circles::{after_item, is_word, tokens};
use crate::sources::{files, none, text};
use crate::tidy::{is_generated, is_test};

/// Names that several parts of the product define, with the reasons.
const MAY_REPEAT: [(&str, &str); 5] = [
    ("Arguments", "a program's command line"),
    ("Config", "a service's configuration"),
    ("ConfigError", "why a service can't use its configuration"),
    ("Flow", "a transfer, as a client submits it and as a link schedules it"),
    ("Permit", "a link's decision, and what the application sees of it (docs/glossary.md)"),
];

/// Returns the types that a file defines at module level, without those of its tests.
fn defined(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    tokens(text.parse().expect("Rust"), &mut all);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let (mut tokens, mut found) = (&all[..], Vec::new());
    while let [_, rest @ ..] = tokens {
        tokens = match tokens {
            ["#", "[", "cfg", "(", "test", item @ ..]
            | ["#", "[", "cfg", "(", "all", "(", "test", item @ ..] => after_item(item),
            ["mod", _, "{", inner @ ..] => inner,
            ["{", ..] => after_item(tokens),
            ["enum" | "struct" | "trait" | "type" | "union", name, item @ ..] if is_word(name) => {
                found.push((*name).to_owned());
                after_item(item)
            }
            _ => rest,
        };
    }
    found
}

#[test]
fn a_type_name_stands_for_one_type() {
    let may_repeat = |name: &str| MAY_REPEAT.iter().any(|(of, _)| *of == name);
    // The part of a name is a crate of the laboratory, or empty for the product.
    let unused = MAY_REPEAT.map(|(name, _)| ((String::new(), name.to_owned()), Vec::new()));
    let mut places: BTreeMap<(String, String), Vec<String>> = unused.into();
    for path in files(&["rs"]).into_iter().filter(|path| !is_test(path)) {
        let (shown, text) = (path.display().to_string(), text(&path));
        let (folder, _) = shown.split_once("/src/").unwrap_or((&shown, ""));
        let is_tool = folder.starts_with("tools/") && folder != "tools/cli";
        let part = if is_tool || folder.starts_with("fuzz") { folder } else { "" };
        for name in defined(&text).into_iter().filter(|_| !is_generated(&text)) {
            places.entry((part.to_owned(), name)).or_default().push(shown.clone());
        }
    }
    places.retain(|(part, name), at| (part.is_empty() && may_repeat(name)) != (at.len() > 1));
    let wrong: Vec<_> = places.iter().map(|(name, at)| format!("{name:?}: {at:?}")).collect();
    none("names of several types, or names that MAY_REPEAT needn't list", &wrong);
}
