"""LMCache's own connectors under Laxity: files of released versions, read from their wheels, against the release's own
server over a socket."""

import asyncio
import contextlib
import enum
import importlib
import pathlib
import sys
import threading
import types

import pytest

import laxity
from laxity import _after_import, lmcache
from laxity.lmcache import _patch, _permit

from . import stubs
from .stubs import imported

FACTS = pathlib.Path(__file__).resolve().parents[2] / "facts"
sys.path.insert(0, str(FACTS))

import refresh  # noqa: E402
import released  # noqa: E402

AT = "lmcache.v1.storage_backend.connector"
REAL = {
    "lmcache.utils",
    "lmcache.v1.cache_engine",
    "lmcache.v1.protocol",
    "lmcache.v1.server.__main__",
    "lmcache.v1.server.storage_backend.abstract_backend",
    "lmcache.v1.server.storage_backend.local_backend",
    "lmcache.v1.server.utils",
    f"{AT}.base_connector",
    f"{AT}.lm_connector",
    f"{AT}.redis_connector",
}
TOPS = {"lmcache", "torch", "nvtx", "cachetools", "redis"}
RECORDED = refresh.recorded("lmcache")
VERSIONS = ("0.3.15", "0.4.7", "0.5.6")
CHUNK = 4096
LAYERS = 4


class MemoryFormat(enum.IntEnum):
    UNDEFINED = 0
    KV_2LTD = 1
    KV_MLA_FMT = 2
    BINARY = 3
    BINARY_BUFFER = 4


class Object:
    """Stands for LMCache's memory object, which needs torch."""

    def __init__(self, nbytes, fill=0):
        self.byte_array = bytearray([fill]) * nbytes

    def get_size(self):
        return len(self.byte_array)

    def get_shape(self):
        return (2, LAYERS, 16, 8)

    def get_dtype(self):
        return importlib.import_module("torch").float16

    def get_memory_format(self):
        return MemoryFormat.KV_2LTD


class Metadata:
    use_mla = False
    chunk_size = 16

    def get_shapes(self):
        return [(2, LAYERS, 16, 8)]

    def get_dtypes(self):
        return [None]

    def get_num_groups(self):
        return 1


class Key:
    """A key of a chunk. With a layer it stands for LayerCacheEngineKey."""

    def __init__(self, name, layer=None):
        self.name = name
        if layer is not None:
            self.layer_id = layer

    def to_string(self):
        return f"model@1@0@{self.name}@half" + (f"@{self.layer_id}" if hasattr(self, "layer_id") else "")


def given():
    """Modules that the files need more of than a stand-in."""
    memory = stubs._Module("lmcache.v1.memory_management")
    memory.MemoryFormat, memory.MemoryObj = MemoryFormat, Object
    sizes = types.ModuleType("lmcache.integration.vllm.utils")
    sizes.get_size_bytes = lambda shapes, dtypes: CHUNK
    return {memory.__name__: memory, sizes.__name__: sizes}


@pytest.fixture(params=VERSIONS)
def release(request, monkeypatch):
    """Imports modules of a release, changed as they would be."""
    with opened(request.param, monkeypatch):
        yield request.param


@contextlib.contextmanager
def opened(version, monkeypatch):
    try:
        root = released.files("lmcache", version, refresh.LMCACHE)
    except released.Unreachable as why:
        pytest.skip(str(why))
    monkeypatch.setattr(_patch.tell, "counts", {})
    with imported(root, REAL, TOPS, given()):
        importlib.import_module("torch").Size = tuple
        yield


def changed(name):
    module = importlib.import_module(name)
    _patch.CHANGES[name](module)
    return module


class Loop:
    """An event loop in a thread of its own, as LMCache has."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def begin(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine):
        return self.begin(coroutine).result(30)

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def loop():
    with Loop() as loop:
        yield loop


@pytest.fixture
def store(release, loop):
    """A changed connector of the release, at a server of the release."""
    server_module = importlib.import_module("lmcache.v1.server.__main__")
    local = importlib.import_module("lmcache.v1.server.storage_backend.local_backend")
    server_module.CreateStorageBackend = lambda device: local.LMSLocalBackend()
    # The server keeps what it gets by key, and the text of a key is one.
    importlib.import_module("lmcache.v1.protocol").parse_cache_key = str
    server = server_module.LMCacheServer("127.0.0.1", 0, "cpu")

    def serve():
        with contextlib.suppress(OSError):
            connection, _ = server.server_socket.accept()
            server.handle_client(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    module = changed(f"{AT}.lm_connector")
    assert not _patch.tell.counts
    backend = types.SimpleNamespace(
        config=types.SimpleNamespace(extra_config=None, use_layerwise=False),
        metadata=Metadata(),
        allocate=lambda shape, dtype, fmt: Object(backend.next),
        next=CHUNK,
    )
    connector = module.LMCServerConnector("127.0.0.1", server.server_socket.getsockname()[1], loop.loop, backend)
    connector.backend = backend
    yield connector
    loop.run(connector.close())
    server.server_socket.close()
    thread.join(30)


def waits_for(holds):
    give_up = threading.Event()
    for _ in range(3000):
        if found := holds():
            return found
        give_up.wait(0.01)
    raise AssertionError("it did not happen")


def test_a_chunk_comes_back_from_the_server_as_it_was_put_with_a_permit_each_way(store, loop, permits):
    permits.at_once = True
    loop.run(store.put(Key("a"), Object(CHUNK, 7)))
    assert loop.run(store.get(Key("a"))).byte_array == bytearray([7]) * CHUNK
    put, get = permits.tickets
    assert (put.stage, put.nbytes) == (laxity.Stage.BACKGROUND, CHUNK)
    assert put.said == {"direction": "egress", "whole": True, "peer": "127.0.0.1"}
    assert (get.stage, get.nbytes) == (laxity.Stage.KV_REUSE, CHUNK)
    assert get.said == {"direction": "ingress", "whole": True, "peer": "127.0.0.1", "request": None, "layer": None}
    assert put.completed == get.completed == CHUNK
    assert not _patch.tell.counts


def test_without_a_daemon_chunks_go_at_once(store, loop, monkeypatch):
    monkeypatch.setattr(_permit, "LOOK_EVERY_S", 60.0)
    loop.run(store.put(Key("a"), Object(CHUNK, 7)))
    assert loop.run(store.get(Key("a"))).byte_array == bytearray([7]) * CHUNK
    assert not _patch.tell.counts


def test_a_load_passes_a_store_that_waits(store, loop, permits):
    permits.at_once = True
    loop.run(store.put(Key("a"), Object(CHUNK, 7)))
    permits.at_once = False
    waiting = loop.begin(store.put(Key("b"), Object(CHUNK)))
    waits_for(lambda: len(permits.tickets) == 2)
    load = loop.begin(store.get(Key("a")))
    waits_for(lambda: len(permits.tickets) == 3)
    permits.tickets[2].grant()
    assert load.result(30) is not None
    assert not waiting.done() and not loop.run(store.exists(Key("b")))
    permits.tickets[1].grant()
    waiting.result(30)
    waits_for(lambda: loop.run(store.exists(Key("b"))))


def test_loads_of_one_call_ask_for_a_permit_each_and_wait_side_by_side(store, loop, permits):
    permits.at_once = True
    for name in "abc":
        loop.run(store.put(Key(name), Object(CHUNK, ord(name))))
    permits.at_once = False
    loads = loop.begin(store.batched_get_non_blocking("lookup", [Key(name) for name in "abc"]))
    waits_for(lambda: len(permits.tickets) == 6)
    for ticket in reversed(permits.tickets[3:]):
        ticket.grant()
    assert [found.byte_array[0] for found in loads.result(30)] == [ord(name) for name in "abc"]
    assert not permits.open()


def test_a_layer_is_a_part_of_a_chunk_and_says_which(store, loop, permits):
    permits.at_once = True
    store.backend.next = CHUNK // LAYERS
    loop.run(store.put(Key("a", 2), Object(CHUNK // LAYERS)))
    assert loop.run(store.get(Key("a", 2))) is not None
    load = permits.tickets[1]
    assert (load.nbytes, load.said["layer"], load.completed) == (CHUNK // LAYERS, 2, CHUNK // LAYERS)


def test_what_is_not_there_and_what_is_shorter_gives_the_rest_of_its_permit_back(store, loop, permits):
    permits.at_once = True
    assert loop.run(store.get(Key("none"))) is None
    assert permits.tickets[0].cancelled and permits.tickets[0].completed == 0
    store.backend.next = 100
    loop.run(store.put(Key("short"), Object(100)))
    assert loop.run(store.get(Key("short"))).get_size() == 100
    assert permits.tickets[2].cancelled and permits.tickets[2].completed == 100


def test_a_permit_that_does_not_come_holds_nothing_up_for_long(store, loop, permits, monkeypatch):
    monkeypatch.setattr(_patch, "STORE_WAIT_S_MAX", 0.05)
    loop.run(store.put(Key("a"), Object(CHUNK)))
    waits_for(lambda: loop.run(store.exists(Key("a"))))
    assert permits.tickets[0].cancelled and permits.tickets[0].completed == 0
    assert "transfers that waited too long for a permit" in _patch.tell.counts


@pytest.mark.parametrize("broken", ("submit", "wait", "poll", "complete", "cancel"))
def test_no_error_of_laxity_reaches_lmcache(broken, store, loop, permits, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("broken on purpose")

    class Broken:
        """Fails where it is to fail, and else waits for ever."""

        done, granted = broken in ("complete", "cancel"), CHUNK
        submit = wait = poll = complete = cancel = lambda *_: None

    setattr(Broken, broken, fails)
    monkeypatch.setattr(laxity, "submit", fails if broken == "submit" else lambda *_, **__: Broken())
    monkeypatch.setattr(_patch, "STORE_WAIT_S_MAX", 0.05)
    monkeypatch.setattr(_patch, "LOAD_WAIT_S_MAX", 0.05)
    loop.run(store.put(Key("a"), Object(CHUNK, 7)))
    assert loop.run(store.get(Key("a"))).byte_array[0] == 7
    assert any("RuntimeError" in what for what in _patch.tell.counts), _patch.tell.counts


def test_errors_of_lmcache_reach_its_caller_and_the_permit_goes_back(store, loop, permits):
    permits.at_once = True
    with pytest.raises(AssertionError, match="Key length"):
        loop.run(store.put(Key("k" * 200), Object(CHUNK)))
    assert permits.tickets[0].cancelled and permits.tickets[0].completed == 0


def test_a_load_that_lmcache_gives_up_gives_its_permit_back(store, loop, permits):
    load = loop.begin(store.get(Key("a")))
    waits_for(lambda: permits.tickets)
    load.cancel()
    waits_for(lambda: permits.tickets[0].cancelled)


def test_loads_name_the_request_that_the_engine_retrieves_for(store, loop, permits):
    permits.at_once = True
    loop.run(store.put(Key("a"), Object(CHUNK)))
    module = changed("lmcache.v1.cache_engine")
    assert not _patch.tell.counts

    class Engine:
        def retrieve(self, tokens, mask=None, **kwargs):
            return loop.run(store.get(Key("a")))

        def async_lookup_and_prefetch(self, lookup_id, tokens=None):
            # It begins in the engine's thread, and ends later.
            return loop.begin(store.batched_get_non_blocking(lookup_id, [Key("a")]))

    other = types.ModuleType("other")
    other.LMCacheEngine = Engine
    _patch.change_engine(other)
    assert Engine().retrieve([1], req_id="request-1").get_size() == CHUNK
    assert len(Engine().async_lookup_and_prefetch("request-2", tokens=[1]).result(30)) == 1
    Engine().retrieve([1])
    assert [ticket.said["request"] for ticket in permits.tickets[1:]] == ["request-1", "request-2", None]
    assert module.LMCacheEngine.retrieve.__wrapped__ and module.LMCacheEngine.async_lookup_and_prefetch.__wrapped__


def test_redis_waits_once_for_a_call_of_many_chunks(release, loop, permits):
    module = changed(f"{AT}.redis_connector")
    assert not _patch.tell.counts
    permits.at_once = True
    connector = object.__new__(module.RESPConnector)
    objects = [Object(CHUNK), Object(CHUNK)]

    class Executor:
        async def submit_job(self, job, **_):
            return objects

    connector.__dict__.update(pq_executor=Executor(), full_chunk_size_bytes=CHUNK, meta_shapes=[(2, LAYERS, 16, 8)])
    keys = [Key("a"), Key("b")]
    assert loop.run(connector.batched_get(keys=keys)) == objects
    loop.run(connector.batched_put(keys, objects))
    assert [(ticket.stage, ticket.nbytes, ticket.completed) for ticket in permits.tickets] == [
        (laxity.Stage.KV_REUSE, 2 * CHUNK, 2 * CHUNK),
        (laxity.Stage.BACKGROUND, 2 * CHUNK, 2 * CHUNK),
    ]
    assert permits.tickets[0].said["peer"] is None


def test_what_moves_beneath_a_permit_asks_for_no_second_one(loop, permits):
    class Connector:
        def __init__(self, config, metadata):
            self.full_chunk_size_bytes, self.meta_shapes = CHUNK, [(2, LAYERS, 16, 8)]

        async def get(self, key):
            return Object(CHUNK)

        async def batched_get(self, keys):
            return await asyncio.gather(*(self.get(key) for key in keys))

    module = types.ModuleType("module")
    module.RemoteConnector = module.Connector = Connector
    _patch.change_connectors(module, ["Connector"])
    permits.at_once = True
    assert len(loop.run(Connector(None, None).batched_get([Key("a"), Key("b")]))) == 2
    assert [ticket.nbytes for ticket in permits.tickets] == [2 * CHUNK]
    loop.run(Connector(None, None).get(Key("a")))
    assert len(permits.tickets) == 2


def test_an_earlier_release_runs_unchanged_and_says_why(monkeypatch, caplog):
    with opened("0.3.12", monkeypatch):
        module = importlib.import_module(f"{AT}.lm_connector")
        before = dict(vars(module.LMCServerConnector))
        _patch.CHANGES[module.__name__](module)
        assert dict(vars(module.LMCServerConnector)) == before
    assert "RemoteConnector has no full_chunk_size_bytes" in caplog.text
    assert "it runs unchanged" in caplog.text


@pytest.mark.parametrize("version", sorted(set(RECORDED) - {"0.3.12"}))
def test_what_is_relied_on_is_in_the_recorded_releases(version):
    facts = RECORDED[version]
    assert {"full_chunk_size_bytes", "meta_shapes"} <= set(facts["RemoteConnector"]["attributes"])
    known = {**_patch.LOADS, **_patch.STORES}
    for name in (name for names in _patch.CONNECTORS.values() for name in names):
        assert {"get", "put"} <= set(facts[name])
        for method, parameters in facts[name].items():
            assert parameters == f"({', '.join(known[method])})", (name, method)
    assert facts["LMCacheEngine"]["retrieve"] == "(self, tokens, mask=None, **kwargs)"
    assert facts["LMCacheEngine"]["async_lookup_and_prefetch"].startswith("(self, lookup_id, tokens")
    assert facts["LayerCacheEngineKey"] == ["layer_id"]


@pytest.mark.parametrize("value, changes", [("off", 0), ("0", 0), ("on", len(_patch.CHANGES)), (None, len(_patch.CHANGES))])
def test_it_is_on_unless_it_is_switched_off(value, changes, monkeypatch):
    asked = []
    monkeypatch.setattr(lmcache, "_installed", False)
    monkeypatch.setattr(lmcache, "after_import", lambda name, change: asked.append(name))
    monkeypatch.delenv("LAXITY_LMCACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("LAXITY_LMCACHE", value)
    lmcache.install()
    lmcache.install()
    assert len(asked) == changes
    assert all(name.startswith("lmcache.v1.") for name in asked)


def test_it_changes_a_module_when_that_is_imported(release, monkeypatch):
    monkeypatch.setattr(lmcache, "_installed", False)
    monkeypatch.setattr(_after_import, "_waiting", {})
    lmcache.install()
    try:
        module = importlib.import_module(f"{AT}.lm_connector")
        assert module.LMCServerConnector.get.__wrapped__ and module.LMCServerConnector.put.__wrapped__
        assert module.RemoteConnector.__module__ == f"{AT}.base_connector", "and not what it imports"
        assert not hasattr(module.RemoteConnector.get, "__wrapped__")
    finally:
        sys.meta_path.remove(_after_import._FINDER)
