"""A transfer as a value, which can be described in one place and submitted in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Union

from ._laxity import Grant, Ticket, submit
from ._stage import Stage

Id = Union[str, int]


@dataclasses.dataclass(frozen=True)
class Flow:
    """The arguments of :func:`laxity.submit`.

        for grant in laxity.Flow(laxity.Stage.P2D, len(data), layer=3).grants():
            send(grant.bytes)

    ``deadline_s`` counts from :meth:`submit`, not from the construction of the value.
    """

    stage: Stage
    nbytes: int
    layer: int | None = None
    batch: Id | None = None
    request: Id | None = None
    deadline_s: float | None = None
    peer: str | None = None
    direction: str = "egress"
    whole: bool = False
    nic: str | None = None

    def submit(self) -> Ticket:
        """Asks for permits. Never blocks."""
        return submit(
            self.stage,
            self.nbytes,
            layer=self.layer,
            batch=self.batch,
            request=self.request,
            deadline_s=self.deadline_s,
            peer=self.peer,
            direction=self.direction,
            whole=self.whole,
            nic=self.nic,
        )

    def grants(self) -> Iterator[Grant]:
        """Yields permits until all bytes are permitted. When the caller asks for the next permit, the bytes of the
        previous one are reported as complete. If the caller stops early, the rest of the transfer is cancelled."""
        ticket = self.submit()
        try:
            while True:
                grant = ticket.wait()
                if grant.bytes:
                    yield grant
                    ticket.complete(grant.bytes)
                if grant.last:
                    return
        finally:
            ticket.cancel()
