"""The package under a real laxityd: permits, deadlines, and what becomes of both when the daemon goes away."""

import json
import signal
import socket
import struct
import subprocess
import sys
import threading

from conftest import eventually, environment


def test_the_daemon_schedules_what_is_submitted_and_counts_it_by_stage(daemon, run_python):
    found = run_python(
        """
import json, laxity
from laxity import Stage
assert laxity.attached()
laxity.request_begin("r", slo_ttft_s=10)
laxity.batch_begin("b", layers=8, layer_time_s=0.002)
laxity.batch_join("b", "r")
levels = []
for layer in range(8):
    laxity.layer_begin("b", layer)
    for stage, direction in (Stage.P2D, "egress"), (Stage.KV_REUSE, "ingress"):
        flow = laxity.Flow(stage, 1 << 20, layer=layer, request="r", direction=direction, peer="127.0.0.2")
        levels += [grant.level for grant in flow.grants()]
laxity.request_end("r")
laxity.batch_end("b")
print(json.dumps([levels, laxity.stats()]))
""",
        daemon,
    )
    levels, stats = found
    assert stats["scheduled_bytes"] == 16 << 20 and stats["bypassed_bytes"] == 0
    assert stats["attached"] and stats["scheduled"] and stats["tickets_dropped"] == 0
    assert levels and 0 not in levels
    for stage, direction in ("p2d", "egress"), ("kv_reuse", "ingress"):
        seen = eventually(
            "all completions were read",
            lambda: (s := daemon.stage(stage, direction))["completed_bytes"] == 8 << 20 and s,
        )
        assert seen["submitted_bytes"] == seen["permitted_bytes"] == 8 << 20


def test_a_request_gives_its_transfers_its_deadline(daemon, run_python):
    run_python(
        """
import laxity, time
from laxity import Stage
assert laxity.attached()
laxity.request_begin("tight", slo_ttft_s=0.02)
laxity.request_begin("loose", slo_ttft_s=1000)
laxity.memory_owner(0x10000, 4096, request="tight")
with laxity.scope(request="tight"):
    in_scope = laxity.submit(Stage.P2D, 1)
by_name = laxity.submit(Stage.P2D, 1, request="tight")
by_memory = laxity.submit(Stage.P2D, 1, address=0x10000 + 100)
loose = laxity.submit(Stage.P2D, 1, request="loose")
with laxity.scope(request="tight"):
    loose_in_scope = laxity.submit(Stage.P2D, 1, request="loose")
loose_by_memory = laxity.submit(Stage.P2D, 1, request="loose", address=0x10000)
time.sleep(0.05)
for ticket in in_scope, by_name, by_memory, loose, loose_in_scope, loose_by_memory:
    ticket.complete(ticket.wait().bytes)
""",
        daemon,
    )
    eventually("all completions were read", lambda: daemon.stage("p2d", "egress")["completed_bytes"] == 6)
    assert daemon.stage("p2d", "egress")["deadline_misses"] == 3


def test_what_waits_goes_when_there_is_room_and_a_wait_has_an_end(slow_daemon, run_python):
    found = run_python(
        """
import json, laxity, time
from laxity import Stage
first = laxity.submit(Stage.P2D, 64 << 20)
granted = first.wait().bytes
while (grant := first.wait(0.2)) is not None:
    granted += grant.bytes
began = time.monotonic()
assert first.wait(0.05) is None and first.poll() is None and not first.done
took = time.monotonic() - began
first.complete(granted)
more = first.wait().bytes
assert more > 0
with first:
    first.complete(more)
second = laxity.submit(Stage.COLLECTIVE, 1000)
second.complete(second.wait().bytes)
print(json.dumps([granted, took, laxity.stats()]))
""",
        slow_daemon,
    )
    granted, took, stats = found
    assert 0 < granted < 8 << 20
    assert 0.05 <= took < 10
    assert stats["bypassed_bytes"] == 0 and stats["tickets_dropped"] == 0
    eventually(
        "the daemon has forgotten what was given up",
        lambda: slow_daemon.status()["ports"][0]["in_flight_bytes"] == 0,
    )


def test_many_threads_wait_at_once_and_each_gets_all_of_its_bytes(slow_daemon, run_python):
    found = run_python(
        """
import json, laxity, threading
from laxity import Stage
sent = []
def transfer(number):
    for turn in range(4):
        flow = laxity.Flow(Stage(1 + (number + turn) % 3), 100_000, request=1 + number)
        sent.append(sum(grant.bytes for grant in flow.grants()))
threads = [threading.Thread(target=transfer, args=(number,)) for number in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([sent, laxity.stats()]))
""",
        slow_daemon,
    )
    sent, stats = found
    assert sent == [100_000] * 96
    assert stats["scheduled_bytes"] == 9_600_000 and stats["bypassed_bytes"] == 0


def test_one_thread_waits_for_any_of_many(slow_daemon, run_python):
    found = run_python(
        """
import json, laxity
from laxity import Stage
from laxity._laxity import _Transfers
transfers = _Transfers()
tickets = [transfers.submit(Stage.P2D, 50_000, 0, "egress", None) for _ in range(40)]
other = laxity.submit(Stage.COLLECTIVE, 10)  # perhaps in the same lane, and nobody comes for it
sent = 0
while tickets:
    for ticket in tickets:
        while not ticket.done and (grant := ticket.poll()) is not None:
            sent += grant.bytes
            ticket.complete(grant.bytes)
    tickets = [ticket for ticket in tickets if not ticket.done]
    transfers.wait_any(0.02)
other.cancel()
print(json.dumps([sent, laxity.stats()]))
""",
        slow_daemon,
    )
    sent, stats = found
    assert sent == 2_000_000 and stats["bypassed_bytes"] == 0


WAITER = """
import json, laxity, signal, sys
from laxity import Stage
hog = laxity.submit(Stage.P2D, 64 << 20)
hog.wait()
while hog.wait(0.2) is not None: pass
try:
    print("waits", flush=True)
    grant = hog.wait()
    print(json.dumps([grant.bypassed, grant.last, hog.granted == hog.nbytes]), flush=True)
except KeyboardInterrupt:
    hog.cancel()
    print(json.dumps("interrupted"), flush=True)
sys.stdin.readline()
laxity.request_begin("later", slo_ttft_s=100)
eventually = 2000
while not laxity.stats()["scheduled"] and (eventually := eventually - 1):
    laxity.batch_begin("b", layers=1)
    import time; time.sleep(0.01)
with laxity.submit(Stage.P2D, 10) as ticket:
    grant = ticket.wait()
    ticket.complete(grant.bytes)
print(json.dumps([grant.bypassed, laxity.stats()["reattaches"]]), flush=True)
"""


def waiter(daemon):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITER],
        env=environment(daemon),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waits\n"
    return process


def test_a_wait_ends_with_the_daemon_and_the_next_one_is_found(slow_daemon):
    process = waiter(slow_daemon)
    slow_daemon.kill()
    assert json.loads(process.stdout.readline()) == [True, True, True]
    slow_daemon.start()
    process.stdin.write("\n")
    process.stdin.close()
    assert json.loads(process.stdout.readline()) == [False, 1]
    assert process.wait() == 0


def test_ctrl_c_ends_a_wait(slow_daemon):
    process = waiter(slow_daemon)
    process.send_signal(signal.SIGINT)
    assert json.loads(process.stdout.readline()) == "interrupted"
    process.stdin.close()
    assert json.loads(process.stdout.readline())[0] is False
    assert process.wait() == 0


def test_a_daemon_of_another_version_is_lived_without_and_named(tmp_path, run_python):
    path = tmp_path / "laxityd.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def refuse():
        connection, _ = listener.accept()
        hello = connection.recv(4096)
        assert hello[:4] == b"LXHI"
        version = struct.unpack_from("<I", hello, 4)[0]
        # Reply: magic, version, kind 2 (reject), reason 1 (version), and a region of nothing.
        connection.sendall(b"LXRE" + struct.pack("<IIIQHHB3x", version + 1, 2, 1, 0, 0, 0, 0))
        connection.recv(1)

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()

    class Theirs:
        socket = path

    found = run_python(
        """
import json, warnings, laxity
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attached = [laxity.attached(), laxity.attached()]
print(json.dumps([attached, [str(w.message) for w in caught], laxity.submit(None, 9).wait().bytes,
                  laxity.stats()["refused"]]))
""",
        Theirs,
    )
    attached, warned, nbytes, refused = found
    assert attached == [False, False] and nbytes == 9
    assert len(warned) == 1 and "refuses this process" in warned[0] and "version" in warned[0]
    assert "version" in refused


def test_the_daemon_hears_what_the_engine_says_and_takes_collectives_for_the_batch_that_it_computes(
    daemon, run_python
):
    daemon.ask("trace_start", seconds=60, events=1000)
    numbers = run_python(
        """
import json, laxity
from laxity import Stage
request, batch = laxity.request_begin("r", slo_ttft_s=10, bytes=5), laxity.number("b")
laxity.batch_begin("b", layers=8)
laxity.batch_join("b", "r")
laxity.layer_begin("b", 6)
with laxity.scope(stage=Stage.P2D, request="r", layer=2):
    ticket = laxity.submit(None, 70)
ticket.complete(ticket.wait().bytes)
ticket = laxity.submit(Stage.COLLECTIVE, 80)
ticket.complete(ticket.wait().bytes)
laxity.compute_end("b")
laxity.request_end("r")
laxity.batch_end("b")
print(json.dumps([request, batch]))
""",
        daemon,
    )
    request, batch = numbers
    daemon.ask("trace_stop")
    page = daemon.ask("trace_read")
    assert page["lost"] == 0 and page["is_over"]
    events = page["events"]
    said = [event["event"] for event in events]
    hints = [what for what in said if what not in ("submitted", "permitted", "completed")]
    assert hints == [
        "batch_begin",
        "request_join",
        "layer_begin",
        "compute_end",
        "request_end",
        "batch_end",
    ]
    join = events[said.index("request_join")]
    assert (join["request"], join["batch"], join["deadline_ns"] > 0) == (request, batch, True)
    flows = [event for event in events if event["event"] == "submitted"]
    p2d = next(flow for flow in flows if flow["stage"] == "p2d")
    assert (p2d["batch"], p2d["request"], p2d["layer"]) == (batch, request, 2)
    assert p2d["deadline_ns"] == join["deadline_ns"]
    collective = next(flow for flow in flows if flow["stage"] == "collective")
    # Hints and transfers go through different lanes: the hint may be read a little later.
    assert collective["batch"] in (batch, 0)
    assert sum(e["bytes"] for e in events if e["event"] == "completed") == 150


def test_a_profile_that_cant_be_used_is_said_and_stops_nothing(daemon, run_python):
    text = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import laxity
ticket = laxity.submit(laxity.Stage.P2D, 1)
ticket.complete(ticket.wait().bytes)
print(json.dumps([[str(one.message) for one in said], laxity.stats()]))
"""
    said, stats = run_python(text, daemon, LAXITY_PROFILE="no-such", LAXITY_SLO_TTFT="soon")
    assert "no-such" in said[0] and "LAXITY_SLO_TTFT" in said[1] and len(said) == 2
    assert stats["scheduled_bytes"] == 1


def test_a_profile_that_is_off_keeps_the_process_to_itself(tmp_path, daemon, run_python):
    profile = tmp_path / "off.toml"
    profile.write_text('description = "nothing"\nmode = "off"\n')
    text = """
import json, laxity
ticket = laxity.submit(laxity.Stage.P2D, 1)
ticket.complete(ticket.wait().bytes)
print(json.dumps(laxity.stats()))
"""
    assert run_python(text, daemon, LAXITY_PROFILE=str(profile))["scheduled_bytes"] == 0
    assert daemon.status()["totals"]["attachments"] == 0
    assert run_python(text, daemon)["scheduled_bytes"] == 1
