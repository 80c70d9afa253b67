//! Tests of `laxity-coordinator --check`: errors name the file that cannot be used and what to do.

use std::fs;

use laxity_trial::certs::{self, Subject};

use crate::operations::coordinator;

/// Checks a configuration in which `PLACE` is a folder with certificates and a FIFO.
fn check_text(text: &str) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let subjects = [
        Subject::Coordinator(vec!["coord1".into(), "10.0.0.1".into()]),
        Subject::Coordinator(vec!["coord2".into()]),
        Subject::Daemon("a".into()),
    ];
    certs::make(at, &subjects, 1).expect("made");
    nix::unistd::mkfifo(&at.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("made");
    let file = at.join("coordinator.toml");
    let text = text.replace("PLACE", &at.display().to_string());
    fs::write(&file, text).expect("written");
    coordinator(&["--check", "--config", &file.to_string_lossy()])
}

fn tls(stem: &str, ca: &str) -> String {
    format!(
        "[tls]\ncert = \"PLACE/{stem}.crt\"\nkey = \"PLACE/{stem}.key\"\nclient_ca \
         = \"PLACE/{ca}\"\n"
    )
}

fn etcd(advertise: &str, more: &str) -> String {
    format!("[etcd]\nendpoints = [\"https://127.0.0.1:1\"]\nadvertise = \"{advertise}\"\n{more}")
}

#[test]
fn certificates_that_peers_would_refuse_are_not_valid() {
    let good = tls("coordinator-coord1", "ca.crt");
    for text in [
        good.clone(),
        good.clone() + &etcd("coord1:7471", ""),
        good.clone() + &etcd("10.0.0.1:7471", ""),
    ] {
        let (accepted, said) = check_text(&text);
        assert!(accepted, "{said}");
    }
    for (text, words) in [
        (tls("daemon-a", "ca.crt"), ["tls.cert: ", "lacks serverAuth"]),
        (
            tls("coordinator-coord1", "daemon-a.crt"),
            ["tls.client_ca: ", "no certificate of an authority"],
        ),
        (
            good.replace("coordinator-coord1.key", "coordinator-coord2.key"),
            ["tls: ", "belong together"],
        ),
        (
            tls("coordinator-coord2", "ca.crt") + &etcd("coord1:7471", ""),
            ["tls.cert: ", "sent to `coord1`"],
        ),
        (good.replace("PLACE/coordinator-coord1.crt", "/none"), ["tls.cert: ", "cannot be read"]),
        ("heartbeat = \"1ms\"".to_owned(), ["coordinator.toml: ", "heartbeat: "]),
        (etcd("coord1:7471", "ca = \"PLACE/fifo\"\n"), ["etcd.ca: ", "it is a FIFO"]),
        (
            etcd("coord1:7471", "cert = \"PLACE/daemon-a.crt\"\nkey = \"PLACE/ca.crt\"\n"),
            ["etcd.key: ", "holds no private key"],
        ),
    ] {
        let (accepted, said) = check_text(&text);
        assert!(!accepted, "{text}");
        assert_eq!(said.matches(words[1]).count(), 1, "said twice: {said}");
        for word in words {
            assert!(said.contains(word), "{word}: {said}\n{text}");
        }
    }
}
