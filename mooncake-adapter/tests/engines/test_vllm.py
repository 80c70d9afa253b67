"""vLLM's connectors through a life: over the base class of released versions, read from their wheels."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import pickle
import sys
import time
import types

import pytest

import laxity
import laxity.vllm
from laxity.objectives import LATE_S
from laxity.vllm import _plugin, _wrap
from laxity.vllm._options import OptionError, Options

from .stubs import imported

FACTS = pathlib.Path(__file__).resolve().parents[2] / "facts"
sys.path.insert(0, str(FACTS))

import refresh  # noqa: E402
import released  # noqa: E402

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
REAL = {f"{V1}.base", f"{V1}.multi_connector", "vllm.distributed.kv_transfer.kv_connector.factory"}

#: The oldest that is recorded, the newest, and some between.
VERSIONS = ("0.11.2", "0.18.1", "0.26.0", "0.33.0")


@pytest.fixture(autouse=True)
def store_class():
    """Restores Mooncake's store, whose class is replaced where it is defined."""
    try:
        from mooncake import store
    except ImportError:
        yield
        return
    theirs = store.MooncakeDistributedStore
    yield
    store.MooncakeDistributedStore = theirs


class Transfer(types.SimpleNamespace):
    """vLLM's KVTransferConfig, as far as connectors look at it."""

    def __init__(self, **said):
        super().__init__(
            **{
                "kv_connector": None,
                "kv_connector_module_path": None,
                "kv_connector_extra_config": {},
                "kv_role": "kv_both",
                "engine_id": "engine",
                **said,
            }
        )

    is_kv_producer = is_kv_consumer = property(lambda self: True)


class Vllm:
    """A release's own classes."""

    def __init__(self, version):
        self.version = version
        self.base = importlib.import_module(f"{V1}.base")
        self.multi = importlib.import_module(f"{V1}.multi_connector")
        self.factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        self.roles = self.base.KVConnectorRole

    def connector(self, name="MooncakeConnector"):
        """A connector that writes down what it is asked, and under which scope."""
        base = self.base

        class Metadata(base.KVConnectorMetadata):
            def __init__(self, step):
                self.step = step

        class Connector(base.KVConnectorBase_V1):
            log: list
            record = None

            def __init__(self, vllm_config, role, kv_cache_config=None):
                super().__init__(vllm_config, role, kv_cache_config)
                self.log = []
                self.finishes = (False, None)
                self.finished_sending = set()

            def _say(self, what, *args):
                self.log.append((what, args, dict(type(self).record.scope) if type(self).record else {}))

            def register_kv_caches(self, kv_caches):
                self._say("register_kv_caches", kv_caches)

            def start_load_kv(self, forward_context, **kwargs):
                self._say("start_load_kv", forward_context, kwargs)

            def wait_for_layer_load(self, layer_name):
                self._say("wait_for_layer_load", layer_name)

            def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
                self._say("save_kv_layer", layer_name, kv_layer, attn_metadata, kwargs)

            def wait_for_save(self):
                self._say("wait_for_save")

            def get_finished(self, finished_req_ids):
                self._say("get_finished", finished_req_ids)
                sent, self.finished_sending = self.finished_sending, set()
                return sent or None, None

            def get_num_new_matched_tokens(self, request, num_computed_tokens):
                self._say("get_num_new_matched_tokens", request, num_computed_tokens)
                return 0, False

            def update_state_after_alloc(self, request, blocks, num_external_tokens):
                self._say("update_state_after_alloc", request, blocks, num_external_tokens)

            def build_connector_meta(self, scheduler_output):
                self._say("build_connector_meta", scheduler_output)
                return Metadata(scheduler_output)

            def request_finished(self, request, block_ids):
                self._say("request_finished", request, block_ids)
                return self.finishes

            def of_a_newer_release(self, *args, **named):
                return "new", args, named

        Connector.__name__ = Connector.__qualname__ = name
        return Connector


@pytest.fixture(params=VERSIONS)
def vllm(request, monkeypatch):
    if sys.version_info < (3, 10):
        pytest.skip("vLLM needs Python 3.10")
    monkeypatch.delenv("LAXITY_OBJECTIVES", raising=False)
    monkeypatch.setenv("LAXITY_NIXL", "off")
    try:
        root = released.files("vllm", request.param, refresh.VLLM)
    except released.Unreachable as why:
        pytest.skip(str(why))
    config = types.ModuleType("vllm.config.kv_transfer")
    config.KVTransferConfig = Transfer
    functions = types.ModuleType("vllm.utils.func_utils")
    functions.supports_kw = lambda function, name: name in inspect.signature(function).parameters
    given = {"vllm.config.kv_transfer": config, "vllm.utils.func_utils": functions}
    with imported(root, REAL, {"vllm", "torch"}, given):
        yield Vllm(request.param)


def configured(**said):
    return types.SimpleNamespace(
        kv_transfer_config=Transfer(**said),
        scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        parallel_config=types.SimpleNamespace(data_parallel_rank=0),
        model_config=types.SimpleNamespace(
            model="org/model", served_model_name=None, hf_text_config=types.SimpleNamespace(num_hidden_layers=4)
        ),
        cache_config=types.SimpleNamespace(num_gpu_blocks=8, block_size=16),
    )


class Tensor:
    def __init__(self, address, shape, strides=None, size=2):
        self.address, self.shape, self._size = address, shape, size
        if strides is None:
            strides, step = [], 1
            for count in reversed(shape):
                strides.insert(0, step)
                step *= count
        self._strides = tuple(strides)

    def data_ptr(self):
        return self.address

    def stride(self):
        return self._strides

    def element_size(self):
        return self._size


def kv_caches(layers=4, at=0x100000):
    """Keys and values, 8 blocks of 16 tokens: 16 KiB a layer."""
    return {
        f"model.layers.{layer}.self_attn.attn": Tensor(at + layer * 0x10000, (2, 8, 16, 32))
        for layer in range(layers)
    }


def prompt(request_id, tokens=40, **said):
    params = said.pop("params", None)
    return types.SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=tokens,
        kv_transfer_params=params,
        priority=0,
        arrival_time=None,
        **said,
    )


def output(new=(), cached=(), finished=()):
    """A step: ``new`` are (id, tokens of prompt, computed, scheduled), ``cached`` (id, computed, scheduled)."""
    return types.SimpleNamespace(
        scheduled_new_reqs=[
            types.SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=computed)
            for name, length, computed, _ in new
        ],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[name for name, _, _ in cached], num_computed_tokens=[computed for _, computed, _ in cached]
        ),
        num_scheduled_tokens={
            **{name: count for name, _, _, count in new},
            **{name: count for name, _, count in cached},
        },
        finished_req_ids=set(finished),
    )


class Engine:
    """A scheduler and its worker, in one process, with the metadata pickled between them as between two."""

    def __init__(self, vllm, record, connector=None, **said):
        self.vllm = vllm
        config = configured(**said)
        wrapped = laxity.vllm.under_laxity(connector or vllm.connector())
        for cls in wrapped.__mro__:
            if "record" in vars(cls):
                cls.record = record
        self.scheduler = wrapped(config, vllm.roles.SCHEDULER, None)
        self.worker = wrapped(config, vllm.roles.WORKER, None)

    def arrive(self, request):
        if hasattr(self.scheduler, "on_new_request"):
            self.scheduler.on_new_request(request)
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, types.SimpleNamespace(new_empty=lambda: None), 0)

    def step(self, scheduled, layers=4):
        metadata = self.scheduler.build_connector_meta(scheduled)
        step = pickle.loads(pickle.dumps(getattr(metadata, "_laxity_step", None)))
        if step is not None:
            metadata._laxity_step = step
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv("context")
        for layer in range(layers):
            name = f"model.layers.{layer}.self_attn.attn"
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, "kv", "attention")
        self.worker.wait_for_save()
        finished = getattr(self.worker, "get_transfer_results", self.worker.get_finished)(scheduled.finished_req_ids)
        self.worker.clear_connector_metadata()
        return finished


def test_the_trace_of_a_request_is_told_once_and_beside_the_requests():
    """Needs no release of vLLM. Workers of an earlier release of laxity unpack five facts of a request."""
    from laxity._telling import Teller
    from laxity.objectives import Objectives
    from laxity.vllm._scheduler import SchedulerHints

    hints = SchedulerHints(Objectives(), None, "engine", Teller("test"))
    for name, headers in [("r1", {"traceparent": "00-1-2-01"}), ("r2", None), ("r3", {}), ("r4", "wrong")]:
        hints.saw(prompt(name, trace_headers=headers))
    names = ["r1", "r2", "r3", "r4"]
    step = hints.step(output(new=[(name, 40, 0, 20) for name in names]))
    assert step["traces"] == {"r1": "00-1-2-01"}
    assert [len(request) for request in step["requests"]] == [5] * 4
    assert hints.step(output(cached=[(name, 20, 20) for name in names]))["traces"] == {}


def test_a_request_through_a_prefill_instance(vllm, said):
    """From its arrival to the arrival of its KV cache at the decode instance."""
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    assert [args for args, _ in said.of("memory_layer")] == [
        (0x100000 + layer * 0x10000, 16384, layer) for layer in range(4)
    ]
    said.clear()

    params = {"do_remote_decode": True, "laxity": {"slo_ttft_ms": 400, "tenant": "gold", "priority": 2}}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = prompt("r1", params=params, trace_headers={"traceparent": trace})
    engine.arrive(request)
    assert said.calls == [], "the scheduler's process says nothing itself"
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert said.names() == [
        "request_begin",
        "batch_begin",
        "batch_join",
        *["layer_begin"] * 4,
        "compute_end",
    ]
    (begun,), named = said.of("request_begin")[0]
    assert begun == "r1"
    assert 0.3 < named["deadline_s"] <= 0.4
    assert (named["tenant"], named["priority"], named["traceparent"]) == ("gold", 2, trace)
    # 4 layers of 16 KiB for 8 blocks of 16 tokens: 512 bytes a token.
    assert named["bytes"] == 40 * 512
    (batch,), named = said.of("batch_begin")[0]
    assert named["layers"] == 4
    assert [args for args, _ in said.of("layer_begin")] == [(batch, layer) for layer in range(4)]
    said.clear()

    engine.scheduler.finishes = (True, {"remote_host": "here"})
    finished = engine.scheduler.request_finished(request, [0, 1, 5])
    assert finished[0] is True
    handed = finished[1]["laxity"]
    assert handed["handed_on"] is True and 0 < handed["slo_ttft_ms"] <= 400
    assert finished[1]["remote_host"] == "here"

    engine.step(output(finished=["r1"]), layers=0)
    owned = said.of("memory_owner")
    # Keys and values of 4 layers, blocks 0 and 1, and 5.
    block = 16384 // 2 // 8
    assert len(owned) == 4 * 2 * 2
    assert owned[0] == ((0x100000, 2 * block), {"request": "r1"})
    assert owned[1] == ((0x100000 + 5 * block, block), {"request": "r1"})
    assert "request_end" not in said.names(), "its KV cache is on the way"
    said.clear()

    engine.worker.finished_sending = {"r1"}
    engine.step(output(), layers=0)
    assert [args for args, _ in said.of("request_end")] == [("r1",)]
    assert said.of("batch_end") == [((batch,), {})]
    assert len(said.of("memory_owner")) == 16, "the blocks are nobody's now"
    assert said.refused == []


def test_a_request_that_decodes_here_ends_with_its_first_token(vllm, said):
    engine = Engine(vllm, said, kv_connector="LMCacheConnectorV1")
    engine.worker.register_kv_caches(kv_caches())
    said.clear()
    engine.arrive(prompt("r1", 40))
    engine.step(output(new=[("r1", 40, 0, 30)]))
    engine.step(output(cached=[("r1", 30, 10)]))
    first, second = (args[0] for args, _ in said.of("batch_begin"))
    assert first != second
    assert said.of("batch_join") == [((first, "r1"), {}), ((second, "r1"), {})]
    assert said.of("batch_end") == [((first,), {})], "its only member went on"
    said.clear()
    engine.step(output(cached=[("r1", 40, 1)]))
    assert said.names() == ["batch_end", "request_end"]
    said.clear()
    engine.step(output(cached=[("r1", 41, 1)]))
    engine.scheduler.request_finished(prompt("r1"), [])
    engine.step(output(finished=["r1"]))
    assert said.calls == [], "steps that only decode cost nothing"


def test_a_request_that_is_preempted_joins_the_batch_that_computes_it_again(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    request = prompt("r1", 40, params={"do_remote_decode": True, "laxity": {"slo_ttft_ms": 1000}})
    engine.arrive(request)
    engine.step(output(new=[("r1", 40, 0, 30)]))
    # Its blocks went to another request. The scheduler asks the connector anew, and all tokens are computed again.
    engine.step(output())
    engine.arrive(request)
    engine.step(output(cached=[("r1", 0, 40)]))
    first, second = (args[0] for args, _ in said.of("batch_begin"))
    assert said.of("batch_join") == [((first, "r1"), {}), ((second, "r1"), {})]
    assert len(said.of("request_begin")) == 1, "its deadline stays"
    assert said.of("request_end") == []


def test_a_request_that_is_preempted_after_its_first_token_is_no_member(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    request = prompt("r1", 40)
    engine.arrive(request)
    engine.step(output(new=[("r1", 40, 0, 40)]))
    engine.step(output(cached=[("r1", 40, 1)]))
    said.clear()
    engine.arrive(request)
    # As one that runs, and as a new one, with which some releases resume it.
    engine.step(output(cached=[("r1", 0, 20)]))
    engine.step(output(new=[("r1", 41, 20, 21)]))
    assert said.calls == []
    engine.scheduler.request_finished(request, [])
    engine.arrive(request)
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert len(said.of("request_begin")) == 1, "another request may have the id of one that is finished"


def test_a_request_that_is_aborted_ends(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    request = prompt("r1", 40, params={"do_remote_decode": True})
    engine.arrive(request)
    engine.step(output(new=[("r1", 40, 0, 16)]))
    engine.scheduler.request_finished(request, [])
    engine.step(output(finished=["r1"]))
    assert said.of("request_end") == [(("r1",), {})]


def test_a_fetch_between_steps_is_known_before_it_starts(vllm, said):
    """A decode instance: nothing is scheduled while the KV cache is fetched."""
    engine = Engine(vllm, said, kv_role="kv_consumer")
    engine.worker.register_kv_caches(kv_caches())
    said.clear()
    request = prompt("r1", 40, params={"do_remote_prefill": True, "laxity": {"slo_ttft_ms": 90, "handed_on": True}})
    blocks = types.SimpleNamespace(get_block_ids=lambda: ([3, 4],))
    engine.scheduler.update_state_after_alloc(request, blocks, 40)
    engine.step(output(), layers=0)
    assert said.names()[:1] == ["request_begin"]
    assert "batch_begin" not in said.names()
    assert said.of("memory_owner")[0][1] == {"request": "r1"}
    loads = [scope for what, _, scope in engine.worker.log if what == "start_load_kv"]
    assert loads == [{"stage": laxity.Stage.P2D}]


@pytest.mark.parametrize("vllm", VERSIONS[-1:], indirect=True)
@pytest.mark.parametrize(
    ("name", "role", "load", "save"),
    [
        ("NixlConnector", "kv_both", "P2D", "P2D"),
        ("MooncakeStoreConnector", "kv_both", "KV_REUSE", "BACKGROUND"),
        ("LMCacheConnectorV1", "kv_both", "KV_REUSE", "BACKGROUND"),
        ("OurConnector", "kv_both", "KV_REUSE", "P2D"),
        ("OurConnector", "kv_consumer", "P2D", "P2D"),
    ],
)
def test_each_call_is_in_the_scope_of_its_stage(vllm, said, name, role, load, save):
    engine = Engine(vllm, said, vllm.connector(name), kv_role=role)
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1"))
    engine.step(output(new=[("r1", 40, 0, 40)]), layers=1)
    scopes = {what: scope for what, _, scope in engine.worker.log}
    batch = said.of("batch_begin")[0][0][0]
    load, save = laxity.Stage[load], laxity.Stage[save]
    assert scopes["start_load_kv"] == {"stage": load, "batch": batch}
    assert scopes["wait_for_layer_load"] == {"stage": load, "batch": batch}
    assert scopes["save_kv_layer"] == {"stage": save, "layer": 0, "batch": batch}
    assert scopes["wait_for_save"]["stage"] is save
    assert scopes["get_finished"]["stage"] is save
    assert said.scope == {}


def test_every_method_is_forwarded_with_its_arguments(vllm, said):
    """All that the release's base class has, and one that it hasn't."""
    inner = vllm.connector()
    calls = []

    def spy(name):
        def method(self, *args, **named):
            calls.append((name, args, named))
            return f"{name}'s result"

        return method

    methods = [
        name
        for name, value in vars(vllm.base.KVConnectorBase_V1).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
    ]
    assert len(methods) > 15
    for name in methods:
        setattr(inner, name, spy(name))
    wrapped = laxity.vllm.under_laxity(inner)
    for role in (vllm.roles.SCHEDULER, vllm.roles.WORKER):
        connector = wrapped(configured(), role, None)
        for name in methods:
            calls.clear()
            args = tuple(f"argument {index}" for index in range(3))
            result = getattr(connector, name)(*args, extra=1)
            # Statistics have ours beside the connector's.
            assert getattr(result, "inner", result) == f"{name}'s result", name
            assert calls == [(name, args, {"extra": 1})], name
        assert connector.of_a_newer_release(1, x=2) == ("new", (1,), {"x": 2})


def test_it_is_the_connector_for_whoever_asks(vllm):
    inner = vllm.connector("NixlConnector")
    wrapped = laxity.vllm.under_laxity(inner)
    assert issubclass(wrapped, inner)
    assert (wrapped.__name__, wrapped.__doc__) == (inner.__name__, inner.__doc__)
    assert laxity.vllm.under_laxity(inner) is wrapped
    assert laxity.vllm.under_laxity(wrapped) is wrapped
    assert not issubclass(wrapped, vllm.base.SupportsHMA)
    hybrid = type(
        "Hybrid",
        (inner, vllm.base.SupportsHMA),
        {"request_finished_all_groups": lambda self, request, blocks: (False, None)},
    )
    assert issubclass(laxity.vllm.under_laxity(hybrid), vllm.base.SupportsHMA)
    assert "kv_cache_config" in inspect.signature(wrapped).parameters, "vLLM refuses connectors without"
    connector = wrapped(configured(), role=vllm.roles.WORKER, kv_cache_config=None)
    assert connector.role is vllm.roles.WORKER
    named = wrapped(vllm_config=configured(), role=vllm.roles.SCHEDULER, kv_cache_config=None)
    assert named.role is vllm.roles.SCHEDULER


def test_vllm_finds_it_by_the_connectors_name(vllm, monkeypatch):
    inner = vllm.connector()
    monkeypatch.setitem(vllm.factory._registry, "OurConnector", lambda: inner)

    def found(name):
        return vllm.factory.get_connector_class(Transfer(kv_connector=name, kv_connector_module_path="laxity.vllm"))

    assert found("LaxityOurConnector") is laxity.vllm.under_laxity(inner)
    path_first = refresh.recorded("vllm")[vllm.version]["module_path_first"]
    assert found("OurConnector") is (laxity.vllm.under_laxity(inner) if path_first else inner)
    with pytest.raises(AttributeError, match="NoSuchConnector"):
        found("NoSuchConnector")
    module = types.ModuleType("ours")
    module.Connector = inner
    monkeypatch.setitem(sys.modules, "ours", module)
    assert found("ours:Connector") is laxity.vllm.under_laxity(inner)
    with pytest.raises(AttributeError, match="nothing_here"):
        found("nothing_here:Connector")


def test_module_paths_come_first_since_0_20():
    """What the documentation says of names."""
    first = {version: facts["module_path_first"] for version, facts in refresh.recorded("vllm").items()}
    assert first == {version: int(version.split(".")[1]) >= 20 for version in first}


@pytest.mark.parametrize("vllm", VERSIONS[-1:], indirect=True)
@pytest.mark.parametrize("gated", [True, False])
def test_mooncakes_engine_is_the_gated_one_unless_it_is_switched_off(vllm, gated, monkeypatch):
    theirs, ours = type("TransferEngine", (), {}), type("TransferEngine", (), {})
    engine, wrapper, module = (
        types.ModuleType("mooncake.engine"),
        types.ModuleType("laxity.mooncake"),
        types.ModuleType("its_module"),
    )
    engine.TransferEngine = module.TransferEngine = theirs
    wrapper.TransferEngine = ours
    monkeypatch.setitem(sys.modules, "mooncake.engine", engine)
    monkeypatch.setitem(sys.modules, "laxity.mooncake", wrapper)
    monkeypatch.setattr(laxity, "mooncake", wrapper, raising=False)
    monkeypatch.setitem(sys.modules, "its_module", module)
    inner = vllm.connector()
    inner.__module__ = "its_module"
    extra = {} if gated else {"laxity": {"gate_mooncake": False}}
    laxity.vllm.under_laxity(inner)(configured(kv_connector_extra_config=extra), vllm.roles.WORKER, None)
    assert module.TransferEngine is (ours if gated else theirs)


@pytest.mark.parametrize("vllm", VERSIONS[-1:], indirect=True)
@pytest.mark.parametrize("name", ["MooncakeStoreConnector", "MooncakeConnector"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_store_of_mooncakes_store_connector_is_the_gated_one(vllm, name, gated, monkeypatch):
    """The connector imports the class in its constructor."""
    theirs, ours = type("MooncakeDistributedStore", (), {}), type("MooncakeDistributedStore", (), {})
    store, wrapper = types.ModuleType("mooncake.store"), types.ModuleType("laxity.mooncake")
    store.MooncakeDistributedStore, wrapper.MooncakeDistributedStore = theirs, ours
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", store)
    monkeypatch.setitem(sys.modules, "laxity.mooncake", wrapper)
    monkeypatch.setattr(laxity, "mooncake", wrapper, raising=False)
    extra = {} if gated else {"laxity": {"gate_mooncake": False}}
    config = configured(kv_connector_extra_config=extra)
    laxity.vllm.under_laxity(vllm.connector(name))(config, vllm.roles.WORKER, None)
    wanted = ours if gated and name == "MooncakeStoreConnector" else theirs
    assert store.MooncakeDistributedStore is wanted


def test_without_vllm_it_has_no_connectors_and_says_why():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(AttributeError, match="vLLM can't be imported"):
        laxity.vllm.NixlConnector
    assert not hasattr(laxity.vllm, "_ipython_display_")


def test_what_is_no_connector_is_refused_by_name():
    with pytest.raises(TypeError, match="int has no build_connector_meta"):
        laxity.vllm.under_laxity(int)
    with pytest.raises(TypeError, match="is no class"):
        laxity.vllm.under_laxity(3)


def test_children_of_a_multiconnector_have_stages_of_their_own(vllm, said, monkeypatch):
    """The release's own MultiConnector over a transfer and a store."""
    p2d, store = vllm.connector("NixlConnector"), vllm.connector("MooncakeStoreConnector")
    for child in (p2d, store):
        child.record = said
        monkeypatch.setitem(vllm.factory._registry, child.__name__, lambda child=child: child)
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
    ]
    engine = Engine(
        vllm,
        said,
        vllm.multi.MultiConnector,
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": children},
    )
    first, second = engine.worker._connectors
    assert isinstance(first, p2d) and isinstance(second, store)
    assert [type(child).__name__ for child in engine.worker._connectors] == [
        "NixlConnector",
        "MooncakeStoreConnector",
    ]

    # MultiConnector hands the parts of its metadata out; what was attached to the whole stays on the whole.
    engine.worker.register_kv_caches(kv_caches())
    assert len(said.of("memory_layer")) == 4, "once, not once a child"
    request = prompt("r1", params={"do_remote_decode": True})
    engine.arrive(request)
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert len(said.of("batch_begin")) == 1
    assert len(said.of("layer_begin")) == 4
    batch = said.of("batch_begin")[0][0][0]
    saves = [next(scope for what, _, scope in child.log if what == "save_kv_layer") for child in (first, second)]
    assert saves == [
        {"stage": laxity.Stage.P2D, "layer": 0, "batch": batch},
        {"stage": laxity.Stage.BACKGROUND, "layer": 0, "batch": batch},
    ]
    for child in engine.scheduler._connectors[:1]:
        child.finishes = (True, {"remote": 1})
    sends, params = engine.scheduler.request_finished(request, [0])
    assert sends is True and params["remote"] == 1


@pytest.fixture
def plugged(vllm, monkeypatch):
    """A release with Laxity's plugin. The release's own lookups are there again afterwards."""
    module = sys.modules["vllm.distributed.kv_transfer.kv_connector.factory"]
    for name in _plugin._LOOKUPS:
        if name in vars(vllm.factory):
            monkeypatch.setattr(vllm.factory, name, vars(vllm.factory)[name])
    monkeypatch.delenv(_plugin.VARIABLE, raising=False)
    _plugin.install()
    assert module.KVConnectorFactory is vllm.factory
    return vllm


def test_a_multiconnector_under_the_plugin_exports_each_of_laxitys_metrics_once(plugged, monkeypatch):
    """Prometheus refuses a metric of the same name, and then vLLM does not start."""
    names = ("NixlConnector", "MooncakeStoreConnector")
    for child in map(plugged.connector, names):
        monkeypatch.setitem(plugged.factory._registry, child.__name__, lambda child=child: child)
    made = []

    class Metric:
        def __init__(self, name, **_):
            made.append(name)

        def labels(self, *_):
            return self

    kinds = {type(kind, (), {}): Metric for kind in ("Histogram", "Counter", "Gauge")}
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    config = configured(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    laxity.vllm.under_laxity(plugged.multi.MultiConnector).build_prom_metrics(config, kinds, ["engine"], {0: ["a"]})
    assert "laxity:kv_permit_wait_seconds" in made and len(made) == len(set(made)), made


def test_the_plugin_wraps_connectors_without_a_module_path(plugged, said, monkeypatch):
    inner = plugged.connector("NixlConnector")
    inner.record = said
    monkeypatch.setitem(plugged.factory._registry, "NixlConnector", lambda: inner)
    found = plugged.factory.get_connector_class(Transfer(kv_connector="NixlConnector"))
    assert found is laxity.vllm.under_laxity(inner)
    assert found.__name__ == "NixlConnector"
    _plugin.install()
    assert plugged.factory.get_connector_class(Transfer(kv_connector="NixlConnector")) is found, "works twice"
    engine = Engine(plugged, said, found, kv_connector="NixlConnector")
    engine.worker.register_kv_caches(kv_caches())
    assert len(said.of("memory_layer")) == 4


def test_the_plugin_gives_children_of_a_multiconnector_only_their_stage(plugged, said, monkeypatch):
    child = plugged.connector("NixlConnector")
    child.record = said
    monkeypatch.setitem(plugged.factory._registry, "NixlConnector", lambda: child)
    multi = plugged.factory.get_connector_class(Transfer(kv_connector="MultiConnector"))
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]
    extra = {"connectors": children}
    engine = Engine(plugged, said, multi, kv_connector="MultiConnector", kv_connector_extra_config=extra)
    engine.worker.register_kv_caches(kv_caches())
    assert len(said.of("memory_layer")) == 4, "once, not once a child"


def test_the_plugin_can_be_switched_off(vllm, monkeypatch):
    monkeypatch.setenv(_plugin.VARIABLE, "off")
    before = {name: vars(vllm.factory).get(name) for name in _plugin._LOOKUPS}
    _plugin.install()
    assert {name: vars(vllm.factory).get(name) for name in _plugin._LOOKUPS} == before


def test_without_hints_transfers_still_wait_for_permits(vllm, said, monkeypatch):
    gated = []
    monkeypatch.setattr(laxity.nixl, "install", lambda: gated.append("nixl"))
    inner = vllm.connector("NixlConnector")
    inner.record = said
    extra = {"laxity": {"hints": False}}
    engine = Engine(vllm, said, laxity.vllm.under_laxity(inner), kv_connector_extra_config=extra)
    assert gated == ["nixl"]
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1", params={"do_remote_decode": True}))
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert not said.calls
    assert all(scope == {} for _, _, scope in engine.worker.log)


def test_metadata_that_take_no_attribute_are_no_reason_to_fail(vllm, said):
    inner = vllm.connector()

    class Sealed:
        __slots__ = ()

    inner.build_connector_meta = lambda self, scheduler_output: Sealed()
    engine = Engine(vllm, said, inner)
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1"))
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert "batch_begin" not in said.names()
    assert [what for what, _, _ in engine.worker.log].count("save_kv_layer") == 4


def test_a_broken_laxity_does_not_disturb_the_engine(vllm, said, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of order")

    for name in ("request_begin", "batch_begin", "batch_join", "layer_begin", "compute_end", "memory_layer", "scope"):
        monkeypatch.setattr(laxity, name, broken)
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1"))
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert [what for what, _, _ in engine.worker.log].count("save_kv_layer") == 4


def test_errors_of_the_connector_are_its_own(vllm, said):
    inner = vllm.connector()

    def failing(self, layer_name, *_, **__):
        raise KeyError(layer_name)

    inner.save_kv_layer = failing
    engine = Engine(vllm, said, inner)
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1"))
    with pytest.raises(KeyError, match="layers.0"):
        engine.step(output(new=[("r1", 40, 0, 40)]))
    assert said.scope == {}, "the scope is closed all the same"


def test_a_worker_that_ends_leaves_nothing_behind(vllm, said):
    engine = Engine(vllm, said)
    caches = kv_caches()
    engine.worker.register_kv_caches(caches)
    engine.arrive(prompt("r1", params={"do_remote_decode": True}))
    engine.step(output(new=[("r1", 40, 0, 40)]))
    said.clear()
    engine.worker.shutdown()
    assert said.of("request_end") == [(("r1",), {})]
    assert len(said.of("memory_forget")) == 4
    if hasattr(engine.worker, "unregister_kv_caches"):
        engine.worker.register_kv_caches(caches)
        said.clear()
        engine.worker.unregister_kv_caches()
        assert len(said.of("memory_forget")) == 4
        engine.worker.restore_kv_caches()
        assert len(said.of("memory_layer")) == 4


def test_an_objective_that_makes_no_sense_leaves_the_default(vllm, said, tmp_path):
    path = tmp_path / "objectives.toml"
    path.write_text('[model."org/model"]\nslo_ttft = "250ms"')
    engine = Engine(vllm, said, kv_connector_extra_config={"laxity": {"objectives": str(path)}})
    engine.worker.register_kv_caches(kv_caches())
    engine.arrive(prompt("r1", params={"laxity": {"slo_ttft_ms": "soon"}}))
    engine.step(output(new=[("r1", 40, 0, 40)]))
    assert 0.1 < said.of("request_begin")[0][1]["deadline_s"] <= 0.25


def test_time_in_the_queue_counts(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    request = prompt("late", params={"laxity": {"slo_ttft_ms": 100}})
    request.arrival_time = time.time() - 5
    engine.arrive(request)
    engine.step(output(new=[("late", 40, 0, 40)]))
    assert said.of("request_begin")[0][1]["deadline_s"] == LATE_S
    assert said.refused == [], "late is no error"


def test_the_time_to_the_first_token_is_divided(vllm, said):
    """At a decode instance, which fetches; at a prefill instance, which finishes with the first token; and not for a
    request that ends without one."""
    from laxity._measured import requests

    requests.take()
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    decode = prompt("decode", num_output_tokens=3)
    decode.arrival_time = time.time() - 5
    engine.arrive(decode)
    engine.scheduler.update_state_after_alloc(decode, types.SimpleNamespace(new_empty=lambda: None), 39)
    engine.step(output())
    time.sleep(0.03)
    engine.step(output(new=[("decode", 40, 39, 1)]))
    time.sleep(0.02)
    engine.step(output(cached=[("decode", 40, 1)]))
    taken = requests.take()
    assert [len(values) for values in taken.values()] == [1, 1, 1]
    assert 5 <= taken["queue"][0] < 5.03 and taken["load"][0] >= 0.03 and taken["compute"][0] >= 0.02
    prefill = prompt("prefill", params={"do_remote_decode": True}, num_output_tokens=1)
    engine.arrive(prefill)
    engine.step(output(new=[("prefill", 40, 0, 40)]))
    aborted = prompt("aborted", num_output_tokens=0)
    engine.arrive(aborted)
    engine.step(output(new=[("aborted", 40, 0, 40)]))
    for request in (aborted, prefill, decode):
        engine.scheduler.request_finished(request, [])
    taken = requests.take()
    assert taken["load"] == [0.0] and len(taken["compute"]) == 1


def test_a_load_is_due_before_its_request_by_what_the_first_token_takes(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())

    def load(name, compute_s):
        request = prompt(name, params={"laxity": {"slo_ttft_ms": 1000}}, num_output_tokens=1)
        engine.arrive(request)
        engine.scheduler.update_state_after_alloc(request, types.SimpleNamespace(new_empty=lambda: None), 39)
        engine.step(output())
        engine.step(output(new=[(name, 40, 39, 1)]))
        time.sleep(compute_s)
        engine.scheduler.request_finished(request, [])
        return said.of("request_begin")[-1][1]["deadline_s"]

    assert load("first", 0.6) > 0.9, "nothing is known yet"
    assert load("second", 0.2) < 0.4
    assert 0.5 < load("third", 0.0) < 0.8, "the shortest counts"


def test_a_transfer_to_a_decode_instance_leaves_time_for_its_step(vllm, said):
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())

    def send(name, slo_ttft_ms, compute_s):
        params = {"do_remote_decode": True, "laxity": {"slo_ttft_ms": slo_ttft_ms}}
        request = prompt(name, params=params, num_output_tokens=1)
        engine.arrive(request)
        engine.step(output(new=[(name, 40, 0, 40)]))
        time.sleep(compute_s)
        engine.scheduler.request_finished(request, [])
        return said.of("request_begin")[-1][1]["deadline_s"]

    assert send("first", 20_000, 0.8) > 19.3, "nothing is known yet"
    assert send("second", 20_000, 0.4) <= 19.2
    assert 19.2 < send("third", 20_000, 0.4) <= 19.6, "the shortest counts"
    assert 1.6 < send("short", 2000, 0.4) <= 1.8, "at most a tenth of its objective"


def test_requests_that_are_never_finished_are_bounded(vllm, said, monkeypatch):
    from laxity.vllm import _scheduler, _worker

    monkeypatch.setattr(_scheduler, "REQUESTS_MAX", 10)
    monkeypatch.setattr(_worker, "REQUESTS_MAX", 10)
    engine = Engine(vllm, said)
    engine.worker.register_kv_caches(kv_caches())
    for number in range(50):
        name = f"r{number}"
        engine.arrive(prompt(name, params={"do_remote_decode": True}))
        engine.step(output(new=[(name, 40, 0, 40)]), layers=1)
    assert len(engine.scheduler._laxity_hints._requests) <= 10
    assert len(engine.worker._laxity_hints._requests) <= 10
    assert len(engine.worker._laxity_hints._members) <= 11
    assert len(said.of("request_end")) >= 39
    assert said.refused == []


@pytest.mark.parametrize(
    ("said_wrongly", "why"),
    [
        ({"load_stage": "kv"}, "load_stage: 'kv' is no stage; write one of kv_reuse"),
        ({"stage": "p2d"}, "unknown key 'stage'; known are"),
        ({"owner_ranges": -1}, "owner_ranges: -1"),
        ({"layer_time_ms": "fast"}, "layer_time_ms: 'fast'"),
        ({"gate_nixl": 1}, "gate_nixl: 1"),
        (3, "3 is no object"),
    ],
)
def test_wrong_options_are_an_error_before_the_engine_starts(said_wrongly, why):
    with pytest.raises(OptionError) as refused:
        Options.of(configured(kv_connector_extra_config={"laxity": said_wrongly}))
    assert why in str(refused.value)


@pytest.mark.parametrize("version", sorted(refresh.recorded("vllm")))
def test_what_is_wrapped_takes_what_the_recorded_releases_take(version):
    """Offline: the first parameters of each method that is wrapped are those that the wrapper names."""
    facts = refresh.recorded("vllm")[version]
    methods = {**facts["KVConnectorBase_V1"], **facts["SupportsHMA"]}
    assert facts["factory_has_registry"]
    checked = 0
    for name, make in {**_wrap._CHILD, **_wrap._WORKER, **_wrap._SCHEDULER}.items():
        if name not in methods:
            continue
        wrapper = make(lambda *_: None)
        ours = [
            parameter.name
            for parameter in inspect.signature(wrapper).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        text = methods[name].replace("abstractmethod ", "")
        theirs = [argument.arg for argument in ast.parse(f"def f{text}: pass").body[0].args.args]
        assert theirs[: len(ours)] == ours, name
        checked += 1
    assert checked >= 14
    for field in ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"):
        assert field in facts["SchedulerOutput"]
    assert {"req_id", "num_computed_tokens", "prompt_token_ids"} <= set(facts["NewRequestData"])


@pytest.mark.parametrize("package", ["vllm", "sglang", "nixl"])
def test_the_facts_are_those_of_the_released_packages(package):
    """The newest that is recorded; ``facts/refresh.py --check`` compares all."""
    facts = refresh.recorded(package)
    version = list(facts)[-1]
    try:
        there = refresh.read(package, version)
    except released.Unreachable as why:
        pytest.skip(str(why))
    assert there == facts[version]
