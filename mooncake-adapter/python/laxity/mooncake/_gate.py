"""The permits of one call of the Transfer Engine.

Memory of different layers or requests makes different flows. They are sent in the order of their permits, not in the
order of the call. If a call waited for one flow while another is permitted, the permitted bytes would fill the window
without moving.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import _measured
from .._laxity import Ticket, _stage_of, _Transfers
from .._stage import Stage
from ._pieces import Lists, Pieces

#: Maximum number of flows of one call that wait for permits at a time. A call may move thousands of blocks, and a
#: process can have a few hundred flows at the daemon.
FLOWS_AT_A_TIME = 32
#: Longest wait for a permit before all flows are polled again, in seconds.
LOOK_EVERY_S = 0.02


class Flow:
    """One flow of a call: its ticket and its memory."""

    def __init__(self, ticket: Ticket, pieces: Pieces) -> None:
        self.ticket = ticket
        self.pieces = pieces

    def take(self) -> int:
        """Returns the bytes that were permitted since the last call."""
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
        # A write loads this host's egress port. A read loads its ingress port and the peer's egress port.
        # The job's profile gives the stage of each: P2D and KV_REUSE by default.
        self._stage = Stage(_stage_of("write" if is_write else "read"))
        self._direction = "egress" if is_write else "ingress"
        self._peer = _address(peer)
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
        """Whether all bytes were handed out."""
        return not self._flows

    def next(self) -> tuple[Ticket, int, Lists] | None:
        """Returns the next permitted pieces with their ticket and bytes, or ``None``. The caller reports them to the
        ticket as complete."""
        for flow in self._flows:
            nbytes = flow.take()
            if flow.ticket.done:
                self._flows.remove(flow)
                self._refill()
            if nbytes > 0:
                return flow.ticket, nbytes, flow.pieces.take(nbytes)
        return None

    def cancel(self) -> list[Ticket]:
        """Cancels all flows that were not handed out, and returns their tickets."""
        tickets = [flow.ticket for flow in self._flows]
        for ticket in tickets:
            ticket.cancel()
        self._flows.clear()
        self._to_come = iter(())
        return tickets


def _address(session: str) -> str:
    """The host of ``host:port``."""
    host = session.rsplit(":", 1)[0] if ":" in session else session
    return host.strip("[]")


def move(gate: Gate, transfers: _Transfers, send: Callable[[Lists, bool], int]) -> int:
    """Sends all pieces, each when it is permitted. ``send`` gets pieces, and whether they are the last. Returns 0, or
    the first result of ``send`` that is not 0. Nothing is sent after that one."""
    began = time.monotonic()
    network_s, total = 0.0, 0
    try:
        while not gate.is_over:
            granted = gate.next()
            if granted is None:
                transfers.wait_any(LOOK_EVERY_S)
                continue
            ticket, nbytes, pieces = granted
            sent = time.monotonic()
            try:
                status = send(pieces, gate.is_over)
            except BaseException:
                ticket.cancel()
                raise
            if status != 0:
                ticket.cancel()
                return status
            ticket.complete(nbytes)
            network_s += time.monotonic() - sent
            total += nbytes
        # Mooncake posts and waits in one call. What is not spent there was spent waiting for permits.
        _measured.transfers.add(time.monotonic() - began - network_s, 0.0, network_s, total)
        return 0
    finally:
        gate.cancel()
