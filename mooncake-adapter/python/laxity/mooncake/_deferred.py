"""Transfers that were submitted and are asked after later.

Mooncake's own numbers for them can't be given out: one that has to wait has none yet, and one that goes in several
pieces has several. So callers get numbers of ours, and a thread hands the pieces to Mooncake when there is leave,
whether or not the caller comes to ask. It exists while something is under way.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from .._laxity import Ticket, _Transfers
from ._gate import LOOK_EVERY_S, Gate
from ._pieces import Lists, Pieces

#: What Mooncake says of a transfer.
WAITING, COMPLETED, FAILED = 0, 1, -1
#: Between two looks at what Mooncake has under way, in seconds: at first, and at most.
POLL_S, POLL_MAX_S = 0.00005, 0.001
#: How long a caller waits for leave that is given at once.
ANSWER_S = 0.0005
#: How long the thread waits for more before it ends.
IDLE_S = 1.0


class _Pending:
    def __init__(self, gate: Gate | None, start: Callable[[Lists], int] | None) -> None:
        #: Held while it is looked at, and its pieces are handed on: Mooncake may take its time over a peer that
        #: is not there, which is nobody else's.
        self.lock = threading.Lock()
        self.gate = gate
        self.start = start
        #: Mooncake's numbers, and what to report when they are complete.
        self.under_way: list[tuple[int, Ticket | None, int]] = []
        self.status = WAITING
        #: The status of a piece that failed, and what Mooncake gave for one that it did not take.
        self.failure = 0
        self.refusal = 0

    @property
    def is_issued(self) -> bool:
        """Mooncake has all of it."""
        return self.gate is None or self.gate.is_over

    def fail(self, status: int) -> None:
        if self.gate is not None:
            self.gate.cancel()
        self.failure = self.failure or status


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
        """Gives a number; or what Mooncake gave, if it refused right away."""
        pending = _Pending(Gate(self._transfers, is_write, peer, pieces), start)
        if not self._issue(pending) and not pending.is_issued:
            # A port that has room says so in less time than it takes the thread to notice.
            self._transfers.wait_any(ANSWER_S)
            self._issue(pending)
        if pending.failure and not pending.under_way:
            return pending.refusal
        return self._enter(pending)

    def adopt(self, number: int) -> int:
        """A transfer that Mooncake has, by its number there; gives ours, or what Mooncake gave if it refused."""
        if number <= 0:
            return number
        pending = _Pending(None, None)
        pending.under_way.append((number, None, 0))
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
        """As Mooncake's ``transfer_check_status``. Of a number that is none, or was asked after when it
        was over, it gives the same as of one that failed."""
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
        """Hands to Mooncake what there is leave for; whether there was any."""
        issued = False
        gate, start = pending.gate, pending.start
        if gate is None or start is None:
            return False
        while not pending.failure and (granted := gate.next()) is not None:
            ticket, nbytes, pieces = granted
            try:
                number = start(pieces)
            except BaseException:
                ticket.cancel()
                pending.fail(FAILED)
                raise
            issued = True
            # Mooncake gives addresses for numbers, and 0 or less for a transfer that it doesn't take.
            if number <= 0:
                ticket.cancel()
                pending.refusal = number
                pending.fail(FAILED)
            else:
                pending.under_way.append((number, ticket, nbytes))
        return issued

    def _step(self, pending: _Pending) -> bool:
        """Looks at one; whether anything happened. With its lock held."""
        if pending.status != WAITING:
            return False
        happened = self._issue(pending)
        for entry in list(pending.under_way):
            number, ticket, nbytes = entry
            status = self._check(number)
            if status == WAITING:
                continue
            happened = True
            pending.under_way.remove(entry)
            if status != COMPLETED:
                pending.fail(status)
            if ticket is not None and status == COMPLETED:
                ticket.complete(nbytes)
            elif ticket is not None:
                ticket.cancel()
        # One that failed is over when Mooncake has let go of all of its memory.
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
                # Whoever has it looks at it right now.
                if not pending.lock.acquire(blocking=False):
                    moving = True
                    continue
                try:
                    try:
                        happened |= self._step(pending)
                    except Exception:
                        # Arguments that Mooncake won't take. Whoever asks after the transfer finds that it failed.
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
