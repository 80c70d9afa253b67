//! Metrics of each attached client. They are text of their own beside the recorder's, because a
//! client's lines end with the client, and the recorder keeps all that it ever had. There are at
//! most `scheduler.clients_max` clients.

use std::fmt::Write;

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
    table(&METRICS, &rows)
}

/// Returns the lines of `metrics`, for rows of labels and what has the values.
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
    fn a_name_ends_no_label_and_no_line() {
        assert_eq!(escaped("a\"} 1\nb\\"), "a\\\"} 1\\nb\\\\");
    }
}
