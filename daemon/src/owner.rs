//! The owner of a client: an identity that outlives an attachment.
//!
//! Each attachment is a new client, so a client's losses and violations are remembered with its
//! owner. An owner is a user, and within a user the control group that the user could not choose.
//! So two containers that both run as root are two owners. A user may create groups below a group
//! that is delegated to it, so the path ends above the first folder that belongs to the user.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Maximum number of characters of a control group's path that are kept.
const CGROUP_CHARS_MAX: usize = 256;

/// A user and a control group. The module explains both.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub uid: u32,
    /// The control group (version 2). Empty if it is unknown.
    pub cgroup: Arc<str>,
}

impl Owner {
    pub fn of(uid: u32, pid: u32) -> Self {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let path = groups.lines().find_map(|line| line.strip_prefix("0::"));
        let cgroup = path.map_or("", |path| undelegated(Path::new("/sys/fs/cgroup"), path, uid));
        let kept: String = cgroup.chars().take(CGROUP_CHARS_MAX).collect();
        Self { uid, cgroup: kept.into() }
    }
}

/// Returns the part of `path` that user `uid` could not choose. For root it is all of `path`, since
/// root can choose any part.
fn undelegated<'a>(root: &Path, path: &'a str, uid: u32) -> &'a str {
    if uid == 0 {
        return path;
    }
    let ends = path.match_indices('/').map(|(at, _)| at).skip(1).chain([path.len()]);
    let mut kept = "";
    for end in ends {
        let folder = root.join(path[..end].trim_start_matches('/'));
        if fs::metadata(folder).is_ok_and(|folder| folder.uid() == uid) {
            break;
        }
        kept = &path[..end];
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_below_one_that_belongs_to_the_user_is_the_users_own_choice() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(root.path().join("user.slice/user-7/app")).expect("made");
        let path = "/user.slice/user-7/app";
        let own = fs::metadata(root.path()).expect("there").uid();
        let stranger = own + 1;
        assert_eq!(undelegated(root.path(), path, stranger), path);
        if own != 0 {
            assert_eq!(undelegated(root.path(), path, own), "");
        } else {
            let app = root.path().join("user.slice/user-7");
            std::os::unix::fs::chown(app, Some(stranger), None).expect("root may");
            assert_eq!(undelegated(root.path(), path, stranger), "/user.slice");
        }
    }

    #[test]
    fn processes_of_one_user_in_one_group_have_one_owner() {
        let pid = std::process::id();
        assert_eq!(Owner::of(7, pid), Owner::of(7, pid));
        assert_ne!(Owner::of(7, pid), Owner::of(8, pid));
        let unknown = Owner::of(7, u32::MAX);
        assert_eq!((unknown.uid, &*unknown.cgroup), (7, ""));
    }
}
