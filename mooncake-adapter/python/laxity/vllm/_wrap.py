"""Makes subclasses of connectors that give hints.

It makes subclasses and not proxies for two reasons. vLLM inspects the class: ``issubclass(connector, SupportsHMA)``,
class methods, and the class's name in metrics. And each release adds methods, which a proxy would have to know.

Only methods that the connector has are wrapped. Each wrapper passes on all arguments. ``facts/vllm.json`` has the
arguments of released packages, and a test compares them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Optional

from .._telling import Teller
from . import _scheduler, _stats
from ._options import Options
from ._scheduler import SchedulerHints
from ._worker import WorkerHints

Method = Callable[..., Any]

#: With this prefix a connector's name differs from vLLM's own names.
PREFIX = "Laxity"

_HINTS = "_laxity_hints"
_lock = threading.Lock()
_made: dict[tuple[type, bool], type] = {}


def by_name(name: str) -> type:
    """The wrapped connector of this name: a name in vLLM's registry, perhaps with :data:`PREFIX`, or
    ``package.module:Class``.

    Raises :class:`AttributeError`, as vLLM expects."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as missing:
            raise AttributeError(f"laxity.vllm: there is no connector {name!r}: {missing}") from missing
        return under_laxity(found)
    try:
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    except ImportError as missing:
        raise AttributeError(f"laxity.vllm: no connector {name!r}: vLLM can't be imported: {missing}") from missing
    registry = getattr(factory, "_registry", {})
    # Before 0.20, vLLM asks its own registry first, so the connector needs a name that is not in that registry.
    load = registry.get(name) or registry.get(name[len(PREFIX) :] if name.startswith(PREFIX) else name)
    if load is None:
        raise AttributeError(
            f"laxity.vllm: vLLM has no connector {name!r}; name one of vLLM's, perhaps with the prefix {PREFIX}, "
            "or another as 'package.module:Class'"
        )
    return under_laxity(load())


def under_laxity(connector: type, *, child: bool = False) -> type:
    """The subclass of ``connector`` that gives hints. A ``child`` of a ``MultiConnector`` gives only the stage. Its
    parent gives the other hints.

    Returns the same class each time for the same connector."""
    if not isinstance(connector, type):
        raise TypeError(f"{connector!r:.80} is no class; name a subclass of KVConnectorBase_V1")
    for method in ("build_connector_meta", "start_load_kv", "wait_for_layer_load", "save_kv_layer"):
        if not callable(getattr(connector, method, None)):
            raise TypeError(f"{connector.__name__} has no {method}: it is no KVConnectorBase_V1 connector")
    with _lock:
        for (original, as_child), wrapped in _made.items():
            if wrapped is connector:
                if as_child == child:
                    return connector
                # vLLM looks up a child as it does its parent, and gets a class that was wrapped there already.
                connector = original
                break
        made = _made.get((connector, child))
        if made is None:
            made = _made[connector, child] = _make(connector, child)
        return made


def _make(connector: Any, child: bool) -> type:
    body: dict[str, Any] = {"__module__": "laxity.vllm", "__qualname__": connector.__qualname__, _HINTS: None}
    body["__doc__"] = connector.__doc__
    makers = _CHILD if child else {**_CHILD, **_WORKER, **_SCHEDULER}
    for name, make in makers.items():
        original = getattr(connector, name, None)
        if callable(original):
            body[name] = functools.wraps(original)(make(original))
    body["__init__"] = functools.wraps(connector.__init__)(_init(connector.__init__, child))
    if not child:
        body.update(_stats.methods(connector))
    if "_get_connector_classes_and_configs" in dir(connector):
        body["_get_connector_classes_and_configs"] = classmethod(_children(connector))
    made: type = type(connector)(connector.__name__, (connector,), body)
    return made


def _init(original: Method, child: bool) -> Method:
    def __init__(self: Any, vllm_config: Any, role: Any, *rest: Any, **named: Any) -> None:
        # Reads the options first, so that wrong ones are an error before the connector does anything.
        hints = _hints(type(self), vllm_config, role, rest, named, child)
        original(self, vllm_config, role, *rest, **named)
        self.__dict__[_HINTS] = hints

    return __init__


def _hints(connector: type, vllm_config: Any, role: Any, rest: Any, named: Any, child: bool) -> Any:
    options = Options.of(vllm_config)
    tell = Teller("vllm")
    if getattr(role, "name", str(role)) == "SCHEDULER":
        if child or not options.hints:
            return None
        transfer = vllm_config.kv_transfer_config
        parallel = getattr(vllm_config, "parallel_config", None)
        engine = f"{getattr(transfer, 'engine_id', '')}/{getattr(parallel, 'data_parallel_rank', 0)}"
        model = getattr(getattr(vllm_config, "model_config", None), "served_model_name", None)
        if isinstance(model, (list, tuple)):
            model = model[0] if model else None
        model = model or getattr(getattr(vllm_config, "model_config", None), "model", None)
        return SchedulerHints(options.load_objectives(), model, engine, tell)
    if options.gate_nixl and any(base.__name__.startswith("Nixl") for base in connector.__mro__):
        from .. import nixl

        tell(nixl.install)
    if options.gate_mooncake:
        tell(_gate_mooncake, connector)
    if not options.hints:
        return None
    several = "_get_connector_classes_and_configs" in dir(connector)
    load, save = (None, None) if several else options.stages(connector, vllm_config)
    cache = getattr(vllm_config, "cache_config", None)
    config = rest[0] if rest else named.get("kv_cache_config")
    return WorkerHints(
        tell,
        layers=_layers(vllm_config),
        layer_time_s=options.layer_time_ms * 1e-3,
        load=load,
        save=save,
        owner_ranges=options.owner_ranges,
        num_blocks=int(getattr(config, "num_blocks", 0) or getattr(cache, "num_gpu_blocks", 0) or 0),
        block_size=int(getattr(cache, "block_size", 0) or 0),
        groups=[frozenset(group.layer_names) for group in getattr(config, "kv_cache_groups", None) or ()],
    )


def _gate_mooncake(connector: type) -> None:
    """Makes the connector create Laxity's objects of Mooncake. It replaces the engine's class in the connector's module.
    The store's connector imports the store's class when it needs it, so that class is replaced where it is defined."""
    if any(base.__name__ == "MooncakeStoreConnector" for base in connector.__mro__):
        try:
            store: Any = importlib.import_module("mooncake.store")
        except ImportError:
            return  # The connector says what is missing.
        from .. import mooncake

        store.MooncakeDistributedStore = mooncake.MooncakeDistributedStore
    engine = sys.modules.get("mooncake.engine")
    if engine is None:
        return
    for base in connector.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None and getattr(module, "TransferEngine", None) is engine.TransferEngine:
            from .. import mooncake

            module.TransferEngine = mooncake.TransferEngine  # type: ignore[attr-defined]


def _layers(vllm_config: Any) -> int:
    model = getattr(vllm_config, "model_config", None)
    for config in (getattr(model, "hf_text_config", None), getattr(model, "hf_config", None)):
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(layers, int) and layers > 0:
            return layers
    return 0


def _children(connector: Any) -> Method:
    def _get_connector_classes_and_configs(cls: type, *args: Any, **named: Any) -> list[tuple[type, Any]]:
        found = connector._get_connector_classes_and_configs.__func__(cls, *args, **named)
        return [(under_laxity(child, child=True), *rest) for child, *rest in found]

    return _get_connector_classes_and_configs


# Makers of wrappers, named after the method that they wrap. Each gets the connector's function and returns its
# replacement. If the connector's constructor calls a method, there are no hints yet.


def _worker(self: Any) -> Optional[WorkerHints]:
    hints = getattr(self, _HINTS, None)
    return hints if isinstance(hints, WorkerHints) else None


def _scheduler_of(self: Any) -> Optional[SchedulerHints]:
    hints = getattr(self, _HINTS, None)
    return hints if isinstance(hints, SchedulerHints) else None


def _loading(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None:
            return original(self, *args, **named)
        with hints.scope(hints.load):
            return original(self, *args, **named)

    return method


def _saving(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None:
            return original(self, *args, **named)
        with hints.scope(hints.save):
            return original(self, *args, **named)

    return method


def _wait_for_layer_load(original: Method) -> Method:
    def method(self: Any, layer_name: str, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None or not hints.batch:
            return original(self, layer_name, *args, **named)
        hints.layer(layer_name)
        # The scope has no layer. While the model waits for one layer, the connector may post a later one, and the
        # memory hints say which layer it is.
        with hints.scope(hints.load):
            return original(self, layer_name, *args, **named)

    return method


def _save_kv_layer(original: Method) -> Method:
    def method(self: Any, layer_name: str, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None or not hints.batch:
            return original(self, layer_name, *args, **named)
        with hints.scope(hints.save, hints.layer(layer_name)):
            return original(self, layer_name, *args, **named)

    return method


def _wait_for_save(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None:
            return original(self, *args, **named)
        with hints.scope(hints.save):
            hints.computed()
            return original(self, *args, **named)

    return method


def _get_finished(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is None:
            return original(self, *args, **named)
        with hints.scope(hints.save):
            result = original(self, *args, **named)
        sent = result[0] if isinstance(result, tuple) else getattr(result, "finished_sending", None)
        hints.arrived(sent)
        return result

    return method


def _bind_connector_metadata(original: Method) -> Method:
    def method(self: Any, connector_metadata: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is not None:
            hints._tell(hints.bind, getattr(connector_metadata, _scheduler.ATTRIBUTE, None))
        return original(self, connector_metadata, *args, **named)

    return method


def _clear_connector_metadata(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is not None:
            hints.computed()
        return original(self, *args, **named)

    return method


def _register_kv_caches(original: Method) -> Method:
    def method(self: Any, kv_caches: Any, *args: Any, **named: Any) -> Any:
        result = original(self, kv_caches, *args, **named)
        hints = _worker(self)
        if hints is not None:
            self.__dict__["_laxity_kv_caches"] = kv_caches
            hints._tell(hints.register, kv_caches)
        return result

    return method


def _unregister_kv_caches(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is not None:
            hints.forget()
        return original(self, *args, **named)

    return method


def _restore_kv_caches(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        hints = _worker(self)
        caches = self.__dict__.get("_laxity_kv_caches")
        if hints is not None and caches is not None:
            hints._tell(hints.register, caches)
        return result

    return method


def _shutdown(original: Method) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        hints = _worker(self)
        if hints is not None:
            hints.close()
            self.__dict__.pop("_laxity_kv_caches", None)
        return original(self, *args, **named)

    return method


def _sees_request(original: Method) -> Method:
    def method(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        hints = _scheduler_of(self)
        if hints is not None:
            hints._tell(hints.saw, request)
        return original(self, request, *args, **named)

    return method


def _update_state_after_alloc(original: Method) -> Method:
    def method(self: Any, request: Any, blocks: Any, num_external_tokens: int, *args: Any, **named: Any) -> Any:
        hints = _scheduler_of(self)
        if hints is not None:
            hints._tell(hints.allocated, request, blocks, num_external_tokens)
        return original(self, request, blocks, num_external_tokens, *args, **named)

    return method


def _build_connector_meta(original: Method) -> Method:
    def method(self: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        metadata = original(self, scheduler_output, *args, **named)
        hints = _scheduler_of(self)
        if hints is not None:
            step = hints._tell(hints.step, scheduler_output)
            if step is not None:
                try:
                    setattr(metadata, _scheduler.ATTRIBUTE, step)
                except (AttributeError, TypeError) as refused:
                    hints._tell.count("metadata of a connector that take no attribute", str(refused))
        return metadata

    return method


def _request_finished(original: Method) -> Method:
    def method(self: Any, request: Any, block_ids: Any, *args: Any, **named: Any) -> Any:
        result = original(self, request, block_ids, *args, **named)
        hints = _scheduler_of(self)
        if hints is None:
            return result
        sends = isinstance(result, tuple) and bool(result) and bool(result[0])
        objective = hints._tell(hints.finished, request, block_ids, sends)
        return _scheduler.with_objective(result, objective)

    return method


_CHILD: dict[str, Callable[[Method], Method]] = {
    "start_load_kv": _loading,
    "wait_for_layer_load": _loading,
    "save_kv_layer": _saving,
    "wait_for_save": _saving,
    "get_finished": _saving,
    "get_transfer_results": _saving,
}
_WORKER: dict[str, Callable[[Method], Method]] = {
    "wait_for_layer_load": _wait_for_layer_load,
    "save_kv_layer": _save_kv_layer,
    "wait_for_save": _wait_for_save,
    "get_finished": _get_finished,
    "get_transfer_results": _get_finished,
    "bind_connector_metadata": _bind_connector_metadata,
    "clear_connector_metadata": _clear_connector_metadata,
    "register_kv_caches": _register_kv_caches,
    "unregister_kv_caches": _unregister_kv_caches,
    "restore_kv_caches": _restore_kv_caches,
    "shutdown": _shutdown,
}
_SCHEDULER: dict[str, Callable[[Method], Method]] = {
    "on_new_request": _sees_request,
    "get_num_new_matched_tokens": _sees_request,
    "update_state_after_alloc": _update_state_after_alloc,
    "build_connector_meta": _build_connector_meta,
    "request_finished": _request_finished,
    "request_finished_all_groups": _request_finished,
}
