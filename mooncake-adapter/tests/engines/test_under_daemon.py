"""The wrappers under a real laxityd: what they say arrives there, and its order is theirs. See ``tests/conftest.py`` for what is needed."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from conftest import PATIENCE_S, binary, environment

from .conftest import FAKE

HERE = str(pathlib.Path(__file__).parent)


@pytest.fixture(autouse=True)
def compiled():
    if FAKE:
        pytest.skip("the compiled part of laxity is not built")


def eventually(holds, within_s=60):
    import time

    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def test_sglangs_queue_lets_the_urgent_request_pass_a_loose_one(slow_daemon, run_python):
    """A port that is busy with one chunk; behind it one that can wait, put first, and one that can't."""
    order, stats = run_python(
        """
import json, types, threading, time, laxity
from laxity.objectives import Objective
from laxity.sglang._patch import requests
from laxity.sglang._queue import PermitQueue, room_id
def chunk(room, pages):
    return types.SimpleNamespace(room=room, prefill_kv_indices=list(range(pages)))
requests.begin(1, Objective(1000.0), None)
requests.begin(2, Objective(900.0), None)
requests.begin(3, Objective(40.0), None)
queue = PermitQueue()
queue.bind(lambda item: (1 << 20) * len(item.prefill_kv_indices), scheduled_beneath=False)
queue.put(chunk(1, 8))
first = queue.get()
queue.put(chunk(2, 8))
queue.put(chunk(3, 8))
time.sleep(0.3)                    # both wait: the port has its fill
order = [first.room, queue.get().room, queue.get().room]
queue.put(None)
assert queue.get() is None
print(json.dumps([order, laxity.stats()]))
""",
        slow_daemon,
    )
    assert order == [1, 3, 2]
    assert stats["scheduled_bytes"] == 24 << 20
    assert stats["bypassed_bytes"] == 0 and stats["tickets_dropped"] == 0
    eventually(lambda: slow_daemon.stage("p2d", "egress")["completed_bytes"] == 24 << 20)


def test_nothing_is_lost_when_the_daemon_dies_while_chunks_wait(slow_daemon, run_python):
    got = run_python(
        f"""
import json, os, signal, threading, time, types, laxity
from laxity.sglang._queue import PermitQueue
queue = PermitQueue()
queue.bind(lambda item: 1 << 20, scheduled_beneath=False)
for room in range(20):
    queue.put(types.SimpleNamespace(room=room, prefill_kv_indices=[0]))
threading.Timer(0.3, os.kill, ({slow_daemon.process.pid}, signal.SIGKILL)).start()
print(json.dumps([queue.get().room for _ in range(20)]))
""",
        slow_daemon,
    )
    assert sorted(got) == list(range(20))


def test_nixls_gate_waits_for_the_daemon_and_tells_it_when_all_is_sent(slow_daemon, run_python):
    """Over a stand-in of NIXL's compiled part that takes its time; real agents are in test_nixl.py."""
    posted, stats = run_python(
        """
import json, time, types, laxity
from laxity import nixl
class Binding:
    posted = []
    def createXferReq(self, operation, local, *_): return local.descriptors[0][0]
    def postXferReq(self, handle, notif=b""):
        self.posted.append((handle, time.monotonic()))
        return 1
    def getXferStatus(self, handle):
        at = dict(self.posted)[handle]
        return 0 if time.monotonic() - at > 0.2 else 1
    makeXferReq = releaseXferReq = prepXferDlist = releasedDlistH = lambda self, *_: None
class List:
    def __init__(self, address, length): self.descriptors = [(address, length, 0)]
    def descCount(self): return 1
    def __getitem__(self, index): return self.descriptors[index]
constants = types.SimpleNamespace(NIXL_SUCCESS=0, NIXL_IN_PROG=1, NIXL_WRITE=0)
binding = Binding()
gate = nixl.Gate(binding, constants, locked=True)
handles = [gate.createXferReq(0, List(address, 8 << 20), None) for address in (1, 2, 3)]
for handle in handles:
    assert gate.postXferReq(handle) == 1
left = set(handles)
while left:
    left = {handle for handle in left if gate.getXferStatus(handle) == 1}
    time.sleep(0.001)
at = dict(binding.posted)
print(json.dumps([[at[2] - at[1], at[3] - at[2]], laxity.stats()]))
""",
        slow_daemon,
    )
    # The second may go when the first is complete, and no sooner.
    assert all(gap > 0.15 for gap in posted), posted
    assert stats["scheduled_bytes"] == 24 << 20 and stats["bypassed_bytes"] == 0
    eventually(lambda: slow_daemon.stage("p2d", "egress")["completed_bytes"] == 24 << 20)


def test_nixls_gate_and_the_preloaded_library_do_not_both_ask(slow_daemon, tmp_path):
    """Real agents. shim/nixl tests the library alone."""
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")):
        pytest.skip("NIXL is not installed (pip install nixl)")
    pytest.importorskip("numpy")
    mover = pathlib.Path(HERE).parents[2] / "shim/nixl/tests/wheel/mover.py"
    report = tmp_path / "report"
    library = {"LD_PRELOAD": str(binary("liblaxity_nixl.so")), "LAXITY_REPORT": str(report)}
    done = subprocess.run(
        [sys.executable, str(mover), "gate"],
        env=environment(slow_daemon, UCX_TLS="tcp,self", **library),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    # The wheel's libnl crashes when the process ends, with Laxity and without it.
    assert done.stdout.endswith("destroyed\n"), done.stdout + done.stderr
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    (line,) = [line for line in lines if line["library"] == "liblaxity_nixl"]
    # The last transfer may be released before its post.
    assert line["posts"] in (8, 9) and (line["exempt"], line["scheduled_bytes"]) == (7, 0)
    assert slow_daemon.status()["totals"]["flows"] == 9


LMCACHE = """
import asyncio, json, os, signal, threading, time, types, laxity
from laxity.lmcache import _patch
class Connector:
    moved = []
    def __init__(self, config, metadata):
        self.full_chunk_size_bytes, self.meta_shapes = 8 << 20, [(2, 4, 16, 8)]
    async def get(self, key):
        self.moved.append(key)
        await asyncio.sleep(0.2)
        return types.SimpleNamespace(get_size=lambda: 8 << 20)
    async def put(self, key, memory_obj):
        self.moved.append(key)
module = types.SimpleNamespace(RemoteConnector=Connector, Connector=Connector)
_patch.change_connectors(module, ["Connector"])
connector = Connector(None, None)
def load(key):
    with _patch._loads_of(key):
        return asyncio.ensure_future(connector.get(key))
"""


def test_lmcaches_loads_go_in_the_order_of_their_requests_deadlines(slow_daemon, run_python):
    moved, counts, stats = run_python(
        LMCACHE
        + """
async def main():
    laxity.request_begin("first", slo_ttft_s=1000.0)
    laxity.request_begin("loose", slo_ttft_s=900.0)
    laxity.request_begin("urgent", slo_ttft_s=40.0)
    first = load("first")
    await asyncio.sleep(0.05)
    await asyncio.gather(first, load("loose"), load("urgent"))
    await connector.put("store", types.SimpleNamespace(get_size=lambda: 1 << 20))
asyncio.run(main())
print(json.dumps([connector.moved, _patch.tell.counts, laxity.stats()]))
""",
        slow_daemon,
    )
    assert moved == ["first", "urgent", "loose", "store"]
    assert counts == {}
    assert stats["scheduled_bytes"] == 25 << 20
    assert stats["bypassed_bytes"] == 0 and stats["tickets_dropped"] == 0
    eventually(lambda: slow_daemon.stage("kv_reuse", "ingress")["completed_bytes"] == 24 << 20)
    eventually(lambda: slow_daemon.stage("background", "egress")["completed_bytes"] == 1 << 20)


def test_lmcaches_loads_go_on_when_the_daemon_dies_while_they_wait(slow_daemon, run_python):
    moved, took_s = run_python(
        LMCACHE
        + f"""
_patch.LOAD_WAIT_S_MAX = 60.0
async def main():
    loads = [load(str(number)) for number in range(10)]
    await asyncio.sleep(0.1)
    os.kill({slow_daemon.process.pid}, signal.SIGKILL)
    await asyncio.gather(*loads)
began = time.monotonic()
asyncio.run(main())
print(json.dumps([connector.moved, time.monotonic() - began]))
""",
        slow_daemon,
    )
    assert sorted(moved) == sorted(map(str, range(10)))
    assert took_s < 30, "the loads waited for a daemon that was dead"


def test_vllms_connector_tells_the_daemon_of_requests_and_stages(daemon, run_python):
    """A connector in a life of its own: what it transfers in its calls has their stage and its request's deadline."""
    stats = run_python(
        """
import json, types, laxity
from laxity.vllm import under_laxity
class Connector:
    def __init__(self, vllm_config, role, kv_cache_config=None): self.role = role
    def register_kv_caches(self, kv_caches): pass
    def bind_connector_metadata(self, connector_metadata): pass
    def clear_connector_metadata(self): pass
    def get_finished(self, finished_req_ids): return {"r"}, None
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def build_connector_meta(self, scheduler_output): return types.SimpleNamespace()
    def request_finished(self, request, block_ids): return True, {"remote": 1}
    def start_load_kv(self, forward_context, **_): move(1 << 20, "ingress")
    def wait_for_layer_load(self, layer_name): pass
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **_): move(1 << 20, "egress")
    def wait_for_save(self): pass
def move(nbytes, direction):
    ticket = laxity.submit(None, nbytes, direction=direction)
    done = 0
    while done < nbytes:
        grant = ticket.wait()
        ticket.complete(grant.bytes)
        done += grant.bytes
config = types.SimpleNamespace(
    kv_transfer_config=types.SimpleNamespace(engine_id="e", kv_role="kv_both", kv_connector_extra_config={}),
    model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace(num_hidden_layers=4)))
scheduler = under_laxity(Connector)(config, types.SimpleNamespace(name="SCHEDULER"))
worker = under_laxity(Connector)(config, types.SimpleNamespace(name="WORKER"))
params = {"do_remote_decode": True, "laxity": {"slo_ttft_ms": 60000}}
request = types.SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=params, priority=0, arrival_time=None)
scheduler.get_num_new_matched_tokens(request, 0)
new = types.SimpleNamespace(req_id="r", prompt_token_ids=[0] * 40, num_computed_tokens=0)
output = types.SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=None, num_scheduled_tokens={"r": 40})
worker.bind_connector_metadata(scheduler.build_connector_meta(output))
worker.start_load_kv(None)
for layer in range(4):
    worker.wait_for_layer_load(f"model.layers.{layer}.attn")
    worker.save_kv_layer(f"model.layers.{layer}.attn", None, None)
worker.wait_for_save()
open_before = laxity.stats()["requests"]
sends, handed = scheduler.request_finished(request, [0])
assert handed["laxity"]["handed_on"] and handed["laxity"]["slo_ttft_ms"] < 60000
worker.get_finished(set())
worker.clear_connector_metadata()
try:
    laxity.request_end("r")
except laxity.RequestEnded:
    print(json.dumps([open_before, laxity.stats()]))
""",
        daemon,
    )
    before, after = stats
    assert before == 1
    assert after["batches"] == 0, "all that began has ended"
    assert after["bypassed_bytes"] == 0
    for counter in (
        "requests_unknown",
        "batches_unknown",
        "layers_unknown",
        "scopes_crossed",
        "requests_begun_twice",
    ):
        assert after[counter] == 0, counter
    eventually(lambda: daemon.stage("p2d", "egress")["completed_bytes"] == 4 << 20)
    eventually(lambda: daemon.stage("kv_reuse", "ingress")["completed_bytes"] == 1 << 20)
