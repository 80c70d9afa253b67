"""SGLang's own modules with the queue changed: files of released versions, read from their wheels."""

import importlib
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest

import laxity
from laxity import _after_import, sglang
from laxity.objectives import Objective
from laxity.sglang import _patch
from laxity.sglang._queue import PermitQueue

from .conftest import FAKE
from .stubs import imported

FACTS = pathlib.Path(__file__).resolve().parents[2] / "facts"
sys.path.insert(0, str(FACTS))

import refresh  # noqa: E402
import released  # noqa: E402

AT = "sglang.srt.disaggregation"
REAL = {
    f"{AT}.{name}"
    for name in (
        "base",
        "base.conn",
        "common",
        "common.conn",
        "common.utils",
        "mooncake",
        "mooncake.conn",
        "nixl",
        "nixl.conn",
        "prefill",
    )
}
TOPS = {
    "sglang",
    "torch",
    "zmq",
    "requests",
    "aiohttp",
    "fastapi",
    "uvicorn",
    "psutil",
    "orjson",
    "msgspec",
    "numpy",
    "prometheus_client",
    "tqdm",
    "pybase64",
    "httpx",
    "typing_extensions_none",
}
RECORDED = refresh.recorded("sglang")
VERSIONS = ("0.5.6", "0.5.11", "0.5.14", "0.5.18", "0.5.23")


@pytest.fixture(params=VERSIONS)
def release(request, monkeypatch):
    """Imports modules of a release, changed as they would be."""
    try:
        root = released.files("sglang", request.param, refresh.SGLANG)
    except released.Unreachable as why:
        pytest.skip(str(why))
    monkeypatch.setattr(_patch, "requests", _patch.Requests())
    monkeypatch.setattr(_patch.tell, "counts", {})
    monkeypatch.delenv("LAXITY_OBJECTIVES", raising=False)
    with imported(root, REAL, TOPS):
        yield request.param


def changed(name):
    module = importlib.import_module(f"{AT}.{name}")
    _patch.CHANGES[module.__name__](module)
    return module


def test_mooncakes_queue_is_changed(release):
    module = changed("mooncake.conn")
    assert issubclass(module.FastQueue, PermitQueue), _patch.tell.counts
    assert module.MooncakeKVManager.transfer_worker.__wrapped__


def test_nixls_queue_is_changed_where_it_has_one(release):
    module = changed("nixl.conn")
    if RECORDED[release]["NixlKVManager"]["transfer_worker"] is None:
        assert any("no transfer_worker" in what or "no class FastQueue" in what for what in _patch.tell.counts), (
            _patch.tell.counts
        )
    else:
        assert issubclass(module.FastQueue, PermitQueue), _patch.tell.counts


def test_requests_are_seen_where_they_come_in(release, said):
    module = changed("prefill")
    queue = object.__new__(module.PrefillBootstrapQueue)
    queue.scheduler = types.SimpleNamespace(server_args=types.SimpleNamespace(served_model_name="org/model"))
    params = types.SimpleNamespace(custom_params={"laxity": {"slo_ttft_ms": 150, "tenant": "gold"}})
    req = types.SimpleNamespace(bootstrap_room=77, sampling_params=params, priority=3)
    module.PrefillBootstrapQueue._check_if_req_exceed_kv_capacity = lambda self, req: True
    module.PrefillBootstrapQueue.add(queue, req, 8)
    assert said.of("request_begin") == [
        (("sglang-room-77",), {"slo_ttft_s": 0.15, "tenant": "gold", "priority": 3, "bytes": 0})
    ], _patch.tell.counts


class Indices(list):
    """Stands for an array of page numbers."""

    size = property(len)

    def __getitem__(self, at):
        found = list.__getitem__(self, at)
        return Indices(found) if isinstance(at, slice) else found


@pytest.mark.parametrize("release", VERSIONS[-1:], indirect=True)
def test_the_released_worker_sends_in_the_order_of_the_permits(release, said, permits):
    """SGLang's add_transfer_request, its transfer_worker and ours between them."""
    module = changed("mooncake.conn")
    manager = object.__new__(module.MooncakeKVManager)
    sent = []
    statuses = {1: 1, 2: 1, 3: 1}
    manager.__dict__.update(
        enable_trace=False,
        enable_staging=False,
        enable_deferred_decode_kv_release=False,
        is_mla_backend=True,
        is_hybrid_mla_backend=False,
        attn_tp_size=1,
        attn_tp_rank=0,
        disaggregation_mode=module.DisaggregationMode.PREFILL,
        request_status=statuses,
        transfer_infos={},
        decode_kv_args_table={},
        session_lock=threading.Lock(),
        failure_lock=threading.Lock(),
        failure_records={},
        state_layout_rejections={},
        failed_sessions=set(),
        session_failures={},
        failed_session_probes={},
        req_to_decode_prefix_len={},
        deferred_bootstrap=None,
        _deferred_ack_targets={},
        _deferred_ack_poisoned_rooms=set(),
        _staging_outstanding=__import__("collections").defaultdict(int),
        kv_args=types.SimpleNamespace(
            kv_item_lens=[100, 100], kv_data_ptrs=[4096, 8192], kv_data_lens=[1000, 1000], kv_layer_ids=[0, 1]
        ),
        bootstrap_port=1,
    )
    manager.engine = types.SimpleNamespace()

    def send_kvcache(self, session, indices, *_, **__):
        sent.append((session, len(indices), dict(said.scope)))
        return 0

    concluded = []
    module.MooncakeKVManager.send_kvcache = send_kvcache
    module.MooncakeKVManager.send_aux = lambda self, *_: 0
    module.MooncakeKVManager._get_dsa_cache_transfer_skip_flags = lambda self, info: (False, False)
    module.MooncakeKVManager.conclude_transfer = lambda self, *, bootstrap_room, status, **_: (
        concluded.append(bootstrap_room),
        self.update_status(bootstrap_room, status),
    )
    for room in (1, 2, 3):
        session = f"host:{1000 + 10 * room}"
        info = types.SimpleNamespace(
            room=room,
            is_dummy=False,
            mooncake_session_id=session,
            dst_kv_indices=Indices(range(10)),
            dst_device_kv_indices=None,
            required_dst_info_num=1,
            endpoint="host",
            dst_port=1,
            decode_prefix_len=0,
        )
        manager.transfer_infos[room] = {session: info}
        manager.decode_kv_args_table[session] = types.SimpleNamespace(
            requires_dcp_relayout=False,
            dst_kv_ptrs=[],
            dst_aux_ptrs=[],
            dst_attn_tp_size=1,
            dst_kv_layer_ids=None,
            dst_kv_item_len=0,
        )
        _patch.requests.begin(room, Objective(0.1 * room), None)

    queue = module.FastQueue()
    manager.transfer_queues = [queue]
    worker = threading.Thread(target=manager.transfer_worker, args=(queue, None), daemon=True)
    worker.start()
    until(lambda: queue._bytes_of is not None)
    for room in (1, 2, 3):
        for last in (False, True):
            manager.add_transfer_request(room, Indices(range(5)), slice(0, 5), last, aux_index=0 if last else None)
    assert [ticket.nbytes for ticket in permits.tickets] == [1000] * 3, "the first of each room: 5 pages of 2 layers"
    for ticket in (2, 0):
        count = len(sent)
        permits.tickets[ticket].grant()
        until(lambda count=count: len(sent) == count + 1)
    until(lambda: len(permits.tickets) == 5)
    permits.at_once = True
    for ticket in permits.tickets:
        ticket.grant()
    until(lambda: len(concluded) == 3)
    queue.put(None)
    worker.join(5)
    assert not worker.is_alive()
    assert [session for session, _, _ in sent][:2] == ["host:1030", "host:1010"]
    assert len(sent) == 6
    assert sent[0][2] == {"stage": laxity.Stage.P2D, "request": "sglang-room-3"}
    assert sorted(concluded) == [1, 2, 3]
    assert sorted(args for args, _ in said.of("request_end")) == [(f"sglang-room-{room}",) for room in (1, 2, 3)]
    assert permits.open() == []
    assert [args for args, _ in said.of("memory_layer")] == [(4096, 1000, 0), (8192, 1000, 1)]


def until(condition, within_s=10.0):
    import time

    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


# What it does not know.


def module_like(**said):
    """A module as a release has it, less or more what a test says."""

    class FastQueue:
        def put(self, item): ...

        def get(self): ...

        def __init__(self): ...

    class TransferKVChunk:
        __dataclass_fields__ = {"room": 0, "prefill_kv_indices": 0}

    class MooncakeKVManager:
        def transfer_worker(self, queue, executor): ...

        def update_status(self, bootstrap_room, status): ...

    module = types.ModuleType("conn")
    module.__dict__.update(FastQueue=FastQueue, TransferKVChunk=TransferKVChunk, MooncakeKVManager=MooncakeKVManager)
    for name, change in said.items():
        change(getattr(module, name)) if callable(change) else setattr(module, name, change)
    return module


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"FastQueue": None}, "no class FastQueue"),
        ({"FastQueue": lambda cls: setattr(cls, "get_nowait", len)}, "has the methods get, get_nowait, put"),
        (
            {"FastQueue": lambda cls: setattr(cls, "get", lambda self, timeout: 0)},
            "takes (self, timeout); known is (self)",
        ),
        ({"MooncakeKVManager": lambda cls: delattr(cls, "transfer_worker")}, "no transfer_worker"),
        (
            {"MooncakeKVManager": lambda cls: setattr(cls, "transfer_worker", lambda self, shard: 0)},
            "takes (self, shard)",
        ),
        ({"TransferKVChunk": lambda cls: setattr(cls, "__dataclass_fields__", {"room": 0})}, "no prefill_kv_indices"),
        ({"MooncakeKVManager": lambda cls: delattr(cls, "update_status")}, "there is no method"),
    ],
)
def test_a_release_that_is_not_as_known_runs_unchanged_and_says_why(change, why, monkeypatch, caplog):
    monkeypatch.setattr(_patch.tell, "counts", {})
    module = module_like(**change)
    before = dict(vars(module))
    worker = getattr(module.MooncakeKVManager, "transfer_worker", None)
    _patch.guarded(lambda found: _patch.change_conn(found, "MooncakeKVManager"))(module)
    assert dict(vars(module)) == before
    assert getattr(module.MooncakeKVManager, "transfer_worker", None) is worker
    assert why in caplog.text
    assert "it runs unchanged" in caplog.text


def test_as_known_it_is_changed_once():
    module = module_like()
    change = _patch.guarded(lambda found: _patch.change_conn(found, "MooncakeKVManager"))
    change(module)
    queue, worker = module.FastQueue, module.MooncakeKVManager.transfer_worker
    change(module)
    assert (module.FastQueue, module.MooncakeKVManager.transfer_worker) == (queue, worker)


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_what_is_relied_on_is_in_the_recorded_releases(version):
    facts = RECORDED[version]
    assert facts["FastQueue"] == {"__init__": "(self)", "put": "(self, item)", "get": "(self)"}
    mooncake = facts["MooncakeKVManager"]
    assert mooncake["transfer_worker"].startswith("(self, queue")
    assert mooncake["update_status"] == "(self, bootstrap_room, status)"
    assert {"room", "prefill_kv_indices"} <= set(mooncake["TransferKVChunk"])
    assert facts["PrefillBootstrapQueue"]["add"].startswith("(self, req")
    assert {"kv_item_lens", "kv_data_ptrs", "kv_data_lens"} <= set(facts["KVArgs"])


# Which layer asks for permits.


@pytest.mark.parametrize(
    ("mode", "preloaded", "beneath"),
    [(None, False, False), (None, True, True), ("gate", False, True), ("none", False, False), ("hint", True, True)],
)
def test_nobody_waits_for_leave_twice(mode, preloaded, beneath, monkeypatch):
    """``laxity_mode`` is what ``laxity.mooncake``'s engine says of itself; Mooncake's own says nothing."""
    monkeypatch.setattr(_patch._beneath, "preloaded", lambda: preloaded)
    inner = types.SimpleNamespace() if mode is None else types.SimpleNamespace(laxity_mode=mode)
    manager = types.SimpleNamespace(engine=types.SimpleNamespace(engine=inner))
    assert _patch.scheduled_beneath(manager) is beneath


def test_a_gated_nixl_agent_asks_itself():
    from laxity import nixl

    gate = object.__new__(nixl.Gate)
    assert _patch.scheduled_beneath(types.SimpleNamespace(agent=types.SimpleNamespace(agent=gate)))


# Requests, and the front door.


def test_requests_begin_and_end_once_and_are_bounded(said, monkeypatch):
    monkeypatch.setattr(_patch, "REQUESTS_MAX", 5)
    monkeypatch.delenv("LAXITY_OBJECTIVES", raising=False)
    requests = _patch.Requests()
    for room in [*range(20), 19, 19]:
        requests.begin(room, Objective(), None)
    assert len(said.of("request_begin")) == 20
    assert len(said.of("request_end")) == 15
    requests.end(19)
    requests.end(19)
    requests.end(1000)
    assert len(said.of("request_end")) == 16
    assert said.refused == []


def test_the_server_gets_the_middleware(monkeypatch):
    monkeypatch.delenv("LAXITY_OBJECTIVES", raising=False)
    added = []
    module = types.ModuleType("http_server")
    module.app = types.SimpleNamespace(
        add_middleware=lambda cls, **named: added.append((cls.__name__, named["field"]))
    )
    _patch.guarded(_patch.change_server)(module)
    assert added == [("ObjectiveMiddleware", "custom_params")]


# How it gets there.


def write(folder, name, text):
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        if parent == folder:
            break
        (parent / "__init__.py").touch()
    path.write_text(text)


def test_a_module_is_changed_as_it_is_imported(tmp_path, monkeypatch):
    write(tmp_path, "ours_later.inner", "value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    _after_import.after_import("ours_later.inner", lambda module: seen.append((module.__name__, module.value)))
    assert seen == []
    inner = importlib.import_module("ours_later.inner")
    assert seen == [("ours_later.inner", 1)]
    assert type(inner.__loader__).__name__ == type(inner.__spec__.loader).__name__ == "SourceFileLoader"
    _after_import.after_import("ours_later.inner", lambda module: seen.append("now"))
    assert seen[-1] == "now"
    _after_import.after_import("ours_never.there", lambda module: seen.append("never"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ours_never.there")
    assert "never" not in seen


def test_one_that_is_being_imported_is_changed_when_that_is_done(tmp_path, monkeypatch):
    write(tmp_path, "ours_begun", "import ours_asks\nvalue = 1\nimport ours_after")
    write(
        tmp_path,
        "ours_asks",
        "from laxity._after_import import after_import\nimport builtins\n"
        "builtins._seen = []\nafter_import('ours_begun', lambda module: builtins._seen.append(module.value))",
    )
    write(tmp_path, "ours_after", "")
    write(tmp_path, "ours_next", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    import builtins

    importlib.import_module("ours_begun")
    assert builtins._seen == []
    importlib.import_module("ours_next")
    assert builtins._seen == [1]
    del builtins._seen


def python(code, tmp_path, *, launcher=False, **environment):
    """Runs a program, also under ``python -m laxity.sglang``."""
    here = os.path.dirname(__file__)
    package = os.path.dirname(os.path.dirname(laxity.__file__))
    hidden = tmp_path / "hidden"
    hidden.mkdir(exist_ok=True)
    # Where the compiled part is not built, its stand-in; it also shows that a sitecustomize that was there still
    # runs.
    fake = "import fake_laxity; fake_laxity.install()\n" if FAKE else ""
    (hidden / "sitecustomize.py").write_text(f"{fake}import os; os.environ['SEEN'] = 'yes'\n")
    path = os.pathsep.join([str(hidden), str(tmp_path), here, package])
    command = [sys.executable, "-c", code]
    if launcher:
        command = [sys.executable, "-m", "laxity.sglang", "--", *command]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CHILD = """
import multiprocessing, os, sys
def child(queue):
    import sglang.srt.disaggregation.mooncake.conn as conn
    queue.put(conn.FastQueue.__mro__[1].__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    import sglang.srt.disaggregation.mooncake.conn as conn
    print(conn.FastQueue.__mro__[1].__name__, os.environ.get("SEEN"))
"""
CONN = """
class FastQueue:
    def __init__(self): pass
    def put(self, item): pass
    def get(self): pass
class TransferKVChunk:
    __dataclass_fields__ = {"room": 0, "prefill_kv_indices": 0}
class MooncakeKVManager:
    def transfer_worker(self, queue, executor): pass
    def update_status(self, bootstrap_room, status): pass
"""


def test_the_launcher_changes_each_process_of_the_command(tmp_path):
    write(tmp_path, "sglang.srt.disaggregation.mooncake.conn", CONN)
    done = python(CHILD, tmp_path, launcher=True)
    assert done.stdout.split() == ["PermitQueue", "yes"], done.stderr
    nested = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {CHILD!r}]))"
    done = python(nested, tmp_path, launcher=True)
    assert done.stdout.split() == ["PermitQueue", "yes"], done.stderr


def test_the_launcher_can_be_switched_off(tmp_path):
    write(tmp_path, "sglang.srt.disaggregation.mooncake.conn", CONN)
    done = python(CHILD, tmp_path, launcher=True, LAXITY_SGLANG="off")
    assert done.stdout.split() == ["object", "yes"], done.stderr


def test_the_launcher_passes_the_exit_code_on_and_explains_wrong_use(tmp_path):
    assert python("raise SystemExit(7)", tmp_path, launcher=True).returncode == 7
    from laxity.sglang.__main__ import main

    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["--", "no-such-command-anywhere"]) == 127


def test_the_plugin_is_the_function_that_sglang_calls():
    """The entry point names it; SGLang calls it without arguments in each process."""
    text = (FACTS.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]' in text
    assert 'laxity = "laxity.sglang:install"' in text
    assert callable(sglang.install)
