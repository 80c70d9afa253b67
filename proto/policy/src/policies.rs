//! The discipline of each policy. No other module names all of them.

use crate::baseline::{
    edf::Edf, fair::Fair, karuna::Karuna, sjf::Sjf, tent::Tent, tent_mlu::TentMlu,
    two_class::TwoClass, two_class_99::TwoClass99,
};
use crate::config::{LinkConfig, PolicyKind};
use crate::discipline::Discipline;
use crate::laxity::Laxity;
use crate::mfs::Mfs;

/// Creates the discipline of the policy that `config` names.
pub(crate) fn of(config: &LinkConfig) -> Box<dyn Discipline> {
    match config.policy {
        PolicyKind::Laxity => Box::new(Laxity::new(config)),
        PolicyKind::Mfs => Box::new(Mfs),
        PolicyKind::Fair => Box::new(Fair::new(config)),
        PolicyKind::Sjf => Box::new(Sjf::new(config)),
        PolicyKind::Edf => Box::new(Edf::explicit_first(config)),
        PolicyKind::EdfLow => Box::new(Edf::explicit_last(config)),
        PolicyKind::Karuna => Box::new(Karuna::strict(config)),
        PolicyKind::KarunaWc => Box::new(Karuna::work_conserving(config)),
        PolicyKind::TwoClass => Box::new(TwoClass::new(config)),
        PolicyKind::TwoClass99 => Box::new(TwoClass99::new(config)),
        PolicyKind::TentEdf => Box::new(Tent::new(config)),
        PolicyKind::Tent => Box::new(TentMlu::new(config)),
    }
}
