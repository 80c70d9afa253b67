"""What the tests share: a real laxityd of their own, and Python processes that are under it.

A process attaches to one daemon, when it first says something. So whatever needs a daemon runs in a process of
its own (`run_python`), and says what it found in one line of JSON.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

PATIENCE_S = 60

# No daemon answers there, so a test's own process behaves alike on machines with and without a daemon.
NOWHERE = "/dev/null/laxityd.sock"
os.environ["LAXITY_SOCKET"] = NOWHERE


def binary(name):
    folder = os.environ.get("LAXITY_BIN")
    if not folder:
        pytest.skip("LAXITY_BIN doesn't say where laxityd is (tests/tests/python.rs does)")
    path = pathlib.Path(folder) / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run `cargo build --workspace --bins` first (make test does)")
    return path


def eventually(what, holds):
    give_up = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < give_up, f"still not so after {PATIENCE_S} s: {what}"
        time.sleep(0.01)
    return found


PORTS_GIVEN = set()


def free_port():
    """A free port below the kernel's ephemeral ports, so that no other program gets it by chance."""
    lowest_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randint(1024, lowest_given - 1)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in PORTS_GIVEN:
            PORTS_GIVEN.add(port)
            return port


class Daemon:
    """A laxityd with sockets of its own; killed at the end."""

    def __init__(self, folder, config=""):
        self.folder = folder
        self.socket = folder / "laxityd.sock"
        self.control = folder / "control.sock"
        self.config = folder / "laxityd.toml"
        self.config.write_text(
            f'socket = "{self.socket}"\ncontrol = "{self.control}"\nmetrics = ""\n{config}\n'
        )
        self.process = None
        self.start()

    def start(self):
        log = open(self.folder / "laxityd.log", "ab")
        command = [binary("laxityd"), "--config", self.config]
        # The daemon's variables would override its configuration.
        own = {key: value for key, value in os.environ.items() if not key.startswith("LAXITY_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own
        )
        eventually("laxityd answers", self.answers)

    def answers(self):
        assert self.process.poll() is None, (self.folder / "laxityd.log").read_text()
        try:
            return self.ask("status")
        except OSError:
            return None

    def ask(self, operation, **arguments):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self.control))
            request = {"v": 1, "op": operation, **arguments}
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        assert answer["answer"] != "error", answer
        return answer

    def status(self):
        return self.ask("status")

    def stage(self, stage, direction):
        """The counters of a stage on the first NIC."""
        ports = [port for port in self.status()["ports"] if port["direction"] == direction]
        return next(entry for entry in ports[0]["stages"] if entry["stage"] == stage)

    def kill(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.kill()


@pytest.fixture
def slow_daemon(tmp_path):
    """A daemon whose only NIC has 1 MB/s, a chunk of 64 KiB and so a window of 256 KiB."""
    daemon = Daemon(tmp_path, '[[nic]]\nname = "default"\nrate = "8Mbit"\nchunk = "64KiB"\n')
    yield daemon
    daemon.kill()


def environment(daemon=None, **more):
    """The environment of a process under the daemon, or under none."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("LAXITY_")}
    ours["LAXITY_SOCKET"] = str(daemon.socket) if daemon else NOWHERE
    # A busy machine may be slow to answer.
    ours.update(LAXITY_ATTACH_MS="20000", LAXITY_STALL_MS="20000", **more)
    return ours


@pytest.fixture
def run_python():
    """Runs Python text in a process of its own, and gives what its last line of JSON says."""

    def run(text, daemon=None, **more):
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=environment(daemon, **more),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    return run
