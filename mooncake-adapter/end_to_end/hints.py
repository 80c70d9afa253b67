"""What differs between the variants, and all that does.

    none   Mooncake's own Transfer Engine, plain sockets; no daemon
    off    `laxity.mooncake` and `laxity.Flow`, under a daemon that knows stages and bytes, and nothing else
    on     the same, and what the engine knows: requests with deadlines, batches, layers
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from memory import Memory
from workload import Request, Shape

NONE, OFF, ON = "none", "off", "on"
VARIANTS = (NONE, OFF, ON)


class Hints:
    """What a serving engine says, where it knows it; nothing in the other variants."""

    def __init__(self, variant: str, shape: Shape) -> None:
        self.variant = variant
        self._shape = shape
        self._ahead: dict[int, int] = {}
        if variant != NONE:
            import laxity

            self._laxity = laxity

    def engine(self) -> Any:
        if self.variant == NONE:
            from mooncake.engine import TransferEngine
        else:
            from laxity.mooncake import TransferEngine
        return TransferEngine()

    def memory(self, memory: Memory) -> None:
        """Where the KV cache of each layer is, once and for all."""
        for layer in range(self._shape.layers if self.variant == ON else 0):
            place = memory.address + memory.layer(layer)
            self._laxity.memory_layer(place, memory.layer_bytes, layer)

    def arrived(self, request: Request, left_s: float) -> None:
        """A request, which is a batch of its own, stands in its unit's queue from now on."""
        if self.variant != ON:
            return
        number, shape = request.number, self._shape
        moved = shape.layers * (shape.kv_bytes(request) + shape.reused_bytes(request))
        # One that is late before it is known of has the deadline that makes it late at once.
        self._laxity.request_begin(number, deadline_s=max(left_s, 1e-6), bytes=moved)
        self._laxity.batch_begin(number, layers=shape.layers, layer_time_s=shape.layer_s(request))
        self._laxity.batch_join(number, number)
        ahead = self._ahead.get(request.unit)
        if ahead is not None:
            self._laxity.batch_queued(number, ahead)
        self._ahead[request.unit] = number

    def layer(self, request: Request, layer: int) -> None:
        if self.variant == ON:
            self._laxity.layer_begin(request.number, layer)

    def computed(self, request: Request) -> None:
        if self.variant == ON:
            self._laxity.compute_end(request.number)
            if self._ahead.get(request.unit) == request.number:
                self._ahead.pop(request.unit, None)

    def landed(self, request: Request) -> None:
        """All of it is where it is decoded."""
        if self.variant == ON:
            self._laxity.batch_end(request.number)
            self._laxity.request_end(request.number)

    def transfer(self, request: Request) -> Any:
        """Around the calls of the Transfer Engine that move a request's KV cache. The stage is what Laxity makes of a
        read or a write by itself, and the layer that of the memory."""
        if self.variant != ON:
            return contextlib.nullcontext()
        return self._laxity.scope(batch=request.number, request=request.number)

    def pieces(self, number: int, layer: int, nbytes: int, peer: str, link: socket.socket) -> Iterator[int]:
        """Bytes of a collective that may be sent, and then the next; what is sent carries its class."""
        if self.variant == NONE:
            yield nbytes
            return
        said: dict[str, Any] = {}
        if self.variant == ON and number:
            said = {"batch": number, "layer": layer}
        flow = self._laxity.Flow(self._laxity.Stage.COLLECTIVE, nbytes, peer=peer, **said)
        is_marked = False
        for grant in flow.grants():
            # A message keeps the class that it begins with: another one would overtake itself.
            if grant.dscp and not is_marked:
                link.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, grant.dscp << 2)
                is_marked = True
            yield grant.bytes

    def stats(self) -> dict[str, Any]:
        return dict(self._laxity.stats()) if self.variant != NONE else {}
