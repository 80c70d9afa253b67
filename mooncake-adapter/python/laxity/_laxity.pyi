"""The compiled part. Everything here is re-exported by :mod:`laxity`, which is where to import it from."""

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
    """A hint that makes no sense; nothing was told to the daemon. No transfer is affected."""

class UnknownLayer(HintError):
    """A layer that the batch does not have, or none that a model can have."""

class RegionOverlap(HintError):
    """Memory that is registered as another layer's."""

class RequestEnded(HintError):
    """The request has ended before."""

class DeadlinePassed(HintError):
    """A deadline that is not in the future."""

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
    # What is known.
    requests: int
    batches: int
    # Hints that were taken.
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
    """Leave to send."""

    @property
    def bytes(self) -> int:
        """Bytes more, beyond earlier grants of the same ticket."""

    @property
    def level(self) -> int:
        """1 the highest, 255 the scavenger; 0 if nobody decided."""

    @property
    def dscp(self) -> int:
        """To mark the bytes with; 0 (leave the marking alone) if nobody decided."""

    @property
    def last(self) -> bool:
        """Nothing more will come for this ticket."""

    @property
    def bypassed(self) -> bool:
        """Granted without the daemon."""

@final
class Ticket:
    """A transfer that was submitted. Safe to use from any thread. Bring it to its last grant and report
    every byte complete, or cancel it; one that is dropped is cancelled and counted.

    As a context manager it is cancelled at the end, which is nothing if all is complete."""

    @overload
    def wait(self, timeout_s: None = None) -> Grant: ...
    @overload
    def wait(self, timeout_s: float) -> Grant | None:
        """Waits for the next grant, without the GIL; ``None`` if there was none in time. After the last
        one it gives an empty last grant. Without a time-out it ends, too, whatever becomes of the daemon."""

    def poll(self) -> Grant | None:
        """What may be sent now, ``None`` if nothing. Never blocks."""

    def complete(self, nbytes: int) -> None:
        """``nbytes`` that were granted have left the wire."""

    def cancel(self) -> None:
        """Gives up what was not granted or not sent. Does nothing on a ticket that is complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the transfer."""

    @property
    def granted(self) -> int:
        """Bytes granted so far."""

    @property
    def done(self) -> bool:
        """Nothing more will be granted."""

    def __enter__(self) -> Ticket: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Scope:
    """``with laxity.scope(...)``: whatever transfers the thread posts meanwhile belong to this. Scopes nest (8
    deep); what an inner one leaves out it has from the outer one, but for the batch and deadline of another request."""

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
    """The number by which the scheduler knows a request or batch: an int itself (1 … 2**64-1), of a string
    its FNV-1a hash, so that all hosts agree."""

def request_begin(
    request_id: _Id,
    *,
    deadline_s: float | None = None,
    slo_ttft_s: float | None = None,
    tenant: str = "",
    priority: int = 0,
    bytes: int = 0,
) -> int:
    """A request came in. ``deadline_s`` is when its first token is due, in seconds from now; else the
    objective ``slo_ttft_s`` counts from now; else the daemon's own objective holds. ``bytes`` are those that
    it will move, if known. Gives its number.

    Raises :class:`DeadlinePassed`."""

def request_end(request_id: _Id) -> None:
    """The request has its first token, or was aborted.

    Raises :class:`RequestEnded` if it has ended before. One that is not known is counted."""

def request_deadline_s(request_id: _Id) -> float | None:
    """Seconds until the request is due, negative if it is late; ``None`` if it is unknown or has none."""

def batch_begin(batch_id: _Id, *, layers: int, layer_time_s: float = 0.0) -> None:
    """A batch was formed. ``layer_time_s`` is the expected time of a layer without contention.

    Raises :class:`UnknownLayer` for a number of layers that no model has."""

def batch_join(batch_id: _Id, request_id: _Id) -> None:
    """A request is a member of a batch. One that was not begun here has no deadline but the daemon's objective.

    Raises :class:`RequestEnded`. A batch that is not known here may be another process's: it is counted."""

def batch_queued(batch_id: _Id, ahead: _Id) -> None:
    """The batch waits behind the batch ``ahead``."""

def layer_begin(batch_id: _Id, layer: int) -> None:
    """The batch now computes a layer, counted from 0.

    Raises :class:`UnknownLayer` if the batch has no such layer. A batch that is not known here may be another
    process's: it is counted, and the daemon is told."""

def compute_end(batch_id: _Id) -> None:
    """The batch has computed its last layer."""

def batch_end(batch_id: _Id) -> None:
    """Nothing of the batch is left. Its requests go on until they are ended."""

def memory_layer(address: int, nbytes: int, layer: int, stage: Stage | None = None) -> None:
    """A range of memory holds the KV cache of a layer; ``stage`` if its transfers always have the same.

    Raises :class:`RegionOverlap` if part of it is another layer's: forget that first."""

def memory_owner(
    address: int,
    nbytes: int,
    *,
    batch: _Id | None = None,
    request: _Id | None = None,
    deadline_s: float | None = None,
) -> None:
    """A range of memory holds blocks of a request. The last word about an address counts."""

def memory_forget(address: int, nbytes: int) -> None:
    """Nothing is known of the range any more."""

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
    """Asks for leave to send ``nbytes``; never blocks. What is not said comes from the thread's open scope,
    then from what is known of the memory at ``address``, then from the request. ``peer`` is the IP address of
    the other end; ``whole`` is for what cannot be sent in pieces: it is granted at once.

    A deadline that has passed and a layer that the batch does not have are counted, and the transfer goes on
    without them."""

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
    """Whether there is a daemon. Warns, once, if there is one that refuses this process."""

def stats() -> _Stats:
    """Counters of this process since it began (a forked child counts anew).

    ``attached``: there is a daemon; ``scheduled``: and it decides (not bypassed, not in mode observe); ``refused``:
    why it wants nothing to do with this process, if so; ``preloaded``: ``liblaxity.so`` is there, too."""

def version() -> str:
    """The version of this package."""
