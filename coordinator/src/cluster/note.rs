//! Who made a change, why and when.

use laxity_policy::{Span, Time};
use laxity_wire::v1;

/// Longest comment or author that is stored, in bytes.
const TEXT_BYTES_MAX: usize = 512;

/// The author, reason and time of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) author: String,
    pub(super) comment: String,
    /// When this coordinator learned of the change.
    at: Time,
    aged: Span,
}

impl Note {
    /// Creates the note of a change made `aged` before `now`. Long texts are cut.
    pub(super) fn new(author: &str, comment: &str, now: Time, aged: Span) -> Self {
        Self { author: cut(author), comment: cut(comment), at: now, aged }
    }

    pub(super) fn age(&self, now: Time) -> Span {
        Span(now.since(self.at).0.saturating_add(self.aged.0))
    }

    pub(super) fn to_wire(&self, now: Time) -> v1::DrainNote {
        v1::DrainNote {
            author: self.author.clone(),
            comment: self.comment.clone(),
            age_ns: self.age(now).0,
        }
    }
}

fn cut(text: &str) -> String {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    let end = ends.take_while(|&end| end <= TEXT_BYTES_MAX).last();
    text[..end.unwrap_or(0)].to_owned()
}
