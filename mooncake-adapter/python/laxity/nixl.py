"""NIXL under Laxity. On mlx5 NICs NIXL writes to the device directly, without a verbs library. So this module asks for a
permit where a transfer is posted.

    from laxity.nixl import nixl_agent          # instead of: from nixl._api import nixl_agent

    laxity.nixl.install()                       # or: all agents of this process, whoever makes them
    laxity.nixl.gate(agent)                     # or: this one

Nothing else changes. ``transfer`` does not block for long. A transfer that has to wait is in progress for its caller,
and a thread of this module posts it. Its stage, layer and request come from the caller's open :class:`laxity.scope`,
else from the local memory. Without both a WRITE is ``p2d`` and a READ is ``kv_reuse``.

The same thread sees when a transfer ends. An engine asks only between two steps, and until the end is known, the bytes
count as in flight and others wait for them. The thread exists only while a transfer waits or is in flight.

The module wraps the agent's compiled part (``agent.agent``): ``postXferReq`` and related methods. They changed less
between releases than the Python class. NIXL refuses the same transfers as without Laxity. If a transfer waited, NIXL's
refusal is raised when the state of the transfer is asked for. A transfer that waits longer than :data:`PATIENCE_S` is
posted without a permit.

``liblaxity_nixl.so`` does the same for programs without Python, and for agents that this module does not wrap. It
passes the transfers of wrapped agents through.

In a process under ``liblaxity.so`` whose UCX uses verbs, ``liblaxity.so`` schedules the transfers, and this module
only passes scopes on. ``LAXITY_NIXL=off`` switches the wrapper off. ``LAXITY_NIXL=gate`` switches it on in any case.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

import laxity

from . import _beneath, _measured
from ._after_import import after_import
from ._telling import Teller

#: Modules that define ``nixl_agent``; ``nixl._api`` is one of them by another name.
MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl_rocm._api", "nixl._api")

#: Longest time that a transfer waits for its permit.
PATIENCE_S = 30.0

#: How long a post waits for its permit before it is deferred. A daemon that is awake has answered by then.
GLANCE_S = 200e-6

#: Longest list of descriptors whose lengths are added up. The bytes of longer lists are estimated from a sample of
#: this size, since the daemon needs the load only roughly. A prepared list counts as one of equal lengths if those of
#: such a sample are equal, so nothing has to be added up for a transfer of it.
COUNTED_MAX = 4096

#: How long a caller that asks for a transfer waits while another thread is in the agent, to post another one.
BUSY_S = 0.001

#: A transfer in flight is asked for again after this part of the time that it has taken so far.
ASK_AFTER = 1 / 8

#: Shortest and longest time until it is asked for again, in seconds.
ASK_MIN_S, ASK_MAX_S = 0.0005, 0.005

_LOOK_EVERY_S = 0.005
_IDLE_S = 5.0

#: Methods that an agent must have to be wrapped.
METHODS = (
    "createXferReq",
    "makeXferReq",
    "postXferReq",
    "getXferStatus",
    "releaseXferReq",
    "prepXferDlist",
    "releasedDlistH",
)

_tell = Teller("nixl")


class Unsupported(RuntimeError):
    """The agent lacks what this wrapper needs. It goes on working, without Laxity."""


@dataclasses.dataclass
class _Request:
    """A transfer request of NIXL, from its creation to its release."""

    handle: int
    operation: str
    nbytes: int
    address: int
    ticket: Optional[laxity.Ticket] = None
    #: The call that waits for a permit, or is under way.
    post: Optional[Callable[[], Any]] = None
    since: float = 0.0
    #: The exception of the deferred post.
    failed: Optional[Exception] = None
    #: NIXL's answer when the transfer had ended.
    ended: Any = None
    #: When it was asked for, when its post began, and when that had ended; 0 before.
    asked: float = 0.0
    begun: float = 0.0
    posted: float = 0.0
    #: When the thread asks for it next.
    ask_at: float = 0.0

    def measure(self) -> None:
        """Notes the times of the transfer, which is complete now."""
        if self.ticket is not None and self.posted:
            network_s = time.monotonic() - self.posted
            _measured.transfers.add(self.begun - self.asked, self.posted - self.begun, network_s, self.nbytes)
            self.posted = 0.0


class Gate:
    """Takes the place of an agent's compiled part."""

    def __init__(self, binding: Any, constants: Any, *, locked: bool) -> None:
        """``locked`` says that the agent has no locks of its own, so only one thread at a time may call it."""
        missing = [name for name in METHODS if not callable(getattr(binding, name, None))]
        missing += [name for name in ("NIXL_SUCCESS", "NIXL_IN_PROG", "NIXL_WRITE") if not hasattr(constants, name)]
        if missing:
            raise Unsupported(f"this release of NIXL has no {', '.join(missing)}")
        self._binding = binding
        self._constants = constants
        self._locked = locked
        self._lock = threading.RLock()
        self._some = threading.Condition(self._lock)
        self._requests: dict[int, _Request] = {}
        self._lists: dict[int, _Lengths] = {}
        self._waiting: dict[int, _Request] = {}
        self._in_flight: dict[int, _Request] = {}
        self._pump: Optional[threading.Thread] = None
        self._pump_of = 0

    # All other methods pass through. They take the lock if the agent has none.
    def __getattr__(self, name: str) -> Any:
        if name in ("_binding", "_locked"):  # __init__ has not set them yet
            raise AttributeError(name)
        found = getattr(self._binding, name)
        if not (self._locked and callable(found)):
            return found

        @functools.wraps(found)
        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                return found(*args, **named)

        # This is made for each access. A stored function would keep the agent alive, and NIXL's agents must be
        # destroyed in a certain order.
        return call

    def prepXferDlist(self, *args: Any, **named: Any) -> Any:
        with self._maybe():
            handle = self._binding.prepXferDlist(*args, **named)
        # A list of the initiator's own memory names no agent (NIXL 1.0 to 1.4), or NIXL_INIT_AGENT (other releases).
        rest = args
        if args and isinstance(args[0], str):
            rest = args[1:] if args[0] in ("", getattr(self._constants, "NIXL_INIT_AGENT", "")) else ()
        lengths = _tell(_Lengths.of, *rest[:2]) if rest else None
        if lengths is not None:
            _tell(lengths.compare)
            with self._lock:
                self._lists[int(handle)] = lengths
        return handle

    def releasedDlistH(self, handle: Any) -> Any:
        with self._lock:
            self._lists.pop(int(handle), None)
        with self._maybe():
            return self._binding.releasedDlistH(handle)

    def createXferReq(self, operation: Any, local: Any, *rest: Any, **named: Any) -> Any:
        with self._maybe():
            handle = self._binding.createXferReq(operation, local, *rest, **named)
        lengths = _tell(_Lengths.of, local)
        self._made(handle, operation, (0, 0) if lengths is None else (lengths.total(), lengths.first()))
        return handle

    def makeXferReq(self, operation: Any, local: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        with self._maybe():
            handle = self._binding.makeXferReq(operation, local, indices, *rest, **named)
        with self._lock:
            lengths = self._lists.get(int(local))
        load = None if lengths is None else _tell(lengths.chosen, indices)
        self._made(handle, operation, load or (0, 0))
        return handle

    def postXferReq(self, handle: Any, *args: Any, **named: Any) -> Any:
        with self._lock:
            request = self._requests.get(int(handle))
            if request is not None and request.post is not None:
                # NIXL does not know yet that the request is under way, and would refuse it.
                raise getattr(self._constants, "nixlRepostActiveError", RuntimeError)("the transfer waits for a permit")
            if request is not None:
                if self._is_moving(request):
                    return self._binding.postXferReq(handle, *args, **named)
                request.failed, request.ended = None, None
            if request is None or not request.nbytes:
                return self._binding.postXferReq(handle, *args, **named)

            post = functools.partial(self._binding.postXferReq, handle, *args, **named)

            ticket = _tell(
                _submit,
                request.nbytes,
                stage=laxity.Stage.P2D if request.operation == "WRITE" else laxity.Stage.KV_REUSE,
                direction="egress" if request.operation == "WRITE" else "ingress",
                address=request.address,
            )
            if ticket is None:
                return post()
            request.ticket, request.asked, request.posted = ticket, time.monotonic(), 0.0
        # Waits without the lock, so that other threads can ask for states.
        granted = _tell(_granted, ticket, GLANCE_S)
        with self._lock:
            if self._requests.get(int(handle)) is not request:
                # The request was released during the wait. NIXL reports the error.
                self._over(request)
                return post()
            if granted is None or granted:
                return self._post(request, post)
            request.post = post
            request.since = time.monotonic()
            self._waiting[int(handle)] = request
            self._start()
            return self._in_progress()

    def getXferStatus(self, handle: Any, *args: Any, **named: Any) -> Any:
        request = self._requests.get(int(handle))
        if request is not None and request.ended is not None:
            return request.ended
        if not self._lock.acquire(timeout=BUSY_S):
            # A post of many descriptors takes long. An engine that asks between two steps must not wait for it.
            if request is not None and (request.post is not None or request.handle in self._in_flight):
                return self._in_progress()
            self._lock.acquire()
        try:
            request = self._requests.get(int(handle))
            if request is not None:
                if request.failed is not None:
                    failed, request.failed = request.failed, None
                    raise failed
                if request.post is not None:
                    self._start()
                    return self._in_progress()
            return self._ask(handle, request, *args, **named)
        finally:
            self._lock.release()

    def releaseXferReq(self, handle: Any, *args: Any, **named: Any) -> Any:
        with self._lock:
            request = self._requests.get(int(handle))
            if self._waiting.pop(int(handle), None) is not None and request is not None:
                # The request is released before it was posted.
                request.post = None
            if request is not None:
                self._is_moving(request)
            # NIXL refuses to release a transfer in progress. The request stays then.
            result = self._binding.releaseXferReq(handle, *args, **named)
            self._requests.pop(int(handle), None)
            if request is not None:
                self._over(request)
            return result

    def waiting(self) -> int:
        """Number of transfers that wait for a permit."""
        with self._lock:
            return len(self._waiting)

    def _maybe(self) -> Any:
        return self._lock if self._locked else _NOTHING

    def _in_progress(self) -> Any:
        return self._constants.NIXL_IN_PROG

    def _made(self, handle: Any, operation: Any, load: tuple[int, int]) -> None:
        nbytes, address = load
        if nbytes:
            _beneath.exempt(int(handle))
        else:
            _tell.count("transfers whose size is not known")
        name = "WRITE" if operation == self._constants.NIXL_WRITE else "READ"
        with self._lock:
            self._requests[int(handle)] = _Request(int(handle), name, nbytes, address)

    def _over(self, request: _Request, delivered: bool = False) -> None:
        """Ends the ticket. Unless all bytes were ``delivered``, it is cancelled. The caller holds the lock."""
        if self._in_flight.get(request.handle) is request:
            # NIXL may give a released handle to another request.
            del self._in_flight[request.handle]
        ticket, request.ticket = request.ticket, None
        if ticket is not None:
            left = ticket.granted
            if delivered and left and ticket.done:
                _tell(ticket.complete, left)
            _tell(ticket.cancel)

    def _is_moving(self, request: _Request) -> bool:
        """Asks NIXL whether a posted transfer is in progress. If not, its ticket ends. The caller holds the lock."""
        if self._in_flight.get(request.handle) is not request:
            self._over(request)
            return False
        try:
            return self._ask(request.handle, request) == self._constants.NIXL_IN_PROG
        except Exception:
            # It failed, and nobody asked before.
            return False

    def _post(self, request: _Request, post: Callable[[], Any]) -> Any:
        """Posts a transfer. The caller holds the lock."""
        request.post, request.begun = post, time.monotonic()
        try:
            status = post()
        except BaseException:
            self._over(request)
            raise
        finally:
            request.post = None
        request.posted = time.monotonic()
        if status == self._constants.NIXL_IN_PROG:
            request.ask_at = request.posted + ASK_MIN_S
            self._in_flight[request.handle] = request
            self._start()
        else:
            self._ended(request, status)
        return status

    def _ended(self, request: _Request, status: Any) -> None:
        delivered = status == self._constants.NIXL_SUCCESS
        if delivered:
            request.measure()
        request.ended = status
        self._over(request, delivered)

    def _ask(self, handle: Any, request: Optional[_Request], *args: Any, **named: Any) -> Any:
        """Asks NIXL for the state of a transfer. The caller holds the lock: two threads that ask for one transfer would
        both find it complete."""
        try:
            status = self._binding.getXferStatus(handle, *args, **named)
        except BaseException:
            if request is not None:
                self._over(request)
            raise
        if request is not None and status != self._constants.NIXL_IN_PROG:
            self._ended(request, status)
        return status

    def _watch(self) -> float:
        """Looks for transfers that have ended. Returns the time until the next look. The caller holds the lock."""
        now = time.monotonic()
        for request in list(self._in_flight.values()):
            # NIXL's handles release requests when Python collects them, which can happen in this loop.
            if self._in_flight.get(request.handle) is not request or request.ask_at > now:
                continue
            try:
                self._ask(request.handle, request)
            except Exception as failed:
                # getXferStatus raises it.
                request.failed = failed
            request.ask_at = now + min(max((now - request.posted) * ASK_AFTER, ASK_MIN_S), ASK_MAX_S)
        return max(min((request.ask_at for request in self._in_flight.values()), default=now + _IDLE_S) - now, 0.0)

    def _look(self) -> None:
        """Posts the waiting transfers that have a permit by now. The caller holds the lock."""
        now = time.monotonic()
        for handle, request in list(self._waiting.items()):
            late = now - request.since > PATIENCE_S
            granted = request.ticket is None or _tell(_granted, request.ticket, None)
            if (granted is False and not late) or self._waiting.get(handle) is not request:
                continue
            if late and granted is False:
                _tell.count("transfers that waited longer than PATIENCE_S")
                self._over(request)
            del self._waiting[handle]
            if request.post is not None:
                try:
                    self._post(request, request.post)
                except Exception as failed:
                    # getXferStatus raises it.
                    request.failed = failed

    def _start(self) -> None:
        """Wakes the thread, or starts it. The caller holds the lock."""
        self._some.notify_all()
        if self._pump is not None and self._pump.is_alive() and self._pump_of == os.getpid():
            return
        self._pump_of = os.getpid()
        self._pump = threading.Thread(target=_pump, args=(weakref.ref(self),), name="laxity-nixl", daemon=True)
        self._pump.start()

    def _turn(self) -> bool:
        """One turn of the thread. Returns false if nothing waits and nothing is in flight."""
        with self._lock:
            if not (self._waiting or self._in_flight):
                self._some.wait(_IDLE_S)
            if not (self._waiting or self._in_flight):
                self._pump = None
                return False
            nap = self._watch()
            waits = bool(self._waiting)
            if nap and not waits:
                self._some.wait(nap)
        if waits and not _tell(_await, min(nap, _LOOK_EVERY_S)):
            time.sleep(_LOOK_EVERY_S)
        with self._lock:
            self._look()
        return True


def _pump(gate: "weakref.ref[Gate]") -> None:
    while True:
        held = gate()
        if held is None or not held._turn():
            return
        # Without this reference, an agent that nobody uses is destroyed, and the thread ends.
        del held


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


_NOTHING = _Nothing()


class _Lengths:
    """Addresses and lengths of the descriptors in a list."""

    def __init__(self, count: int, at: Callable[[int], tuple[int, int]]) -> None:
        self._count = count
        self._at = at
        #: The length of every descriptor, if they are equal.
        self._each: Optional[int] = None

    @classmethod
    def of(cls, first: Any, second: Any = None) -> Optional["_Lengths"]:
        """Reads a ``nixlXferDList``, or a memory type and an array of ``(address, bytes, device, stride, count)``."""
        if hasattr(first, "descCount"):
            return cls(first.descCount(), lambda index: first[index][:2])
        shape: tuple[int, ...] = getattr(second, "shape", ())
        if len(shape) == 2 and shape[1] == 5:
            ends = list(itertools.accumulate(int(row[4]) for row in second))

            def at(index: int) -> tuple[int, int]:
                row = bisect.bisect_right(ends, index)
                within = index - (ends[row - 1] if row else 0)
                return int(second[row][0]) + within * int(second[row][3]), int(second[row][1])

            return cls(ends[-1] if ends else 0, at)
        return None

    def compare(self) -> None:
        """Finds out whether the lengths are equal."""
        lengths = {int(self._at(index)[1]) for index in _sample(range(self._count))}
        self._each = lengths.pop() if len(lengths) == 1 else None

    def first(self) -> int:
        return int(self._at(0)[0]) if self._count else 0

    def total(self) -> int:
        return self._sum(range(self._count))

    def chosen(self, indices: Any) -> tuple[int, int]:
        """Bytes of the descriptors with these indices, and the address of the first."""
        if not len(indices):
            return 0, 0
        return self._sum(indices), int(self._at(int(indices[0]))[0])

    def _sum(self, indices: Any) -> int:
        count = len(indices)
        if self._each is not None:
            return count * self._each
        lengths = [int(self._at(int(index))[1]) for index in _sample(indices)]
        return round(sum(lengths) * (count / max(len(lengths), 1)))


def _sample(indices: Any) -> Any:
    """At most :data:`COUNTED_MAX` of the indices, evenly spaced, with the first and the last."""
    count = len(indices)
    if count <= COUNTED_MAX:
        return indices
    step = (count - 1) / (COUNTED_MAX - 1)
    return [indices[round(place * step)] for place in range(COUNTED_MAX)]


@functools.lru_cache(maxsize=1)
def _transfers() -> Any:
    """Submits transfers with a default stage, which a scope or a memory hint can replace."""
    from ._laxity import _Transfers

    return _Transfers()


def _submit(nbytes: int, *, stage: laxity.Stage, direction: str, address: int) -> laxity.Ticket:
    ticket: laxity.Ticket = _transfers().submit(stage, nbytes, address, direction, None, True)
    return ticket


def _granted(ticket: laxity.Ticket, timeout_s: Optional[float]) -> bool:
    """Whether the whole transfer is permitted."""
    if ticket.done:
        return True
    grant = ticket.poll() if timeout_s is None else ticket.wait(timeout_s)
    return grant is not None and grant.last


def _await(timeout_s: float) -> bool:
    """Sleeps until a permit comes for any transfer that waits, or the time is up."""
    _transfers().wait_any(timeout_s)
    return True


# Agents.


def gate(agent: Any, nixl_conf: Any = None) -> Any:
    """Wraps this agent's compiled part, once, and returns the agent.

    Raises :class:`Unsupported`."""
    if isinstance(agent.agent, Gate):
        return agent
    constants = sys.modules.get(type(agent.agent).__module__)
    if constants is None:
        raise Unsupported(f"the module of {type(agent.agent).__name__} is not loaded")
    agent.agent = Gate(agent.agent, constants, locked=not _has_locks(nixl_conf, constants))
    return agent


def _has_locks(nixl_conf: Any, constants: Any) -> bool:
    mode = getattr(nixl_conf, "sync_mode", None)
    if mode is None:
        return bool(getattr(nixl_conf, "enable_listen", False))
    none = getattr(constants, "NIXL_THREAD_SYNC_NONE", None)
    return none is not None and getattr(mode, "value", mode) != none


def wanted() -> bool:
    """Whether agents of this process wait for permits (``LAXITY_NIXL``)."""
    setting = os.environ.get("LAXITY_NIXL", "auto").lower()
    if setting not in ("auto", "gate", "off"):
        _tell.count("LAXITY_NIXL", f"{setting!r} is none of auto, gate, off; auto holds")
        setting = "auto"
    if setting == "auto":
        return not (_beneath.preloaded() and _beneath.verbs_of_ucx())
    return setting == "gate"


def install() -> None:
    """Wraps every agent that this process creates from now on. NIXL may be imported later."""
    if wanted():
        for name in MODULES:
            after_import(name, _change)


def _change(module: ModuleType) -> None:
    agent = getattr(module, "nixl_agent", None)
    original: Any = getattr(agent, "__init__", None)
    if not inspect.isclass(agent):
        what = f"{module.__name__} without nixl_agent"
        _tell.count(what, "this release of NIXL is not known; its transfers are not scheduled")
        return
    if getattr(original, "_laxity", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, agent_name: str, nixl_conf: Any = None, *args: Any, **named: Any) -> None:
        original(self, agent_name, nixl_conf, *args, **named)
        try:
            gate(self, nixl_conf)
        except Unsupported as unknown:
            _tell.count("agents that are not known", f"{unknown}; its transfers are not scheduled")

    __init__._laxity = True  # type: ignore[attr-defined]
    setattr(agent, "__init__", __init__)


def __getattr__(name: str) -> Any:
    # This module has the names of nixl._api, so that a program changes only one import.
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    install()
    return getattr(_api(), name)


def _api() -> ModuleType:
    """The module with NIXL's Python API, from the package ``nixl`` or a package for one kind of GPU."""
    unavailable = []
    for module in ("nixl._api", *MODULES[:3]):
        try:
            return importlib.import_module(module)
        except ImportError as missing:
            unavailable.append(f"{module}: {missing}")
    raise ImportError(f"NIXL can't be imported ({'; '.join(unavailable)}); install it with pip install nixl")
