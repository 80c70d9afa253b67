//! A classifier, trained before on which policy was best in which window (H-MAS Appendix C.2
//! "supervised classifier").

use super::super::pool::Kind;
use super::super::qos::Long;
use super::super::regressor::{Classes, TrainingError};
use super::{Answer, Decision, Selector, lanes};
use crate::Time;

/// A trained classifier.
#[derive(Debug)]
pub struct Classifier {
    classes: Classes,
}

impl Classifier {
    /// Trains on long views and the policy that was best where they were taken.
    ///
    /// # Errors
    /// If there is nothing to train on.
    pub fn fit(examples: &[(Long, Kind)], seed: u64) -> Result<Self, TrainingError> {
        let rows: Vec<_> = examples.iter().map(|(view, _)| view.features()).collect();
        let number = |kind: &Kind| Kind::ALL.iter().position(|k| k == kind).unwrap_or(0) as i32;
        let kinds: Vec<i32> = examples.iter().map(|(_, kind)| number(kind)).collect();
        let classes = Classes::fit(&rows, &kinds, seed)?;
        Ok(Self { classes })
    }
}

impl Selector for Classifier {
    fn name(&self) -> &'static str {
        "classifier"
    }

    fn select(&mut self, _: Time, view: &Long, _: Kind) -> Answer {
        let number = self.classes.predict(&view.features());
        let kind = number.and_then(|number| Kind::ALL.get(usize::try_from(number).ok()?));
        let Some(kind) = kind else {
            return Answer::Invalid("the classifier gave no class that there is".to_owned());
        };
        Answer::Decided(Decision {
            kind: *kind,
            hints: Some(lanes(view)),
            bypass: false,
        })
    }
}
