//! The jobs whose bytes are counted for the metrics by job, each with the sum over its clients that
//! are gone.
//!
//! A job is the clients of one user that have one name. Clients in a pod whose namespace is known
//! have the namespace in place of the user: a pod may have any user ids, and other ones after each
//! restart. Clients choose their names, so the number of jobs is bounded, in all and by user. No
//! job is ever forgotten, because its counters must not go back. The clients of further jobs count
//! as one, `OTHER`.
//!
//! The scheduler thread changes the table when clients come and go. A client's last counters enter
//! it in the same moment in which the client leaves the snapshots, so sums are exact.

use std::sync::Arc;

use crate::clients::Identity;
use crate::stats::{ClientCounters, JobAccount, JobUser};

/// Maximum number of jobs, without [`OTHER`].
const JOBS_MAX: usize = 64;
/// Maximum number of jobs of one user or namespace. A user also gets no more jobs than are still
/// free, so that greedy users leave some to later ones.
const JOBS_PER_USER_MAX: usize = 16;
/// The number of the job that has the clients of all further jobs.
pub const OTHER: usize = 0;

#[derive(Debug)]
pub struct Jobs(Arc<Vec<JobAccount>>);

impl Default for Jobs {
    fn default() -> Self {
        let gone = ClientCounters::default();
        Self(Arc::new(vec![JobAccount { name: "other".into(), user: JobUser::Several, gone }]))
    }
}

fn user(identity: &Identity) -> JobUser {
    match &identity.pod {
        Some(pod) if !pod.namespace.is_empty() => JobUser::Namespace(pod.namespace.as_str().into()),
        _ => JobUser::Uid(identity.owner.uid),
    }
}

impl Jobs {
    pub fn enter(&mut self, identity: &Identity) -> usize {
        let (name, user) = (&identity.name, user(identity));
        if let Some(known) = self.iter().position(|job| job.user == user && job.name == *name) {
            return known;
        }
        let own = self.iter().filter(|job| job.user == user).count();
        let free = JOBS_MAX + 1 - self.0.len();
        if own >= JOBS_PER_USER_MAX.min(free) {
            return OTHER;
        }
        let job = JobAccount { name: Arc::clone(name), user, gone: ClientCounters::default() };
        Arc::make_mut(&mut self.0).push(job);
        self.0.len() - 1
    }

    /// Adds the last counters of a client that leaves.
    pub fn leave(&mut self, job: usize, counters: &ClientCounters) {
        if let Some(job) = Arc::make_mut(&mut self.0).get_mut(job) {
            job.gone.add(counters);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &JobAccount> {
        self.0.iter()
    }

    /// Returns the table for a snapshot. It is copied only if it changes while a snapshot has it.
    pub fn snapshot(&self) -> Arc<Vec<JobAccount>> {
        Arc::clone(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use laxity_shm::registration::Release;
    use laxity_wire::PodStatus;

    use super::*;
    use crate::clients::ClientId;
    use crate::config::Mode;
    use crate::owner::Owner;

    fn client(uid: u32, namespace: Option<&str>, name: &str) -> Identity {
        let pod = |namespace: &str| {
            Arc::new(PodStatus { namespace: namespace.to_owned(), ..PodStatus::default() })
        };
        Identity {
            id: ClientId(1),
            pid: 1,
            kernel_pid: 1,
            owner: Owner { uid, cgroup: "".into() },
            pod: namespace.map(pod),
            gid: 1,
            name: name.into(),
            mode: Mode::Enforce,
            version: laxity_shm::layout::VERSION,
            release: Release::ours(),
        }
    }

    /// Attaches clients of `uid` under 1000 names, and returns how many jobs the user then has.
    fn flood(jobs: &mut Jobs, uid: u32) -> usize {
        for number in 0..1000 {
            jobs.enter(&client(uid, None, &format!("random {number}")));
        }
        jobs.iter().filter(|job| job.user == JobUser::Uid(uid)).count()
    }

    #[test]
    fn a_client_that_attaches_anew_finds_the_sum_of_its_job() {
        let mut jobs = Jobs::default();
        let counters = ClientCounters { permitted_bytes: 7, ..ClientCounters::default() };
        for _ in 0..3 {
            let job = jobs.enter(&client(1, None, "trainer"));
            jobs.leave(job, &counters);
        }
        let of_others = jobs.enter(&client(2, None, "trainer"));
        jobs.leave(of_others, &counters);
        let sums: Vec<_> = jobs.iter().map(|job| job.gone.permitted_bytes).collect();
        assert_eq!(sums, [0, 21, 7]);
    }

    #[test]
    fn a_user_with_1000_names_takes_its_share_and_displaces_nobody() {
        let mut jobs = Jobs::default();
        let early = jobs.enter(&client(1, None, "early"));
        assert_eq!(flood(&mut jobs, 2), JOBS_PER_USER_MAX);
        assert_eq!(jobs.enter(&client(2, None, "one more")), OTHER);
        assert_eq!(jobs.enter(&client(1, None, "early")), early);
        assert_ne!(jobs.enter(&client(3, None, "late")), OTHER);
        // A name of the user's own does not make it the job of all others.
        assert_ne!(jobs.enter(&client(4, None, "other")), OTHER);
    }

    #[test]
    fn however_many_users_take_all_they_can_the_number_of_jobs_is_bounded() {
        let mut jobs = Jobs::default();
        let taken: Vec<_> = (0..100).map(|uid| flood(&mut jobs, uid)).collect();
        assert_eq!(jobs.iter().count(), JOBS_MAX + 1);
        assert_eq!(taken[..7], [16, 16, 16, 8, 4, 2, 1]);
    }

    #[test]
    fn a_pod_is_known_by_its_namespace_whatever_user_ids_it_has() {
        let mut jobs = Jobs::default();
        for uid in 0..1000 {
            jobs.enter(&client(uid, Some("hostile"), &format!("random {uid}")));
        }
        assert_eq!(jobs.iter().count(), 1 + JOBS_PER_USER_MAX);
        let before = jobs.enter(&client(70_000, Some("team"), "vllm"));
        assert_eq!(jobs.enter(&client(135_536, Some("team"), "vllm")), before);
        // The names of its pod are not known.
        assert_ne!(jobs.enter(&client(70_000, Some(""), "vllm")), before);
    }
}
