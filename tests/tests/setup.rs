//! Tests of the installation: `tools/setup.sh` on a bare machine, `tools/install.sh` under a strict
//! umask, and the units that it installs.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use laxity_tests::{Need, skip};

use crate::process::{Said, binary};
use crate::sources::{root, text};

fn script(folder: &Path, name: &str, body: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/bash\n{body}\n")).expect("a writable folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("own file");
}

#[test]
fn setup_on_a_bare_machine_installs_all_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let bin = folder.path();
    for tool in ["env", "bash"] {
        symlink(Path::new("/usr/bin").join(tool), bin.join(tool)).expect("a link");
    }
    script(bin, "id", "echo 0");
    script(bin, "cargo", "");
    let log = bin.join("log");
    script(bin, "apt-get", &format!("echo \"$@\" >>{}", log.display()));
    let mut setup = Command::new("/bin/bash");
    setup.arg(root().join("tools/setup.sh")).arg("base").env("PATH", bin);
    let said = Said::of(&mut setup).good().stdout;
    let asked = fs::read_to_string(&log).expect("apt-get was called");
    for package in ["gcc", "make", "iproute2"] {
        assert!(asked.contains(package), "{package} is not in: {asked}");
        assert!(said.contains(package), "{package} is not in: {said}");
    }
}

fn install(verb: &str, built: &Path, into: &Path, prefix: &str) {
    let script = root().join("tools/install.sh");
    let script = format!("umask 077; exec bash {} {verb}", script.display());
    let mut bash = Command::new("bash");
    bash.args(["-c", &script]).env("TARGET", built).env("DESTDIR", into).env("PREFIX", prefix);
    Said::of(&mut bash).good();
}

/// Puts stand-ins for built programs and libraries into `folder`.
fn build(folder: &Path) {
    let release = folder.join("release");
    fs::create_dir_all(&release).expect("a folder");
    // `laxity man --out` writes pages into a folder.
    for program in ["laxityd", "laxity-coordinator", "laxity-engine"] {
        script(&release, program, "echo text");
    }
    for program in ["laxity", "laxity-lab"] {
        let pages = format!(
            "[ \"$1\" = man ] && mkdir -p \"$3\" && echo page >\"$3/{program}.1\" || echo text"
        );
        script(&release, program, &pages);
    }
    for library in [
        "liblaxity_client.so", "liblaxity_client.a", "liblaxity.so", "liblaxity_mooncake.so",
        "liblaxity_nixl.so", "libnccl_net_laxity.so",
    ] {
        fs::write(release.join(library), "").expect("written");
    }
}

/// Returns all files and folders below `folder` with their modes.
fn modes(folder: &Path) -> Vec<(PathBuf, u32)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let kind = entry.file_type().expect("a kind");
        if !kind.is_symlink() {
            let mode = entry.metadata().expect("a mode").permissions().mode() & 0o7777;
            found.push((entry.path(), mode));
        }
        if kind.is_dir() {
            found.extend(modes(&entry.path()));
        }
    }
    found
}

#[test]
fn what_is_installed_can_be_read_by_all_whatever_the_umask_of_who_installs_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (built, into) = (folder.path().join("built"), folder.path().join("into"));
    fs::create_dir_all(&into).expect("a folder");
    fs::set_permissions(&into, fs::Permissions::from_mode(0o755)).expect("own folder");
    build(&built);
    let install = |verb: &str| install(verb, &built, &into, "");

    install("install");
    let lab = into.join("usr/local/bin/laxity-lab");
    assert!(!lab.exists(), "an operator's host does without it");
    install("install-lab");
    assert!(lab.exists());
    let found = modes(&into);
    let files = found.iter().filter(|(path, _)| path.is_file());
    assert!(files.count() > 30, "{found:?}");
    for (path, mode) in &found {
        let is_program = ["usr/local/bin/", "usr/local/sbin/"]
            .iter()
            .any(|folder| path.starts_with(into.join(folder)));
        let wanted = if path.is_dir() || is_program { 0o755 } else { 0o644 };
        assert_eq!(*mode, wanted, "{}: {mode:o}", path.display());
    }

    for (program, check, file) in [
        ("laxityd", "--check-config", "laxityd.toml"),
        ("laxity-coordinator", "--check", "coordinator.toml"),
    ] {
        let file = into.join("etc/laxity").join(file);
        Said::of(Command::new(binary(program)).arg(check).arg("--config").arg(&file)).good();
    }
    let config = into.join("etc/laxity/laxityd.toml");
    let text = fs::read_to_string(&config).expect("installed");
    assert!(text.contains("\nmode = \"observe\"\n"), "an installation delays nothing: {text}");
    fs::write(&config, format!("{text}# edited\n")).expect("written");
    install("install");
    assert!(fs::read_to_string(&config).expect("kept").ends_with("# edited\n"));

    install("remove");
    assert!(config.exists(), "an operator's configuration stays");
    fs::remove_file(&config).expect("ours");
    install("install");
    fs::remove_file(&config).expect("installed");
    install("install");
    assert!(!config.exists(), "a daemon that enforced without a configuration goes on");
    install("remove");
    let left: Vec<_> = modes(&into).into_iter().filter(|(path, _)| !path.is_dir()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_prefix_moves_all_but_configuration_and_units_which_name_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (built, into) = (folder.path().join("built"), folder.path().join("into"));
    fs::create_dir(&into).expect("a folder");
    build(&built);
    let install = |verb: &str| install(verb, &built, &into, "/opt/laxity");
    install("install");
    install("install-lab");
    let is_ours =
        |path: &Path| ["etc", "opt/laxity"].iter().any(|at| path.starts_with(into.join(at)));
    let found: Vec<_> = modes(&into).into_iter().filter(|(path, _)| path.is_file()).collect();
    let elsewhere: Vec<_> = found.iter().filter(|(path, _)| !is_ours(path)).collect();
    // systemd's folders for users and temporary files can't be moved.
    let system = ["usr/lib/sysusers.d", "usr/lib/tmpfiles.d"].map(|at| into.join(at));
    let is_system = |path: &Path| system.iter().any(|at| path.starts_with(at));
    assert!(elsewhere.iter().all(|(path, _)| is_system(path)), "{elsewhere:?}");
    let unit = into.join("etc/systemd/system/laxityd.service");
    let unit = fs::read_to_string(unit).expect("installed");
    assert!(unit.contains("=/opt/laxity/sbin/laxityd") && !unit.contains("/usr/local"), "{unit}");
    install("remove");
    let left: Vec<_> = modes(&into).into_iter().filter(|(path, _)| path.is_file()).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| *name == key).map(|(_, value)| value).collect()
}

#[test]
fn the_units_bound_memory_and_addresses_and_show_no_proc_but_that_of_processes() {
    let daemon = text("dist/laxityd.service");
    let coordinator = text("dist/laxity-coordinator.service");
    for unit in [&daemon, &coordinator] {
        assert_eq!(values(unit, "ProcSubset"), ["pid"]);
        assert_eq!(values(unit, "MemoryMax").len(), 1);
        assert_eq!(values(unit, "IPAddressDeny").len(), 1);
        for line in unit.lines() {
            let is_known = line.is_empty()
                || line.starts_with('#')
                || line.starts_with('[') && line.ends_with(']')
                || line.split_once('=').is_some_and(|(key, _)| {
                    key.chars().all(char::is_alphanumeric) && !key.is_empty()
                });
            assert!(is_known, "no line of a unit: {line}");
        }
    }
    assert_eq!(values(&daemon, "IPAddressDeny"), ["any"]);
    // A coordinator in a private network is reached without an edit, and public hosts are not.
    let allowed = values(&daemon, "IPAddressAllow").join(" ");
    assert!(allowed.contains("localhost") && allowed.contains("10.0.0.0/8"));
    assert!(!allowed.contains("any"), "{allowed}");
    // getifaddrs(3) uses netlink, and the control group of a client shows its owner.
    assert!(values(&daemon, "RestrictAddressFamilies")[0].contains("AF_NETLINK"));
    assert_eq!(values(&daemon, "ProtectProc"), ["default"]);
    for unit in ["laxityd", "laxity-coordinator"] {
        let analysed = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager", "--threshold=17"])
            .arg(root().join(format!("dist/{unit}.service")))
            .output();
        match analysed {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success(), "{unit} is exposed: {said}");
            }
            Err(why) => skip(Need::Machine, format!("systemd-analyze: {why}")),
        }
    }
}

#[test]
fn systemd_reads_the_units_that_configure_nics() {
    let folder = tempfile::tempdir().expect("a folder");
    for vendor in ["systemd", "systemd-mlnx-qos"] {
        let sample = root().join("dist/laxityd.toml");
        let printed = Command::new(binary("laxity"))
            .args(["switch-config", "--vendor", vendor, "--pfc", "3", "--config"])
            .arg(sample)
            .output()
            .expect("built");
        let unit = String::from_utf8(printed.stdout).expect("text");
        // systemd accepts only programs that exist.
        let unit =
            unit.replace("/usr/sbin/dcb", "/bin/true").replace("/usr/bin/mlnx_qos", "/bin/true");
        assert!(unit.contains("ExecStart=/bin/true"), "{unit}");
        let path = folder.path().join("laxity-qos@.service");
        fs::write(&path, unit).expect("written");
        let instance = folder.path().join("laxity-qos@eth0.service");
        let verify = ["verify", "--man=no", "--recursive-errors=no"];
        match Command::new("systemd-analyze").args(verify).arg(instance).output() {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && said.is_empty(), "{vendor}: {said}");
            }
            Err(why) => skip(Need::Machine, format!("systemd-analyze: {why}")),
        }
    }
}
