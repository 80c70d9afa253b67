//! Removes secrets, addresses and names of hosts from text.
//!
//! These count as secrets: the value of a name with a word such as *token* or *password*
//! (`TOKEN=…`, `"api_key": "…"`, `--password …`), the word after `Bearer`, a password in a URL, and
//! keys in PEM. An address becomes `[address-N]`, with the same N wherever it occurs. Addresses of
//! the loopback and unspecified addresses stay.

use std::collections::BTreeMap;
use std::net::IpAddr;

use regex_lite::{Captures, Regex};

const SECRET: &str = "[redacted]";

/// A name that ends in one of these words names a secret. So does a name with one more word behind
/// it, as in `TOKEN_FILE`.
const NAMES: &str = "(?:secret|token|password|passwd|pwd|passphrase|credential|authorization|\
                     cookie|(?:api|access|private)[_-]?key)";

pub(super) struct Redaction {
    secrets: Vec<Regex>,
    pem: Regex,
    url: Regex,
    address: Regex,
    host: Option<Regex>,
    with_addresses: bool,
    removed: usize,
    known: BTreeMap<String, usize>,
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a constant pattern, which tests use")
}

impl Redaction {
    /// Makes a redaction that also replaces the name of this host.
    pub(super) fn new(with_addresses: bool, host: Option<String>) -> Self {
        let quoted = r#"\\?"[^"\n]*"|'[^'\n]*'"#;
        let word = r#"(?:bearer\s+|basic\s+)?[^\s{}\[\]&"']+"#;
        // A value is the next word, or the next string of a list.
        let after = r#"(?:\s+|["']\s*,\s*)"#;
        // The name also counts without its domain. One with characters that a pattern may interpret
        // is left out.
        let host = host.map(|name| name.split('.').next().unwrap_or_default().to_owned());
        let is_name = |name: &str| name.chars().all(|c| c.is_alphanumeric() || c == '-');
        let host = host.filter(|it| it.len() > 2 && it != "localhost" && is_name(it));
        Self {
            secrets: vec![
                // NAME=VALUE, NAME: VALUE and "name": "value". The first group stays.
                regex(&format!(
                    r#"(?i)([\w.-]*{NAMES}s?(?:[_-]\w+)?\\?"?\s*[=:]\s*)({quoted}|{word})"#
                )),
                regex(&format!(
                    r#"(?i)(--[\w-]*{NAMES}s?(?:-\w+)?{after})({quoted}|[^\s"'-][^\s"']*)"#
                )),
                regex(r"(?i)(\bbearer\s+)([\w.~+/=-]{8,})"),
                regex(r"(://[^\s/:@]*:)([^\s@]+)(?:@)"),
                // Keys whose form is known: of AWS, GitHub, Hugging Face, OpenAI.
                regex(r"(\b)(AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|hf_\w{20,}|sk-[\w-]{20,})"),
            ],
            pem: regex(
                r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
            ),
            url: regex(r#"(\w://(?:[^\s/@"]*@)?)([\w.-]+)"#),
            // MAC, IPv4, and what may be IPv6.
            address: regex(concat!(
                r"(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b",
                r"|\b\d{1,3}(?:\.\d{1,3}){3}\b|\w*:[\w:]*:[\w:.]*",
            )),
            host: host.map(|name| regex(&format!(r"\b{name}(?:\.[\w.-]+)?\b"))),
            with_addresses,
            removed: 0,
            known: BTreeMap::new(),
        }
    }

    pub(super) fn secrets(&self) -> usize {
        self.removed
    }

    /// Returns the number of different addresses, or `None` if they are kept.
    pub(super) fn addresses(&self) -> Option<usize> {
        (!self.with_addresses).then_some(self.known.len())
    }

    /// Returns `text` without secrets and addresses.
    pub(super) fn text(&mut self, text: &str) -> String {
        let mut removed = 0;
        let mut text = self
            .pem
            .replace_all(text, |_: &Captures<'_>| {
                removed += 1;
                SECRET
            })
            .into_owned();
        for pattern in &self.secrets {
            let hide = |found: &Captures<'_>| {
                let (name, value) = (&found[1], &found[2]);
                // Numbers of tokens and words of a configuration are no secrets: `tokens: 512`.
                let plain = value.trim_matches(['"', '\'', ',', ';', '\\']);
                let is_count =
                    plain.parse::<f64>().is_ok() && name.to_lowercase().contains("token");
                let is_plain = plain.is_empty()
                    || is_count
                    || ["true", "false", "null", SECRET].contains(&plain);
                if is_plain {
                    return found[0].to_owned();
                }
                removed += 1;
                let (quote, at) = match value.chars().next() {
                    Some(quote @ ('"' | '\'')) => (quote.to_string(), ""),
                    _ => (String::new(), if found[0].ends_with('@') { "@" } else { "" }),
                };
                format!("{name}{quote}{SECRET}{quote}{at}")
            };
            text = pattern.replace_all(&text, hide).into_owned();
        }
        self.removed += removed;
        if self.with_addresses { text } else { self.without_addresses(&text) }
    }

    fn without_addresses(&mut self, text: &str) -> String {
        let known = &mut self.known;
        let mut number = |address: &str| {
            let next = known.len() + 1;
            format!("[address-{}]", *known.entry(address.to_owned()).or_insert(next))
        };
        let text = self.url.replace_all(text, |found: &Captures<'_>| match &found[2] {
            "localhost" => found[0].to_owned(),
            host if host.parse::<IpAddr>().is_ok() => found[0].to_owned(),
            host => format!("{}{}", &found[1], number(host)),
        });
        let text = self.address.replace_all(&text, |found: &Captures<'_>| {
            // Other things with colons are times, paths of modules and PCI devices.
            match address_in(&found[0]) {
                Some((start, end)) => {
                    let (before, after) = (&found[0][..start], &found[0][end..]);
                    format!("{before}{}{after}", number(&found[0][start..end]))
                }
                None => found[0].to_owned(),
            }
        });
        match &self.host {
            Some(host) => host.replace_all(&text, "[host]").into_owned(),
            None => text.into_owned(),
        }
    }
}

/// Returns where an address is in a word with colons or dots: all of it, or what is left without
/// words before it and a colon or a full stop behind it.
fn address_in(word: &str) -> Option<(usize, usize)> {
    let end = word.trim_end_matches('.').len();
    let ends = [end, word[..end].trim_end_matches(':').len()];
    let starts = [0].into_iter().chain(word.match_indices(':').map(|(at, _)| at + 1));
    let is_address = |text: &str| {
        let is_mac = text.len() == 17 && text.matches(':').count() == 5;
        let ip = text.parse::<IpAddr>();
        is_mac || ip.is_ok_and(|ip| !ip.is_loopback() && !ip.is_unspecified())
    };
    // A part of a loopback address looks like another address.
    if word.trim_end_matches(['.', ':']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
        return None;
    }
    let spans = starts.flat_map(|start| ends.map(|end| (start, end)));
    spans.into_iter().find(|&(start, end)| word.get(start..end).is_some_and(is_address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(text: &str) -> String {
        Redaction::new(false, Some("prefill-3".into())).text(text)
    }

    #[test]
    fn values_whose_name_or_form_is_that_of_a_secret_are_taken_out() {
        for text in [
            "HF_TOKEN=planted",
            "export AWS_SECRET_ACCESS_KEY='planted one'",
            r#"{"api_key": "planted", "x": 1}"#,
            "password = \"planted\"",
            "vllm serve --api-key planted --port 8000",
            "Authorization: Bearer planted-planted",
            "curl -H 'x: bearer plantedplanted'",
            "https://alice:planted@example.org/x",
            "MYSQL_PASSWORD: planted",
            "-----BEGIN EC PRIVATE KEY-----\nplanted\n-----END EC PRIVATE KEY-----\n",
            "-----BEGIN PRIVATE KEY-----\nplanted, cut off",
            "redis://:planted@cache:6379",
            "postgres://alice:plan/planted@db/x",
            r#"{\"api_key\": \"planted\"}"#,
            r#"["--api-key", "planted"]"#,
            "password=ab,planted;planted",
            "key AKIAPLANTEDPLANTED12 of AWS hf_plantedplantedplanted",
        ] {
            let shown = redacted(text).to_lowercase();
            assert!(!shown.contains("planted") && shown.contains(SECRET), "{text}: {shown}");
        }
        assert!(redacted("vllm --api-key planted --port 8000").ends_with("--port 8000"));
        assert_eq!(redacted("PASSWORD=12345678"), "PASSWORD=[redacted]");
    }

    #[test]
    fn what_an_operator_needs_stays() {
        for text in [
            "max_tokens: 512, tokenizer_mode=auto",
            "rate = \"100Gbit\"\nsocket = \"/run/laxity/laxityd.sock\"",
            "2026-11-23T15:36:23 laxity_daemon::driver: laxityd is ready",
            "listening at 127.0.0.1:7475 and [::1]:7475, any at 0.0.0.0",
            "0000:3b:00.0 mlx5_0 fw_ver 28.39.1002",
            "key = \"/etc/laxity/daemon.key\"",
        ] {
            assert_eq!(redacted(text), text);
        }
    }

    #[test]
    fn an_address_has_one_number_throughout_and_is_kept_only_if_asked_for() {
        let text = "10.1.2.3 to fe80::1, again 10.1.2.3; b8:3f:d2:00:11:22 on prefill-3.example, \
                    https://coord.example:7471";
        let shown = redacted(text);
        assert_eq!(
            shown,
            "[address-2] to [address-3], again [address-2]; [address-4] on [host], \
             https://[address-1]:7471"
        );
        let within = redacted("from:fe80::1: refused, a:b:10.1.2.3, 2001:db8::5:");
        assert_eq!(within, "from:[address-1]: refused, a:b:[address-2], [address-3]:");
        let mut kept = Redaction::new(true, Some("prefill-3".into()));
        assert_eq!((kept.text(text), kept.addresses()), (text.to_owned(), None));
    }
}
