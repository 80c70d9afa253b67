//! Metrics of each attached client. They are text of their own beside the recorder's, because a
//! client's lines end with the client, and the recorder keeps all that it ever had. There are at
//! most `scheduler.clients_max` clients.

use std::cmp::Ordering;
use std::fmt::Write;

use laxity_shm::registration::Release;

use crate::stats::ClientSnapshot;

/// A metric of a `T`: its name, its kind, its help text and its value.
pub(super) type TextMetric<T> = (&'static str, &'static str, &'static str, fn(&T) -> u64);

const METRICS: [TextMetric<ClientSnapshot>; 3] = [
    ("laxity_client_permitted_bytes_total", "counter", "Bytes permitted, by client", |client| {
        client.counters.permitted_bytes
    }),
    ("laxity_client_waiting_flows", "gauge", "Flows that wait for a permit, by client", |client| {
        client.waiting_flows
    }),
    ("laxity_client_owed_bytes", "gauge", "Owed bytes, by client", |client| client.owed_bytes),
];

pub(super) fn rendered(clients: &[ClientSnapshot]) -> String {
    let rows: Vec<_> = clients.iter().map(labels).zip(clients).collect();
    table(&METRICS, &rows) + &libraries(clients.iter().map(|client| client.release))
}

/// Returns the number of clients by the release of their library, compared with the daemon's.
fn libraries(releases: impl Iterator<Item = Release>) -> String {
    let mut counts = [0_usize; 3];
    for release in releases {
        let side = match release.cmp(&Release::ours()) {
            Ordering::Less => 0,
            Ordering::Equal => 1,
            Ordering::Greater => 2,
        };
        counts[side] += 1;
    }
    let rows = ["older", "same", "newer"].map(|side| format!("library=\"{side}\""));
    let rows: Vec<_> = rows.into_iter().zip(&counts).collect();
    let help = "Processes attached, by the release of their library compared with the daemon's";
    table(&[("laxity_client_libraries", "gauge", help, |count| *count as u64)], &rows)
}

/// Returns the lines of `metrics`, for pairs of labels and the struct with the values.
pub(super) fn table<T>(metrics: &[TextMetric<T>], rows: &[(String, &T)]) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in metrics {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, from) in rows {
            let _ = writeln!(text, "{name}{{{labels}}} {}", value(from));
        }
        text.push('\n');
    }
    text
}

fn labels(client: &ClientSnapshot) -> String {
    let mut labels = format!("client=\"{}\",name=\"{}\"", client.id, escaped(&client.name));
    if let Some(pod) = &client.pod {
        let name = if pod.name.is_empty() { &pod.uid } else { &pod.name };
        for (label, value) in
            [("namespace", &pod.namespace), ("pod", name), ("container", &pod.container)]
        {
            let _ = write!(labels, ",{label}=\"{}\"", escaped(value));
        }
    }
    labels
}

/// Returns a value as Prometheus' text format has it. A client chooses its name.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_other_releases_are_counted_apart() {
        let unknown = Release::default();
        let text = libraries([Release::ours(), unknown, Release([255; 3]), unknown].into_iter());
        let value = |side| {
            let start = format!("laxity_client_libraries{{library=\"{side}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&start)).map(str::to_owned)
        };
        let values = ["older", "same", "newer"].map(value);
        assert_eq!(values, ["2", "1", "1"].map(|count| Some(count.to_owned())), "{text}");
    }

    #[test]
    fn a_name_ends_no_label_and_no_line() {
        assert_eq!(escaped("a\"} 1\nb\\"), "a\\\"} 1\\nb\\\\");
    }
}
