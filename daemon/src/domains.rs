//! Trust domains: the clients that may order and end each other's work.
//!
//! Clients of one domain share ids of batches and requests, and one order on each port. Each domain
//! has its part of a port and its bounds ([`laxity_policy::domains`]). A domain is a user unless
//! `access.trust` says otherwise. An engine and its transfer library are one domain if one user
//! runs them, in one container or in several.
//!
//! A domain keeps its number while it has clients, and after that until another one needs the
//! number. So the hints of an engine outlive a new attachment.

use laxity_policy::DomainId;
use laxity_policy::domains::DOMAINS_MAX;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrustScope {
    Process,
    #[default]
    Uid,
    /// Clients whose processes have the same effective group.
    Group,
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    Process(u32),
    /// An attachment of a process whose id is unknown.
    Attachment(u64),
    Uid(u32),
    Group(u32),
    /// The only domain under [`TrustScope::Host`].
    Host,
}

impl Domain {
    /// Returns the domain of a client. `pid` is zero if the kernel does not tell it, as for a
    /// process of another pid namespace. Such a client's own claim must not choose its domain.
    pub const fn of(scope: TrustScope, attachment: u64, pid: u32, uid: u32, gid: u32) -> Self {
        match scope {
            TrustScope::Process if pid == 0 => Self::Attachment(attachment),
            TrustScope::Process => Self::Process(pid),
            TrustScope::Uid => Self::Uid(uid),
            TrustScope::Group => Self::Group(gid),
            TrustScope::Host => Self::Host,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct KnownDomain {
    domain: Domain,
    clients: usize,
    /// The number of attachments when its last client left.
    left: u64,
}

/// The numbers of the domains that have clients, or had some lately.
#[derive(Debug, Default)]
pub struct Domains {
    known: Vec<KnownDomain>,
    attachments: u64,
}

impl Domains {
    /// Counts a client in. Returns the number of its domain, and whether another domain had that
    /// number before. If all numbers are taken, further domains share the last one.
    pub fn enter(&mut self, domain: Domain) -> (DomainId, bool) {
        self.attachments += 1;
        let left = self.attachments;
        let own = self.known.iter().position(|known| known.domain == domain);
        let (at, is_other) = match own {
            Some(at) => (at, false),
            None if self.known.len() < DOMAINS_MAX => {
                self.known.push(KnownDomain { domain, clients: 0, left });
                (self.known.len() - 1, false)
            }
            None => {
                let gone = self.known.iter().enumerate().filter(|(_, known)| known.clients == 0);
                match gone.min_by_key(|(_, known)| known.left) {
                    Some((at, _)) => (at, true),
                    None => (DOMAINS_MAX - 1, false),
                }
            }
        };
        if is_other {
            self.known[at] = KnownDomain { domain, clients: 0, left };
        }
        self.known[at].clients += 1;
        (DomainId(at as u8), is_other)
    }

    pub fn leave(&mut self, domain: DomainId) {
        if let Some(known) = self.known.get_mut(usize::from(domain.0)) {
            known.clients = known.clients.saturating_sub(1);
            known.left = self.attachments;
        }
    }

    pub fn clients(&self, domain: DomainId) -> usize {
        self.known.get(usize::from(domain.0)).map_or(0, |known| known.clients)
    }

    pub fn numbers(&self) -> impl Iterator<Item = DomainId> + use<> {
        (0..self.known.len()).map(|at| DomainId(at as u8))
    }

    /// Returns the number of domains that have clients.
    pub fn attached(&self) -> usize {
        self.known.iter().filter(|known| known.clients > 0).count()
    }

    pub fn are_several(&self) -> bool {
        self.attached() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_of_one_domain_is_what_the_configuration_says() {
        let of = |scope, (pid, uid, gid)| Domain::of(scope, 5, pid, uid, gid);
        let (one, other) = ((1, 10, 100), (2, 10, 200));
        for (scope, same) in [
            (TrustScope::Process, false),
            (TrustScope::Uid, true),
            (TrustScope::Group, false),
            (TrustScope::Host, true),
        ] {
            assert_eq!(of(scope, one) == of(scope, other), same, "{scope:?}");
        }
    }

    #[test]
    fn processes_that_the_kernel_does_not_name_are_domains_of_their_own() {
        let of = |attachment| Domain::of(TrustScope::Process, attachment, 0, 10, 100);
        assert_ne!(of(1), of(2));
        assert_ne!(of(1), Domain::of(TrustScope::Process, 3, 1, 10, 100));
    }

    #[test]
    fn a_domain_keeps_its_number_until_another_needs_it_and_none_is_taken_from_clients() {
        let mut domains = Domains::default();
        for uid in 0..DOMAINS_MAX as u32 {
            assert_eq!(domains.enter(Domain::Uid(uid)), (DomainId(uid as u8), false));
        }
        let last = DomainId(DOMAINS_MAX as u8 - 1);
        assert_eq!(domains.enter(Domain::Uid(1000)), (last, false), "they share the last one");
        domains.leave(DomainId(9));
        domains.leave(DomainId(3));
        assert_eq!(domains.enter(Domain::Uid(9)), (DomainId(9), false), "it is back");
        domains.leave(DomainId(9));
        assert_eq!(domains.enter(Domain::Uid(1001)), (DomainId(3), true), "it left first");
        assert_eq!((domains.clients(DomainId(3)), domains.clients(DomainId(9))), (1, 0));
    }
}
