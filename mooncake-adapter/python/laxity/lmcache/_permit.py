"""Permits for coroutines. A wait for one never blocks the event loop, which serves all of LMCache's transfers.

A thread for each wait would not do: if stores took all threads of a pool, loads would wait behind them. So one timer
of the loop looks at everything that waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Optional, TypeVar

import laxity

from .._telling import Teller

T = TypeVar("T")

#: How long a transfer waits for its permit before others run. A daemon that is awake has answered by then.
GLANCE_S = 200e-6
#: Time between two looks at the transfers that wait.
LOOK_EVERY_S = 0.001

tell = Teller("lmcache")
_thread = threading.local()


async def moved_with_permit(
    ticket: laxity.Ticket,
    wait_s_max: float,
    move: Callable[[], Awaitable[T]],
    bytes_of: Callable[[T], int],
) -> T:
    """Waits for the permit, at most ``wait_s_max``, then awaits ``move()``. ``bytes_of`` says how many bytes its result
    stands for. Only ``move`` raises exceptions, apart from a cancellation."""
    try:
        if not await _permitted(ticket, wait_s_max):
            tell.count("transfers that waited too long for a permit", f"longer than {wait_s_max:g} s")
            tell(ticket.cancel)
        result = await move()
        tell(_complete, ticket, result, bytes_of)
        return result
    finally:
        tell(ticket.cancel)


def _complete(ticket: laxity.Ticket, result: T, bytes_of: Callable[[T], int]) -> None:
    """Reports what was moved. The rest of the permit is cancelled by the caller."""
    nbytes = min(ticket.granted, bytes_of(result))
    if nbytes:
        ticket.complete(nbytes)


async def _permitted(ticket: laxity.Ticket, wait_s_max: float) -> bool:
    """Whether the permit came in time. An error counts as a permit."""
    try:
        loop = asyncio.get_running_loop()
        waiting: Optional[_Waiting] = getattr(_thread, "waiting", None)
        if waiting is None or waiting.loop is not loop:
            waiting = _thread.waiting = _Waiting(loop)
        if not waiting.some and _granted(ticket, GLANCE_S):
            return True
        return await waiting.permit(ticket, time.monotonic() + wait_s_max)
    except Exception as broken:
        tell.count(f"wait: {type(broken).__name__}", repr(broken), exc_info=True)
        return True


def _granted(ticket: laxity.Ticket, timeout_s: Optional[float] = None) -> bool:
    if ticket.done:
        return True
    grant = ticket.poll() if timeout_s is None else ticket.wait(timeout_s)
    return grant is not None and grant.last


class _Waiting:
    """The transfers of one event loop that wait. Only the loop's thread uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.some: list[tuple[laxity.Ticket, asyncio.Future[bool], float]] = []

    def permit(self, ticket: laxity.Ticket, until: float) -> asyncio.Future[bool]:
        """Whether the permit came before the time ``until``."""
        future = self.loop.create_future()
        self.some.append((ticket, future, until))
        if len(self.some) == 1:
            self.loop.call_later(LOOK_EVERY_S, self._look)
        return future

    def _look(self) -> None:
        now = time.monotonic()
        left = []
        for ticket, future, until in self.some:
            if future.done():  # the task that waited was cancelled
                continue
            granted = tell(_granted, ticket)
            if granted is False and now < until:
                left.append((ticket, future, until))
            else:
                # None stands for an error: the transfer goes on.
                future.set_result(granted is not False)
        self.some = left
        if left:
            self.loop.call_later(LOOK_EVERY_S, self._look)
