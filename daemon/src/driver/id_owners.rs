//! Which domain may report what about an id to the coordinator.
//!
//! A coordinator knows one name space for all users of a host. So an id belongs to the domain that
//! announced it first, until that domain ends it. Hints of other domains about the id stay on this
//! host, and the cluster order of the id applies to its own domain only.

use std::collections::{HashMap, VecDeque};

use laxity_policy::domains::DOMAINS_MAX;
use laxity_policy::{BatchId, DomainId, RequestId};
use laxity_shm::record::Hint;

/// Maximum number of ids of one domain. Beyond that, any domain may claim its oldest ones.
const IDS_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkId {
    Batch(BatchId),
    Request(RequestId),
}

#[derive(Debug)]
pub struct IdOwners {
    /// The domain of each id, and the number of its announcement.
    of: HashMap<WorkId, (DomainId, u64)>,
    /// The announcements of each domain, the oldest first.
    ages: Vec<VecDeque<(WorkId, u64)>>,
    announcements: u64,
}

impl Default for IdOwners {
    fn default() -> Self {
        let ages = vec![VecDeque::new(); DOMAINS_MAX];
        Self { of: HashMap::new(), ages, announcements: 0 }
    }
}

impl IdOwners {
    /// Reports whether an id belongs to this domain or to none.
    pub fn may(&self, domain: DomainId, id: WorkId) -> bool {
        self.of.get(&id).is_none_or(|(owner, _)| *owner == domain)
    }

    /// Records a hint. Returns whether its domain may report it.
    pub fn hint(&mut self, domain: DomainId, hint: &Hint) -> bool {
        let batch = |id| WorkId::Batch(BatchId(id));
        let request = |id| WorkId::Request(RequestId(id));
        match *hint {
            Hint::BatchBegin { batch: id, .. } => self.announce(domain, batch(id)),
            Hint::RequestJoin { batch: of, request: id, .. } => {
                self.may(domain, batch(of)) && self.announce(domain, request(id))
            }
            Hint::RequestEnd { request: id } => self.end(domain, request(id)),
            Hint::BatchEnd { batch: id } => self.end(domain, batch(id)),
            Hint::BatchQueued { batch: id, ahead } => {
                self.may(domain, batch(id)) && self.may(domain, batch(ahead))
            }
            Hint::LayerBegin { batch: id, .. } => self.may(domain, batch(id)),
            Hint::ComputeEnd { .. } | Hint::RequestTrace { .. } => true,
        }
    }

    fn announce(&mut self, domain: DomainId, id: WorkId) -> bool {
        if self.of.contains_key(&id) {
            return self.may(domain, id);
        }
        self.announcements += 1;
        let age = self.announcements;
        let ages = &mut self.ages[usize::from(domain.0).min(DOMAINS_MAX - 1)];
        self.of.insert(id, (domain, age));
        ages.push_back((id, age));
        if ages.len() > IDS_MAX
            && let Some((oldest, age)) = ages.pop_front()
            && self.of.get(&oldest) == Some(&(domain, age))
        {
            self.of.remove(&oldest);
        }
        true
    }

    fn end(&mut self, domain: DomainId, id: WorkId) -> bool {
        let may = self.may(domain, id);
        if may {
            self.of.remove(&id);
        }
        may
    }

    pub fn forget(&mut self, domain: DomainId) {
        self.of.retain(|_, (owner, _)| *owner != domain);
        self.ages[usize::from(domain.0).min(DOMAINS_MAX - 1)].clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_domain_that_announced_an_id_reports_it_until_it_ends_it() {
        let mut id_owners = IdOwners::default();
        let (honest, hostile) = (DomainId(0), DomainId(1));
        let begin = Hint::BatchBegin { batch: 7, layers: 1, layer_time_ns: 1 };
        let join = Hint::RequestJoin { batch: 7, request: 70, deadline_ns: 1, bytes: 1 };
        assert!(id_owners.hint(honest, &begin) && id_owners.hint(honest, &join));
        for hint in [
            begin,
            join,
            Hint::RequestEnd { request: 70 },
            Hint::LayerBegin { batch: 7, layer: 9 },
            Hint::BatchQueued { batch: 7, ahead: 8 },
            Hint::BatchEnd { batch: 7 },
        ] {
            assert!(!id_owners.hint(hostile, &hint), "{hint:?}");
        }
        assert!(id_owners.may(honest, WorkId::Request(RequestId(70))));
        assert!(id_owners.hint(honest, &Hint::BatchEnd { batch: 7 }));
        assert!(id_owners.hint(hostile, &begin), "it is anybody's again");
    }

    #[test]
    fn a_domain_with_too_many_ids_loses_its_own_oldest() {
        let mut id_owners = IdOwners::default();
        let begin = |batch| Hint::BatchBegin { batch, layers: 1, layer_time_ns: 1 };
        assert!(id_owners.hint(DomainId(0), &begin(1)));
        for batch in 2..=IDS_MAX as u64 + 2 {
            id_owners.hint(DomainId(1), &begin(batch));
        }
        assert_eq!(id_owners.of.len(), IDS_MAX + 1);
        assert!(!id_owners.may(DomainId(1), WorkId::Batch(BatchId(1))));
        assert!(id_owners.may(DomainId(0), WorkId::Batch(BatchId(2))));
    }
}
