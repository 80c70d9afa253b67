"""A transfer as a value: described in one place, submitted in another."""

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

    ``deadline_s`` counts from the submit, not from when the flow was described.
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
        """Asks for leave to send; never blocks."""
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
        """Yields leave to send until there is leave for all bytes. When the caller comes back for more,
        what it was given before counts as sent; if it doesn't come back, the rest is given up."""
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
