//! Whether this library makes transfers wait: `LAXITY_NIXL`, with the meaning that it has for
//! `laxity.nixl`, and whether `liblaxity.so` sees the work requests of UCX.

use std::path::Path;

use laxity_client::Mode;
use laxity_job::{Environment, Job, symbol};

/// Reports whether requests that are created now wait for permits.
pub(crate) fn is_wanted() -> bool {
    if Job::of_this_process().mode == Mode::Off {
        return false;
    }
    let mut environment = Environment::of_this_process();
    let choices = [("auto", None), ("gate", Some(true)), ("off", Some(false))];
    let chosen = environment.choice("LAXITY_NIXL", &choices);
    for problem in environment.into_problems() {
        eprintln!("laxity: {problem}");
    }
    chosen.unwrap_or_else(|| {
        // A transfer that waits twice can wait for ever: its own bytes fill the window that its
        // work requests wait for. Only liblaxity.so has this function.
        let is_beneath = symbol::find(c"laxity_verbs_exempt").is_some();
        let transports = std::env::var("UCX_TLS").unwrap_or_default();
        !(is_beneath && uses_verbs(&transports, Path::new("/sys/class/infiniband")))
    })
}

/// Reports whether UCX posts by the verbs library. It writes to mlx5 devices itself, unless
/// `UCX_TLS` names a verbs transport.
fn uses_verbs(transports: &str, devices: &Path) -> bool {
    if transports.split(',').any(|name| name.trim().ends_with("_verbs")) {
        return true;
    }
    let names = devices.read_dir().into_iter().flatten().flatten();
    let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
    let is_mlx5 = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("mlx5");
    !names.is_empty() && !names.iter().any(is_mlx5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_uses_verbs_where_it_is_told_to_and_on_devices_other_than_mlx5() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(!uses_verbs("", folder.path()) && !uses_verbs("", Path::new("/nowhere")));
        assert!(uses_verbs("rc_verbs, tcp", folder.path()));
        std::fs::create_dir(folder.path().join("bnxt_re0")).expect("a device");
        assert!(uses_verbs("", folder.path()));
        std::fs::create_dir(folder.path().join("mlx5_0")).expect("a device");
        assert!(
            !uses_verbs("tcp,self", folder.path()) && uses_verbs("tcp,ud_verbs", folder.path())
        );
    }
}
