"""Leave to send for one call of the Transfer Engine: its flows, and whose turn it is.

Memory that belongs to different layers or requests makes different flows. They are served in the order in which the
daemon permits them, not in that of the call: whoever waits for one flow while another has leave keeps the
window full with bytes that never move.
"""

from __future__ import annotations

from collections.abc import Callable

from .._laxity import Ticket, _stage_of, _Transfers
from .._stage import Stage
from ._pieces import Lists, Pieces

#: Flows of one call that ask for leave at a time. A call may move thousands of blocks; the daemon has a few hundred
#: places for all of a process.
FLOWS_AT_A_TIME = 32
#: Longest sleep between two looks, in seconds.
LOOK_EVERY_S = 0.02


class Flow:
    """One of them."""

    def __init__(self, ticket: Ticket, pieces: Pieces) -> None:
        self.ticket = ticket
        self.pieces = pieces

    def take(self) -> int:
        """Bytes more that there is leave for now."""
        nbytes = 0
        while not self.ticket.done:
            grant = self.ticket.poll()
            if grant is None:
                break
            nbytes += grant.bytes
        return nbytes


class Gate:
    """The flows of one call."""

    def __init__(self, transfers: _Transfers, is_write: bool, peer: str, pieces: Pieces) -> None:
        self._transfers = transfers
        # A write loads the way out of this host; a read the way in, and the peer's way out.
        # What either is for, the job's profile says: P2D and KV_REUSE, by default.
        self._stage = Stage(_stage_of("write" if is_write else "read"))
        self._direction = "egress" if is_write else "ingress"
        self._peer = None if is_write else _address(peer)
        self._to_come = pieces.runs()
        self._flows: list[Flow] = []
        self._refill()

    def _refill(self) -> None:
        while len(self._flows) < FLOWS_AT_A_TIME:
            run = next(self._to_come, None)
            if run is None:
                return
            ticket = self._transfers.submit(
                self._stage, run.left, run.address, self._direction, self._peer
            )
            self._flows.append(Flow(ticket, run))

    @property
    def is_over(self) -> bool:
        """Everything was handed out."""
        return not self._flows

    def next(self) -> tuple[Ticket, int, Lists] | None:
        """What may be sent now: report it complete to the ticket. ``None`` if nothing."""
        for flow in self._flows:
            nbytes = flow.take()
            if flow.ticket.done:
                self._flows.remove(flow)
                self._refill()
            if nbytes > 0:
                return flow.ticket, nbytes, flow.pieces.take(nbytes)
        return None

    def cancel(self) -> None:
        """Gives up what was not handed out."""
        for flow in self._flows:
            flow.ticket.cancel()
        self._flows.clear()
        self._to_come = iter(())


def _address(session: str) -> str:
    """The host of ``host:port``."""
    host = session.rsplit(":", 1)[0] if ":" in session else session
    return host.strip("[]")


def move(gate: Gate, transfers: _Transfers, send: Callable[[Lists, bool], int]) -> int:
    """Sends everything as soon as there is leave; ``send`` gets the pieces and whether they are the last. 0, or
    what ``send`` gave that was not 0, after which nothing more is sent."""
    try:
        while not gate.is_over:
            granted = gate.next()
            if granted is None:
                transfers.wait_any(LOOK_EVERY_S)
                continue
            ticket, nbytes, pieces = granted
            try:
                status = send(pieces, gate.is_over)
            except BaseException:
                ticket.cancel()
                raise
            if status != 0:
                ticket.cancel()
                return status
            ticket.complete(nbytes)
        return 0
    finally:
        gate.cancel()
