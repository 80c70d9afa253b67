//! The container of Kubernetes that a client runs in.
//!
//! The kernel says which control group a process is in, and the kubelet names groups by the pod's
//! uid and the container's id. Names come from the links that the kubelet makes in
//! `/var/log/containers`: `POD_NAMESPACE_CONTAINER-ID.log`. So the daemon needs neither the API
//! server nor a privilege, and a client can't choose any of it.

use std::fs;
use std::path::Path;

use laxity_wire::PodStatus;

/// Where the kubelet links the logs of all containers of the host.
const LOGS: &str = "/var/log/containers";

/// Returns the container of the process `pid`, or `None` if it is in none of Kubernetes.
pub fn of(pid: u32) -> Option<PodStatus> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    found(&groups, Path::new(LOGS))
}

fn found(groups: &str, logs: &Path) -> Option<PodStatus> {
    let mut pod = groups.lines().find_map(container)?;
    let names = fs::read_dir(logs).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (names, id) = name.strip_suffix(".log")?.rsplit_once('-')?;
        (id == pod.container_id).then(|| names.to_owned())
    });
    for name in names {
        // None of the three may contain an underscore.
        if let [name, namespace, container] = name.split('_').collect::<Vec<_>>()[..] {
            pod.name = name.to_owned();
            pod.namespace = namespace.to_owned();
            pod.container = container.to_owned();
        }
    }
    Some(pod)
}

/// Returns the pod and the container of a line of `/proc/PID/cgroup`, without names.
///
/// The driver `cgroupfs` has `…/podUID/ID`, and `systemd` has `…-podUID.slice/RUNTIME-ID.scope`,
/// with underscores for the dashes of the uid. containerd without its option `SystemdCgroup` has
/// `…-podUID.slice:cri-containerd:ID`.
fn container(line: &str) -> Option<PodStatus> {
    let path = line.splitn(3, ':').nth(2)?;
    // A user makes and names the groups below its slice, so they prove nothing.
    if path.contains("/user.slice/") {
        return None;
    }
    let mut parts = path.split(['/', ':']);
    let uid = parts.find_map(|part| {
        let part = part.strip_suffix(".slice").unwrap_or(part);
        let uid = part.rsplit_once("pod")?.1.replace('_', "-");
        let is_hex = uid.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
        // A static pod has a hash in place of a uid.
        (is_hex && matches!(uid.len(), 32 | 36)).then_some(uid)
    })?;
    let container_id = parts.find_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let id = part.rsplit('-').next()?;
        let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then(|| id.to_owned())
    })?;
    Some(PodStatus { uid, container_id, ..PodStatus::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "3f2504e0-4f89-41d3-9a0c-0305e82c3301";

    fn id() -> String {
        "0123456789abcdef".repeat(4)
    }

    /// Returns the uid and the id of a line in which `U`, `D` and `I` stand for the uid, the uid
    /// with underscores, and the id.
    fn seen(line: &str) -> Option<(String, String)> {
        let line = line.replace("{I}", &id()).replace("{U}", UID);
        let line = line.replace("{D}", &UID.replace('-', "_"));
        container(&line).map(|pod| (pod.uid, pod.container_id))
    }

    #[test]
    fn groups_of_all_drivers_versions_and_runtimes_are_read() {
        for line in [
            "0::/kubepods/burstable/pod{U}/{I}",
            "0::/kubepods/pod{U}/{I}",
            "0::/kubepods.slice/kubepods-pod{D}.slice/cri-containerd-{I}.scope",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{D}.slice/\
             crio-{I}.scope/container",
            "11:memory:/kubepods/besteffort/pod{U}/{I}",
            "4:cpu,cpuacct:/kubepods.slice/kubepods-burstable.slice/\
             kubepods-burstable-pod{D}.slice/docker-{I}.scope",
            "1:name=systemd:/system.slice/containerd.service/\
             kubepods-burstable-pod{D}.slice:cri-containerd:{I}",
            // The path that a daemon in its own control group namespace sees.
            "0::/../../kubepods-pod{D}.slice/cri-containerd-{I}.scope",
            // Kubernetes in a container.
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{D}.slice/\
             cri-containerd-{I}.scope/init",
        ] {
            assert_eq!(seen(line), Some((UID.to_owned(), id())), "{line}");
        }
        let mirror = "a".repeat(32);
        let line = format!("0::/kubepods/burstable/pod{mirror}/{{I}}");
        assert_eq!(seen(&line), Some((mirror, id())));
    }

    #[test]
    fn other_groups_and_nonsense_are_no_container() {
        for line in [
            "",
            "0::/",
            "0::",
            "0::/user.slice/user-1000.slice/session-3.scope",
            "0::/user.slice/user-1000.slice/user@1000.service/pod{U}/{I}",
            "0::/system.slice/docker-{I}.scope",
            "0::/machine.slice/libpod-{I}.scope",
            "0::/kubepods/pod{U}",
            "0::/kubepods/pod{U}/0123",
            "0::/kubepods/podé/{I}",
            "0::/{I}/kubepods/pod{U}",
        ] {
            assert_eq!(seen(line), None, "{line}");
        }
    }

    #[test]
    fn names_are_those_of_the_log_of_the_container() {
        let logs = tempfile::tempdir().expect("a folder");
        let log = |name: &str| {
            fs::write(logs.path().join(format!("{name}.log")), "").expect("written");
        };
        log(&format!("prefill-0_team-a_engine-{}", id()));
        log(&format!("prefill-0_team-a_engine-{}", "f".repeat(64)));
        log("nonsense");
        let groups = format!("1:cpu:/\n0::/kubepods/pod{UID}/{}\n", id());
        let pod = found(&groups, logs.path()).expect("a container");
        assert_eq!(
            (&*pod.namespace, &*pod.name, &*pod.container),
            ("team-a", "prefill-0", "engine")
        );
        let unnamed = found(&groups, Path::new("/nowhere")).expect("a container");
        assert_eq!((&*unnamed.uid, &*unnamed.name), (UID, ""));
        assert_eq!(unnamed.to_string(), format!("pod {UID}"));
        assert_eq!(pod.to_string(), "team-a/prefill-0/engine");
    }
}
