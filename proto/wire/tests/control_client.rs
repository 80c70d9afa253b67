//! Tests of the blocking client against scripted daemons.
#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use laxity_wire::control::parse_request;
use laxity_wire::{ControlClient, ControlError, Envelope, Request, Response, Status};

/// Starts a daemon that answers every line with the result of `answer`. It sends no empty answer.
fn daemon(name: &str, answer: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> PathBuf {
    let path = std::env::temp_dir().join(format!("laxity-wire-{}-{name}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
            if reader.get_mut().write_all(&answer(&line)).is_err() {
                return;
            }
            line.clear();
        }
    });
    path
}

fn line(response: &Response) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Envelope::new(response)).unwrap();
    line.push(b'\n');
    line
}

#[test]
fn a_status_and_a_bypass_make_the_round_trip_on_one_connection() {
    let path = daemon("round", |request| match parse_request(request).unwrap() {
        Request::Status => {
            line(&Response::Status(Box::new(Status { pid: 42, ..Status::default() })))
        }
        Request::Bypass { on } => line(&Response::done(format!("bypass {on}"))),
        _ => line(&Response::error("no")),
    });
    let mut client = ControlClient::connect(&path, Duration::from_secs(5)).unwrap();
    assert_eq!(client.status().unwrap().pid, 42);
    assert_eq!(client.bypass(true).unwrap(), "bypass true");
    assert!(matches!(client.reload(), Err(ControlError::Refused(words)) if words == "no"));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_silent_daemon_is_a_timeout_and_not_a_hang() {
    let path = daemon("silent", |_| Vec::new());
    let mut client = ControlClient::connect(&path, Duration::from_millis(50)).unwrap();
    assert!(matches!(client.status(), Err(ControlError::Timeout { .. })));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn no_daemon_is_named_with_its_socket() {
    let error = ControlClient::connect("/nonexistent/control.sock", Duration::from_secs(1));
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("/nonexistent/control.sock") && text.contains("LAXITY_CONTROL"),
        "{text}"
    );
}

#[test]
fn an_answer_that_is_no_answer_is_malformed() {
    let path = daemon("garbage", |_| b"HTTP/1.1 400 Bad Request\n".to_vec());
    let mut client = ControlClient::connect(&path, Duration::from_secs(5)).unwrap();
    assert!(matches!(client.status(), Err(ControlError::Malformed { .. })));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn who_may_not_operate_the_daemon_is_told_who_may() {
    let text = |kind: std::io::ErrorKind| {
        let path = "/run/laxity/control.sock".into();
        let cause = kind.into();
        ControlError::Connect { path, cause }.to_string()
    };
    let denied = text(std::io::ErrorKind::PermissionDenied);
    assert!(denied.contains("sudo") && !denied.contains("is it running"), "{denied}");
    let nobody = text(std::io::ErrorKind::ConnectionRefused);
    assert!(nobody.contains("is it running"), "{nobody}");
}
