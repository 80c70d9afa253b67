#!/usr/bin/env python3
"""Runs the DaemonSet as a kubelet would, without a cluster: run.py IMAGE.

It unpacks the image of tools/image.sh and makes the folders of the manifest. runc runs the containers with the
manifest's commands, environment, mounts and capabilities. Then the probes are asked, and a client in the control
group of a pod attaches by the library that the init container has put onto the host. It needs root.
"""

import ctypes
import io
import json
import os
import pathlib
import select
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request

import yaml
from render import DIST

IMAGE = pathlib.Path(sys.argv[1]).resolve()
POD, CONTAINER = "3f2504e0-4f89-41d3-9a0c-0305e82c3301", "0123456789abcdef" * 4
FIRST = "laxity-check"
FIELDS = {"status.hostIP": "127.0.0.1", "spec.nodeName": "node-1"}


def run(*command) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_for(ask):
    for _ in range(100):
        try:
            return ask()
        except (AssertionError, OSError):
            time.sleep(0.1)
    return ask()


def host_paths(pod: dict, items: list[dict], folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Makes the folders of the pod's volumes below `folder`, and returns them by the volume's name."""
    configs = {item["metadata"]["name"]: item["data"] for item in items if item["kind"] == "ConfigMap"}
    paths = {}
    for volume in pod["volumes"]:
        path = folder / volume.get("hostPath", {"path": volume["name"]})["path"].lstrip("/")
        (path / "..data").mkdir(parents=True)
        for name, text in configs[volume["configMap"]["name"]].items() if "configMap" in volume else ():
            # The kubelet makes links, so that it can change all files at once.
            (path / "..data" / name).write_text(text)
            (path / name).symlink_to(f"..data/{name}")
        paths[volume["name"]] = path
    return paths


def bundle(folder: pathlib.Path, rootfs: pathlib.Path, container: dict, paths: dict) -> pathlib.Path:
    """Writes runc's configuration of a container that has the host's network and process ids."""
    values = {}

    def expanded(text: str) -> str:
        for name, value in values.items():
            text = text.replace(f"$({name})", value)
        return text

    for each in container.get("env", []):
        values[each["name"]] = expanded(each.get("value") or FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]])
    arguments = [expanded(argument) for argument in container["command"] + container.get("args", [])]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    image = json.loads((rootfs.parent / "config.json").read_text())
    mounts = [("/proc", "/proc", "rw"), ("/sys", "/sys", "ro"), ("/dev", "/dev", "rw")]
    mounts += [(str(paths[each["name"]]), each["mountPath"], "ro" if each.get("readOnly") else "rw")
               for each in container["volumeMounts"]]
    config = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            # A runtime takes the image's environment, and adds PATH if the image has none. So does umoci.
            "env": image["process"]["env"] + [f"{name}={value}" for name, value in values.items()],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": container["securityContext"]["readOnlyRootFilesystem"]},
        "mounts": [{"destination": to, "type": "bind", "source": source, "options": ["rbind", mode]}
                   for source, to, mode in mounts],
        # In one control group, runc would forget both containers as soon as one ends.
        "linux": {"namespaces": [{"type": "mount"}], "cgroupsPath": f"/laxity-check/{folder.name}"},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def group() -> pathlib.Path:
    """Returns the control group of the client, as the kubelet's driver cgroupfs names it."""
    root = pathlib.Path("/sys/fs/cgroup")
    return (root if (root / "cgroup.procs").exists() else root / "pids") / f"kubepods/burstable/pod{POD}/{CONTAINER}"


def attach(library: pathlib.Path, socket: pathlib.Path) -> None:
    """Attaches a client in the control group of a pod. It sends until standard input ends.

    A client that sends nothing does not look for the next daemon.
    """
    group().mkdir(parents=True, exist_ok=True)
    (group() / "cgroup.procs").write_text(str(os.getpid()))
    os.environ.update(LAXITY_SOCKET=str(socket), LAXITY_NAME="engine", LAXITY_ATTACH_MS="5000")
    client = ctypes.CDLL(str(library))
    client.lax_attach.restype = ctypes.c_void_p
    client.lax_attach.argtypes = [ctypes.c_void_p]
    attached = client.lax_attach(None)
    assert attached, "there is no client"
    client.lax_lane_open.restype = ctypes.c_void_p
    lane = ctypes.c_void_p(client.lax_lane_open(ctypes.c_void_p(attached)))
    # lax_flow of background bytes, lax_ticket and lax_grant.
    flow = struct.pack("=I2xB9xQ24x", 48, 5, 4096)
    ticket, grant = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        client.lax_submit(lane, flow, ticket)
        client.lax_wait(lane, ticket, grant)
        client.lax_complete(lane, ticket, ctypes.c_uint64(4096))


def main() -> None:
    text = (DIST / "base/laxity.yaml").read_text()
    with tempfile.TemporaryDirectory(prefix="laxity") as temporary:
        folder = pathlib.Path(temporary)
        items = list(yaml.safe_load_all(text))
        pod = next(item for item in items if item["kind"] == "DaemonSet")["spec"]["template"]["spec"]
        paths = host_paths(pod, items, folder / "host")
        (folder / "layout").mkdir()
        run("tar", "-C", folder / "layout", "-xf", IMAGE)
        index = json.loads((folder / "layout/index.json").read_text())
        tag = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]
        run("umoci", "unpack", "--image", f"{folder}/layout:{tag}", folder / "image")
        rootfs = folder / "image/rootfs"

        for container in pod["initContainers"] * 2:
            made = bundle(folder / f"init-{time.monotonic_ns()}", rootfs, container, paths)
            run("runc", "run", "--bundle", made, "laxity-check-init")
        libraries = sorted(path.name for path in paths["libraries"].glob("*.so*"))
        print("libraries:", *libraries)
        assert "liblaxity.so" in libraries and "libnccl-net-laxity.so" in libraries

        container = pod["containers"][0]
        log = (folder / "log").open("w+")

        def start(name: str) -> subprocess.Popen:
            made = bundle(folder / name, rootfs, container, paths)
            return subprocess.Popen(["runc", "run", "--bundle", made, name], stdout=log, stderr=log)

        def stop(name: str) -> None:
            subprocess.run(["runc", "kill", name, "TERM"], check=False)
            daemons[name].wait(10)

        def upgrade() -> None:
            """Does what a rolling update does: the next pod is ready before the first one ends."""
            daemons["laxity-check-next"] = start("laxity-check-next")
            wait_for(lambda: run("grep", "waiting for its end", folder / "log"))
            stop(FIRST)
            wait_for(lambda: run("grep", "sockets=2", folder / "log"))

        daemons = {FIRST: start(FIRST)}
        try:
            check(container, paths, upgrade)
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            for name in daemons:
                stop(name)


def check(container: dict, paths: dict, upgrade) -> None:
    """Asks the probes, lets a client attach, and upgrades the daemon below it."""
    probe = container["readinessProbe"]["httpGet"]
    url = f"http://127.0.0.1:{probe['port']}"

    def get(path: str) -> str:
        with urllib.request.urlopen(url + path, timeout=5) as answer:
            return answer.read().decode()

    wait_for(lambda: get(probe["path"]))
    in_daemon = ["runc", "exec", "--env", "LAXITY_CONTROL=/run/laxity-control/control.sock", FIRST]
    alive = container["livenessProbe"]["exec"]["command"]
    wait_for(lambda: run(*in_daemon, *alive))
    (paths["containers"] / f"prefill-0_team-a_engine-{CONTAINER}.log").touch()
    arguments = [paths["libraries"] / "liblaxity_client.so.0", paths["clients"] / "laxityd.sock"]
    client = subprocess.Popen([sys.executable, __file__, "attach", *arguments], stdin=subprocess.PIPE)
    try:
        def seen():
            status = json.loads(run(*in_daemon, *alive, "--json"))
            assert status["mode"] == "observe" and status["clients"], status
            return status["clients"][0]

        pod = wait_for(seen)["pod"]
        assert (pod["namespace"], pod["name"], pod["container"]) == ("team-a", "prefill-0", "engine"), pod
        assert (pod["uid"], pod["container_id"]) == (POD, CONTAINER)
        print(*run(*in_daemon, *alive).splitlines()[:3], sep="\n")

        def counted():
            labels = 'name="engine",namespace="team-a",pod="prefill-0",container="engine"'
            assert labels in get("/metrics"), get("/metrics")

        wait_for(counted)
        bundled = subprocess.run([*in_daemon, alive[0], "support-bundle", "-o", "-"], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(bundled.stdout)) as archive:
            assert b"laxity_build_info{" in archive.extractfile("laxity-support/metrics.txt").read()
        upgrade()
        in_daemon[-1] = "laxity-check-next"
        assert wait_for(seen)["name"] == "engine"
        assert "\nlaxity_refused_clients_total 0\n" in get("/metrics")
        print("upgraded: the next daemon has the client, and serves metrics at once")
    finally:
        client.stdin.close()
        client.wait(10)
        for folder in [group(), group().parent]:
            folder.rmdir()


if __name__ == "__main__":
    if sys.argv[1] == "attach":
        attach(*map(pathlib.Path, sys.argv[2:]))
    else:
        main()
