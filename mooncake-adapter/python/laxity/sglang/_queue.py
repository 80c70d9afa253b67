"""The queue of KV-cache chunks that a prefill instance sends, in the scheduler's order.

SGLang's own queue is first in, first out, so an urgent chunk waits behind others. Here each chunk is submitted as a
transfer when it is put, and the worker gets the chunk whose permit came first. Three properties stay:

* Chunks of one room (request) keep their order, because the last one carries the end of the request.
* ``None``, which ends a worker, comes after everything that was put before it.
* Without a daemon the queue is first in, first out.

A worker sends one chunk at a time, and a chunk is complete when the worker asks for the next one. If a library below
schedules each work request (``liblaxity.so``, or the gates of :mod:`laxity.nixl` and ``laxity.mooncake``), a chunk must
not hold a permit itself: its bytes would fill the window that its own work requests wait for. Then chunks are ordered
by deadline, and those that have missed theirs come last.

A chunk that waits longer than :data:`PATIENCE_S` is sent without a permit.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Optional

import laxity

from .._telling import QuietScope, Teller

#: Longest time that a chunk waits for its permit.
PATIENCE_S = 30.0

_LOOK_EVERY_S = 0.001


@dataclasses.dataclass(eq=False)
class _Entry:
    item: Any
    number: int
    since: float
    #: The chunk was sent before, and the receiver was not ready. Other chunks go first.
    again: bool = False
    ticket: Optional[laxity.Ticket] = None
    level: int = 0

    def ready(self, tell: Teller) -> bool:
        """Whether the chunk is permitted, or needs no permit."""
        ticket = self.ticket
        if ticket is None or ticket.done:
            return True
        grant = tell(ticket.poll)
        if grant is not None and grant.last:
            self.level = grant.level
            return True
        return False


class PermitQueue:
    """Has the methods of SGLang's ``FastQueue``. One thread gets, and any thread may put."""

    def __init__(self, tell: Optional[Teller] = None) -> None:
        self._tell = tell or Teller("sglang")
        self._cond = threading.Condition()
        self._rooms: OrderedDict[Any, deque[_Entry]] = OrderedDict()
        self._ends: deque[int] = deque()
        self._number = 0
        self._sending: Optional[_Entry] = None
        self._scope: Optional[QuietScope] = None
        self._scope_of: Optional[int] = None
        # Until a manager is bound, sizes are unknown and the queue is first in, first out.
        self._bytes_of: Optional[Callable[[Any], int]] = None
        self._beneath = False

    def bind(self, bytes_of: Callable[[Any], int], *, scheduled_beneath: bool) -> None:
        """Sets the function that gives a chunk's bytes, and whether a library below asks for permits."""
        with self._cond:
            self._bytes_of = bytes_of
            self._beneath = scheduled_beneath

    def put(self, item: Any) -> None:
        with self._cond:
            self._number += 1
            if item is None:
                self._ends.append(self._number)
            else:
                sending = self._sending
                again = sending is not None and sending.item is item
                entry = _Entry(item, self._number, time.monotonic(), again)
                room = self._rooms.setdefault(getattr(item, "room", None), deque())
                room.append(entry)
                if room[0] is entry:
                    self._submit(entry)
            self._cond.notify()

    def get(self) -> Any:
        self._sent()
        while True:
            with self._cond:
                heads = self._heads()
                if not heads:
                    if self._ends:
                        self._end()
                        return None
                    self._cond.wait()
                    continue
                chosen = self._choose(heads)
                if chosen is not None:
                    self._take(chosen)
                    break
                waited = min(heads, key=lambda entry: entry.since).ticket
                if waited is None:
                    continue
            # Sleeps without the lock so that other threads can put, and briefly so that new chunks are considered.
            self._tell(_sleep, waited)
        self._open(chosen)
        return chosen.item

    def waiting(self) -> int:
        """Number of chunks in the queue."""
        with self._cond:
            return sum(len(room) for room in self._rooms.values())

    # The methods below need the lock.

    def _heads(self) -> list[_Entry]:
        """The first chunk of each room, if it was put before the next end."""
        end = self._ends[0] if self._ends else math.inf
        return [room[0] for room in self._rooms.values() if room[0].number < end]

    def _choose(self, heads: list[_Entry]) -> Optional[_Entry]:
        now = time.monotonic()
        ready = [entry for entry in heads if entry.ready(self._tell)]
        late = [entry for entry in heads if now - entry.since > PATIENCE_S]
        if late:
            chosen = min(late, key=lambda entry: entry.number)
            if chosen not in ready:
                self._tell.count("chunks that waited longer than PATIENCE_S")
            return chosen
        if not ready:
            return None
        by_deadline = self._beneath and bool(self._tell(laxity.attached))
        return min(ready, key=lambda entry: self._place(entry, by_deadline))

    def _place(self, entry: _Entry, by_deadline: bool) -> tuple[bool, float, float, int]:
        if not (by_deadline or entry.level):
            return entry.again, 0.0, 0.0, entry.number  # There is no decision of a scheduler.
        due = self._tell(laxity.request_deadline_s, room_id(entry.item))
        # A chunk whose deadline has passed must not delay others.
        due = math.inf if due is None or due <= 0 else due
        return entry.again, float(entry.level), due, entry.number

    def _take(self, entry: _Entry) -> None:
        key = getattr(entry.item, "room", None)
        room = self._rooms[key]
        room.popleft()
        if room:
            self._submit(room[0])
        else:
            del self._rooms[key]
        self._sending = entry

    def _submit(self, entry: _Entry) -> None:
        if self._bytes_of is None or self._beneath:
            return
        nbytes = self._tell(self._bytes_of, entry.item)
        if nbytes:
            request = room_id(entry.item)
            entry.ticket = self._tell(
                laxity.submit,
                laxity.Stage.P2D,
                nbytes,
                request=request,
                # The deadline is explicit because the worker also puts chunks while another chunk's scope is open.
                deadline_s=self._tell(laxity.request_deadline_s, request),
                whole=True,
            )

    def _end(self) -> None:
        """Ends a worker. No thread gets the chunks that follow."""
        self._ends.popleft()
        for room in self._rooms.values():
            for entry in room:
                if entry.ticket is not None:
                    self._tell(entry.ticket.cancel)
                    entry.ticket = None

    # The thread that gets calls these before and after it sends a chunk.

    def _open(self, entry: _Entry) -> None:
        self._scope = self._tell.scope(stage=laxity.Stage.P2D, request=room_id(entry.item))
        self._scope_of = threading.get_ident()
        self._scope.__enter__()

    def _sent(self) -> None:
        """Completes the chunk that the thread got last, which is sent by now."""
        scope, self._scope = self._scope, None
        if scope is not None and self._scope_of == threading.get_ident():
            scope.__exit__(None, None, None)
        with self._cond:
            entry, self._sending = self._sending, None
        if entry is not None and entry.ticket is not None:
            if entry.ticket.done and entry.ticket.granted:
                self._tell(entry.ticket.complete, entry.ticket.granted)
            self._tell(entry.ticket.cancel)


def room_id(item: Any) -> str:
    """The id of a request, made from its bootstrap room: the same on the prefill and the decode instance."""
    return f"sglang-room-{getattr(item, 'room', item)}"


def _sleep(ticket: laxity.Ticket) -> None:
    """Sleeps until a permit comes or the time is up. ``ticket.done`` shows the permit."""
    if not ticket.done:
        ticket.wait(_LOOK_EVERY_S)
