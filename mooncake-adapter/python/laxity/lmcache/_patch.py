"""The changes to LMCache, and what each of them relies on.

LMCache has no plugin point around its own connectors. So their methods are changed when the modules are imported:

=============================================  ==========================================================
``….connector.lm_connector`` and others        ``get``, ``put`` and their batched forms ask for permits
``cache_engine.LMCacheEngine.retrieve``        names the request that the loads are for
``….LMCacheEngine.async_lookup_and_prefetch``  the same, for loads ahead of time
=============================================  ==========================================================

A connector runs in the event loop of LMCache, in another thread than the engine. The request reaches it in a
``ContextVar``, because asyncio hands the caller's context on to a coroutine. A :class:`laxity.scope` belongs to a
thread and would not reach it.

No library of Laxity is beneath these connectors: all of them use TCP. So there is nothing to ask :mod:`laxity._beneath`.

Each change is made only if the module is as in the releases in ``facts/lmcache.json``, from 0.3.15 on. Earlier
releases don't know the size of a chunk before it arrives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Optional

import laxity

from .._changing import Change, Unknown, class_of, guarded, takes
from ._permit import moved_with_permit, tell

PACKAGE = "lmcache.v1"

#: Longest wait of a load for its permit. LMCache gives a load up after 10 s (``blocking_timeout_secs``), and then
#: computes what it could have loaded. The chunks of one call all wait from its beginning.
LOAD_WAIT_S_MAX = 5.0
#: Longest wait of a store. LMCache's CPU memory holds the chunk meanwhile.
STORE_WAIT_S_MAX = 10.0

#: Methods of a connector that move chunks, with their parameters. A class may have some of them.
LOADS = {
    "get": ["self", "key"],
    "batched_get": ["self", "keys"],
    "batched_get_non_blocking": ["self", "lookup_id", "keys"],
}
STORES = {
    "put": ["self", "key", "memory_obj"],
    "batched_put": ["self", "keys", "memory_objs"],
}

#: Connectors over TCP, by module.
CONNECTORS = {
    "lm_connector": ("LMCServerConnector",),
    "redis_connector": ("RedisConnector", "RedisSentinelConnector", "RedisClusterConnector", "RESPConnector"),
}

_request: ContextVar[Optional[str]] = ContextVar("laxity_lmcache_request", default=None)
#: Whether the caller holds a permit. What moves beneath it must not wait for a second one.
_permitted: ContextVar[bool] = ContextVar("laxity_lmcache_permitted", default=False)


# Connectors.


def change_connectors(module: Any, names: Sequence[str]) -> None:
    base = class_of(module, "RemoteConnector")
    takes(base.__init__, ["self", "config", "metadata"])
    for field in ("full_chunk_size_bytes", "meta_shapes"):
        if field not in base.__init__.__code__.co_names:
            raise Unknown(f"RemoteConnector has no {field}")
    changes: list[tuple[Any, str, Any]] = []
    for name in names:
        connector = class_of(module, name)
        for table, wrapper in ((LOADS, _load), (STORES, _store)):
            for method, parameters in table.items():
                # The base class has the others, and calls these.
                if method in vars(connector):
                    takes(vars(connector)[method], parameters, exactly=True)
                    changes.append((connector, method, wrapper(vars(connector)[method], parameters[-1])))
    for connector, method, changed in changes:
        setattr(connector, method, changed)


def _load(real: Callable[..., Any], last: str) -> Callable[..., Any]:
    @functools.wraps(real)
    async def load(self: Any, *args: Any, **named: Any) -> Any:
        keys = _listed(named[last] if last in named else args[-1])
        return await _moved(
            functools.partial(_load_ticket, self, keys), LOAD_WAIT_S_MAX, functools.partial(real, self, *args, **named),
            _bytes_of,
        )

    return load


def _store(real: Callable[..., Any], last: str) -> Callable[..., Any]:
    @functools.wraps(real)
    async def store(self: Any, *args: Any, **named: Any) -> Any:
        nbytes = tell(_bytes_of, named[last] if last in named else args[-1]) or 0
        return await _moved(
            functools.partial(_store_ticket, self, nbytes), STORE_WAIT_S_MAX,
            functools.partial(real, self, *args, **named), lambda _: nbytes,
        )

    return store


async def _moved(
    ask: Callable[[], Optional[laxity.Ticket]],
    wait_s_max: float,
    move: Callable[[], Any],
    bytes_of: Callable[[Any], int],
) -> Any:
    ticket = None if _permitted.get() else tell(ask)
    if ticket is None:
        return await move()
    before = _permitted.set(True)
    try:
        return await moved_with_permit(ticket, wait_s_max, move, bytes_of)
    finally:
        _permitted.reset(before)


def _load_ticket(connector: Any, keys: list[Any]) -> Optional[laxity.Ticket]:
    nbytes = sum(_expected(connector, key) for key in keys)
    layers = {getattr(key, "layer_id", None) for key in keys}
    return _ticket(
        connector,
        laxity.Stage.KV_REUSE,
        nbytes,
        direction="ingress",
        request=_request.get(),
        layer=layers.pop() if len(layers) == 1 else None,
    )


def _store_ticket(connector: Any, nbytes: int) -> Optional[laxity.Ticket]:
    return _ticket(connector, laxity.Stage.BACKGROUND, nbytes, direction="egress")


def _ticket(connector: Any, stage: laxity.Stage, nbytes: int, **what: Any) -> Optional[laxity.Ticket]:
    if nbytes <= 0:
        return None
    return laxity.submit(stage, nbytes, whole=True, peer=tell(_peer, connector), **what)


def _expected(connector: Any, key: Any) -> int:
    """Bytes of a chunk before it arrives: those of a full one, or of its layer. A chunk that a serializer compresses,
    or the last one of a prompt, may have fewer. The rest is cancelled when it has arrived."""
    full = int(connector.full_chunk_size_bytes)
    if getattr(key, "layer_id", None) is None:
        return full
    # A full chunk of KV_2LTD is [2, layers, tokens, width], and of MLA [1, layers, tokens, width].
    return full // max(1, sum(int(shape[1]) for shape in connector.meta_shapes))


def _bytes_of(objects: Any) -> int:
    """Bytes of what was moved: an object, a list of them, or ``None`` for what is not there."""
    return sum(int(thing.get_size()) for thing in _listed(objects) if thing is not None)


def _listed(things: Any) -> list[Any]:
    return list(things) if isinstance(things, (list, tuple)) else [things]


def _peer(connector: Any) -> Optional[str]:
    """The address of the store, if the connector has one socket."""
    socket = getattr(connector, "client_socket", None)
    return str(socket.getpeername()[0]) if socket is not None else None


# Requests.


def change_engine(module: Any) -> None:
    engine = class_of(module, "LMCacheEngine")
    retrieve, prefetch = getattr(engine, "retrieve", None), getattr(engine, "async_lookup_and_prefetch", None)
    takes(retrieve, ["self", "tokens", "mask", "kwargs"])
    takes(prefetch, ["self", "lookup_id", "tokens"])

    def naming(real: Any, name: str, place: Optional[int]) -> Any:
        @functools.wraps(real)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            given = named.get(name)
            if given is None and place is not None and len(args) > place:
                given = args[place]
            with _loads_of(given):
                return real(self, *args, **named)

        return call

    engine.retrieve = naming(retrieve, "req_id", None)
    engine.async_lookup_and_prefetch = naming(prefetch, "lookup_id", 0)


@contextlib.contextmanager
def _loads_of(request: Any) -> Iterator[None]:
    """Loads that begin in this block are for this request."""
    before = _request.set(request if isinstance(request, str) and request else None)
    try:
        yield
    finally:
        _request.reset(before)


def _connectors(names: Sequence[str]) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        change_connectors(module, names)

    return change


CHANGES: dict[str, Change] = {
    f"{PACKAGE}.cache_engine": guarded(tell, change_engine),
    **{
        f"{PACKAGE}.storage_backend.connector.{module}": guarded(tell, _connectors(names))
        for module, names in CONNECTORS.items()
    },
}
