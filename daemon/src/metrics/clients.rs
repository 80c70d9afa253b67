//! Metrics of each attached client. There are at most `scheduler.clients_max` clients.

use std::cmp::Ordering;
use std::fmt::Write;

use laxity_shm::registration::Release;

use super::table::{escaped, metrics, table};
use crate::stats::ClientSnapshot;

metrics! {
    CLIENT: ClientSnapshot {
        Counter laxity_client_permitted_bytes_total "Bytes permitted, by client"
            |c| c.counters.permitted_bytes;
        Gauge laxity_client_waiting_flows "Flows that wait for a permit, by client"
            |c| c.waiting_flows;
        Gauge laxity_client_owed_bytes "Owed bytes, by client" |c| c.owed_bytes;
    }
}

metrics! {
    LIBRARIES: u64 {
        Gauge laxity_client_libraries
            "Processes attached, by the release of their library compared with the daemon's"
            |count| *count;
    }
}

pub(super) fn rendered(clients: &[ClientSnapshot]) -> String {
    let rows: Vec<_> = clients.iter().map(labels).zip(clients).collect();
    table(CLIENT, &rows) + &libraries(clients.iter().map(|client| client.release))
}

/// Returns the number of clients by the release of their library, compared with the daemon's.
fn libraries(releases: impl Iterator<Item = Release>) -> String {
    let mut counts = [0_u64; 3];
    for release in releases {
        let side = match release.cmp(&Release::ours()) {
            Ordering::Less => 0,
            Ordering::Equal => 1,
            Ordering::Greater => 2,
        };
        counts[side] += 1;
    }
    let rows = ["older", "same", "newer"].map(|side| format!("library=\"{side}\""));
    let rows: Vec<_> = rows.into_iter().zip(counts).collect();
    table(LIBRARIES, &rows)
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
}
