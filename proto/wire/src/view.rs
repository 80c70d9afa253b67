//! The JSON for operators, in `laxity cluster … --json` and on the coordinator's page.
//!
//! It has the messages of `laxity.v1.Operator` with the same names. `build.rs` derives `Serialize`
//! for them, and this file has the functions for fields that differ. Ids are strings, because they
//! use all 64 bits and most readers of JSON keep 53. Directions, levels and stages are words. An
//! absent value is `null`, so each key is always there. `event` has the kind of an event.

use laxity_types::Stage;
use serde::{Serialize, Serializer};

use crate::v1;

/// Returns the name of a direction: `egress` or `ingress`.
pub fn direction(number: i32) -> &'static str {
    match v1::Direction::try_from(number) {
        Ok(v1::Direction::Egress) => "egress",
        Ok(v1::Direction::Ingress) => "ingress",
        _ => "unknown",
    }
}

/// The waiting bytes of one level or stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// The name of the level (`P1` to `P16` or `scavenger`) or of the stage.
    pub name: String,
    /// Bytes that are not yet permitted.
    pub bytes: u64,
}

/// Converts a daemon's list by level: the highest level first, the scavenger last.
pub fn by_level(bytes: &[u64]) -> Vec<Queue> {
    let name = |index: usize| match index + 1 {
        last if last == bytes.len() => "scavenger".to_owned(),
        level => format!("P{level}"),
    };
    let queue = |(index, &bytes)| Queue { name: name(index), bytes };
    bytes.iter().enumerate().map(queue).collect()
}

/// Converts a daemon's list by stage, in the order of the stages' numbers. Stages that this release
/// does not have are left out.
pub fn by_stage(bytes: &[u64]) -> Vec<Queue> {
    let queue = |(stage, &bytes): (Stage, &u64)| Queue { name: stage.name().to_owned(), bytes };
    Stage::ALL.into_iter().zip(bytes).map(queue).collect()
}

pub(crate) fn direction_name<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
    direction(*number).serialize(to)
}

pub(crate) fn queued_by_level<S: Serializer>(bytes: &[u64], to: S) -> Result<S::Ok, S::Error> {
    by_level(bytes).serialize(to)
}

pub(crate) fn queued_by_stage<S: Serializer>(bytes: &[u64], to: S) -> Result<S::Ok, S::Error> {
    by_stage(bytes).serialize(to)
}

pub(crate) fn id<S: Serializer>(id: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(id)
}

pub(crate) fn optional_id<S: Serializer>(id: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|id| id.to_string()).serialize(to)
}

pub(crate) fn missed<S: Serializer>(events: &u64, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Missed {
        events: u64,
    }
    Missed { events: *events }.serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::watch_event::Event;

    #[test]
    fn the_last_level_is_the_scavenger_whatever_the_number_of_levels() {
        let names = |bytes: &[u64]| by_level(bytes).into_iter().map(|queue| queue.name);
        assert!(names(&[1, 2, 3]).eq(["P1", "P2", "scavenger"]));
        assert_eq!(names(&[]).count(), 0);
    }

    #[test]
    fn stages_of_a_later_release_are_left_out() {
        let queues = by_stage(&[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(queues.len(), Stage::ALL.len());
        assert_eq!((queues[2].name.as_str(), queues[2].bytes), ("p2d", 3));
    }

    #[test]
    fn an_id_of_64_bits_survives_readers_of_json_that_keep_53() {
        let status = v1::BatchStatus { batch: u64::MAX, ..v1::BatchStatus::default() };
        let json = serde_json::to_value(&status).expect("JSON");
        assert_eq!(json["batch"], u64::MAX.to_string());
        assert!(json["rank"].is_null(), "keys are always there");
    }

    #[test]
    fn queues_and_events_have_names() {
        let port = v1::PortStatus {
            port: "eth0".into(),
            direction: 1,
            queued_level_bytes: vec![1, 2],
            ..v1::PortStatus::default()
        };
        let json = serde_json::to_string(&port).expect("JSON");
        let queues =
            r#""queued_by_level":[{"name":"P1","bytes":1},{"name":"scavenger","bytes":2}]"#;
        assert!(json.contains(queues), "{json}");
        assert!(json.starts_with(r#"{"port":"eth0","direction":"egress","rate"#), "{json}");
        let events = [
            (Event::Missed(3), r#"{"event":"missed","events":3}"#),
            (
                Event::Host(v1::HostChanged::default()),
                r#"{"event":"host","host":"","connected":false,"drained":false}"#,
            ),
        ];
        for (event, json) in events {
            assert_eq!(serde_json::to_string(&event).expect("JSON"), json);
        }
    }
}
