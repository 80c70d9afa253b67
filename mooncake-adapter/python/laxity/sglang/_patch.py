"""The changes to SGLang, and what each of them relies on.

SGLang has no plugin point for the order of transfers. So names in its modules are changed when these are imported:

===================================================  =====================================================
``disaggregation.{mooncake,nixl}.conn.FastQueue``    the queue of transfers: :class:`PermitQueue`
``….{Mooncake,Nixl}KVManager.transfer_worker``       tells the queue the bytes of a chunk
``….{Mooncake,Nixl}KVManager.update_status``         ends a request
``disaggregation.prefill.PrefillBootstrapQueue.add`` begins a request
``entrypoints.http_server.app``                      gets the middleware
===================================================  =====================================================

Each change is made only if the module is as in the releases in ``facts/sglang.json``. Otherwise that change is left
out, a warning names the difference, and the module runs unchanged.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Optional

import laxity

from .. import _beneath, _changing
from .._changing import Change, Unknown
from .._changing import class_of as _class
from .._changing import takes as _takes
from .._telling import Teller
from ..objectives import Objective, ObjectiveError, Objectives
from ._queue import PermitQueue, room_id

PACKAGE = "sglang.srt"

#: Maximum number of requests that are remembered.
REQUESTS_MAX = 1 << 16

tell = Teller("sglang")


def guarded(change: Change) -> Change:
    """:func:`laxity._changing.guarded` for SGLang."""
    return _changing.guarded(tell, change)


# The queue.


def check_conn(module: Any, manager_name: str) -> tuple[Any, Any]:
    """The queue and the manager of a backend. Raises :class:`Unknown`."""
    queue = _class(module, "FastQueue")
    manager = _class(module, manager_name)
    _takes(queue.__init__, ["self"], exactly=True)
    _takes(queue.put, ["self", "item"], exactly=True)
    _takes(queue.get, ["self"], exactly=True)
    methods = {name for name in vars(queue) if not name.startswith("_")}
    if methods != {"put", "get"}:
        raise Unknown(f"FastQueue has the methods {', '.join(sorted(methods))}; known are get, put")
    worker = getattr(manager, "transfer_worker", None)
    if worker is None:
        raise Unknown(f"{manager_name} has no transfer_worker: this release posts transfers without a queue")
    _takes(worker, ["self", "queue"])
    _takes(getattr(manager, "update_status", None), ["self", "bootstrap_room", "status"])
    fields = getattr(_class(module, "TransferKVChunk"), "__dataclass_fields__", {})
    for field in ("room", "prefill_kv_indices"):
        if field not in fields:
            raise Unknown(f"TransferKVChunk has no {field}")
    return queue, manager


def change_conn(module: Any, manager_name: str) -> None:
    queue, manager = check_conn(module, manager_name)
    module.FastQueue = type("FastQueue", (PermitQueue,), {"__doc__": queue.__doc__, "__module__": queue.__module__})
    worker = manager.transfer_worker
    update = manager.update_status
    poll = getattr(module, "KVPoll", None)
    over = (getattr(poll, "Success", 4), getattr(poll, "Failed", 0))

    @functools.wraps(worker)
    def transfer_worker(self: Any, queue: Any, *args: Any, **named: Any) -> Any:
        if isinstance(queue, PermitQueue):
            tell(_bind, self, queue)
        return worker(self, queue, *args, **named)

    @functools.wraps(update)
    def update_status(self: Any, bootstrap_room: Any, status: Any, *args: Any, **named: Any) -> Any:
        result = update(self, bootstrap_room, status, *args, **named)
        if status in over:
            requests.end(bootstrap_room)
        return result

    manager.transfer_worker = transfer_worker
    manager.update_status = update_status


def _bind(manager: Any, queue: PermitQueue) -> None:
    held = weakref.ref(manager)

    def bytes_of(chunk: Any) -> int:
        owner = held()
        page = sum(owner.kv_args.kv_item_lens) if owner is not None else 0
        return int(page) * len(chunk.prefill_kv_indices)

    queue.bind(bytes_of, scheduled_beneath=scheduled_beneath(manager))
    register_layers(manager.kv_args)


def scheduled_beneath(manager: Any) -> bool:
    """Whether a library below asks for permits for what a manager sends."""
    from .. import nixl

    agent = getattr(manager, "agent", None)
    if agent is not None:
        if isinstance(getattr(agent, "agent", None), nixl.Gate):
            return True
        return _beneath.preloaded() and _beneath.verbs_of_ucx()
    engine = getattr(manager, "engine", None)
    engine = getattr(engine, "engine", engine)
    return getattr(engine, "laxity_mode", None) == "gate" or _beneath.preloaded()


def register_layers(kv_args: Any) -> None:
    """Gives a hint for the memory of each layer, if this release names the layers."""
    layers = getattr(kv_args, "kv_layer_ids", None)
    pointers = getattr(kv_args, "kv_data_ptrs", None) or ()
    lengths = getattr(kv_args, "kv_data_lens", None) or ()
    if not layers or not len(layers) == len(pointers) == len(lengths):
        return
    key = tuple(pointers)
    with requests.lock:
        if key in requests.registered:
            return
        requests.registered = {key}
    for address, nbytes, layer in zip(pointers, lengths, layers):
        if address and nbytes and layer >= 0:
            tell(laxity.memory_layer, int(address), int(nbytes), int(layer))


# Requests.


class Requests:
    """Begins and ends requests, each once. Safe from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.registered: set[tuple[int, ...]] = set()
        self._open: OrderedDict[Any, None] = OrderedDict()
        self._objectives: Optional[Objectives] = None

    def begin(self, room: Any, objective: Objective, model: Optional[str], nbytes: int = 0) -> None:
        """Begins the request with this room."""
        wanted = objective.over(self._defaults().find(model=model, tenant=objective.tenant))
        evicted = None
        with self.lock:
            if room is None or room in self._open:
                return
            self._open[room] = None
            if len(self._open) > REQUESTS_MAX:
                evicted, _ = self._open.popitem(last=False)
        if evicted is not None:
            tell.count("requests that were never ended")
            tell(laxity.request_end, _id(evicted))
        tell(
            laxity.request_begin,
            _id(room),
            slo_ttft_s=wanted.slo_ttft_s,
            tenant=wanted.tenant,
            priority=wanted.priority or 0,
            bytes=nbytes,
        )

    def end(self, room: Any) -> None:
        """Ends the request: its KV cache has arrived, or the transfer failed."""
        with self.lock:
            if room not in self._open:
                return
            del self._open[room]
        tell(laxity.request_end, _id(room))

    def _defaults(self) -> Objectives:
        if self._objectives is None:
            try:
                self._objectives = Objectives.from_environment()
            except ObjectiveError as wrong:
                tell.count("LAXITY_OBJECTIVES", str(wrong))
                self._objectives = Objectives()
        return self._objectives


requests = Requests()


def _id(room: Any) -> str:
    return room_id(room)


def change_prefill(module: Any) -> None:
    queue = _class(module, "PrefillBootstrapQueue")
    add: Any = getattr(queue, "add", None)
    _takes(add, ["self", "req"])
    methods = {"add": add}
    # Some requests reach the queue through create_sender and not through add.
    if getattr(queue, "create_sender", None) is not None:
        _takes(queue.create_sender, ["self", "req"])
        methods["create_sender"] = queue.create_sender

    def seen(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, req: Any, *args: Any, **named: Any) -> Any:
            tell(_begin, self, req)
            return method(self, req, *args, **named)

        return call

    for name, method in methods.items():
        setattr(queue, name, seen(method))


def _begin(queue: Any, req: Any) -> None:
    params = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    said = Objective()
    try:
        said = Objective.carried_by(params) or said
    except ObjectiveError as wrong:
        tell.count("objective of a request", str(wrong))
    if said.priority is None and getattr(req, "priority", None) is not None:
        said = said.over(Objective(priority=int(req.priority)))
    scheduler = getattr(queue, "scheduler", None)
    model = getattr(getattr(scheduler, "server_args", None), "served_model_name", None)
    requests.begin(getattr(req, "bootstrap_room", None), said, model)


# The front door.


def change_server(module: Any) -> None:
    from ..asgi import ObjectiveMiddleware

    app: Any = getattr(module, "app", None)
    if not callable(getattr(app, "add_middleware", None)):
        raise Unknown("it has no app with add_middleware")
    try:
        objectives = Objectives.from_environment()
    except ObjectiveError as wrong:
        tell.count("LAXITY_OBJECTIVES", str(wrong))
        objectives = Objectives()
    app.add_middleware(ObjectiveMiddleware, objectives=objectives, field="custom_params")


CHANGES: dict[str, Change] = {
    f"{PACKAGE}.disaggregation.mooncake.conn": guarded(lambda module: change_conn(module, "MooncakeKVManager")),
    f"{PACKAGE}.disaggregation.nixl.conn": guarded(lambda module: change_conn(module, "NixlKVManager")),
    f"{PACKAGE}.disaggregation.prefill": guarded(change_prefill),
    f"{PACKAGE}.entrypoints.http_server": guarded(change_server),
}
