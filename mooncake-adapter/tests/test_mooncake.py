"""Real Mooncake between two processes, over its TCP transport, under a real laxityd."""

import json
import pathlib
import subprocess
import sys

import pytest
from conftest import PATIENCE_S, environment, eventually, free_port

pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine is not installed")

EXAMPLE = pathlib.Path(__file__).parent / "mooncake_example.py"
LAYERS, BYTES = 10, 300_000

#: Before the program: what an engine would say of it.
HINTS = """
import laxity
laxity.request_begin("r", slo_ttft_s=100)
laxity.batch_begin("b", layers=64)
laxity.batch_join("b", "r")
"""


def program(tmp_path, old="", new="", before=""):
    text = EXAMPLE.read_text()
    assert old in text
    path = tmp_path / "program.py"
    path.write_text(before + text.replace(old, new, 1))
    return path


def run(path, daemon, **more):
    """Both ends; what the initiator says."""
    port = free_port()
    both = [
        subprocess.Popen(
            [sys.executable, path, role, str(port), str(LAYERS), str(BYTES)],
            env=environment(daemon, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("target", "initiator")
    ]
    said = []
    try:
        for process in reversed(both):
            out, err = process.communicate(timeout=PATIENCE_S)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            assert process.returncode == 0 and lines, out + err
            said.append(json.loads(lines[-1]))
    finally:
        for process in both:
            process.kill()
    assert all(end["passed"] for end in said), said
    return said[0]


OURS = ("from mooncake.engine import", "from laxity.mooncake import")


def test_a_program_of_mooncake_passes_with_only_its_import_changed(tmp_path, daemon):
    as_it_is = run(program(tmp_path), daemon)
    assert daemon.status()["totals"]["attachments"] == 0
    under = run(program(tmp_path, *OURS), daemon)
    assert as_it_is["statuses"] == under["statuses"]
    for stage, direction in ("p2d", "egress"), ("kv_reuse", "ingress"):
        seen = eventually(
            "all completions were read",
            lambda: (s := daemon.stage(stage, direction))["completed_bytes"] == LAYERS * BYTES and s,
        )
        assert seen["submitted_bytes"] == seen["permitted_bytes"] == LAYERS * BYTES
    assert daemon.status()["totals"]["bypassed_bytes"] == 0


def test_a_port_that_is_too_slow_makes_it_wait_and_loses_nothing(tmp_path, slow_daemon):
    path = program(tmp_path, *OURS)
    measured = "from laxity import _measured\n    taken = _measured.transfers.take()\n    print(json.dumps({"
    path.write_text(path.read_text().replace('"statuses": statuses}', '"statuses": statuses, "took": taken}'))
    path.write_text(measured.join(path.read_text().rsplit("print(json.dumps({", 1)))
    took = run(path, slow_daemon)["took"]
    # The writes of six layers and the reads of six are synchronous calls, which measure.
    assert sum(took["bytes"]) == (6 + LAYERS // 2 + 1) * BYTES
    assert sum(took["permit_wait"]) > 0 and min(took["network"]) > 0
    seen = eventually(
        "all completions were read",
        lambda: (s := slow_daemon.stage("p2d", "egress"))["completed_bytes"] == LAYERS * BYTES and s,
    )
    assert seen["wait"]["flows"] >= LAYERS
    assert slow_daemon.status()["totals"]["bypassed_bytes"] == 0


def test_the_jobs_profile_says_what_reads_and_writes_are_for(tmp_path, daemon):
    profile = tmp_path / "mine.toml"
    profile.write_text('description = "as a store"\n[stage]\nwrite = "background"\nread = "p2d"\n')
    run(program(tmp_path, *OURS), daemon, LAXITY_PROFILE=str(profile))
    for stage, direction in ("background", "egress"), ("p2d", "ingress"):
        eventually(
            "all completions were read",
            lambda: daemon.stage(stage, direction)["completed_bytes"] == LAYERS * BYTES,
        )


def test_the_jobs_objective_is_the_deadline_of_transfers_that_have_none(tmp_path, daemon):
    for objective, counts in ("90s", True), ("", False):
        daemon.ask("trace_start", seconds=60, events=100_000)
        run(program(tmp_path, *OURS), daemon, LAXITY_SLO_TTFT=objective)
        daemon.ask("trace_stop")
        events = daemon.ask("trace_read")["events"]
        flows = [event for event in events if event["event"] == "submitted"]
        assert len(flows) >= 2 * LAYERS - 4
        assert all((flow["deadline_ns"] > 0) == counts for flow in flows)


def test_without_a_daemon_it_is_as_if_laxity_were_not_there(tmp_path):
    run(program(tmp_path, *OURS), None)


def test_the_memory_says_what_a_transfer_is(tmp_path, daemon):
    """Half of the layers are weights, by the table of memory; each is a flow of its own, though one call
    moves all."""
    old = "    statuses = []\n"
    new = (
        "    statuses = []\n"
        "    for layer in range(layers):\n"
        "        stage = laxity.Stage.WEIGHTS if layer % 2 else None\n"
        "        laxity.memory_layer(address + layer * size, size, layer, stage)\n"
    )
    path = program(tmp_path, *OURS, before=HINTS)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    run(path, daemon)
    eventually(
        "all completions were read",
        lambda: daemon.stage("weights", "egress")["completed_bytes"] == LAYERS // 2 * BYTES,
    )
    assert daemon.stage("p2d", "egress")["completed_bytes"] == (LAYERS - LAYERS // 2) * BYTES


def test_an_asynchronous_call_is_complete_when_all_of_its_pieces_are(run_python):
    """Mooncake's own ``transfer_check_status`` looks at the first piece only. Without a daemon, Mooncake gets all pieces
    at once."""
    early = run_python(
        """
import ctypes, json, mmap
from laxity.mooncake import TransferEngine
FIRST, SECOND = 8, 30 << 20
def engine_with(byte):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = mmap.mmap(-1, FIRST + SECOND)
    memory[:] = byte * len(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert engine.register_memory(address, len(memory)) == 0
    return engine, memory, address
peer, _, there = engine_with(b"x")
engine, memory, here = engine_with(b".")
lists = [here, here + FIRST], [there, there + FIRST], [FIRST, SECOND]
def polled(number):
    while (status := engine.transfer_check_status(number)) == 0:
        pass
    return status - 1
early = []
for wait in (polled, lambda number: engine.get_batch_transfer_status([number])) * 5:
    memory[:] = b"." * len(memory)
    number = engine.batch_transfer_async_read(f"127.0.0.1:{peer.get_rpc_port()}", *lists)
    assert wait(number) == 0
    early.append(memory[-1:] != b"x")
print(json.dumps(early))
"""
    )
    assert not any(early)


def test_a_transfer_that_fails_fails_as_mooncakes_does_and_leaves_nothing_behind(daemon, run_python):
    found = run_python(
        """
import ctypes, json, mmap, time
from laxity.mooncake import TransferEngine
engine = TransferEngine()
before = engine.laxity_mode
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register_memory(address, 4096) == 0
nobody = "127.0.0.1:1"
def submitted():
    # Refused at once, as Mooncake does, or, where it had to wait for its turn, when it is asked after.
    number = engine.transfer_submit_write(nobody, address, 0, 100)
    if number <= 0:
        return -1
    while (status := engine.transfer_check_status(number)) == 0:
        time.sleep(0.001)
    return status
found = [
    before, engine.laxity_mode,
    engine.transfer_sync_write(nobody, address, 0, 100),
    engine.batch_transfer_sync_read(nobody, [address], [0], [100]),
    engine.batch_transfer_sync_read(nobody, [address], [], [100]),
    submitted(),
    engine.transfer_check_status(12345),
    engine.get_batch_transfer_status([12345]),
    engine.get_batch_transfer_status([]),
]
try:
    engine.transfer_sync_write(nobody, -1, 0, 100)
except TypeError as error:
    found.append("incompatible" in str(error))
import laxity, os
print(json.dumps([found, laxity.stats()]), flush=True)
""",
        daemon,
    )
    found, stats = found
    assert found == ["none", "gate", -1, -1, -1, -1, -1, -1, 0, True]
    assert stats["tickets_dropped"] == 0
    eventually(
        "nothing is in flight",
        lambda: all(port["in_flight_bytes"] == 0 for port in daemon.status()["ports"]),
    )
