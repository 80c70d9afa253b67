//! The daemon's number of a NIC by the name of a device.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{LazyLock, Mutex};

/// The devices that own the ports of devices without a NIC of their own. They don't change.
static OWNERS: LazyLock<Mutex<HashMap<String, Option<String>>>> = LazyLock::new(Mutex::default);

/// Returns the number of the NIC of this name, else of the device whose port it uses, as a virtual
/// function does, else of the NIC named `default`. `find` knows the daemon's NICs.
pub(crate) fn number(find: impl Fn(&str) -> Option<u8>, name: &str) -> Option<u8> {
    by(find, name, owner)
}

fn by(
    find: impl Fn(&str) -> Option<u8>,
    name: &str,
    owner: impl FnOnce(&str) -> Option<String>,
) -> Option<u8> {
    find(name).or_else(|| find(&owner(name)?)).or_else(|| find("default"))
}

fn owner(name: &str) -> Option<String> {
    let read = || laxity_nic::physical(Path::new("/"), name);
    // In a forked child nobody may ever release the lock.
    let Ok(mut owners) = OWNERS.try_lock() else { return read() };
    owners.entry(name.to_owned()).or_insert_with(read).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_a_nic_has_its_number_unless_it_has_its_own() {
        let known = ["mlx5_0", "default", "mlx5_3"];
        let find = |name: &str| known.iter().position(|one| *one == name).map(|at| at as u8);
        let of = |name| by(find, name, |_| Some("mlx5_0".to_owned()));
        assert_eq!([of("mlx5_2"), of("mlx5_3")], [Some(0), Some(2)]);
        assert_eq!(by(find, "eth0", |_| None), Some(1));
        assert_eq!(number(find, "none-of-that-name"), Some(1), "/sys is read");
    }
}
