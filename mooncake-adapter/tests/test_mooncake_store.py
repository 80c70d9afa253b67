"""Mooncake's store with its real master, under a real laxityd: what is fetched and what is put there."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import PATIENCE_S, environment, eventually, free_port

pytest.importorskip("mooncake.store", reason="Mooncake's store is not installed")

PROGRAM = """
import ctypes, json, mmap, os, sys
from laxity.mooncake import MooncakeDistributedStore

store = MooncakeDistributedStore()
assert store.laxity_mode == "none"
role, name, master = sys.argv[1:]
assert store.setup(name, "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master) == 0
assert store.laxity_mode == "gate"
if role == "put":
    found = [store.put("k", b"x" * 100_000), store.put_batch(["a", "b"], [b"1" * 10, b"2" * 20])]
else:
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert store.register_buffer(address, 1 << 20) == 0
    found = [
        store.get("k") == b"x" * 100_000,
        store.get("nothing") == b"",
        [len(value) for value in store.get_batch(["a", "b"])],
        store.get_into("k", address, 100_000),
        bytes(memory[:2]).decode(),
        store.batch_get_into(["a", "b"], [address, address + 100], [10, 20]),
    ]
try:
    store.put()
except TypeError as error:
    found.append("incompatible" in str(error))
import laxity
print(json.dumps([found, laxity.stats()]), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def master(tmp_path):
    script = shutil.which("mooncake_master", path=str(sys.prefix) + "/bin")
    if script is None:
        pytest.skip("mooncake_master is not installed")
    rpc, metrics = free_port(), free_port()
    command = [script, f"-rpc_port={rpc}", f"-metrics_port={metrics}", "-enable_metric_reporting=false"]
    log = open(tmp_path / "master.log", "wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)

    def listens():
        assert process.poll() is None, (tmp_path / "master.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", rpc)) == 0

    eventually("the master listens", listens)
    yield f"127.0.0.1:{rpc}"
    process.kill()
    process.wait()


def test_what_is_fetched_is_kv_reuse_and_what_is_put_there_stands_behind(daemon, master):
    processes = []

    def start(role):
        name = f"127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, role, name, master],
            env=environment(daemon),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        for line in process.stdout:
            if line.startswith("[["):
                return json.loads(line)
        raise AssertionError(process.stderr.read())

    try:
        found, stats = start("put")
        assert found == [0, 0, True]
        assert stats["scheduled_bytes"] == 100_030 and stats["bypassed_bytes"] == 0
        found, stats = start("get")
        assert found == [True, True, [10, 20], 100_000, "xx", [10, 20], True]
        assert stats["scheduled_bytes"] == 200_060 and stats["tickets_dropped"] == 0
        for stage, direction, nbytes in ("background", "egress", 100_030), ("kv_reuse", "ingress", 200_060):
            eventually(
                "all completions were read",
                lambda: daemon.stage(stage, direction)["completed_bytes"] == nbytes,
            )
    finally:
        for process in processes:
            process.kill()
            process.wait(PATIENCE_S)
