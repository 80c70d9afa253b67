//! The owners of ports by the names of NICs that share them, as sysfs had them at the first look. A
//! look at sysfs costs more than a submit.

use std::collections::BTreeMap;
use std::sync::Mutex;

/// Maximum number of NICs whose owners are remembered.
const OWNERS_MAX: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct PortOwners(Mutex<BTreeMap<String, Option<String>>>);

impl PortOwners {
    /// Returns the NIC whose port the NIC `name` shares, if it is a function of another one.
    pub(crate) fn owner(&self, name: &str) -> Option<String> {
        // Another thread may hold the lock forever in a forked child, so nobody waits for it.
        if let Ok(known) = self.0.try_lock()
            && let Some(owner) = known.get(name)
        {
            return owner.clone();
        }
        let owner = laxity_nic::owner("/".as_ref(), name);
        if let Ok(mut known) = self.0.try_lock()
            && known.len() < OWNERS_MAX
        {
            known.insert(name.to_owned(), owner.clone());
        }
        owner
    }
}
