//! `laxity.v1`: the gRPC messages and services of `proto/laxity/v1/*.proto`, and the values that
//! both ends share. `docs/coordinator.md` has the rules of compatibility.

mod generated {
    #![allow(
        missing_docs,
        unreachable_pub,
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated; the .proto files hold the documentation"
    )]
    tonic::include_proto!("laxity.v1");
}

pub use generated::*;

/// The file descriptors for gRPC reflection.
pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("laxity.v1");

/// The newest protocol version that this release supports.
pub const PROTOCOL: u32 = 1;

/// The oldest protocol version that this release supports.
pub const PROTOCOL_MIN: u32 = 1;

/// Largest message that a side accepts by default, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Maximum number of ranks and pruned requests in one piece of an order.
pub const ORDER_PIECE_ENTRIES_MAX: usize = 4096;

/// The sort key of a batch without deadlines, which puts the batch last.
pub const SORT_KEY_LAST: u64 = u64::MAX;

impl Epoch {
    /// Returns the key that orders epochs: the term, then the sequence.
    #[must_use]
    pub const fn key(&self) -> (u64, u64) {
        (self.term, self.sequence)
    }
}

/// Returns the newest protocol that both sides support, or `None`. Each side is given as (newest,
/// oldest).
pub fn common_protocol(one: (u32, u32), other: (u32, u32)) -> Option<u32> {
    let newest = one.0.min(other.0);
    (newest >= one.1.max(other.1)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    #[test]
    fn protocols_overlap_at_the_older_of_the_newest() {
        assert_eq!(common_protocol((1, 1), (1, 1)), Some(1));
        assert_eq!(common_protocol((3, 1), (2, 2)), Some(2));
        assert_eq!(common_protocol((3, 3), (2, 1)), None);
    }

    #[test]
    fn an_event_of_a_later_protocol_reads_as_none_and_leaves_its_neighbours_alone() {
        // Field 900, length-delimited, with the value "x": an arm of the oneof that no release has.
        let unknown = [0xa2, 0x38, 0x01, b'x'];
        assert_eq!(Event::decode(&unknown[..]), Ok(Event { event: None }));
        let mut report = Report { sequence: 4, ..Report::default() }.encode_to_vec();
        report.extend([0x1a, unknown.len() as u8]);
        report.extend(unknown);
        let known = Event { event: Some(event::Event::BatchStarted(BatchStarted { batch: 9 })) };
        let encoded = known.encode_to_vec();
        report.extend([0x1a, encoded.len() as u8]);
        report.extend(encoded);
        let read = Report::decode(&report[..]).expect("it decodes");
        assert_eq!(read.events, [Event { event: None }, known]);
    }

    #[test]
    fn an_unknown_field_of_a_message_is_ignored() {
        let mut hello = Hello { host: "a".into(), ..Hello::default() };
        let mut bytes = hello.encode_to_vec();
        bytes.extend([0xa2, 0x38, 0x01, b'x']);
        hello.applied = None;
        assert_eq!(Hello::decode(&bytes[..]), Ok(hello));
    }
}
