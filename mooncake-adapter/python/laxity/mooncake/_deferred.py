"""Asynchronous transfers: submitted by one call, polled by later ones.

Mooncake's own numbers can't be returned to callers. A transfer that waits has none yet, and a transfer in several
pieces has several. So callers get numbers of this module. A thread hands each piece to Mooncake when it is permitted,
even if the caller never polls. The thread exists only while transfers are in progress.

Mooncake's only call that polls without blocking looks at the first piece of a transfer. So each piece is a transfer of
its own there, and an asynchronous call is complete when all of its pieces are.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from .._laxity import Ticket, _Transfers
from ._gate import LOOK_EVERY_S, Gate
from ._pieces import Lists, Pieces

#: Mooncake's states of a transfer.
WAITING, COMPLETED, FAILED = 0, 1, -1
#: Shortest and longest time between two polls of Mooncake, in seconds.
POLL_S, POLL_MAX_S = 0.00005, 0.001
#: How long :meth:`Deferred.submit` waits for a permit before it defers the transfer, in seconds.
ANSWER_S = 0.0005
#: How long the thread waits for another transfer before it ends, in seconds.
IDLE_S = 1.0


class _Sent:
    """The pieces of one permit, which were handed to Mooncake."""

    def __init__(self, numbers: list[int], ticket: Ticket | None, nbytes: int) -> None:
        #: Mooncake's numbers of the pieces that were not seen to end yet.
        self.numbers = collections.deque(numbers)
        #: Where to report ``nbytes`` as complete when all pieces ended, unless one failed. A ticket can have several
        #: permits.
        self.ticket = ticket
        self.nbytes = nbytes
        self.has_failed = False


class _Pending:
    def __init__(self, gate: Gate | None, start: Callable[[Lists], int] | None) -> None:
        #: Held while this transfer is polled and its pieces are handed on. Each transfer has its own lock, because
        #: Mooncake may take long for a peer that is unreachable.
        self.lock = threading.Lock()
        self.gate = gate
        self.start = start
        self.under_way: list[_Sent] = []
        self.cancelled: list[Ticket] = []
        self.status = WAITING
        #: The status of a piece that failed, and what Mooncake returned for a piece that it refused.
        self.failure = 0
        self.refusal = 0

    @property
    def is_issued(self) -> bool:
        """Whether Mooncake has all pieces."""
        return self.gate is None or self.gate.is_over

    def fail(self, status: int) -> None:
        """Cancels the tickets that would get more permits."""
        if self.gate is not None:
            self.cancelled += self.gate.cancel()
        self.failure = self.failure or status

    def end(self, sent: _Sent) -> None:
        """Ends the pieces of a permit. A ticket that has all its permits is cancelled when the last of its pieces ends:
        until then its bytes are in flight."""
        self.under_way.remove(sent)
        ticket = sent.ticket
        if ticket is None or any(other is ticket for other in self.cancelled):
            return
        if not sent.has_failed:
            ticket.complete(sent.nbytes)
        if self.failure and not any(other.ticket is ticket for other in self.under_way):
            ticket.cancel()


class Deferred:
    """The submitted transfers of one engine."""

    def __init__(self, check: Callable[[int], int]) -> None:
        self._check = check
        self._lock = threading.Condition()
        self._transfers = _Transfers()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._open: dict[int, _Pending] = {}
        self._worker: threading.Thread | None = None

    def submit(
        self, is_write: bool, peer: str, pieces: Pieces, start: Callable[[Lists], int]
    ) -> int:
        """Returns the transfer's number, or Mooncake's result if Mooncake refused it at once."""
        pending = _Pending(Gate(self._transfers, is_write, peer, pieces), start)
        try:
            if not self._issue(pending) and not pending.is_issued:
                # If the window has room, the permit comes sooner than the thread would notice it.
                self._transfers.wait_any(ANSWER_S)
                self._issue(pending)
        except BaseException:
            # The thread waits for the pieces that Mooncake has.
            if pending.under_way:
                self._enter(pending)
            raise
        if pending.failure and not pending.under_way:
            return pending.refusal
        return self._enter(pending)

    def adopt(self, number: int) -> int:
        """Takes in a transfer that Mooncake already has. Returns its number here, or Mooncake's refusal."""
        if number <= 0:
            return number
        pending = _Pending(None, None)
        pending.under_way.append(_Sent([number], None, 0))
        return self._enter(pending)

    def _enter(self, pending: _Pending) -> int:
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = self._open[number] = pending
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._work, name="laxity-mooncake", daemon=True
                )
                self._worker.start()
            self._lock.notify()
        return number

    def check(self, number: int) -> int:
        """As Mooncake's ``transfer_check_status``. For an unknown number, and for one whose end was already reported,
        the result is that of a failed transfer."""
        with self._lock:
            pending = self._pending.get(number)
        if pending is None:
            return FAILED
        with pending.lock:
            self._step(pending)
            status = pending.status
        if status != WAITING:
            with self._lock:
                self._pending.pop(number, None)
                self._open.pop(number, None)
        return status

    def wait(self, numbers: Sequence[int]) -> int:
        """As Mooncake's ``get_batch_transfer_status``: 0 when all are complete, -1 if one failed."""
        result = 0
        for number in numbers:
            nap = POLL_S
            while (status := self.check(number)) == WAITING:
                time.sleep(nap)
                nap = min(nap * 1.5, POLL_MAX_S)
            if status != COMPLETED:
                result = FAILED
        return result

    def _issue(self, pending: _Pending) -> bool:
        """Hands the permitted pieces to Mooncake. Returns whether there were any."""
        issued = False
        gate, start = pending.gate, pending.start
        if gate is None or start is None:
            return False
        while not pending.failure and (granted := gate.next()) is not None:
            ticket, nbytes, pieces = granted
            issued = True
            sent = _Sent([], ticket, nbytes)
            # From here on a failure has to wait for the pieces that Mooncake has.
            pending.under_way.append(sent)
            for here, there, length in zip(*pieces):
                try:
                    number = start(([here], [there], [length]))
                except BaseException:
                    self._give_up(pending, sent)
                    raise
                # Mooncake's numbers are addresses. It returns 0 or less for a transfer that it refuses.
                if number <= 0:
                    pending.refusal = number
                    self._give_up(pending, sent)
                    break
                sent.numbers.append(number)
        return issued

    @staticmethod
    def _give_up(pending: _Pending, sent: _Sent) -> None:
        """Sends no more pieces. The bytes of those that Mooncake has stay permitted until they end."""
        sent.has_failed = True
        pending.fail(FAILED)
        if not sent.numbers:
            pending.end(sent)

    def _step(self, pending: _Pending) -> bool:
        """Polls one transfer. Returns whether its state changed. The caller holds the transfer's lock."""
        if pending.status != WAITING:
            return False
        happened = self._issue(pending)
        for sent in list(pending.under_way):
            while sent.numbers and (status := self._check(sent.numbers[0])) != WAITING:
                happened = True
                sent.numbers.popleft()
                if status != COMPLETED:
                    sent.has_failed = True
                    pending.fail(status)
            if not sent.numbers:
                pending.end(sent)
        # A failed transfer ends only when Mooncake no longer uses its memory.
        if not pending.under_way and (pending.is_issued or pending.failure):
            pending.status = pending.failure or COMPLETED
            happened = True
        return happened

    def _work(self) -> None:
        nap = POLL_S
        while True:
            with self._lock:
                if not self._open and not self._lock.wait_for(lambda: self._open, IDLE_S):
                    self._worker = None
                    return
                those = list(self._open.items())
            happened = moving = waiting = False
            over = []
            for number, pending in those:
                # Another thread holds the lock, so it polls this transfer right now.
                if not pending.lock.acquire(blocking=False):
                    moving = True
                    continue
                try:
                    try:
                        happened |= self._step(pending)
                    except Exception:
                        # Mooncake refused the arguments. The next poll of the caller reports the failure.
                        happened = True
                    moving |= bool(pending.under_way)
                    waiting |= not pending.is_issued
                    if pending.status != WAITING:
                        over.append(number)
                finally:
                    pending.lock.release()
            with self._lock:
                for number in over:
                    self._open.pop(number, None)
            if happened:
                nap = POLL_S
                continue
            if moving:
                nap = min(nap * 1.5, POLL_MAX_S)
            if waiting:
                self._transfers.wait_any(nap if moving else LOOK_EVERY_S)
            elif moving:
                time.sleep(nap)
