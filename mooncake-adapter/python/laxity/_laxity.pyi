"""The compiled part of the package. Import its names from :mod:`laxity`, which re-exports them."""

from types import TracebackType
from typing import Literal, TypedDict, Union, final, overload

from ._stage import Stage

__all__ = [
    "DeadlinePassed",
    "Grant",
    "HintError",
    "RegionOverlap",
    "RequestEnded",
    "Scope",
    "Ticket",
    "UnknownLayer",
    "_Transfers",
    "_empty",
    "_memory_own",
    "_memory_runs",
    "_stage_of",
    "attached",
    "batch_begin",
    "batch_end",
    "batch_join",
    "batch_queued",
    "compute_end",
    "layer_begin",
    "memory_forget",
    "memory_layer",
    "memory_owner",
    "number",
    "request_begin",
    "request_deadline_s",
    "request_end",
    "stats",
    "submit",
    "version",
]

_Id = Union[str, int]

class HintError(ValueError):
    """A hint is invalid. The daemon is not told, and no transfer is affected."""

class UnknownLayer(HintError):
    """The batch has no such layer, or no model can have it."""

class RegionOverlap(HintError):
    """Part of the memory is registered for another layer."""

class RequestEnded(HintError):
    """The request has already ended."""

class DeadlinePassed(HintError):
    """The deadline is not in the future."""

class _Stats(TypedDict):
    """See :func:`stats`."""

    # The daemon.
    attached: bool
    scheduled: bool
    refused: str
    preloaded: bool
    reattaches: int
    unscheduled_s: float
    # Bytes of this process.
    scheduled_bytes: int
    bypassed_bytes: int
    bypassed_flows: int
    observed_bytes: int
    lane_full: int
    # Requests and batches that have begun and not ended.
    requests: int
    batches: int
    # Hints that were accepted.
    hints: int
    # Counted warnings.
    requests_evicted: int
    batches_evicted: int
    requests_begun_twice: int
    requests_ended_twice: int
    requests_unknown: int
    batches_begun_twice: int
    batches_unknown: int
    layers_unknown: int
    layers_backwards: int
    deadlines_passed: int
    scopes_crossed: int
    tickets_dropped: int

@final
class Grant:
    """A permit: how many bytes of a transfer may be sent now, and how."""

    @property
    def bytes(self) -> int:
        """Number of bytes, in addition to earlier permits of the same ticket."""

    @property
    def level(self) -> int:
        """1 is the highest level and 255 the scavenger. 0 means that no daemon decided."""

    @property
    def dscp(self) -> int:
        """The DSCP for these bytes. 0 means that no daemon decided; do not change the marking then."""

    @property
    def last(self) -> bool:
        """Whether this is the last permit of its ticket."""

    @property
    def bypassed(self) -> bool:
        """Whether the permit was given without a daemon."""

@final
class Ticket:
    """A submitted transfer. Safe to use from any thread. Wait for its last permit and report every byte complete, or
    cancel it. A ticket that is dropped before that is cancelled and counted.

    As a context manager it cancels the transfer at the end. That has no effect on a complete transfer."""

    @overload
    def wait(self, timeout_s: None = None) -> Grant: ...
    @overload
    def wait(self, timeout_s: float) -> Grant | None:
        """Waits for the next permit without holding the GIL. Returns ``None`` when the time is up. After the last
        permit it returns an empty last permit. Without a time-out it returns at the latest when the daemon ends, or a
        second later if the daemon is upgraded."""

    def poll(self) -> Grant | None:
        """Returns the next permit, or ``None`` if there is none yet. Never blocks."""

    def complete(self, nbytes: int) -> None:
        """Reports that ``nbytes`` of the permitted bytes were delivered.

        Raises :class:`HintError` if that is more than was permitted."""

    def cancel(self) -> None:
        """Cancels the bytes that are not permitted or not complete. Has no effect on a complete transfer."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the transfer."""

    @property
    def granted(self) -> int:
        """Number of bytes permitted so far."""

    @property
    def done(self) -> bool:
        """Whether all permits have come."""

    def __enter__(self) -> Ticket: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Scope:
    """``with laxity.scope(...)``: all transfers that the thread posts within it have these hints. Scopes nest, at most
    8 deep. An inner scope takes what it leaves out from the outer scope, except the batch and deadline of another
    request."""

    def __new__(
        cls,
        *,
        stage: Stage | None = None,
        layer: int | None = None,
        batch: _Id | None = None,
        request: _Id | None = None,
        deadline_s: float | None = None,
    ) -> Scope: ...
    def __enter__(self) -> Scope: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def number(id: _Id) -> int:
    """The number of a request or batch at the daemon. For an int (1 … 2**64-1) it is the int, for a string its FNV-1a
    hash, which is the same on all hosts."""

def request_begin(
    request_id: _Id,
    *,
    deadline_s: float | None = None,
    slo_ttft_s: float | None = None,
    tenant: str = "",
    priority: int = 0,
    bytes: int = 0,
    traceparent: str = "",
) -> int:
    """Begins a request and returns its number. ``deadline_s`` says in how many seconds its first token is due. Without
    it, the objective ``slo_ttft_s`` counts from now. Without both, the daemon's objective holds. ``tenant`` is cut to 64
    bytes. ``bytes`` is the number of bytes that the request will move, if known. ``traceparent`` is the W3C header of
    the request's trace, whose id Laxity's spans and logs then have. An invalid one is ignored.

    Raises :class:`DeadlinePassed`."""

def request_end(request_id: _Id) -> None:
    """Ends a request: it has its first token, or was aborted.

    Raises :class:`RequestEnded` if it has already ended. An unknown request is counted."""

def request_deadline_s(request_id: _Id) -> float | None:
    """Seconds until the request is due, negative if it is late. ``None`` if it is unknown or has no deadline."""

def batch_begin(batch_id: _Id, *, layers: int, layer_time_s: float = 0.0) -> None:
    """Begins a batch. ``layer_time_s`` is the expected time of a layer without contention.

    Raises :class:`UnknownLayer` for a number of layers that no model has."""

def batch_join(batch_id: _Id, request_id: _Id) -> None:
    """Adds a request to a batch. A request that did not begin in this process has the daemon's objective.

    Raises :class:`RequestEnded`. A batch that is unknown here may be another process's; the hint is counted and passed
    on."""

def batch_queued(batch_id: _Id, ahead: _Id) -> None:
    """Says that the batch waits behind the batch ``ahead``."""

def layer_begin(batch_id: _Id, layer: int) -> None:
    """Says that the batch now computes this layer, counted from 0.

    Raises :class:`UnknownLayer` if the batch has no such layer. A batch that is unknown here may be another process's;
    the hint is counted and passed on."""

def compute_end(batch_id: _Id) -> None:
    """Says that the batch has computed its last layer."""

def batch_end(batch_id: _Id) -> None:
    """Ends a batch. Its requests go on until they end themselves."""

def memory_layer(address: int, nbytes: int, layer: int, stage: Stage | None = None) -> None:
    """Registers a range of memory for the KV cache of a layer. Give ``stage`` if all transfers of it have that stage.

    Raises :class:`RegionOverlap` if part of it is registered for another layer. Call :func:`memory_forget` first."""

def memory_owner(
    address: int,
    nbytes: int,
    *,
    batch: _Id | None = None,
    request: _Id | None = None,
    deadline_s: float | None = None,
) -> None:
    """Registers a range of memory as blocks of a request. The latest call for an address holds."""

def memory_forget(address: int, nbytes: int) -> None:
    """Removes all hints about a range of memory."""

def submit(
    stage: Stage | None,
    nbytes: int,
    *,
    layer: int | None = None,
    batch: _Id | None = None,
    request: _Id | None = None,
    deadline_s: float | None = None,
    peer: str | None = None,
    direction: Literal["egress", "ingress"] | str = "egress",
    whole: bool = False,
    nic: str | None = None,
    address: int | None = None,
) -> Ticket:
    """Asks for permits for ``nbytes``. Never blocks. Arguments that are left out come from the thread's open scope,
    else from the memory hints for ``address``, else from the request. ``peer`` is the IP address of the other end.
    With ``whole`` a single permit covers all bytes, for transfers that can't be sent in pieces.

    A deadline that has passed is counted and left out. So is a layer that the batch does not have."""

@final
class _Transfers:
    def submit(
        self,
        otherwise: Stage,
        nbytes: int,
        address: int,
        direction: str,
        peer: str | None,
        whole: bool = False,
    ) -> Ticket: ...
    def wait_any(self, timeout_s: float) -> None: ...

def _memory_runs(addresses: list[int]) -> list[int]: ...
def _memory_own(addresses: list[int], lengths: list[int]) -> None: ...
def _stage_of(opcode: str) -> int: ...
def _empty(batch_id: _Id, layer: int) -> None: ...
def attached() -> bool:
    """Whether a daemon has accepted this process. Warns once if a daemon refuses it."""

def stats() -> _Stats:
    """Counters of this process. A forked child starts with zeroes.

    * ``attached``: a daemon has accepted this process.
    * ``scheduled``: the daemon also decides; it is not bypassed, and the mode is not ``observe``.
    * ``refused``: why the daemon refused this process, or empty.
    * ``preloaded``: ``liblaxity.so`` is in this process."""

def version() -> str:
    """The version of this package."""
